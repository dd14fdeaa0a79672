"""Chunks in tiers below host memory: the scheduler half asks for them, the worker half brings them.

A lookup finds what host memory holds. Where that is not all and there are tiers below, the request
waits once, for as long as a lookup may take, while the worker half brings the rest into host
memory; then it is looked up again. The asking travels with the steps that vLLM describes anyway,
and so does the answer: nobody waits for a tier but the thread that reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_rs.key import keys_of
from lmcache_rs.lookup import Rank
from lmcache_rs.storage.events import EventStatus, EventType

if TYPE_CHECKING:
    from lmcache_rs.storage import StorageManager
    from lmcache_rs.vllm_v1.faults import Faults


@dataclass(frozen=True)
class Wanted:
    """A request's chain: its namespace, and packed hashes of all its full chunks."""

    namespace: str
    hashes: bytes


@dataclass
class PrefetchOrders:
    """What one step tells the worker half: first whose chunks to let go of, then whose to bring."""

    ended: list[str] = field(default_factory=list)
    begun: dict[str, Wanted] = field(default_factory=dict)


@dataclass
class _Asked:
    wanted: Wanted
    give_up_at: float
    awaited: set[Rank]
    is_over: bool = False
    is_settled: bool = False


class AskedPrefetches:
    """The scheduler half's side.

    Args:
        deadline_s: Seconds after which a request goes on with what host memory has by then.
        ranks: Those that have lower tiers: each brings its part. May grow.
    """

    def __init__(self, deadline_s: float, ranks: Set[Rank]) -> None:
        self._deadline_s = deadline_s
        self._ranks = ranks
        self._asked: dict[str, _Asked] = {}
        self._orders = PrefetchOrders()

    def is_pending(self, req_id: str, namespace: str, hashes: bytes) -> bool:
        """Whether the request's chunks are on their way; asks for them when it is new."""
        wanted = Wanted(namespace, hashes)
        asked = self._asked.get(req_id)
        if asked is None or asked.wanted != wanted:
            self.end(req_id)
            give_up_at = time.monotonic() + self._deadline_s
            self._asked[req_id] = _Asked(wanted, give_up_at, set(self._ranks))
            self._orders.begun[req_id] = wanted
            return True
        if not asked.is_over and time.monotonic() >= asked.give_up_at:
            asked.is_over = True
        return not asked.is_over

    def is_new(self, req_id: str) -> bool:
        """Whether the worker half has yet to be told of the request's chunks."""
        return req_id in self._orders.begun

    def settle(self, req_id: str) -> bool:
        """True the first time it is asked for a request that is not pending any more."""
        asked = self._asked.get(req_id)
        is_first = asked is not None and asked.is_over and not asked.is_settled
        if asked is not None and is_first:
            asked.is_settled = True
        return is_first

    def done(self, rank: Rank, req_ids: Iterable[str]) -> None:
        """What this rank could bring for these requests is in its host memory."""
        for req_id in req_ids:
            if (asked := self._asked.get(req_id)) is not None:
                asked.awaited.discard(rank)
                asked.is_over = asked.is_over or not asked.awaited

    def end(self, req_id: str) -> None:
        """The request has what it needs, or needs nothing more."""
        if self._asked.pop(req_id, None) is None:
            return
        if self._orders.begun.pop(req_id, None) is None:
            self._orders.ended.append(req_id)

    def take_orders(self) -> PrefetchOrders:
        """What the next step says."""
        orders, self._orders = self._orders, PrefetchOrders()
        return orders


class RunningPrefetches:
    """The worker half's side: LOADING events of the store, by request.

    Args:
        storage: The tiers.
        faults: Where faults of ours are noted.
        own_name: The namespace under which this rank keeps what the scheduler half names.
    """

    def __init__(
        self, storage: StorageManager, faults: Faults, own_name: Callable[[str], str]
    ) -> None:
        self._storage = storage
        self._own_name = own_name
        self._faults = faults
        # Begun and not ended, and those of them that are not said to be done.
        self._begun: set[str] = set()
        self._running: set[str] = set()

    def follow(self, orders: PrefetchOrders) -> None:
        """Begins and ends what a step says."""
        for req_id in orders.ended:
            self._end(req_id)
        self._begin_all(orders.begun)

    def _begin_all(self, wanted: Mapping[str, Wanted]) -> None:
        for req_id, of in wanted.items():
            self._end(req_id)
            self._begun.add(req_id)
            self._running.add(req_id)
            try:
                keys = keys_of(self._own_name(of.namespace), of.hashes)
                self._storage.async_lookup_and_prefetch(req_id, keys)
            except Exception as error:
                self._faults.note("prefetch", error)

    def _end(self, req_id: str) -> None:
        self._begun.discard(req_id)
        self._running.discard(req_id)
        event = self._storage.event_manager.pop_event(EventType.LOADING, req_id)
        if event is not None:
            event.cancel()

    def take_done(self) -> set[str]:
        """Requests whose chunks are there now, as far as they will be; each said once.

        The chunks stay held until the scheduler half ends the request's prefetch.
        """
        events = self._storage.event_manager
        ongoing = EventStatus.ONGOING
        done = {
            req_id
            for req_id in self._running
            if events.get_event_status(EventType.LOADING, req_id) is not ongoing
        }
        self._running -= done
        return done

    def close(self) -> None:
        """Lets go of everything. Idempotent."""
        for req_id in list(self._begun):
            self._end(req_id)
