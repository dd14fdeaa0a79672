"""The thread that brings chunks into host memory: `PrefetchThread`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Jobs = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


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
