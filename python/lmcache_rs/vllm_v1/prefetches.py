"""Chunks in tiers below host memory: the scheduler half asks for them, the worker half brings them.

A lookup finds what host memory holds. Where that is not all and there are tiers below, the request
waits once, for as long as a lookup may take, while the worker half brings the rest into host
memory; then it is looked up again. The asking travels with the steps that vLLM describes anyway,
and so does the answer: nobody waits for a tier but the thread that reads it. What is not worth the
wait (load_costs.py) is not asked for, or not waited for any longer; now and then some of it is
asked for while nobody waits, to see whether it is worth it by now.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lmcache_rs.key import keys_of
from lmcache_rs.lookup import Rank
from lmcache_rs.storage.events import EventStatus, EventType
from lmcache_rs.vllm_v1.load_costs import SHORTEST_WAIT_S

if TYPE_CHECKING:
    from lmcache_rs.storage import StorageManager
    from lmcache_rs.vllm_v1.faults import Faults


@dataclass(frozen=True)
class Wanted:
    """A request's chain: its namespace, and packed hashes of all its full chunks; and by tier, how
    many neighbouring chunks it must have to be read."""

    namespace: str
    hashes: bytes
    least_chunks: Mapping[str, int] = field(default_factory=dict, compare=False)


@dataclass
class PrefetchOrders:
    """What one step tells the worker half: first whose chunks to let go of, then whose to bring."""

    ended: list[str] = field(default_factory=list)
    begun: dict[str, Wanted] = field(default_factory=dict)


class Brought(NamedTuple):
    """Chunks that all ranks have brought as far as they could.

    Args:
        req_id: For whom.
        seconds: Since they were asked for.
        is_alone: Whether its request has waited until now, and nobody was waiting when it asked.
            What nobody waits for is heard of with the end of a step, however long that took.
    """

    req_id: str
    seconds: float
    is_alone: bool


@dataclass
class _Asked:
    wanted: Wanted
    began: float
    give_up_at: float
    awaited: set[Rank]
    # In which all of it could be computed instead.
    compute_s: float = 0.0
    # Nobody was waited for when it was asked for.
    is_alone: bool = False
    # Nobody waits for it, and it ends by itself.
    is_probe: bool = False
    # The worker half is not to hear of it.
    is_refused: bool = False
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
        # Not waited for any longer, and still being brought: what is asked for next comes behind.
        self._given_up: dict[str, _Asked] = {}
        self._orders = PrefetchOrders()

    def is_known(self, req_id: str, namespace: str, hashes: bytes) -> bool:
        """Whether these chunks were asked for already, or refused."""
        asked = self._asked.get(req_id)
        return asked is not None and asked.wanted == Wanted(namespace, hashes)

    @property
    def is_held_up(self) -> bool:
        """Whether chunks are still being brought that nobody waits for any longer."""
        return bool(self._given_up)

    def is_pending(
        self,
        req_id: str,
        namespace: str,
        hashes: bytes,
        least_chunks: Mapping[str, int] | None = None,
        compute_s: float = math.inf,
    ) -> bool:
        """Whether the request's chunks are on their way; asks for them when it is new.

        Args:
            req_id: The request.
            namespace, hashes: Its chunks.
            least_chunks: By tier, how many neighbouring chunks it must have to be read.
            compute_s: Seconds in which the engine would compute them: it is waited for no longer
                than computing would take, what others wait for included.
        """
        asked = self._asked.get(req_id)
        if asked is None or asked.wanted != Wanted(namespace, hashes):
            self.end(req_id)
            self._begin(req_id, Wanted(namespace, hashes, least_chunks or {}), compute_s)
            return True
        if not asked.is_over and time.monotonic() >= asked.give_up_at:
            asked.is_over = True
            if math.isfinite(asked.compute_s):
                self._given_up[req_id] = asked
        return not asked.is_over

    def _begin(self, req_id: str, wanted: Wanted, compute_s: float) -> None:
        # With the name of an old request, it takes that one's place with the worker half.
        self._given_up.pop(req_id, None)
        now = time.monotonic()
        waiting = [other for other in self._asked.values() if not other.is_over]
        asked = _Asked(wanted, now, now + self._deadline_s, set(self._ranks), compute_s)
        asked.is_alone = not waiting and not self._given_up
        in_turn_s = compute_s + sum(other.compute_s for other in waiting)
        asked.give_up_at = now + min(self._deadline_s, max(SHORTEST_WAIT_S, in_turn_s))
        self._asked[req_id] = asked
        self._orders.begun[req_id] = wanted

    def refuse(self, req_id: str, namespace: str, hashes: bytes) -> None:
        """The request goes on with what host memory has."""
        self.end(req_id)
        now = time.monotonic()
        asked = _Asked(Wanted(namespace, hashes), now, now, set(), is_over=True, is_settled=True)
        asked.is_refused = True
        self._asked[req_id] = asked

    def probe(
        self, probe_id: str, namespace: str, hashes: bytes, least_chunks: Mapping[str, int]
    ) -> None:
        """Has chunks brought that nobody waits for."""
        self._begin(probe_id, Wanted(namespace, hashes, least_chunks), 0.0)
        self._asked[probe_id].is_probe = True

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

    def done(self, rank: Rank, req_ids: Iterable[str]) -> list[Brought]:
        """What this rank could bring for these requests is in its host memory; those for which it
        was the last rank."""
        brought = []
        for req_id in req_ids:
            asked = self._given_up.get(req_id) or self._asked.get(req_id)
            if asked is None or asked.is_refused:
                continue
            asked.awaited.discard(rank)
            if asked.awaited:
                continue
            is_alone = asked.is_alone and not asked.is_over and not asked.is_probe
            asked.is_over = True
            brought.append(Brought(req_id, time.monotonic() - asked.began, is_alone))
            is_given_up = self._given_up.pop(req_id, None) is not None
            if asked.is_probe:
                self.end(req_id)
            elif is_given_up and req_id not in self._asked:
                self._orders.ended.append(req_id)
        return brought

    def end(self, req_id: str) -> None:
        """The request has what it needs, or needs nothing more."""
        asked = self._asked.pop(req_id, None)
        if asked is None or asked.is_refused:
            return
        if self._orders.begun.pop(req_id, None) is not None:
            self._given_up.pop(req_id, None)
        elif req_id not in self._given_up:
            # Once it is brought it is said to have ended: until then it holds up what is behind it.
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
                self._storage.async_lookup_and_prefetch(req_id, keys, of.least_chunks)
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
