"""Loads that run beside the engine's steps: `AsyncLoads`.

A request that waits for such a load holds its blocks until the worker half says that the load is
over, whatever becomes of the request: vLLM frees the blocks of one that was aborted only then. So
each load that was begun is said to be over exactly once, and never while it may still write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lmcache_rs.cache_engine import Loaded

if TYPE_CHECKING:
    from lmcache_rs.vllm_v1.faults import Faults
    from lmcache_rs.vllm_v1.metadata import ReqMeta

SHUTDOWN_WAIT_MS = 10_000


class Transfer(Protocol):
    """A copy under way: the native `Transfer`."""

    def is_done(self) -> bool:
        """Whether it is over, well or not: nothing is written any more."""
        ...

    def wait(self, timeout_ms: int) -> bool:
        """Waits for that; whether it is so."""
        ...

    def outcome(self) -> tuple[int, int, int]:
        """Of a load that is over: the end of what is there, tokens and bytes written."""
        ...


class FinishedLoad(NamedTuple):
    """A load that is over."""

    req: ReqMeta
    loaded: Loaded


class AsyncLoads:
    """The loads under way, by request.

    Args:
        faults: Where faults of ours are noted.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._under_way: list[tuple[ReqMeta, Transfer]] = []
        self._finished: list[FinishedLoad] = []

    def begin(self, req: ReqMeta, start: Callable[[ReqMeta], Transfer | None]) -> None:
        """Starts a load; one that cannot be started is over, with nothing loaded."""
        transfer = None
        try:
            transfer = start(req)
        except Exception as error:
            self._faults.note("start_load_kv", error)
        if transfer is None:
            self.fail(req)
        else:
            self._under_way.append((req, transfer))

    def fail(self, req: ReqMeta) -> None:
        """A load that was never started is over."""
        self._finished.append(FinishedLoad(req, _nothing_of(req)))

    def fail_others(self, reqs: Iterable[ReqMeta]) -> None:
        """Those of these loads that were never started are over."""
        started = [req for req, _ in (*self._under_way, *self._finished)]
        for req in reqs:
            if not any(req is each for each in started):
                self.fail(req)

    def take_finished(self) -> list[FinishedLoad]:
        """The loads that are over since the last call."""
        still_under_way = []
        for req, transfer in self._under_way:
            if self._is_over(transfer):
                self._finished.append(FinishedLoad(req, self._outcome(req, transfer)))
            else:
                still_under_way.append((req, transfer))
        self._under_way = still_under_way
        finished, self._finished = self._finished, []
        return finished

    def _is_over(self, transfer: Transfer) -> bool:
        try:
            return transfer.is_done()
        except Exception as error:
            # It may write still.
            self._faults.note("finish_load", error)
            return False

    def _outcome(self, req: ReqMeta, transfer: Transfer) -> Loaded:
        try:
            return Loaded(*transfer.outcome())
        except Exception as error:
            self._faults.note("finish_load", error)
            return _nothing_of(req)

    def __len__(self) -> int:
        return len(self._under_way)

    def close(self) -> None:
        """Waits until nothing writes into the engine's blocks any more. Idempotent."""
        for _, transfer in self._under_way:
            transfer.wait(SHUTDOWN_WAIT_MS)
        self._under_way, self._finished = [], []


def _nothing_of(req: ReqMeta) -> Loaded:
    assert req.load_spec is not None
    return Loaded(req.load_spec.vllm_cached_tokens, 0, 0)
