"""What the connector counts, on its way from both halves to Prometheus."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from test_vllm_halves import BLOCK, CHUNK, CHUNK_BYTES, Pair, new_request
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
    KVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

from lmcache_rs.gpu_connector import RegisteredCache
from lmcache_rs.lookup import InProcessLookupClient
from lmcache_rs.vllm_v1.connector import LMCacheConnectorV1Dynamic
from lmcache_rs.vllm_v1.faults import Faults
from lmcache_rs.vllm_v1.manager import LMCacheManager
from lmcache_rs.vllm_v1.metrics import BY_NAME, METRICS, PREFIX, LMCacheStats, Meter

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
OURS = {"kv_connector": "LMCacheRsConnector", "kv_role": "kv_both"}
MULTI = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [OURS]},
}
BLOCK_BYTES = 2 * BLOCK * 6 * 4 * 2
STORED_BYTES = CHUNK // BLOCK * BLOCK_BYTES


class Server:
    """vLLM's metrics in a registry of their own."""

    def __init__(self, transfer: dict[str, Any] = OURS) -> None:
        self.registry = registry = CollectorRegistry()

        def of_registry(kind: type) -> Any:
            return lambda *given, **more: kind(*given, registry=registry, **more)

        class Prom(KVConnectorProm):
            _gauge_cls = staticmethod(of_registry(Gauge))
            _counter_cls = staticmethod(of_registry(Counter))
            _histogram_cls = staticmethod(of_registry(Histogram))

        self.transfer = KVTransferConfig(**transfer)
        config: Any = SimpleNamespace(kv_transfer_config=self.transfer)
        self.prom = Prom(config, ["model_name", "engine"], {0: ["m", "0"]})

    def value(self, name: str, **labels: str) -> float | None:
        suffix = {"counter": "_total", "histogram": "_count"}.get(BY_NAME[name].kind, "")
        everything = {"model_name": "m", "engine": "0", **labels}
        return self.registry.get_sample_value(PREFIX + name + suffix, everything)

    def observe(self, stats: KVConnectorStats) -> dict[str, Any]:
        """As vLLM brings it: pickled from the worker, then as msgpack to the server."""
        at_scheduler = pickle.loads(pickle.dumps(stats))
        payload = msgspec.msgpack.decode(msgspec.msgpack.encode(at_scheduler.to_dict()))
        self.prom.observe(payload)
        return dict(payload)


class Script:
    """Both halves, with the meters that a connector gives them."""

    def __init__(self, **settings: Any) -> None:
        self.pair = Pair(**settings)
        self.pair.faults.counts.clear()
        self.meters = [self._meter(is_scheduler=True), self._meter(is_scheduler=False)]

    def _meter(self, *, is_scheduler: bool) -> Meter:
        manager = object.__new__(LMCacheManager)
        # Of each half's own process.
        manager.faults = self.pair.faults if is_scheduler else Faults()
        manager.scheduler = self.pair.scheduler if is_scheduler else None
        manager.worker = None if is_scheduler else self.pair.worker
        manager.event_reports = None
        manager._is_scheduler, manager._rank = is_scheduler, 0
        return manager._new_meter()

    def take(self) -> LMCacheStats:
        stats = LMCacheStats()
        for meter in self.meters:
            stats.aggregate(meter.take() or LMCacheStats())
        return stats


@pytest.fixture(params=[False, True], ids=["bulk", "layerwise"])
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setattr(Pair, "use_layerwise", request.param)
    script = Script(pool_chunks=8)
    yield script
    script.pair.close()


def test_each_metric_equals_what_the_script_did(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, pair = Server(), script.pair
    tier = {"tier": "local_cpu", "rank": "0"}
    server.observe(script.take())

    first = new_request(3 * CHUNK + 1)
    assert pair.prefill(first) == 0
    # As vLLM does behind a load that was waited for: the request is admitted once all the same.
    pair.grant(first, 0)
    pair.finish(first)
    server.observe(script.take())
    assert server.value("held_bytes", **tier) == 3 * CHUNK_BYTES

    again = new_request(3 * CHUNK + 1)
    assert pair.ask(again, BLOCK) == 3 * CHUNK - BLOCK
    server.observe(script.take())
    assert server.value("leased_bytes", **tier) == 3 * CHUNK_BYTES
    assert server.value("hit_tokens") == 0, "not admitted yet"
    pair.grant(again, 3 * CHUNK - BLOCK)
    again.num_computed_tokens = 3 * CHUNK
    pair.step({again: 1})
    pair.finish(again)

    for seed in (1, 2):
        other = new_request(3 * CHUNK, seed)
        pair.prefill(other)
        pair.finish(other)

    nameless = new_request(CHUNK + 1, cache_salt="\ud800")
    assert pair.prefill(nameless) == 0
    pair.finish(nameless)

    with monkeypatch.context() as broken:
        broken.setattr(pair.worker._engine, "is_healthy", lambda: False)
        failing = new_request(4 * CHUNK, 2)
        assert pair.prefill(failing) == 3 * CHUNK
        pair.finish(failing)

    long = new_request(10 * CHUNK, 3)
    pair.prefill(long)
    pair.finish(long)
    pair.faults.note("somewhere", ValueError("of the script"))
    pair.step({})
    server.observe(script.take())

    expected = {
        # 3 x 8 + 1, all but a block of it, 2 prompts of 3 chunks, 4 chunks, 10 chunks
        "requested_tokens": 25 + 21 + 2 * 24 + 32 + 80,
        "hit_tokens": 20 + 24,
        "loaded_tokens": 20,
        "stored_tokens": (3 + 2 * 3 + 8) * CHUNK,
        "stored_chunks": 3 + 2 * 3 + 8,
        "stored_bytes": (3 + 2 * 3 + 8) * STORED_BYTES,
        "loaded_chunks": 3,
        "loaded_bytes": 5 * BLOCK_BYTES,
        # of 10 chunks, 8 have room
        "refused_chunks": 2,
        # the ninth chunk drove out one; of 8 the failed one was gone, the long prompt drove out 7
        "evicted_chunks": 1 + 7,
        "failed_loads": 1,
        "dropped_saves": 1,
        "bypassed_requests": 1,
        # Told by the half beside which no tier is; see test_vllm_load_costs.
        "refused_loads": 0,
        "streamed_loads": 0,
        "probes": 0,
        "lookups": 6,
        "lookup_asks": 6,
        "lookup_timeouts": 0,
        "lookup_errors": 0,
        "lookup_round_trip_seconds": 6,
        "event_overflows": 0,
    }
    assert {name: server.value(name) for name in expected} == expected
    gauges = {
        "capacity_bytes": 8 * CHUNK_BYTES,
        "held_bytes": 8 * CHUNK_BYTES,
        "leased_bytes": 0,
        "resident_chunks": 8,
        "tier_healthy": 1,
    }
    assert {name: server.value(name, **tier) for name in gauges} == gauges
    assert server.value("copy_path_active", path="host", rank="0") == 1
    assert server.value("faults", place="somewhere") == 1
    for direction in ("store", "load"):
        seconds = server.value("copy_seconds", direction=direction)
        assert seconds is not None
        assert 0 < seconds < 60
    told = {*expected, *gauges, "copy_path_active", "faults", "copy_seconds", "chunk_seconds"}
    assert told == BY_NAME.keys(), "every metric is in this script"


def test_what_copies_is_told_by_where_the_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    manager = object.__new__(LMCacheManager)
    manager.worker, manager.event_reports, manager.faults = pair.worker, None, Faults()
    assert manager._worker_totals()["copy_path_active", "host"] == 1
    with monkeypatch.context() as plant:
        plant.setattr(RegisteredCache, "device", object())
        assert manager._worker_totals()["copy_path_active", "cuda"] == 1
    pair.close()


def test_nothing_new_is_nothing_to_tell(script: Script) -> None:
    assert not script.take().is_empty()
    assert script.take().is_empty()
    assert script.meters[0].take() is None


def test_ranks_are_summed_but_their_gauges_stand_side_by_side() -> None:
    server = Server()
    ranks = []
    for rank in (0, 1):
        stats = LMCacheStats()
        stats.add("stored_bytes", 100)
        stats.set("held_bytes", 10 + rank, str(rank), "local_cpu")
        stats.observe("lookup_round_trip_seconds", [0.001])
        ranks.append(stats)
    merged = ranks[0].aggregate(ranks[1])
    later = LMCacheStats()
    later.set("held_bytes", 30, "1", "local_cpu")
    later.add("faults", 2, "start_load_kv")
    server.observe(merged)
    server.observe(later)
    assert server.value("stored_bytes") == 200
    assert server.value("lookup_round_trip_seconds") == 2
    for rank, held in (("0", 10), ("1", 30)):
        assert server.value("held_bytes", tier="local_cpu", rank=rank) == held
    assert merged.aggregate(later).reduce() == {
        "stored_bytes": 200,
        "held_bytes[local_cpu]": 40,
        "lookup_round_trip_seconds_count": 2,
        "lookup_round_trip_seconds_mean": 0.001,
        "faults[start_load_kv]": 2,
    }
    merged.reset()
    assert merged.is_empty()


@pytest.mark.parametrize("transfer", [OURS, MULTI], ids=["alone", "in MultiConnector"])
def test_vllm_logs_and_serves_them_alone_and_in_a_multi_connector(transfer: dict[str, Any]) -> None:
    server = Server(transfer)
    logging = KVConnectorLogging(server.transfer)
    lines: list[str] = []
    for _ in range(2):
        ours = LMCacheStats()
        ours.add("stored_tokens", 64)
        ours.set("held_bytes", 5, "0", "local_cpu")
        stats: KVConnectorStats = ours
        if transfer is MULTI:
            stats = MultiKVConnectorStats({LMCacheConnectorV1Dynamic.__name__: ours})
        logging.observe(server.observe(stats))
    logging.log(lambda text, *values: lines.append(text % values))
    assert server.value("stored_tokens") == 128
    assert server.value("held_bytes", tier="local_cpu", rank="0") == 5
    (line,) = lines
    assert re.search(r"stored_tokens'?[=:] ?128\b", line), line
    assert re.search(r"held_bytes\[local_cpu\]'?[=:] ?5\b", line), line


def test_what_a_server_accumulates_is_not_what_it_was_handed() -> None:
    handed = {"counter": {"stored_tokens": {"": 1}}}
    stats = LMCacheConnectorV1Dynamic.build_kv_connector_stats(handed)
    stats.aggregate(LMCacheStats({"counter": {"stored_tokens": {"": 2}}}))
    assert handed == {"counter": {"stored_tokens": {"": 1}}}
    assert LMCacheConnectorV1Dynamic.build_kv_connector_stats().is_empty()


def test_a_metric_of_a_newer_half_is_passed_over() -> None:
    server = Server()
    newer: dict[str, Any] = {"counter": {"of_next_year": {"": 1}}, "quantile": {"x": {"": [1]}}}
    server.observe(LMCacheStats(newer))
    assert LMCacheStats().aggregate(LMCacheStats(newer)).is_empty()


def test_a_half_that_could_not_start_says_that_its_tier_does_not_serve() -> None:
    manager = object.__new__(LMCacheManager)
    manager.faults, manager.scheduler, manager.worker = Faults(), None, None
    manager.event_reports, manager._is_scheduler, manager._rank = None, False, 3
    manager.faults.note("start", MemoryError("no room"))
    server = Server()
    server.observe(manager._new_meter().take() or LMCacheStats())
    assert server.value("tier_healthy", tier="local_cpu", rank="3") == 0
    assert server.value("faults", place="start") == 1


def test_names_are_what_prometheus_and_vllm_ask_for() -> None:
    # vLLM unregisters by this beginning when a process makes another engine.
    assert PREFIX.startswith("vllm:")
    for metric in METRICS:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", metric.name)
        assert not metric.name.endswith("_total"), "the client adds it"
        counted = "tokens|requests|chunks|bytes|seconds|lookups|asks|timeouts|errors|loads|saves"
        others = "probes|overflows|faults|healthy|active"
        assert re.search(rf"(^|_)({counted}|{others})$", metric.name), "a unit or what is counted"
    assert len(BY_NAME) == len(METRICS)


def test_the_page_has_every_metric_with_its_kind_labels_and_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", DOCS.read_text(), re.MULTILINE)
    documented = {name: (kind, labels, meaning) for name, kind, labels, meaning in rows}
    expected = {
        metric.name: (
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels),
            metric.meaning,
        )
        for metric in METRICS
    }
    assert documented == expected


def test_round_trips_are_told_once() -> None:
    pair = Pair()
    client = InProcessLookupClient(pair.pool)
    client._round_trips.extend([0.1, 0.2, 0.3])
    client._num_round_trips = 2
    assert client.take_round_trips() == [0.2, 0.3]
    assert client.take_round_trips() == []
    pair.close()


def test_hit_sources_add_up_to_what_was_promised() -> None:
    # vLLM asks for them since 0.32.
    sources = pytest.importorskip("vllm.v1.metrics.cache_hit_source")
    connector = object.__new__(LMCacheConnectorV1Dynamic)
    request = new_request(CHUNK)
    assert connector.get_external_cache_hit_sources(request, 0) == {}
    assert connector.get_external_cache_hit_sources(request, 5) == {sources.CacheHitSource.HOST: 5}
