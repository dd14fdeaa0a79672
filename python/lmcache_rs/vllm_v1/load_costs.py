"""What a load from a tier below host memory is expected to take, and what computing would.

A load that takes longer than computing the same tokens is worse than no cache. So both are learned
from what happens anyway, and a load that is expected to be the slower one is refused: the request
is computed at once. What host memory holds is never refused.

*A tier.* Reading n chunks takes L + n·S seconds: L is its latency, S the time of one chunk more.
Both come from the last reads by the Theil–Sen rule: S is the median of the slopes between any two
of them, L the median of what is left (H. Theil, Proc. Kon. Ned. Akad. v. Wetensch. 53, 1950;
P. K. Sen, J. Am. Stat. Assoc. 63, 1968). One read in four may be off by anything without a change
to either; a mean would carry one stall for dozens of reads. Two reads in a row that take more than
twice what was expected, or less than half, are no chance: all earlier ones are forgotten.

*Computing* n tokens takes n·C seconds, C being the median over the last large steps of (t - B)/n: t
and n are a step's seconds and tokens, and B is the median of what small steps take, which a request
pays either way. Attention makes tokens deep in a prompt dearer than C, so a load is refused rather
too seldom.

*A load* of n chunks is refused if  A + L + n·(S + K) > n·chunk·C:  A is the median of what waiting
for chunks took beyond their reading, and K the time in which a chunk gets from host memory into
the engine's blocks. Of several ranks the slowest counts.

*What is not known.* A tier is known after three reads, computing after two large steps; until then
loads go ahead. Where nothing but hits comes, a hit is cut by a chunk once or twice, so that
computing becomes known, too.

*What has been refused* is tried again: a chunk or a few of a refused load are read all the same, in
the background, while the request computes. That costs its TTFT nothing. The pause behind such a
probe is twenty times what it took, so that a slow tier is read for a twentieth of the time at most.

*A load that takes longer than expected* is waited for no longer than computing would have taken,
what is asked for before it included. So a load that nothing was known of costs no more than that.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from lmcache_rs.lookup import Rank
from lmcache_rs.storage.reads import TierRead

SAMPLES_KEPT = 8
READS_TO_KNOW = 3
STEPS_TO_KNOW = 2
CHANGED_BY = 2.0
READS_BEFORE_CUTTING = 4
"""From here on hits are cut so that computing becomes known: it is by the eighth load."""

SMALL_STEPS_BETWEEN = 16
"""Of small steps one in so many is timed: the worker's answer to it is one more message."""

PROBE_PAUSE = 20.0
SHORTEST_PAUSE_S = 0.5
PROBE_BUDGET_S = 0.25
MOST_PROBED_CHUNKS = 4
LONGEST_PROBE_S = 60.0
"""After so long nobody answers any more."""

SHORTEST_WAIT_S = 0.05
"""A step or two: nobody gives up on a load before that."""

NEVER = 1 << 30
"""As a least number of chunks: none are ever worth it."""


class ReadCost:
    """Seconds of a tier's reads by the number of their chunks; see the module's description."""

    def __init__(self) -> None:
        self._samples: collections.deque[tuple[int, float]]
        self._samples = collections.deque(maxlen=SAMPLES_KEPT)
        self.num_reads = 0
        self._latency_s = self._chunk_s = 0.0
        # The last read took much longer than expected (1), much less (-1), or neither.
        self._surprise = 0

    def note(self, read: TierRead) -> None:
        """A read. One that ended early counts with what it would have taken at its pace, and one
        that gave nothing as if it had given half a chunk."""
        wanted = read.wanted_chunks
        if wanted < 1:
            return
        seconds = read.seconds * max(1.0, wanted / (read.chunks or 0.5))
        if self.is_known:
            expected = self.seconds(wanted)
            surprise = (seconds > CHANGED_BY * expected) - (seconds < expected / CHANGED_BY)
            if surprise and surprise == self._surprise:
                before = self._samples[-1]
                self._samples.clear()
                self._samples.append(before)
                surprise = 0
            self._surprise = surprise
        self._samples.append((wanted, seconds))
        self.num_reads += 1
        self._fit()

    def _fit(self) -> None:
        slopes = [
            (later[1] - earlier[1]) / (later[0] - earlier[0])
            for earlier, later in combinations(self._samples, 2)
            if later[0] != earlier[0]
        ]
        # Of reads of one size no latency can be told: chunks then take what they took there.
        each = [seconds / chunks for chunks, seconds in self._samples]
        self._chunk_s = max(0.0, statistics.median(slopes)) if slopes else statistics.median(each)
        rests = [seconds - chunks * self._chunk_s for chunks, seconds in self._samples]
        self._latency_s = statistics.median(rests)
        if self._latency_s < 0:
            self._latency_s, self._chunk_s = 0.0, statistics.median(each)

    @property
    def is_known(self) -> bool:
        """Whether enough reads were seen since the tier changed last."""
        return len(self._samples) >= READS_TO_KNOW

    @property
    def latency_s(self) -> float:
        """Seconds of a read, however few its chunks."""
        return self._latency_s

    @property
    def chunk_s(self) -> float:
        """Seconds of one chunk more."""
        return self._chunk_s

    def seconds(self, num_chunks: int) -> float:
        """What a read of so many chunks is expected to take."""
        return self._latency_s + num_chunks * self._chunk_s


class ComputeCost:
    """Seconds that the engine takes to compute a token of a prompt; see the module's description.

    Args:
        large_tokens: Tokens from which on a step counts as large.
    """

    def __init__(self, large_tokens: int) -> None:
        self.large_tokens = large_tokens
        self._large: collections.deque[tuple[int, float]] = collections.deque(maxlen=SAMPLES_KEPT)
        self._small: collections.deque[float] = collections.deque(maxlen=SAMPLES_KEPT)
        self._token_s = math.inf

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step that computed so many tokens and loaded nothing."""
        if num_tokens >= self.large_tokens:
            self._large.append((num_tokens, seconds))
        elif num_tokens > 0:
            self._small.append(seconds)
        if self.is_known:
            base = statistics.median(self._small) if self._small else 0.0
            self._token_s = statistics.median(
                # A step of a chunk is hardly all base: then small steps have been disturbed.
                (took - min(base, took / 2)) / tokens
                for tokens, took in self._large
            )

    @property
    def is_known(self) -> bool:
        """Whether enough large steps were seen."""
        return len(self._large) >= STEPS_TO_KNOW

    @property
    def token_s(self) -> float:
        """Seconds of a token; infinite while unknown."""
        return self._token_s


@dataclass(frozen=True)
class Verdict:
    """What is worth loading of some chunks.

    Args:
        least_chunks: By tier, how many neighbouring chunks it must have for a read to be worth it.
            A tier that is not named may be read for a single one.
        refused_tiers: Those that cannot have enough of them.
        is_refused: Whether there is no tier left to read from.
        compute_s: Seconds in which the engine would compute all of them; infinite while unknown.
    """

    least_chunks: Mapping[str, int] = field(default_factory=dict)
    refused_tiers: Sequence[str] = ()
    is_refused: bool = False
    compute_s: float = math.inf


@dataclass
class _Probe:
    tier: str
    lookup_id: str
    began: float
    read_s: float = 0.0


class LoadCosts:
    """Learns what loading and computing take, and says which loads are worth it.

    Knows no clock: whoever calls says what time it is, in seconds on any clock that goes on evenly.

    Args:
        chunk_size: Tokens of a chunk.
    """

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._reads: dict[tuple[Rank, str], ReadCost] = {}
        self._tiers: dict[Rank, tuple[str, ...]] = {}
        self._compute = ComputeCost(chunk_size)
        self._waits: collections.deque[float] = collections.deque(maxlen=SAMPLES_KEPT)
        # In which a chunk gets from host memory into the engine's blocks.
        self.copied_chunk_s = 0.0
        # Steps whose end is awaited: number, tokens, when they were described, seconds of loads.
        self._timed: collections.deque[tuple[int, int, float, float]] = collections.deque(maxlen=8)
        self._num_small_steps = 0
        self._last_outcome = -math.inf
        self._probe: _Probe | None = None
        self._next_probe: dict[str, float] = {}
        self._num_probes = 0

    # --- what happened ------------------------------------------------------------------------

    def begin_step(self, step: int, num_tokens: int, now: float, *, load_s: float = 0.0) -> bool:
        """A step was described; whether its end is to be told.

        One that waits for loads, `load_s` seconds by their measured speed, is looked at only while
        no other has told what computing takes.
        """
        if not num_tokens or (load_s and self._compute.is_known):
            return False
        if num_tokens < self._compute.large_tokens:
            self._num_small_steps += 1
            if self._num_small_steps % SMALL_STEPS_BETWEEN != 1:
                return False
        self._timed.append((step, num_tokens, now, load_s))
        return True

    def end_step(self, step: int, now: float) -> None:
        """The step's outcome is there. A step that was described while another one ran began when
        that one ended."""
        while self._timed and self._timed[0][0] <= step:
            number, num_tokens, described, load_s = self._timed.popleft()
            if number == step:
                took = now - max(described, self._last_outcome)
                self._compute.note(num_tokens, took - min(load_s, took / 2))

    def note_outcome(self, now: float) -> None:
        """The outcome of some step is there, and was taken in."""
        self._last_outcome = now

    def has_tiers(self, rank: Rank, tiers: Sequence[str]) -> None:
        """The tiers below this rank's host memory."""
        self._tiers[rank] = tuple(tiers)

    def take_in(self, rank: Rank, reads: Iterable[TierRead], waits: Mapping[str, float]) -> None:
        """What a rank has read, and seconds that requests which had nobody before them have waited
        until this rank, the last one, had brought what they asked for."""
        read_s: dict[str, float] = {}
        for read in reads:
            self._reads.setdefault((rank, read.tier), ReadCost()).note(read)
            read_s[read.lookup_id] = read_s.get(read.lookup_id, 0.0) + read.seconds
            if self._probe is not None and read.lookup_id == self._probe.lookup_id:
                self._probe.read_s += read.seconds
        for lookup_id, waited in waits.items():
            self._waits.append(max(0.0, waited - read_s.get(lookup_id, 0.0)))

    # --- what to do ---------------------------------------------------------------------------

    def judge(self, num_chunks: int) -> Verdict:
        """What is worth loading of so many chunks, whoever has them."""
        if not self._compute.is_known:
            return Verdict()
        computed_chunk_s = self._chunk_size * self._compute.token_s
        least = {}
        for tier in self.all_tiers():
            least[tier] = self._least_chunks(tier, computed_chunk_s)
        refused = [tier for tier, chunks in least.items() if chunks > num_chunks]
        return Verdict(
            {tier: chunks for tier, chunks in least.items() if chunks > 1},
            refused,
            is_refused=bool(least) and len(refused) == len(least),
            compute_s=num_chunks * computed_chunk_s,
        )

    def all_tiers(self) -> list[str]:
        """The tiers below host memory, of all ranks together."""
        return list(dict.fromkeys(tier for tiers in self._tiers.values() for tier in tiers))

    def _least_chunks(self, tier: str, computed_chunk_s: float) -> int:
        least = 1
        for cost in self._of_tier(tier):
            if not cost.is_known:
                continue
            won = computed_chunk_s - cost.chunk_s - self.copied_chunk_s
            if won <= 0:
                return NEVER
            least = max(least, min(NEVER, math.ceil((self.asking_s + cost.latency_s) / won)))
        return least

    def _of_tier(self, tier: str) -> list[ReadCost]:
        return [cost for (_, name), cost in self._reads.items() if name == tier]

    @property
    def asking_s(self) -> float:
        """Seconds that asking for chunks takes beyond reading them."""
        return statistics.median(self._waits) if self._waits else 0.0

    @property
    def cuts_a_chunk(self) -> bool:
        """Whether a hit is to leave its last chunk to be computed: loads are known, and nothing
        that was computed has said how long that takes."""
        return not self._compute.is_known and any(
            cost.num_reads >= READS_BEFORE_CUTTING for cost in self._reads.values()
        )

    def begin_probe(self, verdict: Verdict, num_chunks: int, now: float) -> tuple[str, int] | None:
        """The tier of which a refused load is to be tried, and how many chunks; None for now.

        Whoever is told one calls `start_probe`, and `end_probe` when it is over.
        """
        due = [tier for tier in verdict.refused_tiers if now >= self._next_probe.get(tier, -1e99)]
        if not due or (self._probe is not None and now < self._probe.began + LONGEST_PROBE_S):
            return None
        tier = min(due, key=lambda name: self._next_probe.get(name, -1e99))
        return tier, min(num_chunks, self._probed_chunks(tier))

    def _probed_chunks(self, tier: str) -> int:
        """One, or every other time as many as tell latency from speed, if that is soon done."""
        if self._num_probes % 2 == 0:
            return 1
        in_time = 1
        while in_time < MOST_PROBED_CHUNKS and all(
            cost.seconds(in_time + 1) <= PROBE_BUDGET_S for cost in self._of_tier(tier)
        ):
            in_time += 1
        return in_time

    def start_probe(self, tier: str, lookup_id: str, now: float) -> None:
        """A probe begins."""
        self._num_probes += 1
        self._probe = _Probe(tier, lookup_id, now)

    def end_probe(self, lookup_id: str, now: float) -> None:
        """A probe is over, whatever it gave."""
        probe = self._probe
        if probe is not None and probe.lookup_id == lookup_id:
            # Not since it began: its end is heard of with the end of a step.
            pause = max(SHORTEST_PAUSE_S, PROBE_PAUSE * probe.read_s)
            self._next_probe[probe.tier] = now + pause
            # Who is refused for the waiting alone would never wait again, nor learn of its end.
            if self._waits:
                self._waits.popleft()
            self._probe = None

    # --- for operators ------------------------------------------------------------------------

    def chunk_seconds(self) -> dict[str, float]:
        """Seconds of one chunk more: by tier, and of computing it; what is known."""
        found = {}
        for tier in self.all_tiers():
            known = [cost.chunk_s for cost in self._of_tier(tier) if cost.is_known]
            if known:
                found[tier] = max(known)
        if self._compute.is_known:
            found["computing"] = self._chunk_size * self._compute.token_s
        return found
