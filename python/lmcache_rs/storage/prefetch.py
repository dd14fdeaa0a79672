"""The thread that brings chunks into host memory, what comes of it, and for how much there is room:
`PrefetchThread`, `Prefetched`, `Room`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_rs._native import LocalCpu

if TYPE_CHECKING:
    from lmcache_rs.storage.memory_obj import MemoryObj

T = TypeVar("T")
_Jobs = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Room:
    """How many chunks may be brought into a pool: those that a lookup could lease afterwards.

    Args:
        pool: The pool.
        chunk_bytes: Bytes of a chunk.
        is_closed: Whether there is never room: what is stored is only counted.
    """

    def __init__(self, pool: LocalCpu, chunk_bytes: int, *, is_closed: bool = False) -> None:
        self._pool = pool
        self._chunk_bytes = chunk_bytes
        self._is_closed = is_closed

    def num_chunks(self) -> int:
        """How many it is now."""
        if self._is_closed:
            return 0
        usage = self._pool.usage()
        leased_bytes = usage["leased_bytes"]
        free_bytes = usage["capacity_bytes"] // 2 - leased_bytes
        # A lookup leases a first chunk whatever the pool's size.
        return max(not leased_bytes, free_bytes // self._chunk_bytes)

    def is_full(self) -> bool:
        """Whether the pool has no place for another chunk, and nothing that it could evict."""
        return self._pool.allocate([self._chunk_bytes]) is None


class Prefetched(list["MemoryObj"]):
    """Chunks that were brought, held.

    Args:
        chunks: They, from the first to the first gap.
        num_stored: Chunks that are stored, in whichever tier, as far as is known: more than were
            brought, where those had no room.
    """

    def __init__(self, chunks: Iterable[MemoryObj] = (), num_stored: int | None = None) -> None:
        super().__init__(chunks)
        self.num_stored = len(self) if num_stored is None else num_stored


class PrefetchThread:
    """Does one job after the other. It starts with the first one, and is a daemon: what it brings
    is of use to this process alone.
    """

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, future: Future[T], job: Callable[[], T], nothing: T) -> None:
        """Has the thread do `job`, whose result `future` gets; `nothing` if it fails or there is no
        thread. A future that is cancelled before its turn is passed over."""

        def guarded() -> T:
            try:
                return job()
            except Exception:
                return nothing

        with self._lock:
            starts = not self._closed and self._start()
            if starts:
                self._jobs.put((future, guarded))
        if not starts:
            future.set_result(nothing)

    def close(self) -> None:
        """Takes nothing more; jobs that wait are called off. Idempotent."""
        with self._lock:
            self._closed = True
            while not self._jobs.empty():
                waiting = self._jobs.get_nowait()
                if waiting is not None:
                    waiting[0].cancel()
            self._jobs.put(None)

    def _start(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(
                target=_serve, args=(self._jobs,), name="lmcache_rs-prefetch", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True


def _serve(jobs: _Jobs) -> None:
    while (taken := jobs.get()) is not None:
        future, job = taken
        if future.set_running_or_notify_cancel():
            future.set_result(job())
        # What the result holds is its taker's alone.
        del taken, future, job
