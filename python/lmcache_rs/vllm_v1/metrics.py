"""Statistics through vLLM's hooks: what both halves count, and the Prometheus metrics of it.

`METRICS` is the one list of them (docs/metrics.md has it in words). Each half has a `Meter`, which
gives vLLM what changed since the last step; vLLM merges ranks and steps with `aggregate`, logs
`reduce`, and hands the sum to `LMCachePromMetrics` where its server answers `/metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from lmcache_rs import _native

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX: Final = "vllm:lmcache_rs_"
"""vLLM takes metrics of this beginning down with an engine, so that the next one can have them."""
RANK: Final = "rank"
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
SECONDS_BUCKETS: Final = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)
LOCAL_CPU: Final = "local_cpu"
HOST: Final = "host"
COUNTED_BY_WORKER: Final = (
    "stored_chunks",
    "stored_bytes",
    "refused_chunks",
    "loaded_chunks",
    "loaded_bytes",
    "failed_loads",
    "dropped_saves",
)


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        name: Without the prefix, and without the `_total` that Prometheus adds to counters.
        kind: `counter`, `gauge` or `histogram`.
        meaning: What it counts, in a sentence.
        label: What tells its series apart, besides vLLM's own labels; gauges have the rank too.
    """

    name: str
    kind: str
    meaning: str
    label: str | None = None

    @property
    def labels(self) -> list[str]:
        """Names of the labels of ours."""
        label = [] if self.label is None else [self.label]
        return [*label, RANK] if self.kind == GAUGE else label


METRICS: Final = (
    # What requests asked for and got; told by the scheduler half, once for all ranks.
    Metric(
        "requested_tokens",
        COUNTER,
        "Tokens that admitted requests asked the cache for: those behind the engine's own hit.",
    ),
    Metric("hit_tokens", COUNTER, "Tokens promised to admitted requests, which then load them."),
    Metric("loaded_tokens", COUNTER, "Tokens that loads wrote into the engine's blocks."),
    Metric("stored_tokens", COUNTER, "Tokens newly stored."),
    Metric("bypassed_requests", COUNTER, "Requests that cannot be named and use no cache."),
    Metric(
        "refused_loads",
        COUNTER,
        "Requests that went on without the tiers below host memory, as computing is quicker.",
    ),
    Metric(
        "streamed_loads",
        COUNTER,
        "Requests promised what host memory has no room for: it goes past it (local-disk.md).",
    ),
    Metric("probes", COUNTER, "Reads of what was refused, to see whether it is quick by now."),
    Metric(
        "lookups", COUNTER, "Lookups of the scheduler, also of requests that it asks again for."
    ),
    Metric("lookup_asks", COUNTER, "Questions to the store; the others had an answer that stands."),
    Metric("lookup_timeouts", COUNTER, "Lookups taken as a miss at their deadline."),
    Metric("lookup_errors", COUNTER, "Lookups taken as a miss as the store could not be asked."),
    Metric(
        "lookup_round_trip_seconds",
        HISTOGRAM,
        "Time from a question to the store until its answer is picked up.",
    ),
    # What workers did; summed over ranks.
    Metric("stored_chunks", COUNTER, "Chunks newly stored."),
    Metric("stored_bytes", COUNTER, "Bytes newly stored."),
    Metric("refused_chunks", COUNTER, "Chunks that got no place in host memory."),
    Metric("loaded_chunks", COUNTER, "Chunks that loads read."),
    Metric("loaded_bytes", COUNTER, "Bytes that loads wrote."),
    Metric("evicted_chunks", COUNTER, "Chunks that left host memory to make room."),
    Metric("failed_loads", COUNTER, "Loads that gave less than was promised."),
    Metric("dropped_saves", COUNTER, "Saves dropped, as their step ran on blocks in doubt."),
    Metric("copy_seconds", COUNTER, "Time spent in copies.", "direction"),
    Metric(
        "event_overflows",
        COUNTER,
        "How often more chunks came and went in a step than wait for it, and all were told anew.",
    ),
    Metric("faults", COUNTER, "Faults of lmcache_rs, each taken as a miss.", "place"),
    # What is the case; by rank.
    Metric("capacity_bytes", GAUGE, "Size of a tier.", "tier"),
    Metric("held_bytes", GAUGE, "Bytes of a tier that are not free.", "tier"),
    Metric("leased_bytes", GAUGE, "Bytes that lookups hold for requests not admitted yet.", "tier"),
    Metric("resident_chunks", GAUGE, "Chunks that a tier holds.", "tier"),
    Metric("tier_healthy", GAUGE, "1 where a tier serves, 0 where it does not.", "tier"),
    Metric(
        "chunk_seconds",
        GAUGE,
        "Seconds that one chunk more takes: read from a tier, or by `computing` it.",
        "source",
    ),
    Metric("copy_path_active", GAUGE, "1 for the way in which KV is copied.", "path"),
)
BY_NAME: Final = {metric.name: metric for metric in METRICS}

Totals = Mapping[tuple[str, str], float]
"""Values since the start, or as they are now, by a metric's name and its label's value."""


class LMCacheStats(KVConnectorStats):
    """What happened in some steps, on some ranks.

    `data` has, by kind and a metric's name, `{label value: ...}`: of counters a number, of gauges
    `{rank: number}`, of histograms a list of observations. It is made of what any encoder takes.
    """

    def reset(self) -> None:
        """Drops everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data

    def add(self, name: str, amount: float, label: str = "") -> None:
        """Counts."""
        series = self._series(name)
        series[label] = series.get(label, 0) + amount

    def set(self, name: str, value: float, rank: str, label: str = "") -> None:
        """Says what is the case on a rank."""
        self._series(name).setdefault(label, {})[rank] = value

    def observe(self, name: str, values: list[float], label: str = "") -> None:
        """Takes in observations."""
        self._series(name).setdefault(label, []).extend(values)

    def _series(self, name: str) -> dict[str, Any]:
        series: dict[str, Any] = self.data.setdefault(BY_NAME[name].kind, {}).setdefault(name, {})
        return series

    def aggregate(self, other: KVConnectorStats) -> LMCacheStats:
        """Takes in another rank's, or a later step's."""
        for name, label, value in _entries(other.data):
            kind = BY_NAME[name].kind
            if kind == COUNTER:
                self.add(name, value, label)
            elif kind == GAUGE:
                for rank, of_rank in value.items():
                    self.set(name, of_rank, rank, label)
            else:
                self.observe(name, value, label)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: counts, gauges summed over ranks, number and mean of observations."""
        reduced: dict[str, int | float] = {}
        for name, label, value in _entries(self.data):
            shown = f"{name}[{label}]" if label else name
            kind = BY_NAME[name].kind
            if kind == COUNTER:
                reduced[shown] = round(value, 6)
            elif kind == GAUGE:
                reduced[shown] = sum(value.values())
            elif value:
                reduced[f"{shown}_count"] = len(value)
                reduced[f"{shown}_mean"] = round(sum(value) / len(value), 6)
        return reduced


def _entries(data: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """`(metric, label value, value)` of what is known; a newer half may tell more."""
    return [
        (name, label, value)
        for kind in data.values()
        for name, series in kind.items()
        if name in BY_NAME
        for label, value in series.items()
    ]


class Meter:
    """What one half tells vLLM: the differences of what it counts.

    Args:
        rank: The worker's rank, for its gauges.
        read: Values since the start (counters) and as they are (gauges).
        take_observations: Observations since the last call, by histogram.
    """

    def __init__(
        self,
        rank: int,
        read: Callable[[], Totals],
        take_observations: Callable[[], Mapping[str, list[float]]] = dict,
    ) -> None:
        self._rank = str(rank)
        self._read = read
        self._take_observations = take_observations
        self._before: dict[tuple[str, str], float] = {}

    def take(self) -> LMCacheStats | None:
        """What changed since the last call; None if nothing did."""
        stats = LMCacheStats()
        for (name, label), value in self._read().items():
            before = self._before.get((name, label))
            if value == before:
                continue
            self._before[name, label] = value
            if BY_NAME[name].kind == GAUGE:
                stats.set(name, value, self._rank, label)
            elif value != (before or 0):
                # Less than before: what counts was made anew.
                start = before if before is not None and value > before else 0
                stats.add(name, value - start, label)
        for name, values in self._take_observations().items():
            if values:
                stats.observe(name, values)
        return None if stats.is_empty() else stats


def scheduler_totals(
    counts: Mapping[str, int],
    lookups: Mapping[str, int],
    faults: Mapping[str, int],
    chunk_seconds: Mapping[str, float] | None = None,
) -> Totals:
    """What the scheduler half tells.

    Args:
        counts: Its own counters.
        lookups: Its lookup client's.
        faults: Faults by place.
        chunk_seconds: Seconds of a chunk by where it comes from.
    """
    totals: dict[tuple[str, str], float] = {
        ("requested_tokens", ""): counts["requested_tokens"],
        ("hit_tokens", ""): counts["promised_tokens"],
        ("loaded_tokens", ""): counts["hit_tokens"],
        ("stored_tokens", ""): counts["stored_tokens"],
        ("bypassed_requests", ""): counts["bypassed_requests"],
        ("refused_loads", ""): counts["refused_loads"],
        ("streamed_loads", ""): counts["streamed_loads"],
        ("probes", ""): counts["probes"],
        ("lookups", ""): lookups.get("lookups", 0),
        ("lookup_asks", ""): lookups.get("asks", 0),
        ("lookup_timeouts", ""): lookups.get("timeouts", 0),
        ("lookup_errors", ""): lookups.get("errors", 0) + lookups.get("unreachable", 0),
        # Not more often than it says something new.
        **{
            ("chunk_seconds", source): float(f"{seconds:.2g}")
            for source, seconds in (chunk_seconds or {}).items()
        },
    }
    return totals | {("faults", place): count for place, count in faults.items()}


def worker_totals(
    counts: Mapping[str, int],
    usage: Mapping[str, int] | None,
    faults: Mapping[str, int],
    event_overflows: int = 0,
    *,
    copy_path: str = HOST,
) -> Totals:
    """What a worker half tells.

    Args:
        counts: Its counters; empty where the engine serves without it.
        usage: The sums of host memory's books; None where it is off.
        faults: Faults by place.
        event_overflows: How often events had to be told anew.
        copy_path: The way in which KV is copied.
    """
    tier = LOCAL_CPU
    gathered, scattered = _native.copy_seconds()
    totals: dict[tuple[str, str], float] = {
        **{(name, ""): counts[name] for name in COUNTED_BY_WORKER if name in counts},
        ("copy_seconds", "store"): gathered,
        ("copy_seconds", "load"): scattered,
        ("event_overflows", ""): event_overflows,
        ("tier_healthy", tier): int(usage is not None),
        ("copy_path_active", copy_path): 1,
    }
    if usage is not None:
        totals |= {
            ("evicted_chunks", ""): usage["evicted_chunks"],
            ("capacity_bytes", tier): usage["capacity_bytes"],
            ("held_bytes", tier): usage["held_bytes"],
            ("leased_bytes", tier): usage["leased_bytes"],
            ("resident_chunks", tier): usage["chunks"],
        }
    return totals | {("faults", place): count for place, count in faults.items()}


class LMCachePromMetrics(KVConnectorPromMetrics):
    """The metrics where vLLM's server answers for them; arguments as vLLM gives them."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {metric.name: self._make(metric, labelnames) for metric in METRICS}
        for engine in per_engine_labelvalues:
            for metric in METRICS:
                if not metric.labels:
                    # There from the start, at 0: a series that appears late hides its first step.
                    self._of(metric.name, engine)

    def _make(self, metric: Metric, labelnames: list[str]) -> Any:
        arguments: dict[str, Any] = {
            "name": PREFIX + metric.name,
            "documentation": metric.meaning,
            "labelnames": [*labelnames, *metric.labels],
        }
        make: Any = self._counter_cls
        if metric.kind == GAUGE:
            make, arguments["multiprocess_mode"] = self._gauge_cls, "mostrecent"
        elif metric.kind == HISTOGRAM:
            make, arguments["buckets"] = self._histogram_cls, list(SECONDS_BUCKETS)
        return make(**arguments)

    def _of(self, name: str, engine: int, *labels: str) -> Any:
        values = [*self.per_engine_labelvalues[engine], *labels]
        return self._metrics[name].labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes in what happened."""
        for name, label, value in _entries(transfer_stats_data):
            metric = BY_NAME[name]
            labels = [] if metric.label is None else [label]
            if metric.kind == COUNTER:
                self._of(name, engine_idx, *labels).inc(value)
            elif metric.kind == GAUGE:
                for rank, of_rank in value.items():
                    self._of(name, engine_idx, *labels, rank).set(of_rank)
            else:
                series = self._of(name, engine_idx, *labels)
                for observation in value:
                    series.observe(observation)
