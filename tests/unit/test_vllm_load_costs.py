"""The halves of the connector where loads may be slower than computing."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_vllm_halves import CHUNK, Pair, new_request

from lmcache_rs.lookup import Rank
from lmcache_rs.storage.reads import TierRead
from lmcache_rs.vllm_v1 import prefetches
from lmcache_rs.vllm_v1.load_costs import NEVER, SHORTEST_WAIT_S, LoadCosts
from lmcache_rs.vllm_v1.metadata import ONLY_RANK, LMCacheWorkerMetadata
from lmcache_rs.vllm_v1.metrics import scheduler_totals
from lmcache_rs.vllm_v1.prefetches import AskedPrefetches

CHUNK_S = 100.0


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Over a shelf."""
    tiers = {"shelf": "plain_shelf:Shelf"}
    made = Pair({"refuse_slow_loads": True, "storage_backends": tiers, "lookup_timeout_ms": 60_000})
    yield made
    made.close()


def teach(pair: Pair, share: float) -> None:
    """Loads take this share of what computing takes."""
    costs = pair.scheduler._costs = LoadCosts(CHUNK)
    costs.has_tiers(ONLY_RANK, ["shelf"])
    for number in range(2):
        assert costs.begin_step(number, 4 * CHUNK, 0.0)
        costs.end_step(number, 4 * CHUNK_S)
    reads = [TierRead("r", "shelf", n, n, n, n * CHUNK_S * share) for n in range(1, 9)]
    costs.take_in(ONLY_RANK, reads, {})


def stored_below(pair: Pair, num_chunks: int, seed: int) -> None:
    """The shelf has the chunks, and host memory has not."""
    request = new_request(num_chunks * CHUNK + 1, seed=seed)
    while (promised := pair.scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
        pair.step({})
    assert promised == 0
    pair.grant(request, 0)
    pair.step({request: num_chunks * CHUNK + 1})
    pair.finish(request)
    pair.step({})
    storage = pair.worker._tiers.storage
    assert storage is not None
    assert storage.flush(60)
    pair.pool.clear()


def test_a_load_that_would_be_slower_is_refused_at_once(pair: Pair) -> None:
    stored_below(pair, 4, seed=1)
    teach(pair, share=3.0)
    request = new_request(4 * CHUNK + 1, seed=1)
    assert pair.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    # Nor is it counted, or tried, anew while it waits for blocks.
    assert pair.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert pair.scheduler.counts["refused_loads"] == 1
    metadata = pair.describe({})
    assert metadata.prefetches is not None
    assert request.request_id not in metadata.prefetches.begun
    pair.execute(metadata)
    pair.report()
    pair.grant(request, 0)
    pair.finish(request)
    orders = pair.describe({}).prefetches
    assert orders is not None
    assert request.request_id not in orders.ended, "it was never told of"


def test_what_the_engine_has_itself_is_no_gain(pair: Pair) -> None:
    stored_below(pair, 4, seed=1)
    teach(pair, share=0.3)
    costs = pair.scheduler._costs
    assert costs is not None
    costs.take_in(ONLY_RANK, [], {f"r{number}": 1.5 * CHUNK_S for number in range(8)})
    request = new_request(4 * CHUNK + 1, seed=1)
    # Of four chunks one is left: that one is not worth the asking.
    assert pair.ask(request, 3 * CHUNK) == 0
    pair.finish(request)
    whole = new_request(4 * CHUNK + 1, seed=1)
    assert pair.scheduler.get_num_new_matched_tokens(whole, 0) == (None, False)
    pair.finish(whole)


def test_a_load_that_is_quicker_is_made(pair: Pair) -> None:
    stored_below(pair, 4, seed=1)
    teach(pair, share=0.3)
    request = new_request(4 * CHUNK + 1, seed=1)
    while (found := pair.scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
        pair.step({})
    assert found == 4 * CHUNK
    assert pair.scheduler.counts["refused_loads"] == 0
    pair.finish(request)


def test_what_host_memory_holds_is_never_refused(pair: Pair) -> None:
    request = new_request(3 * CHUNK + 1, seed=2)
    stored_below(pair, 3, seed=3)
    while pair.scheduler.get_num_new_matched_tokens(request, 0)[0] is None:
        pair.step({})
    pair.grant(request, 0)
    pair.step({request: 3 * CHUNK + 1})
    pair.finish(request)
    pair.step({})
    teach(pair, share=1000.0)
    again = new_request(3 * CHUNK + 1, seed=2)
    assert pair.ask(again) == 3 * CHUNK
    # And where the rest of a prompt lies below, what is here is used.
    longer = new_request(6 * CHUNK + 1, seed=2)
    longer_start = list(again.all_token_ids[: 3 * CHUNK])
    assert list(longer.all_token_ids[: 3 * CHUNK]) == longer_start, "the same beginning"
    assert pair.ask(longer) == 3 * CHUNK
    assert pair.scheduler.counts["refused_loads"] == 1
    for each in (again, longer):
        pair.finish(each)


def test_a_probe_reads_a_chunk_while_the_request_computes(pair: Pair) -> None:
    stored_below(pair, 4, seed=1)
    teach(pair, share=3.0)
    request = new_request(4 * CHUNK + 1, seed=1)
    assert pair.ask(request) == 0
    assert pair.scheduler.counts["probes"] == 1
    costs = pair.scheduler._costs
    assert costs is not None
    before = costs._reads[ONLY_RANK, "shelf"].num_reads
    until = time.monotonic() + 60
    while costs._reads[ONLY_RANK, "shelf"].num_reads == before and time.monotonic() < until:
        pair.step({})
    assert costs._reads[ONLY_RANK, "shelf"].num_reads == before + 1
    assert costs._reads[ONLY_RANK, "shelf"]._samples[-1][0] == 1, "of one chunk"
    assert pair.pool.usage()["chunks"] == 1
    # It is over: nothing is held, and the scheduler half has forgotten it.
    pair.step({})
    assert pair.scheduler._prefetches is not None
    assert set(pair.scheduler._prefetches._asked) == {request.request_id}
    assert costs._probe is None
    pair.finish(request)


def test_a_hit_is_cut_once_or_twice_where_nothing_is_known_of_computing(pair: Pair) -> None:
    stored_below(pair, 4, seed=1)
    costs = pair.scheduler._costs
    assert costs is not None
    costs._compute = type(costs._compute)(CHUNK)
    reads = [TierRead("r", "shelf", n, n, n, n * CHUNK_S) for n in range(1, 9)]
    costs.take_in(ONLY_RANK, reads, {})
    request = new_request(4 * CHUNK + 1, seed=1)
    while (found := pair.scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
        pair.step({})
    assert found == 3 * CHUNK
    pair.finish(request)


def test_the_worker_tells_what_was_read_and_that_a_timed_step_is_over(pair: Pair) -> None:
    stored_below(pair, 3, seed=1)
    pair.scheduler._costs = None
    request = new_request(3 * CHUNK + 1, seed=1)
    told: list[TierRead] = []
    while pair.scheduler.get_num_new_matched_tokens(request, 0)[0] is None:
        pair.step({})
        if isinstance(pair.outcome, LMCacheWorkerMetadata):
            told += pickle.loads(pickle.dumps(pair.outcome)).tier_reads
            assert pair.outcome.lower_tiers == ("shelf",)
    (read,) = told
    assert (read.lookup_id, read.tier, read.wanted_chunks, read.chunks) == (
        request.request_id,
        "shelf",
        3,
        3,
    )
    assert read.num_bytes > 0
    assert read.seconds > 0
    pair.finish(request)
    metadata = pair.describe({})
    metadata.is_timed = True
    pair.execute(metadata)
    outcome = pair.outcome
    assert isinstance(outcome, LMCacheWorkerMetadata)
    assert outcome.timed_step == metadata.fences.step
    pair.execute(pair.describe({}))
    assert pair.outcome is None or pair.outcome.timed_step is None


def test_what_computing_takes_is_learned_from_steps(pair: Pair) -> None:
    for seed in range(10, 14):
        stored_below(pair, 2, seed=seed)
    assert pair.scheduler.chunk_seconds()["computing"] > 0
    told = scheduler_totals(pair.scheduler.counts, {}, {}, pair.scheduler.chunk_seconds())
    assert told["chunk_seconds", "computing"] > 0


def test_switched_off_nothing_is_refused_or_timed() -> None:
    pair = Pair({"storage_backends": {"shelf": "plain_shelf:Shelf"}, "lookup_timeout_ms": 60_000})
    assert pair.scheduler._costs is None
    stored_below(pair, 2, seed=1)
    assert pair.scheduler.chunk_seconds() == {}
    pair.close()


# --- waiting --------------------------------------------------------------------------------------


@dataclass
class Clock:
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(prefetches, "time", made)
    return made


def hashes(num_chunks: int, seed: int) -> bytes:
    return bytes([seed]) * 32 * num_chunks


def test_nobody_waits_longer_than_computing_takes(clock: Clock) -> None:
    asked = AskedPrefetches(3.0, {ONLY_RANK})
    assert asked.is_pending("a", "n", hashes(2, 1), {}, 0.5)
    # Computed, it would come behind the first.
    assert asked.is_pending("b", "n", hashes(2, 2), {}, 0.25)
    assert asked.is_pending("unknown", "n", hashes(2, 3))
    clock.now = 0.49
    assert asked.is_pending("a", "n", hashes(2, 1))
    clock.now = 0.51
    assert not asked.is_pending("a", "n", hashes(2, 1))
    assert asked.is_pending("b", "n", hashes(2, 2))
    clock.now = 0.76
    assert not asked.is_pending("b", "n", hashes(2, 2))
    assert asked.is_pending("unknown", "n", hashes(2, 3))
    clock.now = 3.1
    assert not asked.is_pending("unknown", "n", hashes(2, 3))


def test_a_step_or_two_is_always_waited_for(clock: Clock) -> None:
    asked = AskedPrefetches(3.0, {ONLY_RANK})
    assert asked.is_pending("a", "n", hashes(2, 1), {}, 1e-9)
    clock.now = SHORTEST_WAIT_S * 0.9
    assert asked.is_pending("a", "n", hashes(2, 1))


def test_what_was_given_up_holds_up_until_it_is_there_and_is_let_go_of_then(clock: Clock) -> None:
    asked = AskedPrefetches(3.0, {ONLY_RANK, Rank(0, 0, 1)})
    assert asked.is_pending("a", "n", hashes(2, 1), {}, 0.5)
    asked.take_orders()
    clock.now = 1.0
    assert not asked.is_pending("a", "n", hashes(2, 1))
    assert asked.is_held_up
    asked.end("a")
    assert asked.take_orders().ended == [], "the worker half would no longer say when it is done"
    assert asked.done(ONLY_RANK, ["a"]) == []
    assert asked.is_held_up
    (brought,) = asked.done(Rank(0, 0, 1), ["a"])
    assert (brought.req_id, brought.seconds) == ("a", 1.0)
    assert not brought.is_alone, "when nobody waits any more, it is heard of late"
    assert not asked.is_held_up
    assert asked.take_orders().ended == ["a"]


def test_what_was_given_up_before_it_was_asked_for_holds_nobody_up(clock: Clock) -> None:
    asked = AskedPrefetches(3.0, {ONLY_RANK})
    assert asked.is_pending("a", "n", hashes(2, 1), {}, 0.5)
    clock.now = 1.0
    assert not asked.is_pending("a", "n", hashes(2, 1))
    asked.end("a")
    orders = asked.take_orders()
    assert (orders.begun, orders.ended) == ({}, [])
    assert not asked.is_held_up


def test_an_old_name_is_taken_over(clock: Clock) -> None:
    asked = AskedPrefetches(3.0, {ONLY_RANK})
    assert asked.is_pending("a", "n", hashes(2, 1), {}, 0.5)
    asked.take_orders()
    clock.now = 1.0
    assert not asked.is_pending("a", "n", hashes(2, 1))
    assert asked.is_pending("a", "n", hashes(3, 2), {"far": NEVER}, 0.5)
    assert not asked.is_held_up
    orders = asked.take_orders()
    # The worker half ends an old one of the name before it begins.
    assert orders.begun["a"].least_chunks == {"far": NEVER}
    asked.done(ONLY_RANK, ["a"])
    assert not asked.is_pending("a", "n", hashes(3, 2))
    asked.end("a")
    assert asked.take_orders().ended == ["a"]


def test_who_is_asked_for_beside_others_says_nothing_of_waiting(clock: Clock) -> None:
    asked = AskedPrefetches(3.0, {ONLY_RANK})
    asked.is_pending("a", "n", hashes(2, 1), {}, 0.5)
    asked.is_pending("b", "n", hashes(2, 2), {}, 0.5)
    assert [each.is_alone for each in asked.done(ONLY_RANK, ["a", "b"])] == [True, False]
    asked.probe("probe", "n", hashes(2, 3), {})
    assert [each.is_alone for each in asked.done(ONLY_RANK, ["probe"])] == [False]
