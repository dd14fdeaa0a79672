"""The lease protocol over ranks, in any order of messages, deaths and times.

The asking side is the shipped one. The ranks and what lies between are models with a clock that
stands still until it is moved, so that a message can be late by any time: a rank grants, renews and
gives back as the store does, and takes one connection at a time, the newest, as the server does.

A number is given only while every rank leases just that many chunks; a release never ends what was
granted after it; no lease of a request that has ended stays, but where the word of it was lost with
a connection, and there no longer than its deadline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_rs.lookup import RanksLookupClient, ranks, records

NUM_RANKS = 3
CHUNKS = 5
LEASE_MS = 10_000
DEADLINE_MS = 1_000
MAX_QUEUED = 4
NAMESPACE = "ns"
request_ids = st.sampled_from(["r0", "r1", "r2"])
rank_numbers = st.integers(0, NUM_RANKS - 1)


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Lease:
    num_chunks: int
    expires: float
    granted_by: int


@dataclass
class RankModel:
    """A worker: what it stores, whom it leases to, and its one connection."""

    clock: Clock
    stored: int = CHUNKS
    is_alive: bool = True
    life: int = 0
    died_at: float = 0.0
    leases: dict[str, Lease] = field(default_factory=dict)
    # Words of the client may have been lost; leases from before that end by their deadlines.
    lost_words_until: float = 0.0
    connection: int | None = None
    unread: deque[tuple[str, int, str, int]] = field(default_factory=deque)
    unsent: deque[ranks.Told] = field(default_factory=deque)

    def disconnect(self) -> None:
        self.connection = None
        if self.unread or self.leases:
            self.lost_words_until = self.clock.now + LEASE_MS / 1e3
        self.unread.clear()
        self.unsent.clear()

    def die(self) -> None:
        self.disconnect()
        self.is_alive, self.died_at = False, self.clock.now
        self.leases.clear()
        self.lost_words_until = 0.0

    def expire(self) -> None:
        now = self.clock.now
        self.leases = {key: lease for key, lease in self.leases.items() if lease.expires > now}

    def read_one(self) -> None:
        self.expire()
        kind, message_id, lookup_id, num_chunks = self.unread.popleft()
        if kind == "release":
            lease = self.leases.pop(lookup_id, None)
            assert lease is None or lease.granted_by < message_id, "another's lease was released"
            return
        if kind == "clear":
            self.stored = 0
            self.unsent.append((message_id, 0, 0, 0))
            return
        self.leases.pop(lookup_id, None)
        hit = min(self.stored, num_chunks)
        if hit:
            expires = self.clock.now + LEASE_MS / 1e3
            self.leases[lookup_id] = Lease(hit, expires, message_id)
        self.unsent.append((message_id, 0, hit, LEASE_MS if hit else 0))


class Wires:
    """`ranks.Connections` over the models; what is on its way moves when the machine says so."""

    def __init__(self, models: list[RankModel], clock: Clock) -> None:
        self._models = models
        self._clock = clock
        self._numbers: dict[int, int] = {}
        self._lost: list[int] = []
        self.inbox: list[tuple[int, ranks.Told | None]] = []

    def _open(self, rank: int) -> RankModel | None:
        model = self._models[rank]
        mine = self._numbers.get(rank)
        return model if mine is not None and model.connection == mine else None

    def connect(self) -> bool:
        for rank, model in enumerate(self._models):
            if rank not in self._numbers and model.is_alive:
                # The newest connection is the only one; what an older one left unread is dropped.
                model.disconnect()
                model.connection = self._numbers[rank] = id(self) + model.life
        return len(self._numbers) == len(self._models)

    def _takes(self, rank: int, limit: int) -> bool:
        model = self._open(rank)
        # Who finds out only later that nobody listens believes that it was sent.
        return rank in self._numbers and (model is None or len(model.unread) < limit)

    def _put(self, rank: int, word: tuple[str, int, str, int]) -> None:
        model = self._open(rank)
        if model is not None:
            model.unread.append(word)

    def ask(
        self,
        message_id: int,
        lookup_id: str,
        namespace: str,
        hashes: bytes,
        ranks: Sequence[int] | None = None,
    ) -> bool:
        asked = range(len(self._models)) if ranks is None else ranks
        if not all(self._takes(rank, MAX_QUEUED) for rank in asked):
            return False
        for rank in asked:
            self._put(rank, ("ask", message_id, lookup_id, len(hashes) // 32))
        return True

    def release(self, message_id: int, lookup_id: str) -> object:
        return self._post(("release", message_id, lookup_id, 0))

    def clear(self, message_id: int) -> list[int]:
        return self._post(("clear", message_id, "", 0))

    def _post(self, word: tuple[str, int, str, int]) -> list[int]:
        everyone = range(len(self._models))
        not_told = [rank for rank in everyone if not self._takes(rank, 10 * MAX_QUEUED)]
        for rank in set(everyone) - set(not_told):
            self._put(rank, word)
        return not_told

    def receive(self, wait_us: int) -> list[tuple[int, ranks.Told | None]]:
        for rank in list(self._numbers):
            if self._open(rank) is None:
                del self._numbers[rank]
                self.inbox = [told for told in self.inbox if told[0] != rank]
                self.inbox.append((rank, None))
        events, self.inbox = self.inbox, []
        if not events:
            self._clock.now += wait_us / 1e6
        return events

    def close(self) -> None:
        for rank in list(self._numbers):
            model = self._open(rank)
            if model is not None:
                model.disconnect()
        self._numbers.clear()


class LeasesOverRanks(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self._real: list[tuple[Any, Any]] = [(ranks, ranks.time), (records, records.time)]
        for module, _ in self._real:
            module.time = self.clock
        self.models = [RankModel(self.clock) for _ in range(NUM_RANKS)]
        self.prompts = {"r0": CHUNKS, "r1": CHUNKS + 1, "r2": 2}
        self.begin()

    def begin(self) -> None:
        self.wires = Wires(self.models, self.clock)
        self.client = RanksLookupClient(self.wires, NUM_RANKS, deadline_ms=DEADLINE_MS)
        # The requests that were given a number, and not yet blocks.
        self.given: set[str] = set()

    # --- the scheduler ------------------------------------------------------------------------

    @rule(req_id=request_ids, num_chunks=st.integers(1, CHUNKS + 1))
    def a_prompt_changes(self, req_id: str, num_chunks: int) -> None:
        self.prompts[req_id] = num_chunks

    @rule(req_id=request_ids)
    def ask_until_there_is_a_number(self, req_id: str) -> None:
        for _ in range(4):
            self.ask(req_id)
            self.all_is_delivered()
        self.ask(req_id)

    @rule(req_id=request_ids)
    def ask(self, req_id: str) -> None:
        num_chunks = self.prompts[req_id]
        hashes = b"".join(bytes([chunk]) * 32 for chunk in range(num_chunks))
        began = self.clock.now
        found = self.client.lookup(hashes, req_id, NAMESPACE)
        record = self.client._records[req_id]
        self.given.discard(req_id)
        if found is None:
            assert began - record.asked_at < DEADLINE_MS / 1e3, "an ask is out beyond its deadline"
            return
        assert found <= num_chunks
        if not found:
            return
        self.given.add(req_id)
        for model in self.models:
            if model.died_at >= record.asked_at:
                # Its chunks are gone with it, as no lease could prevent.
                continue
            model.expire()
            lease = model.leases.get(req_id)
            assert lease is not None, "a number stands on no lease"
            assert lease.num_chunks == found, "ranks lease different prefixes"

    @rule(req_id=request_ids)
    def ask_in_vain(self, req_id: str) -> None:
        self.ask(req_id)
        self.clock.now += DEADLINE_MS / 1e3
        self.ask(req_id)

    @rule(req_id=request_ids)
    def allocate(self, req_id: str) -> None:
        """Blocks are granted: the record ends, and the workers take their leases."""
        if req_id in self.given:
            self.client.end(req_id, release=False)
            for model in self.models:
                model.leases.pop(req_id, None)
            self.given.discard(req_id)

    @rule(req_id=request_ids)
    def finish(self, req_id: str) -> None:
        self.client.end(req_id, release=True)
        self.given.discard(req_id)

    @rule()
    def the_scheduler_dies(self) -> None:
        self.client.close()
        for model in self.models:
            model.lost_words_until = self.clock.now + LEASE_MS / 1e3
        self.begin()

    # --- the ranks ----------------------------------------------------------------------------

    @rule(rank=rank_numbers, count=st.integers(1, 4))
    def a_rank_reads(self, rank: int, count: int) -> None:
        model = self.models[rank]
        for _ in range(min(count, len(model.unread))):
            model.read_one()

    @rule(rank=rank_numbers, count=st.integers(1, 4))
    def answers_arrive(self, rank: int, count: int) -> None:
        model = self.models[rank]
        for _ in range(min(count, len(model.unsent))):
            self.wires.inbox.append((rank, model.unsent.popleft()))

    @rule(rank=rank_numbers)
    def answers_arrive_twice(self, rank: int) -> None:
        self.a_rank_reads(rank, MAX_QUEUED)
        self.wires.inbox += [(rank, answer) for answer in self.models[rank].unsent]
        self.answers_arrive(rank, MAX_QUEUED)

    @rule()
    def all_is_delivered(self) -> None:
        for rank in range(NUM_RANKS):
            self.a_rank_reads(rank, 10**6)
            self.answers_arrive(rank, 10**6)

    @rule(rank=rank_numbers, stored=st.integers(0, CHUNKS))
    def a_ranks_cache_changes(self, rank: int, stored: int) -> None:
        """Evicted or stored on its own. What is leased cannot be evicted."""
        model = self.models[rank]
        model.expire()
        held = max((lease.num_chunks for lease in model.leases.values()), default=0)
        model.stored = max(stored, held)

    @rule(rank=rank_numbers)
    def a_rank_is_cleared(self, rank: int) -> None:
        self.models[rank].stored = 0

    @rule(rank=rank_numbers)
    def a_rank_dies_or_comes_back(self, rank: int) -> None:
        model = self.models[rank]
        if model.is_alive:
            model.die()
        else:
            model.is_alive, model.life, model.stored = True, model.life + 1, CHUNKS

    @rule(rank=rank_numbers)
    def a_connection_breaks(self, rank: int) -> None:
        self.models[rank].disconnect()

    @rule(seconds=st.sampled_from([0.01, 0.3, DEADLINE_MS / 1e3, LEASE_MS / 2e3, LEASE_MS / 1e3]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        for model in self.models:
            model.expire()

    # --- what always holds --------------------------------------------------------------------

    @invariant()
    def every_lease_has_an_owner(self) -> None:
        for model in self.models:
            if self.clock.now <= model.lost_words_until:
                continue
            for lookup_id, lease in model.leases.items():
                assert lease.expires <= self.clock.now + LEASE_MS / 1e3
                given_back = any(
                    kind == "release" and key == lookup_id for kind, _, key, _ in model.unread
                )
                assert lookup_id in self.client._leased or given_back, "a lease without an owner"

    def teardown(self) -> None:
        for req_id in ("r0", "r1", "r2"):
            self.client.end(req_id, release=True)
        self.all_is_delivered()
        for model in self.models:
            assert not model.leases or self.clock.now <= model.lost_words_until
        self.time_passes(LEASE_MS / 1e3)
        assert not any(model.leases for model in self.models)
        assert not self.client._records
        assert not self.client._leased
        assert not self.client._rounds
        assert not self.client._awaited
        for module, real in self._real:
            module.time = real


LeasesOverRanks.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLeasesOverRanks = LeasesOverRanks.TestCase
