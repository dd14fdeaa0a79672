"""The halves of the connector over a tier on local disks: its start, its first request, its end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from lmcache_rs import LMCacheEngineConfig, LMCacheMetadata
from lmcache_rs.vllm_v1.faults import Faults
from lmcache_rs.vllm_v1.scheduler import LMCacheSchedulerHalf
from lmcache_rs.vllm_v1.worker import LMCacheWorkerHalf

BLOCK, CHUNK, LAYERS, BLOCKS = 4, 8, 2, 64
BLOCK_BYTES = 2 * BLOCK * 6 * 4
META = LMCacheMetadata("m", 1, 0, "float32", block_size=BLOCK)


def settings(path: Path | None, **more: object) -> LMCacheEngineConfig:
    disk = {} if path is None else {"local_disk": str(path), "max_local_disk_size": 0.1}
    return LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, max_local_cpu_size=0.001, **{**disk, **more}
    )


def worker(config: LMCacheEngineConfig) -> LMCacheWorkerHalf:
    half = LMCacheWorkerHalf(config, META, "start", in_scheduler_process=True, faults=Faults())
    caches = [torch.randn(BLOCKS, 2, BLOCK, 6) for _ in range(LAYERS)]
    try:
        half.register_kv_caches(caches, BLOCK_BYTES, ["a", "b"])
    except BaseException:
        half.shutdown()
        raise
    return half


def unusable(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"")
    return tmp_path / "file"


def request() -> Request:
    params = SamplingParams(max_tokens=1)
    params.update_from_generation_config({}, None)
    return Request("r", list(range(3 * CHUNK)), params, None)


@pytest.mark.parametrize("local_cpu", [True, False])
def test_the_tier_is_named_with_its_state(tmp_path: Path, local_cpu: bool) -> None:
    half = worker(settings(tmp_path, local_cpu=local_cpu))
    host = "local_cpu healthy" if local_cpu else "local_cpu staging"
    assert half.tiers() == [host, "LocalDiskBackend healthy"]
    assert half.counters()["LocalDiskBackend_chunks"] == 0
    half.shutdown()


def test_a_tier_that_cannot_be_made_is_named_and_counted(tmp_path: Path) -> None:
    half = worker(settings(unusable(tmp_path)))
    host, disk = half.tiers()
    assert host == "local_cpu healthy"
    assert disk.startswith("LocalDiskBackend off (")
    assert dict(half._faults.counts) == {"local_disk": 1}
    half.shutdown()


def test_strict_makes_a_tier_that_cannot_be_made_a_stop(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="make folders"):
        worker(settings(unusable(tmp_path), strict=True))


def test_without_host_memory_and_without_the_disk_there_is_no_cache(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no tier below host memory"):
        worker(settings(unusable(tmp_path), local_cpu=False))


def test_without_host_memory_and_without_any_tier_nothing_is_stored() -> None:
    half = worker(settings(None, local_cpu=False))
    assert (half.local_cpu, half.tiers()) == (None, ["local_cpu off"])
    half.shutdown()


@pytest.mark.parametrize("has_disk", [True, False])
def test_the_first_request_waits_for_the_workers_where_the_disk_may_have_it(
    tmp_path: Path, has_disk: bool
) -> None:
    config = settings(tmp_path if has_disk else None, lookup_timeout_ms=60_000)
    half = LMCacheSchedulerHalf(config, META, "start", "kv_both", Faults())
    assert half.get_num_new_matched_tokens(request(), 0) == (None if has_disk else 0, False)
    # No longer than a lookup may take, all requests together.
    half._workers_due = 0.0
    assert half.get_num_new_matched_tokens(request(), 0) == (0, False)


def test_a_shutdown_stores_what_was_saved_and_not_yet_offered(tmp_path: Path) -> None:
    config = settings(tmp_path)
    half = worker(config)
    namespace = "model=m@world=1@worker=0@dtype=float32"
    hashes = bytes(range(64))
    assert half._engine is not None
    transfer = half._engine.begin_store_chunks(namespace, hashes, [1, 2, 3, 4])
    saved = SimpleNamespace(
        req_id="r",
        namespace=namespace,
        hashes=hashes,
        num_tokens=2 * CHUNK,
        save_spec=SimpleNamespace(skip_leading_tokens=0),
    )
    half._saves._under_way.append((1, saved, transfer))  # type: ignore[arg-type]
    half.shutdown()
    again = worker(config)
    assert again.counters()["LocalDiskBackend_chunks"] == 2
    again.shutdown()
