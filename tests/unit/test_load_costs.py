"""Load or recompute: what is learned of tiers and of the engine, and what follows from it.

Time is a number here: nothing waits, and no machine is too slow.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from lmcache_rs.lookup import Rank
from lmcache_rs.storage.reads import TierRead
from lmcache_rs.vllm_v1.load_costs import (
    MOST_PROBED_CHUNKS,
    NEVER,
    PROBE_PAUSE,
    READS_TO_KNOW,
    SHORTEST_WAIT_S,
    ComputeCost,
    LoadCosts,
    ReadCost,
)

CHUNK = 256
RANK, OTHER = Rank(0, 0, 0), Rank(0, 0, 1)
TOKEN_S, BASE_S = 1e-4, 0.005
CHUNK_S = CHUNK * TOKEN_S


def read(
    chunks: int, seconds: float, *, came: int | None = None, tier: str = "disk", of: str = "r"
) -> TierRead:
    came = chunks if came is None else came
    return TierRead(of, tier, chunks, came, came << 20, seconds)


def costs_of(
    reads: dict[tuple[Rank, str], Callable[[int], float]], *, computed: bool = True
) -> LoadCosts:
    """With reads of 1 to 8 chunks by rank and tier, and some steps."""
    costs = LoadCosts(CHUNK)
    for rank in dict.fromkeys(rank for rank, _ in reads):
        costs.has_tiers(rank, [tier for of, tier in reads if of == rank])
    for (rank, tier), seconds in reads.items():
        costs.take_in(rank, [read(n, seconds(n), tier=tier) for n in range(1, 9)], {})
    if computed:
        now = 0.0
        for _ in range(4):
            now = step(costs, 1, step(costs, 4 * CHUNK, now))
    return costs


def step(costs: LoadCosts, num_tokens: int, now: float = 0.0) -> float:
    """Computes so many tokens; when that is done."""
    end = now + BASE_S + num_tokens * TOKEN_S
    if costs.begin_step(1, num_tokens, now):
        costs.end_step(1, end)
    costs.note_outcome(end)
    return end


# --- a tier ---------------------------------------------------------------------------------------


def test_latency_and_speed_are_told_apart() -> None:
    cost = ReadCost()
    for chunks in (1, 4, 2, 16):
        cost.note(read(chunks, 0.05 + chunks * 0.002))
    assert cost.latency_s == pytest.approx(0.05)
    assert cost.chunk_s == pytest.approx(0.002)
    assert cost.seconds(100) == pytest.approx(0.25)


def test_of_reads_of_one_size_a_chunk_takes_what_it_took() -> None:
    cost = ReadCost()
    for _ in range(4):
        cost.note(read(4, 0.1))
    assert (cost.latency_s, cost.chunk_s) == (0.0, pytest.approx(0.025))


def test_one_stall_changes_nothing() -> None:
    cost = ReadCost()
    for chunks in (1, 2, 3, 4, 5, 6, 7):
        cost.note(read(chunks, chunks * 0.002))
    cost.note(read(4, 3.0))
    assert cost.seconds(8) < 2 * 8 * 0.002


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_two_surprises_in_a_row_are_a_change_and_all_before_is_forgotten(factor: float) -> None:
    cost = ReadCost()
    for chunks in range(1, 9):
        cost.note(read(chunks, chunks * 0.01))
    for chunks in (4, 5):
        cost.note(read(chunks, chunks * 0.01 * factor))
    assert not cost.is_known
    cost.note(read(6, 6 * 0.01 * factor))
    assert cost.is_known
    assert cost.chunk_s == pytest.approx(0.01 * factor)


def test_surprises_of_both_kinds_are_noise() -> None:
    cost = ReadCost()
    for chunks in range(1, 9):
        cost.note(read(chunks, chunks * 0.01))
    cost.note(read(4, 0.4))
    cost.note(read(4, 0.004))
    assert cost.is_known


def test_a_read_that_ends_early_counts_with_its_pace_and_an_empty_one_as_half_a_chunk() -> None:
    cost = ReadCost()
    for came, seconds in ((4, 1.0), (2, 1.0), (0, 1.0)):
        cost.note(read(8, seconds, came=came))
    assert cost.seconds(8) == pytest.approx(statistics.median([2.0, 4.0, 16.0]))


def test_what_a_tier_never_had_says_nothing() -> None:
    cost = ReadCost()
    cost.note(read(0, 5.0))
    assert cost.num_reads == 0


# --- computing ------------------------------------------------------------------------------------


def test_a_token_takes_what_large_steps_take_beyond_small_ones() -> None:
    cost = ComputeCost(CHUNK)
    for tokens in (1, 3, 1, 512, 1024):
        cost.note(tokens, BASE_S + tokens * TOKEN_S)
    assert cost.token_s == pytest.approx(TOKEN_S, rel=0.02)


def test_a_first_step_that_takes_forever_is_outvoted() -> None:
    cost = ComputeCost(CHUNK)
    cost.note(CHUNK, 20.0)
    for _ in range(3):
        cost.note(CHUNK, CHUNK * TOKEN_S)
    assert cost.token_s == pytest.approx(TOKEN_S)


def test_of_small_steps_alone_nothing_is_known() -> None:
    cost = ComputeCost(CHUNK)
    for tokens in (1, 20, CHUNK - 1):
        cost.note(tokens, 1.0)
    assert not cost.is_known
    assert cost.token_s == math.inf


def test_a_step_that_was_described_early_began_with_the_end_of_the_one_before() -> None:
    costs = LoadCosts(CHUNK)
    for number in range(4):
        # As with two steps in flight: described a step ahead.
        assert costs.begin_step(number, CHUNK, float(number))
        costs.end_step(number, number + 2.0)
        costs.note_outcome(number + 2.0)
    assert costs.chunk_seconds()["computing"] == pytest.approx(1.0)


def test_steps_that_load_are_looked_at_while_no_other_has_told_what_computing_takes() -> None:
    costs = LoadCosts(CHUNK)
    now = 0.0
    for number in range(2):
        assert costs.begin_step(number, CHUNK, now, load_s=0.5)
        now += 0.5 + CHUNK_S * 100
        costs.end_step(number, now)
        costs.note_outcome(now)
    assert costs.chunk_seconds()["computing"] == pytest.approx(CHUNK_S * 100)
    assert not costs.begin_step(3, CHUNK, now, load_s=0.5)
    assert costs.begin_step(4, CHUNK, now)


def test_steps_that_compute_nothing_are_not_timed_and_small_ones_seldom() -> None:
    costs = LoadCosts(CHUNK)
    assert not costs.begin_step(2, 0, 0.0)
    timed = [costs.begin_step(number, 1, 0.0) for number in range(3, 67)]
    assert sum(timed) == 4


# --- what is worth it -----------------------------------------------------------------------------


def test_the_cheaper_one_is_chosen() -> None:
    for factor, is_refused in ((0.2, False), (0.9, False), (1.1, True), (50.0, True)):
        costs = costs_of({(RANK, "disk"): lambda n, f=factor: n * CHUNK_S * f})
        assert costs.judge(16).is_refused == is_refused, factor


def test_latency_refuses_short_loads_alone() -> None:
    costs = costs_of({(RANK, "disk"): lambda n: 5 * CHUNK_S + n * CHUNK_S / 2})
    assert costs.judge(9).is_refused
    verdict = costs.judge(16)
    assert not verdict.is_refused
    # Of those 16 it may have fewer.
    assert verdict.least_chunks["disk"] in (10, 11)


def test_what_a_load_takes_beyond_reading_counts() -> None:
    costs = costs_of({(RANK, "disk"): lambda n: n * CHUNK_S / 2})
    assert not costs.judge(4).is_refused
    costs.copied_chunk_s = CHUNK_S
    assert costs.judge(4).is_refused
    costs.copied_chunk_s = 0.0
    costs.take_in(RANK, [read(4, 0.05, of="r")], {"r": 0.05 + 4 * CHUNK_S})
    assert costs.judge(4).is_refused
    assert not costs.judge(16).is_refused


def test_the_slowest_rank_counts() -> None:
    costs = costs_of(
        {(RANK, "disk"): lambda n: n * 1e-4, (OTHER, "disk"): lambda n: n * CHUNK_S * 2}
    )
    assert costs.judge(16).is_refused


def test_a_tier_that_is_worth_it_is_asked_beside_one_that_is_not() -> None:
    costs = costs_of({(RANK, "disk"): lambda n: n * 1e-4, (RANK, "far"): lambda n: n * CHUNK_S * 2})
    verdict = costs.judge(16)
    assert not verdict.is_refused
    assert verdict.refused_tiers == ["far"]
    assert verdict.least_chunks == {"far": NEVER}


def test_without_estimates_it_loads() -> None:
    slow: dict[tuple[Rank, str], Callable[[int], float]] = {(RANK, "disk"): lambda n: n * 10.0}
    assert not costs_of(slow, computed=False).judge(16).is_refused
    costs = costs_of({(RANK, "disk"): lambda n: 0.0})
    costs.has_tiers(RANK, ["disk", "new"])
    assert not costs.judge(16).is_refused
    for number in range(READS_TO_KNOW):
        assert "new" not in costs.judge(16).least_chunks, f"after {number} reads"
        costs.take_in(RANK, [read(4, 10.0, tier="new")], {})
    assert costs.judge(16).refused_tiers == ["new"]
    nothing = LoadCosts(CHUNK)
    step(nothing, CHUNK, step(nothing, CHUNK))
    assert not nothing.judge(16).is_refused


def test_where_nothing_but_hits_comes_computing_becomes_known_all_the_same() -> None:
    costs = LoadCosts(CHUNK)
    costs.has_tiers(RANK, ["disk"])
    cut, now = 0, 0.0
    for _ in range(8):
        costs.take_in(RANK, [read(8, 8 * CHUNK_S * 3)], {})
        cut += costs.cuts_a_chunk
        now = step(costs, CHUNK + 7 if costs.cuts_a_chunk else 7, now)
    assert cut == 2
    assert costs.judge(8).is_refused


# --- trying again ---------------------------------------------------------------------------------


def test_a_probe_is_small_and_its_pause_as_long_as_it_was() -> None:
    costs = costs_of({(RANK, "disk"): lambda n: n * CHUNK_S * 4})
    verdict, now, sizes, reading = costs.judge(16), 0.0, [], 0.0
    for number in range(2000):
        now = number / 10
        due = costs.begin_probe(verdict, 16, now)
        if due is not None:
            tier, chunks = due
            sizes.append(chunks)
            costs.start_probe(tier, f"probe {number}", now)
            assert costs.begin_probe(verdict, 16, now) is None, "one at a time"
            costs.end_probe("of somebody else", now)
            assert costs.begin_probe(verdict, 16, now) is None
            took = chunks * CHUNK_S * 4
            reading += took
            costs.take_in(RANK, [read(chunks, took, of=f"probe {number}")], {})
            costs.end_probe(f"probe {number}", now + took)
    assert len(sizes) > 5
    assert reading <= now / PROBE_PAUSE + 0.5
    assert set(sizes) <= set(range(1, MOST_PROBED_CHUNKS + 1))
    assert 1 in sizes
    assert len(set(sizes)) > 1, "or no latency could be told"


def test_a_probe_that_nobody_answers_does_not_end_all_probing() -> None:
    costs = costs_of({(RANK, "disk"): lambda n: n * CHUNK_S * 4})
    costs.start_probe("disk", "lost", 0.0)
    assert costs.begin_probe(costs.judge(16), 16, 59.0) is None
    assert costs.begin_probe(costs.judge(16), 16, 61.0) is not None


def test_who_is_refused_for_the_waiting_alone_waits_again_some_day() -> None:
    costs = costs_of({(RANK, "disk"): lambda n: n * CHUNK_S / 10})
    costs.take_in(RANK, [], {f"r{number}": 100 * CHUNK_S for number in range(8)})
    for number in range(9):
        verdict = costs.judge(8)
        if not verdict.is_refused:
            break
        now = number * 1000.0
        assert costs.begin_probe(verdict, 8, now) is not None
        costs.start_probe("disk", "probe", now)
        costs.end_probe("probe", now + CHUNK_S / 10)
    assert not costs.judge(8).is_refused


# --- the promise, on a clock that is a number -----------------------------------------------------


@dataclass
class TokenBucket:
    """A tier that gives so many chunks a second, after a first burst."""

    chunks_per_s: float
    latency_s: float = 0.0
    burst: float = 0.0
    left: float = 0.0
    at: float = 0.0

    def seconds(self, chunks: int, now: float) -> float:
        if now >= self.at:
            self.left = min(self.burst, self.left + (now - self.at) * self.chunks_per_s)
            self.at = now
        wait = max(0.0, self.at - now) + max(0.0, chunks - self.left) / self.chunks_per_s
        self.left, self.at = max(0.0, self.left - chunks), now + wait
        return self.latency_s + wait


@dataclass
class World:
    """One request after the other over a tier, as the scheduler half handles them."""

    tier: TokenBucket
    noise: random.Random = field(default_factory=lambda: random.Random(1))
    disturbed: float = 0.0
    now: float = 0.0

    def __post_init__(self) -> None:
        self.costs = LoadCosts(CHUNK)
        self.costs.has_tiers(RANK, ["disk"])
        # Reads that go on: when they end, and what they say then.
        self.pending: list[tuple[float, TierRead]] = []
        self.loads = self.refused = self.held_up = self.probes = 0
        for _ in range(4):
            self.compute(4 * CHUNK)
            self.compute(1)

    def noisy(self, seconds: float) -> float:
        seconds *= 1 + self.noise.random() * self.disturbed
        return seconds * 20 if self.disturbed and self.noise.random() < 0.05 else seconds

    def compute(self, num_tokens: int) -> None:
        end = self.now + self.noisy(BASE_S + num_tokens * TOKEN_S)
        if self.costs.begin_step(1, num_tokens, self.now):
            self.costs.end_step(1, end)
        self.costs.note_outcome(end)
        self.now = end

    def hear(self) -> None:
        for end, told in [each for each in self.pending if each[0] <= self.now]:
            self.pending.remove((end, told))
            self.costs.take_in(RANK, [told], {})
            self.costs.end_probe(told.lookup_id, end)

    def ask(self, chunks: int) -> float:
        """TTFT over that of computing, but for the noise."""
        self.hear()
        began, costs = self.now, self.costs
        verdict = costs.judge(chunks)
        given_up = [told for _, told in self.pending if not told.lookup_id.startswith("probe")]
        left = chunks
        if verdict.is_refused or given_up:
            self.refused += 1
            self.held_up += not verdict.is_refused
            due = None if given_up else costs.begin_probe(verdict, chunks, self.now)
            if due is not None:
                self.probes += 1
                name = f"probe {self.probes}"
                costs.start_probe(due[0], name, self.now)
                took = self.noisy(self.tier.seconds(due[1], self.now))
                self.pending.append((self.now + took, read(due[1], took, of=name)))
        else:
            self.loads += 1
            took = self.noisy(self.tier.seconds(chunks, self.now))
            self.pending.append((self.now + took, read(chunks, took)))
            patience = max(SHORTEST_WAIT_S, verdict.compute_s)
            if took <= patience:
                left = 1 if costs.cuts_a_chunk else 0
            self.now += min(took, patience)
            self.hear()
        self.compute(left * CHUNK + 1)
        took = self.now - began
        self.compute(1)
        self.now += 0.01
        return took / (BASE_S + (chunks * CHUNK + 1) * TOKEN_S)


@pytest.mark.parametrize("disturbed", [0.0, 0.3])
@pytest.mark.parametrize("burst", [0.0, 40.0])
@pytest.mark.parametrize("slower", [1.1, 2.0, 10.0, 1000.0])
def test_a_tier_slowed_by_a_token_bucket_costs_nothing_after_eight_loads(
    slower: float, burst: float, disturbed: float
) -> None:
    tier = TokenBucket(1 / (CHUNK_S * slower), burst=burst, left=burst)
    world = World(tier, disturbed=disturbed)
    lengths = random.Random(3)
    early = []
    while world.loads < 8 and len(early) < 200:
        early.append(world.ask(lengths.choice((4, 8, 16))))
    pairs = [world.ask(lengths.choice((4, 8, 16))) for _ in range(200 if disturbed else 20)]
    # The noise makes computing longer, too: by this in the middle.
    assert statistics.median(pairs) <= 1.05 * (1 + disturbed / 2)
    if not disturbed:
        # And no load has cost more than waiting as long as computing takes, and then computing.
        assert max(early + pairs) <= 2.05


@pytest.mark.parametrize("disturbed", [0.0, 0.3])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.6])
def test_a_tier_that_is_quicker_than_computing_goes_on_being_loaded_from(
    share: float, disturbed: float
) -> None:
    world = World(TokenBucket(1 / (CHUNK_S * share)), disturbed=disturbed)
    ratios = [world.ask(8) for _ in range(200)]
    # A read that stalls holds up those behind it; nothing else is refused.
    assert world.refused - world.held_up <= (0 if not disturbed else 10)
    assert statistics.median(ratios) <= share * 1.4 + 0.1


def test_a_tier_that_has_become_quick_again_is_loaded_from_again() -> None:
    world = World(TokenBucket(1 / (CHUNK_S * 5)))
    for _ in range(60):
        world.ask(8)
    assert world.refused > 40
    world.tier = TokenBucket(1 / (CHUNK_S * 0.1))
    before = world.now
    for _ in range(500):
        if world.ask(8) < 0.5:
            break
    else:
        raise AssertionError(f"refused for ever: {world.costs.chunk_seconds()}")
    assert world.now - before < 60
    loads = world.loads
    for _ in range(50):
        world.ask(8)
    assert world.loads - loads >= 48


def test_a_tier_that_becomes_slow_is_refused_after_a_few_loads() -> None:
    world = World(TokenBucket(1 / (CHUNK_S * 0.1)))
    for _ in range(50):
        world.ask(8)
    assert world.refused == 0
    world.tier = TokenBucket(1 / (CHUNK_S * 8))
    loads = world.loads
    ratios = [world.ask(8) for _ in range(50)]
    assert world.loads - loads <= 2 + READS_TO_KNOW
    assert max(ratios) <= 2.05
    assert statistics.median(ratios) <= 1.05
