"""Loads that run beside the engine's steps: `AsyncLoads`.

A request that waits for such a load holds its blocks until the worker half says that the load is
over, whatever becomes of the request: vLLM frees the blocks of one that was aborted only then. So
each load that was begun is said to be over exactly once, and never while it may still write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lmcache_rs.cache_engine import Loaded

if TYPE_CHECKING:
    from lmcache_rs.vllm_v1.faults import Faults
    from lmcache_rs.vllm_v1.metadata import ReqMeta


class RunningLoad(Protocol):
    """What goes on beside the steps: a `Transfer`, or a `Stream` of them."""

    def is_done(self) -> bool:
        """Whether it has ended: its blocks are free to be used."""
        ...

    def outcome(self) -> Loaded:
        """What it did; raises what became of it."""
        ...


class FinishedLoad(NamedTuple):
    """A load that is over, and the seconds that it took at most."""

    req: ReqMeta
    loaded: Loaded
    seconds: float = 0.0


class _LoadUnderWay(NamedTuple):
    req: ReqMeta
    transfer: RunningLoad
    began: float


class AsyncLoads:
    """The loads under way, by request.

    Args:
        faults: Where faults of ours are noted.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._under_way: list[_LoadUnderWay] = []
        self._finished: list[FinishedLoad] = []

    def begin(self, req: ReqMeta, start: Callable[[ReqMeta], RunningLoad | None]) -> None:
        """Starts a load; one that cannot be started is over, with nothing loaded."""
        transfer, began = None, time.perf_counter()
        try:
            transfer = start(req)
        except Exception as error:
            self._faults.note("start_load_kv", error)
        if transfer is None:
            self.fail(req)
        else:
            self._under_way.append(_LoadUnderWay(req, transfer, began))

    def fail(self, req: ReqMeta) -> None:
        """A load that was never started is over."""
        self._finished.append(FinishedLoad(req, _nothing_of(req)))

    def fail_others(self, reqs: Iterable[ReqMeta]) -> None:
        """Those of these loads that were never started are over."""
        started = [load.req for load in self._under_way]
        started += [load.req for load in self._finished]
        for req in reqs:
            if not any(req is other for other in started):
                self.fail(req)

    def take_finished(self) -> list[FinishedLoad]:
        """The loads that are over since the last call."""
        still_under_way = []
        for load in self._under_way:
            if self._is_over(load.transfer):
                seconds = time.perf_counter() - load.began
                loaded = self._outcome(load.req, load.transfer)
                self._finished.append(FinishedLoad(load.req, loaded, seconds))
            else:
                still_under_way.append(load)
        self._under_way = still_under_way
        finished, self._finished = self._finished, []
        return finished

    def _is_over(self, transfer: RunningLoad) -> bool:
        try:
            return transfer.is_done()
        except Exception as error:
            # It may write still.
            self._faults.note("finish_load", error)
            return False

    def _outcome(self, req: ReqMeta, transfer: RunningLoad) -> Loaded:
        try:
            return transfer.outcome()
        except Exception as error:
            self._faults.note("finish_load", error)
            return _nothing_of(req)

    def __len__(self) -> int:
        return len(self._under_way)

    def close(self) -> None:
        """Nothing more is said; the engine's own close ends the copies. Idempotent."""
        self._under_way, self._finished = [], []


def _nothing_of(req: ReqMeta) -> Loaded:
    assert req.load_spec is not None
    return Loaded(req.load_spec.vllm_cached_tokens, 0, 0)
