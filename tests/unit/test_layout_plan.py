"""Which plan a model gets in vLLM: as the engine declares, never by the looks of its tensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
)

import vllm
from lmcache_rs import LMCacheEngineConfig
from lmcache_rs.layouts import LayoutError
from lmcache_rs.vllm_v1 import compat
from lmcache_rs.vllm_v1.faults import Faults
from lmcache_rs.vllm_v1.worker import LMCacheWorkerHalf

BLOCK, BLOCKS, DIM = 16, 12, 24
NAMES = ["model.layers.0.attn", "model.layers.1.attn"]
engine_ids = itertools.count()


def mla(**changes: Any) -> MLAAttentionSpec:
    given = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": DIM, "dtype": torch.float32}
    return MLAAttentionSpec(**given | changes)


def dense() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32)


def kv_cache_config(spec: KVCacheSpec) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(NAMES, spec)],
        kv_cache_layout="LBHNC",
    )


def vllm_config(backends: Mapping[str, str]) -> Any:
    """The parts of vLLM's configuration that are asked; layers know their backend."""

    def layer(backend: str) -> Any:
        return SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))

    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={name: layer(backend) for name, backend in backends.items()}
        ),
        model_config=SimpleNamespace(model="m", dtype=torch.float32),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            data_parallel_rank=0, pipeline_parallel_size=1, tensor_parallel_size=1
        ),
    )


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (mla(), "mla"),
        (mla(block_size=64), "mla"),
        (dense(), "opaque"),
        (mla(page_size_padded=4096), "opaque"),
        (mla(tokens_per_state=4), "opaque"),
        (mla(state_content_bytes=656), "opaque"),
    ],
)
def test_only_a_plain_table_is_copied_by_token(spec: KVCacheSpec, layout: str) -> None:
    assert compat.layout_of(kv_cache_config(spec)) == layout


def test_the_key_names_the_stored_form_and_the_block_only_where_it_shows() -> None:
    def facts(spec: KVCacheSpec) -> dict[str, str]:
        return compat.metadata_of(vllm_config({}), kv_cache_config(spec)).facts()

    small, large = facts(mla()), facts(mla(block_size=64))
    assert small == large
    assert (small["stored_form"], small["layout_id"]) == ("KV_MLA_FMT", "KV_MLA_FMT-1x24")
    assert facts(dense())["stored_form"] == "OPAQUE"
    assert facts(dense())["block_size"] == "32"


def test_whole_blocks_are_of_one_release_backend_and_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # vLLM packs K by the processor's instructions, in a block of one declared layout and size.
    def layout_id(spec: KVCacheSpec, backend: str | None = None) -> str | None:
        config = vllm_config({})
        config.attention_config = SimpleNamespace(backend=backend and SimpleNamespace(name=backend))
        return compat.metadata_of(config, kv_cache_config(spec)).layout_id

    plain, table = layout_id(dense()), layout_id(mla())
    assert layout_id(dense()) == plain
    found = {plain, layout_id(dense(), "FLEX_ATTENTION")}
    with monkeypatch.context() as patch:
        patch.setattr(cpu_attn, "_get_attn_isa", lambda *facts: "another")
        found.add(layout_id(dense()))
        assert layout_id(mla()) == table
    with monkeypatch.context() as patch:
        patch.setattr(compat, "machine", lambda: "another")
        found.add(layout_id(dense()))
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "__version__", "9.9.9")
        found.add(layout_id(dense()))
        assert layout_id(mla()) == table, "a plain table is one everywhere"
    assert len(found) == 5


def test_a_table_is_only_believed_of_backends_that_are_known() -> None:
    config = kv_cache_config(mla())
    for backend in ("CPU_MLA", "AMX_MLA"):
        compat.require_backends(vllm_config(dict.fromkeys(NAMES, backend)), config)
    for backends in ({}, {NAMES[0]: "CPU_MLA", NAMES[1]: "FANCY_MLA"}):
        with pytest.raises(compat.UnsupportedEngineError, match=r"(FANCY_MLA|unknown).*CPU_MLA"):
            compat.require_backends(vllm_config(backends), config)
    # Whole blocks need no belief.
    compat.require_backends(vllm_config({}), kv_cache_config(dense()))


def worker_of(spec: KVCacheSpec) -> LMCacheWorkerHalf:
    settings = LMCacheEngineConfig.from_defaults(chunk_size=64, max_local_cpu_size=0.01)
    metadata = compat.metadata_of(vllm_config({}), kv_cache_config(spec))
    return LMCacheWorkerHalf(
        settings,
        metadata,
        f"plan-{next(engine_ids)}",
        in_scheduler_process=True,
        faults=Faults(),
    )


def test_the_worker_copies_as_both_halves_know_it() -> None:
    for spec, shape, plan in (
        (mla(), (BLOCKS, 1, BLOCK, DIM), "copied token by token"),
        (dense(), (BLOCKS, 2, 32, 32), "copied in whole blocks"),
    ):
        worker = worker_of(spec)
        block_bytes = compat.block_bytes_of(kv_cache_config(spec))
        worker.register_kv_caches([torch.randn(shape) for _ in NAMES], block_bytes)
        assert worker.plan == f"{plan} by the CPU"
        assert worker.capacity()[1] > 0
        worker.shutdown()


def test_a_declared_table_that_is_none_stops_and_is_never_copied_in_blocks_under_its_key() -> None:
    worker = worker_of(mla())
    two_heads = [torch.randn(BLOCKS, 2, BLOCK, DIM) for _ in NAMES]
    with pytest.raises(LayoutError, match="2 heads"):
        worker.register_kv_caches(two_heads, 2 * BLOCK * DIM * 4)
    worker.shutdown()
