"""Loads of what host memory has no room for: `Streams`.

A hit may be larger than host memory. Where the tiers below it have more of a prompt than fits, the
request is promised all of it, and waits while its chunks go through a small share of host memory, a
window at a time: one is read from the tiers while the one before it is copied into the engine's
blocks, and then let go of. What L1 has is copied from there, and not read.

One stream at a time holds windows; the others wait in turn. Nothing of what is promised here is
certain: a chunk may have left its tier, or the tier may hang. So a stream ends where the first
chunk is missing, at its deadline, when no window comes for too long, or when its request has gone;
what it has not copied by then is reported as failed, and vLLM computes it. While a read that took
too long has not come back, no other stream begins; copies may take their time.
"""

from __future__ import annotations

import collections
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_rs.cache_engine import LMCacheEngine, Loaded
from lmcache_rs.key import HASH_BYTES, keys_of

if TYPE_CHECKING:
    from lmcache_rs.key import CacheEngineKey
    from lmcache_rs.storage.staging import Staging
    from lmcache_rs.transfers import Transfer
    from lmcache_rs.vllm_v1.faults import Faults
    from lmcache_rs.vllm_v1.metadata import ReqMeta

MOST_SHARE_CHUNKS = 16
"""Two windows: more do not make reads quicker."""
LEAST_SHARE_CHUNKS = 2
SHARE_OF_POOL = 8
"""A share is so manieth a part of host memory, between these."""


def share_of(pool_chunks: int) -> int:
    """Chunks that are kept free for streams, of a pool of so many: one is left to it at least."""
    wanted = min(MOST_SHARE_CHUNKS, max(LEAST_SHARE_CHUNKS, pool_chunks // SHARE_OF_POOL))
    # Less would hold one window, and the next one is read while that is copied.
    return wanted if wanted < pool_chunks else 0


@dataclass
class StreamSpec:
    """How a load is to be streamed.

    Args:
        within_s: Seconds in which the engine would compute what is loaded: from its turn on, a
            stream takes no longer.
        refused_tiers: Tiers that are not worth reading it from.
    """

    within_s: float = math.inf
    refused_tiers: tuple[str, ...] = ()


class _Copy(NamedTuple):
    """A copy under way: the token that it counts from, and the one up to which it must come."""

    start: int
    due: int
    transfer: Transfer[Loaded]


class Stream:
    """One load; a `Transfer` to whoever waits for it.

    Args:
        req: What is loaded, and where.
        keys: Its chunks, from the first of the prompt on.
        chunk_size: Tokens of a chunk.
        faults: Where faults of ours are noted.
    """

    def __init__(
        self, req: ReqMeta, keys: list[CacheEngineKey], chunk_size: int, faults: Faults
    ) -> None:
        assert req.load_spec is not None
        self.req = req
        self.keys = keys
        self.spec = req.load_spec.stream or StreamSpec()
        self.skip = req.load_spec.vllm_cached_tokens
        self._chunk_size = chunk_size
        self._faults = faults
        # Reads may go on behind it, copies may not: each begins under the lock, or not at all.
        self._lock = threading.Lock()
        self._copies: collections.deque[_Copy] = collections.deque()
        self._has_ended = False
        self._is_torn = False
        self._loaded = Loaded(self.skip, 0, 0)
        self._over = threading.Event()
        # From its turn on.
        self._due = math.inf
        # While a read is out, whatever has become of the stream: those behind it wait for it.
        self._read_due = math.inf

    def begin(self) -> None:
        """Its turn has come."""
        self._due = time.monotonic() + self.spec.within_s

    @contextlib.contextmanager
    def reading(self, stall_s: float) -> Iterator[None]:
        """Within it a window is read, which may take so many seconds."""
        self._read_due = time.monotonic() + stall_s
        try:
            yield
        finally:
            self._read_due = math.inf

    @property
    def first(self) -> int:
        """The first chunk that is not wholly the engine's."""
        return self.skip // self._chunk_size

    @property
    def has_ended(self) -> bool:
        """Whether no more copies begin."""
        return self._has_ended

    @property
    def is_torn(self) -> bool:
        """Whether a chunk that was held was none after all: that at its end."""
        return self._is_torn

    @property
    def end(self) -> int:
        """The first token that is not copied, as far as it is known."""
        return self._loaded.end

    def copy(self, first: int, due: int, begin: Callable[[], Transfer[Loaded]]) -> bool:
        """Begins a copy of chunks, behind those that were begun; False if the stream has ended.

        Args:
            first: The copy's first chunk; it counts tokens from there.
            due: The chunk up to which it must come.
            begin: Begins it.
        """
        with self._lock:
            if self._has_ended:
                return False
            copy = _Copy(first * self._chunk_size, due * self._chunk_size, begin())
            self._copies.append(copy)
            return True

    def wait_for_copies(self, most: int) -> None:
        """Returns when no more than so many copies are under way."""
        while True:
            with self._lock:
                self._settle()
                if len(self._copies) <= most:
                    return
                transfer = self._copies[0].transfer
            transfer.wait()

    def finish(self) -> None:
        """No more copies begin."""
        with self._lock:
            self._has_ended = True
            self._settle()

    def is_late(self) -> bool:
        """Whether it has not ended in time."""
        return not self._has_ended and time.monotonic() >= self._due

    def is_stalled(self) -> bool:
        """Whether its read takes too long."""
        return time.monotonic() >= self._read_due

    # --- as a transfer ------------------------------------------------------------------------

    def is_done(self) -> bool:
        """Whether nothing of it writes any more. Not known while a copy begins, which may take as
        long as the copy: nobody waits for that here."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._settle()
            return self._over.is_set()
        finally:
            self._lock.release()

    def wait(self, timeout_ms: int | None = None) -> bool:
        """Returns once it is done, or after `timeout_ms`; whether it is."""
        due = math.inf if timeout_ms is None else time.monotonic() + timeout_ms / 1e3
        while not self.is_done():
            if time.monotonic() >= due:
                return False
            self._over.wait(0.005)
        return True

    def outcome(self) -> Loaded:
        """Every token below its end is there."""
        if not self._over.is_set():
            raise RuntimeError("the stream has not ended; wait for it before you ask for more")
        return self._loaded

    def _settle(self) -> None:
        """Takes in the copies that are done, in order; the lock is held."""
        while self._copies and self._copies[0].transfer.is_done():
            copy = self._copies.popleft()
            try:
                loaded = copy.transfer.outcome()
            except Exception as error:
                # What it has written is unknown: nothing from here on counts.
                self._faults.note("finish_load", error)
                loaded = Loaded(0, 0, 0)
            if not self._is_torn:
                before = self._loaded
                self._loaded = Loaded(
                    max(before.end, copy.start + loaded.end),
                    before.tokens + loaded.tokens,
                    before.bytes + loaded.bytes,
                )
            if self._loaded.end < copy.due:
                self._is_torn = self._has_ended = True
        if self._has_ended and not self._copies:
            self._over.set()


@dataclass
class _Turns:
    """The streams that wait, and the one whose turn it is."""

    waiting: collections.deque[Stream] = field(default_factory=collections.deque)
    current: Stream | None = None
    # The current one was given up on, and its read has not come back.
    is_stuck: bool = False


class Streams:
    """See the module's description. One thread reads; it starts with the first stream.

    Args:
        engine: What copies into the engine's blocks.
        staging: The share of host memory that windows go through, and the tiers.
        window_chunks: Chunks of a window: half of what the share holds.
        chunk_blocks: The engine's blocks that a chunk lies in.
        own_name: The namespace under which this rank keeps what the scheduler half names.
        stall_s: Seconds that a window may take.
        faults: Where faults of ours are noted.
    """

    def __init__(
        self,
        engine: LMCacheEngine,
        staging: Staging,
        window_chunks: int,
        chunk_blocks: int,
        own_name: Callable[[str], str],
        stall_s: float,
        faults: Faults,
    ) -> None:
        self._engine = engine
        self._staging = staging
        self._window_chunks = window_chunks
        self._chunk_blocks = chunk_blocks
        self._own_name = own_name
        self._stall_s = stall_s
        self._faults = faults
        self._lock = threading.Lock()
        self._turns = _Turns()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        # Requests that have gone, and whose streams have not been accounted for.
        self._stopped: set[str] = set()
        self._behind: Any = None
        self.counts = {"streamed_loads": 0, "streamed_chunks": 0, "given_up_streams": 0}

    @property
    def staging(self) -> Staging:
        """The share of host memory that windows go through."""
        return self._staging

    # --- the worker half's thread -------------------------------------------------------------

    def begin(self, req: ReqMeta) -> Stream | None:
        """A load that its request waits for; None if it cannot begin."""
        assert req.load_spec is not None
        end = req.load_spec.lmcache_cached_tokens // self._engine.chunk_size
        keys = keys_of(self._own_name(req.namespace), req.hashes[: end * HASH_BYTES])
        stream = Stream(req, keys, self._engine.chunk_size, self._faults)
        self._order_copies()
        with self._lock:
            self._give_up_late()
            if self._closed or self._turns.is_stuck or not self._start():
                return None
            self._turns.waiting.append(stream)
        self.counts["streamed_loads"] += 1
        self._wake.put(True)
        return stream

    def stop(self, req_id: str) -> None:
        """The request has gone: what is not copied yet is not needed."""
        with self._lock:
            for stream in self._all():
                if stream.req.req_id == req_id and not stream.has_ended:
                    self._stopped.add(req_id)
                    stream.finish()

    def take_stopped(self, req_id: str) -> bool:
        """Whether the request had gone before its stream ended; told once."""
        with self._lock:
            is_stopped = req_id in self._stopped
            self._stopped.discard(req_id)
            return is_stopped

    def poll(self) -> None:
        """Gives up on what is late. To be called now and then."""
        with self._lock:
            self._give_up_late()

    def close(self) -> None:
        """No copy begins any more, and those under way are done. Idempotent."""
        with self._lock:
            self._closed = True
            streams = self._all()
            for stream in streams:
                stream.finish()
        for stream in streams:
            stream.wait_for_copies(0)
        self._wake.put(False)

    def _all(self) -> list[Stream]:
        current = self._turns.current
        return [*([] if current is None else [current]), *self._turns.waiting]

    def _give_up_late(self) -> None:
        current = self._turns.current
        if current is None or self._turns.is_stuck:
            return
        late = [current] if current.is_late() else []
        if current.is_stalled():
            # Those behind it would wait for the same tier, and for this read first.
            self._turns.is_stuck = True
            late = [stream for stream in self._all() if not stream.has_ended]
        for stream in late:
            self.counts["given_up_streams"] += 1
            stream.finish()

    def _order_copies(self) -> None:
        """On a GPU, copies come behind what the engine's stream has been given by now: its blocks
        may be read by an earlier step still."""
        registered = self._engine.registered
        if registered is None or registered.device is None:
            return
        import torch

        assert registered.tensor is not None
        device = registered.tensor.device
        if self._behind is None:
            self._behind = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._behind.wait_stream(torch.cuda.current_stream(device))

    # --- the thread that reads ----------------------------------------------------------------

    def _start(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="lmcache_rs-stream", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _serve(self) -> None:
        while self._wake.get():
            with self._lock:
                if not self._turns.waiting:
                    continue
                stream = self._turns.waiting.popleft()
                self._turns.current = stream
                stream.begin()
            try:
                with self._on_device():
                    self._run(stream)
            except Exception as error:
                self._faults.note("start_load_kv", error)
            finally:
                stream.finish()
                stream.wait_for_copies(0)
                self._forget_torn(stream)
                with self._lock:
                    self._turns.current, self._turns.is_stuck = None, False

    def _forget_torn(self, stream: Stream) -> None:
        """What host memory had and could not give leaves it, so as not to be promised again."""
        at, pool = stream.end // self._engine.chunk_size, self._engine.local_cpu
        if stream.is_torn and pool is not None and at < len(stream.keys):
            pool.remove(stream.keys[at].namespace, stream.keys[at].chunk_hash)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        if self._behind is None:
            return contextlib.nullcontext()
        import torch

        context: contextlib.AbstractContextManager[Any] = torch.cuda.stream(self._behind)
        return context

    def _run(self, stream: Stream) -> None:
        at = self._copy_held(stream)
        while at < len(stream.keys) and not stream.has_ended:
            # One window is read while another one is copied: there is room for two.
            stream.wait_for_copies(1)
            window = stream.keys[at : at + self._window_chunks]
            held = self._staging.num_held(window)
            if held:
                end = at + held
                is_begun = stream.copy(at, end, partial(self._copy, stream, at, end))
            else:
                refused = stream.spec.refused_tiers
                with stream.reading(self._stall_s):
                    end = at + self._staging.read(stream.req.req_id, window, refused)
                if end == at:
                    return
                try:
                    copy = partial(self._copy, stream, at, end, self._staging.pool)
                    is_begun = stream.copy(at, end, copy)
                finally:
                    # What is being copied is held by its copy.
                    self._staging.let_go(window[: end - at])
                self.counts["streamed_chunks"] += end - at
            if not is_begun:
                return
            at = end

    def _copy_held(self, stream: Stream) -> int:
        """Copies what L1 holds of the beginning, by the request's lease; where that ends."""
        first = stream.first
        # However little it is.
        stream.copy(first, first, partial(self._copy, stream, first, len(stream.keys)))
        stream.wait_for_copies(0)
        return max(first, stream.end // self._engine.chunk_size)

    def _copy(self, stream: Stream, first: int, end: int, source: Any = None) -> Transfer[Loaded]:
        """Begins to copy the chunks from `first` to `end`, as a chain of their own: what is handed
        over does not grow with what lies before."""
        chunk_size, req = self._engine.chunk_size, stream.req
        blocks = slice(first * self._chunk_blocks, end * self._chunk_blocks)
        return self._engine.begin_load_chunks(
            req.req_id,
            self._own_name(req.namespace),
            req.hashes[first * HASH_BYTES : end * HASH_BYTES],
            req.block_ids[blocks],
            skip=max(0, stream.skip - first * chunk_size),
            **({} if source is None else {"source": source}),
        )
