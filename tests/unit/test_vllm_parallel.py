"""Which parallel engines are served, and what is said of their ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.platforms
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
)

from lmcache_rs.lookup import Rank
from lmcache_rs.vllm_v1 import compat
from lmcache_rs.vllm_v1.manager import machine_bytes, require_memory

GIB = 1 << 30
DENSE = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)


def engine(spec: KVCacheSpec = DENSE, **parallel: int) -> tuple[Any, KVCacheConfig]:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1} | parallel
    world = sizes["tensor_parallel_size"] * sizes["pipeline_parallel_size"]
    defaults = {
        "data_parallel_rank": 0,
        "data_parallel_size_local": 1,
        "world_size": world,
        "local_world_size": world,
        "rank": 0,
    }
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**{**defaults, **sizes}),
        model_config=SimpleNamespace(model="m", dtype=torch.float32),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        kv_transfer_config=None,
        instance_id="i",
    )
    group = KVCacheGroupSpec(["model.layers.0.attn", "model.layers.1.attn"], spec)
    return config, KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group])


@pytest.mark.parametrize(
    ("spec", "parallel"),
    [
        (DENSE, {"tensor_parallel_size": 2}),
        (DENSE, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        (DENSE, {"data_parallel_size": 2}),
        (MLA, {"pipeline_parallel_size": 2}),
        (MLA, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        (MLA, {"data_parallel_size": 2}),
    ],
)
def test_ranks_of_one_host_are_served(spec: KVCacheSpec, parallel: dict[str, int]) -> None:
    compat.require_supported(*engine(spec, **parallel))


@pytest.mark.parametrize(
    ("spec", "parallel", "named"),
    [
        (DENSE, {"tensor_parallel_size": 4, "local_world_size": 2}, "2 of 4"),
        (DENSE, {"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        (DENSE, {"prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2"),
    ],
)
def test_what_is_not_served_stops_with_a_line_that_names_it(
    spec: KVCacheSpec, parallel: dict[str, int], named: str
) -> None:
    with pytest.raises(compat.UnsupportedEngineError, match=named) as stop:
        compat.require_supported(*engine(spec, **parallel))
    assert "\n" not in str(stop.value)


def test_a_rank_is_told_by_its_stage_and_place_in_whichever_replica() -> None:
    found = []
    for number in range(8):
        sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
        config, _ = engine(DENSE, rank=number, data_parallel_rank=number // 4, **sizes)
        found.append(compat.rank_of(config))
        assert compat.rank_number_of(config) == number % 4
    assert found == [Rank(dp, pp, tp) for dp in (0, 1) for pp in (0, 1) for tp in (0, 1)]


def test_replicas_have_the_same_facts_and_ranks_others() -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}

    def facts(replica: int) -> list[dict[str, str]]:
        config, kv_cache = engine(DENSE, data_parallel_rank=replica, **sizes)
        return [
            compat.metadata_of(config, kv_cache, rank).facts() for rank in compat.ranks_of(config)
        ]

    assert facts(0) == facts(1)
    places = [(of["world_size"], of["worker_id"]) for of in facts(0)]
    assert places == [("4", "0"), ("4", "1"), ("4", "2"), ("4", "3")]


def test_mla_on_a_gpu_is_not_served_under_tensor_parallelism_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm.platforms.current_platform, "is_cpu", lambda: False)
    with pytest.raises(compat.UnsupportedEngineError, match="tensor_parallel_size is 2"):
        compat.require_supported(*engine(MLA, tensor_parallel_size=2))
    compat.require_supported(*engine(DENSE, tensor_parallel_size=2))


def test_mla_is_kept_by_the_first_rank_of_each_stage_under_names_of_any_width() -> None:
    config, kv_cache = engine(MLA, tensor_parallel_size=3, pipeline_parallel_size=2)
    ranks = compat.ranks_of(config)
    firsts = [rank for rank in ranks if rank.tp == 0]
    assert compat.storing_ranks_of(config, kv_cache) == firsts
    assert [compat.owner_of(kv_cache, rank) for rank in ranks] == [
        first for first in firsts for _ in range(3)
    ]
    for width in (1, 3):
        narrow, _ = engine(MLA, tensor_parallel_size=width, pipeline_parallel_size=2)
        named = compat.metadata_of(narrow, kv_cache, Rank(0, 1, width - 1))
        assert (named.world_size, named.worker_id) == (1, 0)
    dense, of_dense = engine(DENSE, tensor_parallel_size=3)
    assert compat.storing_ranks_of(dense, of_dense) == compat.ranks_of(dense)
    assert compat.owner_of(of_dense, ranks[2]) == ranks[2]


def test_pools_that_cannot_all_be_there_are_a_fault_however_well_each_would_fit() -> None:
    require_memory(8 * GIB, 2, 16 * GIB)
    require_memory(20 * GIB, 1, 16 * GIB)  # the pool itself says so, when it is made
    require_memory(8 * GIB, 4, 0)  # nobody says what there is
    with pytest.raises(MemoryError, match=r"8\.00 \(GB\) for each of 3 ranks .* 24\.00 .* 16\.00"):
        require_memory(8 * GIB, 3, 16 * GIB)
    assert 0 < machine_bytes() < 1 << 50


def test_replicas_that_are_known_count_into_the_memory_of_the_host() -> None:
    assert compat.num_local_pools(*engine(tensor_parallel_size=2, data_parallel_size_local=3)) == 6
    assert compat.num_local_pools(*engine(data_parallel_size_local=0)) == 1
    # Of MLA's ranks the first keeps a pool.
    several = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    assert compat.num_local_pools(*engine(MLA, **several)) == 2
    assert compat.num_local_pools(*engine(DENSE, **several, local_world_size=4)) == 4


@pytest.mark.parametrize(("number", "found"), [(None, 2), (0, 2), (1, 4), (2, 6)])
def test_replicas_that_vllm_keeps_from_each_other_count_those_before_them(
    number: Any, found: int
) -> None:
    """So where three pools of two ranks are too much for the host, the third replica has none."""
    sizes = {"tensor_parallel_size": 2, "data_parallel_rank_local": number}
    assert compat.num_local_pools(*engine(DENSE, **sizes)) == found
