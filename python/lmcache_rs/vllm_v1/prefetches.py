"""Chunks in tiers below host memory: the scheduler half asks for them, the worker half brings them.

A lookup finds what host memory holds. Where that is not all and there are tiers below, the request
waits once, for as long as a lookup may take, while the worker half brings the rest into host
memory; then it is looked up again. The asking travels with the steps that vLLM describes anyway,
and so does the answer: nobody waits for a tier but the thread that reads it. What is not worth the
wait (load_costs.py) is not asked for, or not waited for any longer; now and then some of it is
asked for while nobody waits, to see whether it is worth it by now.

What the engine has itself is not asked for. What does not fit into host memory is not brought: the
answer says how much is stored, and it can be streamed (streams.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lmcache_rs.key import HASH_BYTES, keys_of
from lmcache_rs.lookup import Rank
from lmcache_rs.storage.events import EventStatus, EventType
from lmcache_rs.vllm_v1.load_costs import SHORTEST_WAIT_S

if TYPE_CHECKING:
    from concurrent.futures import Future

    from lmcache_rs._native import LocalCpu
    from lmcache_rs.key import CacheEngineKey
    from lmcache_rs.storage import StorageManager
    from lmcache_rs.storage.prefetch import Prefetched, Room
    from lmcache_rs.vllm_v1.faults import Faults


_NONE_ASKED = 1 << 30


@dataclass(frozen=True)
class Wanted:
    """A request's chain.

    Args:
        namespace, hashes: Its namespace, and packed hashes of all its full chunks.
        least_chunks: By tier, how many neighbouring chunks it must have to be read.
        first: The first chunk that is wanted: the engine has those before it.
        is_probe: Whether it is to be read in any case, to see what that takes.
    """

    namespace: str
    hashes: bytes
    least_chunks: Mapping[str, int] = field(default_factory=dict, compare=False)
    first: int = field(default=0, compare=False)
    is_probe: bool = field(default=False, compare=False)


@dataclass
class PrefetchOrders:
    """What one step tells the worker half: first whose streams to stop and whose chunks to let go
    of, then whose to bring."""

    ended: list[str] = field(default_factory=list)
    begun: dict[str, Wanted] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)


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
    # What all ranks that have answered could stream, in chunks from the first wanted on.
    streamable: int = _NONE_ASKED
    # Nobody was waited for when it was asked for.
    is_alone: bool = False
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

    def is_known(self, req_id: str, namespace: str, hashes: bytes, first: int = 0) -> bool:
        """Whether these chunks, from `first` on, were asked for already, or refused."""
        asked = self._asked.get(req_id)
        known = asked is not None and asked.wanted == Wanted(namespace, hashes)
        return asked is not None and known and asked.wanted.first <= first

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
        first: int = 0,
    ) -> bool:
        """Whether the request's chunks are on their way; asks for them when it is new, and again
        where the engine has lost some that it had.

        Args:
            req_id: The request.
            namespace, hashes: Its chunks.
            least_chunks: By tier, how many neighbouring chunks it must have to be read.
            compute_s: Seconds in which the engine would compute them: it is waited for no longer
                than computing would take, what others wait for included.
            first: The first chunk that the engine does not have.
        """
        if not self.is_known(req_id, namespace, hashes, first):
            asked = self._asked.get(req_id)
            wanted = Wanted(namespace, hashes, least_chunks or {}, first)
            self.end(req_id)
            self._begin(req_id, wanted, compute_s)
            if asked is not None and asked.wanted == wanted:
                # It waits for no longer than it would have.
                again = self._asked[req_id]
                again.give_up_at = min(again.give_up_at, asked.give_up_at)
            return True
        asked = self._asked[req_id]
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
        self,
        probe_id: str,
        namespace: str,
        hashes: bytes,
        least_chunks: Mapping[str, int],
        first: int = 0,
    ) -> None:
        """Has chunks brought that nobody waits for, and that end by themselves."""
        wanted = Wanted(namespace, hashes, least_chunks, first, is_probe=True)
        self._begin(probe_id, wanted, 0.0)

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

    def streamable(self, req_id: str) -> int:
        """End of the chunks that all ranks could stream, from the prompt's first on; 0 if none."""
        asked = self._asked.get(req_id)
        if asked is None or asked.awaited or not 0 < asked.streamable < _NONE_ASKED:
            return 0
        # Never more than was asked for: vLLM stops where a promise is longer than its prompt.
        asked_chunks = len(asked.wanted.hashes) // HASH_BYTES
        return min(asked.wanted.first + asked.streamable, asked_chunks)

    def stop_stream(self, req_id: str) -> None:
        """The request has gone, and may be waiting for a stream."""
        self._orders.stopped.append(req_id)

    def done(
        self, rank: Rank, req_ids: Iterable[str], streamable: Mapping[str, int] | None = None
    ) -> list[Brought]:
        """What this rank could bring for these requests is in its host memory; those for which it
        was the last rank.

        Args:
            rank: The rank.
            req_ids: The requests.
            streamable: Chunks that it could stream, from the first wanted on; none unless given.
        """
        brought = []
        for req_id in req_ids:
            asked = self._given_up.get(req_id) or self._asked.get(req_id)
            if asked is None or asked.is_refused:
                continue
            if rank in asked.awaited:
                # Who has given up waiting for the answer does not wait for a stream either.
                here = 0 if asked.is_over else (streamable or {}).get(req_id, 0)
                asked.streamable = min(asked.streamable, here)
            asked.awaited.discard(rank)
            if asked.awaited:
                continue
            is_alone = asked.is_alone and not asked.is_over and not asked.wanted.is_probe
            asked.is_over = True
            brought.append(Brought(req_id, time.monotonic() - asked.began, is_alone))
            is_given_up = self._given_up.pop(req_id, None) is not None
            if asked.wanted.is_probe:
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
        room: For how many chunks there is room in host memory; None where nothing can be streamed.
        staged_in: Host memory, where it only stages: what was brought is let go of.
    """

    def __init__(
        self,
        storage: StorageManager,
        faults: Faults,
        own_name: Callable[[str], str],
        *,
        room: Room | None = None,
        staged_in: LocalCpu | None = None,
    ) -> None:
        self._storage = storage
        self._own_name = own_name
        self._faults = faults
        self._room = room
        self._staged_in = staged_in
        # Begun and not ended, with their chunks; and those of them that are not said to be done.
        self._begun: dict[str, list[CacheEngineKey]] = {}
        self._running: dict[str, Future[Prefetched] | None] = {}

    def follow(self, orders: PrefetchOrders) -> None:
        """Begins and ends what a step says."""
        for req_id in orders.ended:
            self._end(req_id)
        self._begin_all(orders.begun)

    def _begin_all(self, wanted: Mapping[str, Wanted]) -> None:
        for req_id, of in wanted.items():
            self._end(req_id)
            self._begun[req_id] = []
            self._running[req_id] = None
            try:
                hashes = of.hashes[of.first * HASH_BYTES :]
                keys = self._begun[req_id] = keys_of(self._own_name(of.namespace), hashes)
                self._running[req_id] = self._storage.async_lookup_and_prefetch(
                    req_id, keys, of.least_chunks, None if of.is_probe else self._room
                )
            except Exception as error:
                self._faults.note("prefetch", error)

    def _end(self, req_id: str) -> None:
        keys = self._begun.pop(req_id, [])
        self._running.pop(req_id, None)
        event = self._storage.event_manager.pop_event(EventType.LOADING, req_id)
        if event is not None:
            event.cancel()
        if keys and self._staged_in is not None:
            # Leased by now, where it is of use.
            self.let_go(keys[0].namespace, b"".join(key.chunk_hash for key in keys))

    def let_go(self, namespace: str, hashes: bytes) -> None:
        """Host memory that only stages finds these chunks no more, unless somebody has asked for
        them."""
        if self._staged_in is None:
            return
        wanted = {
            key.chunk_hash
            for keys in self._begun.values()
            for key in keys
            if key.namespace == namespace
        }
        for at in range(0, len(hashes), HASH_BYTES):
            chunk_hash = hashes[at : at + HASH_BYTES]
            if chunk_hash not in wanted:
                self._staged_in.remove(namespace, chunk_hash)

    def take_done(self) -> dict[str, int]:
        """Requests whose chunks are there now, as far as they will be, each said once; with how
        many could be streamed, from the first wanted on.

        The chunks stay held until the scheduler half ends the request's prefetch.
        """
        events = self._storage.event_manager
        done: dict[str, int] = {}
        for req_id, future in list(self._running.items()):
            if events.get_event_status(EventType.LOADING, req_id) is EventStatus.ONGOING:
                continue
            del self._running[req_id]
            is_whole = future is not None and not future.cancelled() and self._room is not None
            done[req_id] = future.result().num_stored if future is not None and is_whole else 0
        return done

    def close(self) -> None:
        """Lets go of everything. Idempotent."""
        for req_id in list(self._begun):
            self._end(req_id)
