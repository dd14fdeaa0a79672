"""The halves of the connector over remote tiers that cannot be made, or are out of reach."""

from __future__ import annotations

import socket

import pytest
import torch

from lmcache_rs import LMCacheEngineConfig, LMCacheMetadata
from lmcache_rs.config import WITHOUT_LOWER_TIERS
from lmcache_rs.vllm_v1.faults import Faults
from lmcache_rs.vllm_v1.worker import LMCacheWorkerHalf

BLOCK, CHUNK, LAYERS, BLOCKS = 4, 8, 2, 64
META = LMCacheMetadata("m", 1, 0, "float32", block_size=BLOCK)


def settings(url: str, **more: object) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, max_local_cpu_size=0.001, remote_url=url, **more
    )


def worker(config: LMCacheEngineConfig) -> LMCacheWorkerHalf:
    half = LMCacheWorkerHalf(config, META, "start", in_scheduler_process=True, faults=Faults())
    caches = [torch.randn(BLOCKS, 2, BLOCK, 6) for _ in range(LAYERS)]
    try:
        half.register_kv_caches(caches, 2 * BLOCK * 6 * 4, ["a", "b"])
    except BaseException:
        half.shutdown()
        raise
    return half


def nobody() -> str:
    """The URL of a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"redis://me:hunter2@127.0.0.1:{probe.getsockname()[1]}/"


def test_a_wrong_url_costs_its_tier_and_is_counted_under_its_own_name() -> None:
    half = worker(settings("gopher://me:hunter2@h"))
    host, remote = half.tiers()
    assert host == "local_cpu healthy"
    assert remote.startswith("RemoteBackend off (")
    assert "hunter2" not in remote
    assert dict(half._faults.counts) == {"remote": 1}
    half.shutdown()


def test_a_server_out_of_reach_is_a_tier_that_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    half = worker(settings(nobody()))
    assert half.tiers() == ["local_cpu healthy", "RemoteBackend out of reach"]
    assert dict(half._faults.counts) == {}
    counters = half.counters()
    assert counters["RemoteBackend_out_of_reach"] == 1
    assert counters["RemoteBackend_faults_unreachable"] >= 1
    assert "hunter2" not in caplog.text
    half.shutdown()


def test_strict_makes_both_a_stop() -> None:
    for url in ("gopher://h", nobody()):
        with pytest.raises((ValueError, ConnectionError)) as raised:
            worker(settings(url, strict=True))
        assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("local_cpu", [True, False])
def test_no_lower_tier_is_left_where_none_is_wanted(local_cpu: bool) -> None:
    config = settings(nobody(), local_cpu=local_cpu, local_disk="/x", max_local_disk_size=1)
    assert config.wants_lower_tiers
    assert not config.with_values("a test", **WITHOUT_LOWER_TIERS).wants_lower_tiers
