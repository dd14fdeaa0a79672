"""Loads that run beside the steps, when a schedule says so: `Transfers`.

They stand between the connector's worker half and its engine. Each copy is the engine's own; what a
schedule draws is when it is made, when it is said to be over, and whether something goes wrong on
the way. Until it is made its chunks are held, as they are by a copy that waits behind others.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from judge import Violation
from world import CHUNK, CHUNK_BYTES, LAYERS, PagedMemory

from lmcache_rs import _native
from lmcache_rs.vllm_v1.streams import Stream

if TYPE_CHECKING:
    from judge import Judge

    from lmcache_rs.cache_engine import LMCacheEngine, Loaded
    from lmcache_rs.vllm_v1.worker import LMCacheWorkerHalf

HASH_BYTES = 32
MOST_POLLS = 6
"""How often a load is asked for before it is over for sure."""


class LateTransfer:
    """One load; see the module's description."""

    def __init__(self, transfers: Transfers, req_id: str, copy: Callable[[], Any]) -> None:
        self.req_id = req_id
        self.is_copied = False
        self.is_said_to_be_over = False
        self._transfers = transfers
        self._copy = copy
        self._polls = 0
        self._outcome: Loaded | None = None
        self.held: list[_native.MemoryObj] = []
        self._copied = threading.Event()

    def is_done(self) -> bool:
        if not (in_loop() and self._transfers.may_copy):
            # Only while nothing else writes, or nothing could be said of what a copy writes.
            self.is_said_to_be_over = self.is_copied
            return self.is_copied
        self._polls += 1
        if self._transfers.takes_long() and self._polls < MOST_POLLS:
            return False
        self.copy()
        self.is_said_to_be_over = True
        return True

    def outcome(self) -> Loaded:
        if self._outcome is None:
            self._transfers.judge.raised["finish_load"] += 1
            raise RuntimeError("the copy fails")
        return self._outcome

    def wait(self, timeout_ms: int | None = None) -> bool:
        if self._transfers.is_closing and in_loop():
            # No step comes any more in which it would be made, and what was wrong is known.
            with contextlib.suppress(Violation):
                self.copy()
        return self._copied.wait(60 if timeout_ms is None else timeout_ms / 1e3)

    def copy(self) -> None:
        """Makes the copy, once."""
        if self.is_copied:
            return
        try:
            self._make()
        finally:
            self.is_copied = True
            self._copied.set()

    def _make(self) -> None:
        transfers = self._transfers
        if not transfers.fails():
            transfers.memory.watch_writes()
            native = self._copy()
            assert native.wait(60_000), "the copy ends"
            self._outcome = native.outcome()
            written = [transfers.memory.written_slots(layer) for layer in range(LAYERS)]
            transfers.judge.check_late_writes(self.req_id, written)
        self.held = []


class Transfers:
    """See the module's description.

    Args:
        worker: The worker half.
        engine: What it loads from.
        memory: The engine's KV memory.
        judge: Who is told of every write.
    """

    def __init__(
        self, worker: LMCacheWorkerHalf, engine: LMCacheEngine, memory: PagedMemory, judge: Judge
    ) -> None:
        self._worker = worker
        self.memory = memory
        self.judge = judge
        self.under_way: list[LateTransfer] = []
        self._engine = engine
        self._draw = random.Random(0)
        self._slowness = 0.0
        self._failures = 0.0
        # What the next load to begin does instead.
        self.instead: Callable[[], None] | None = None
        # Whether the worker half asks which loads are over.
        self.may_copy = False
        # Whether whoever waits for a copy makes it.
        self.is_closing = False
        self._take_finished = worker.take_finished_loads
        worker.take_finished_loads = self._copy_and_take  # type: ignore[method-assign]
        self._begin_load_chunks = engine.begin_load_chunks
        engine.begin_load_chunks = self._begin  # type: ignore[method-assign]

    def draw_from(self, draw: random.Random, slowness: float, failures: float) -> None:
        """From now on loads are late as often as `slowness` says, and fail as `failures` does."""
        self._draw, self._slowness, self._failures = draw, slowness, failures

    def takes_long(self) -> bool:
        return self._draw.random() < self._slowness

    def fails(self) -> bool:
        return self._draw.random() < self._failures

    def not_over(self) -> set[str]:
        """Requests whose loads are under way, as far as the worker half has heard."""
        self.under_way = [each for each in self.under_way if not each.is_said_to_be_over]
        loads = self._worker._async_loads._under_way
        # A stream may have no copy under way.
        streams = {each.req.req_id for each in loads if isinstance(each.transfer, Stream)}
        return {each.req_id for each in self.under_way} | streams

    def _copy_and_take(self) -> tuple[set[str], set[str]]:
        self.may_copy = True
        try:
            return self._take_finished()
        finally:
            self.may_copy = False

    def go_on(self) -> None:
        """Some time passes: copies are made."""
        for transfer in list(self.under_way):
            if not self.takes_long():
                transfer.copy()

    def _begin(
        self,
        lookup_id: str,
        namespace: str,
        hashes: bytes,
        block_ids: list[int],
        *,
        skip: int,
        source: _native.LocalCpu | None = None,
    ) -> LateTransfer:
        if self.instead is not None and in_loop():
            self.instead()
        pool = self._engine.local_cpu
        assert pool is not None
        first = skip // CHUNK * HASH_BYTES

        def copy() -> Any:
            where: dict[str, Any] = {"skip": skip}
            if source is not None:
                # What is staged is found only until its copy has begun.
                where["source"] = _again(transfer.held, namespace, hashes[first:])
            return self._begin_load_chunks(lookup_id, namespace, hashes, block_ids, **where)

        transfer = LateTransfer(self, lookup_id, copy)
        transfer.held = (source or pool).get(namespace, hashes[first:])
        pool.release(lookup_id)
        self.under_way.append(transfer)
        return transfer


def _again(objects: list[_native.MemoryObj], namespace: str, hashes: bytes) -> _native.LocalCpu:
    """The same chunks in a pool of their own."""
    pool = _native.LocalCpu((len(objects) + 1) * CHUNK_BYTES, 60_000)
    allocated = pool.allocate([each.nbytes for each in objects])
    assert allocated is not None
    for at, (ours, theirs) in enumerate(zip(allocated, objects, strict=True)):
        memoryview(ours)[:] = theirs.to_bytes()  # type: ignore[arg-type]
        pool.put(namespace, hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES], ours)
    return pool


def in_loop() -> bool:
    """Whether it is the schedule that asks, and not a thread of the connector's."""
    return threading.current_thread() is threading.main_thread()
