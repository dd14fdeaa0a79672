"""An engine's configuration, as a schedule draws it, and the real vLLM configuration made of it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from world import BLOCK, CHUNK, CHUNK_BYTES, LAYER_NAMES

from lmcache_rs.vllm_v1.worker import LMCacheWorkerHalf

MODEL = Path(__file__).parents[1] / "vllm" / "models" / "tiny-llama"
"""Only its config is read: no weights, no forward pass."""
MAX_MODEL_LEN = 48
GOES_LAYER_BY_LAYER = hasattr(LMCacheWorkerHalf, "save_kv_layer")
"""Whether this version of the connector can."""
_engine_ids = itertools.count()


@dataclass(frozen=True)
class Settings:
    """One engine with one connector.

    Args:
        is_async: vLLM's AsyncScheduler, which describes a step before the last one's outcome.
        num_blocks: vLLM's block pool; small ones force preemptions.
        pool_chunks: The connector's pool; small ones force refusals and evictions.
        budget: Tokens of a step: prompts longer than it are computed in pieces.
        max_seqs: Requests that run at once.
        caching: vLLM's own prefix cache.
        priority: Its scheduling policy, priority instead of first come, first served.
        recompute: What vLLM does with a failed load; otherwise it fails the request.
        kv_role: `kv_both`, `kv_producer` or `kv_consumer`.
        save_decode: Whether the KV of generated tokens is stored.
        min_retrieve: The shortest hit that is loaded, in tokens.
        lookup_delay: How often the first asks for a request go unanswered, 0 to 1.
        num_drafts: Tokens that speculative decoding guesses; not with `is_async`.
        layerwise: Whether loads and saves go layer by layer, beside the forward pass.
        waited_for: The share of loads that requests wait for while others compute, 0 to 1. Where
            vLLM does not recover from others that fail, all are.
        shelf: Whether there is a tier below host memory, of `shelf.Shelf`.
        lookup_ms: Deadline of a lookup, in milliseconds.
        window: Tokens that attention reaches back, its own included; 0 for all. Blocks behind it
            leave the block table.
    """

    is_async: bool = False
    num_blocks: int = 40
    pool_chunks: int = 64
    budget: int = 64
    max_seqs: int = 4
    caching: bool = True
    priority: bool = False
    recompute: bool = True
    kv_role: str = "kv_both"
    save_decode: bool = True
    min_retrieve: int = 0
    lookup_delay: float = 0.0
    num_drafts: int = 0
    layerwise: bool = False
    window: int = 0
    waited_for: float = 0.0
    shelf: bool = False
    lookup_ms: int = 60_000

    @property
    def recovers_from_sync_load(self) -> bool:
        """Whether vLLM has a right answer to a load that fails in the step that computes on it."""
        return not self.window and not (self.is_async and self.recompute)

    @classmethod
    def drawn(cls, draw: random.Random) -> Self:
        """Any legal combination, the usual ones more often."""
        is_async = draw.random() < 0.4
        return cls(
            is_async=is_async,
            num_blocks=draw.choice((14, 14, 16, 18, 24, 40)),
            pool_chunks=draw.choice((2, 4, 6, 10, 64, 64)),
            budget=draw.choice((5, CHUNK, 19, 64, 64)),
            max_seqs=draw.choice((2, 4, 6)),
            caching=draw.random() < 0.6,
            priority=draw.random() < 0.25,
            recompute=draw.random() < 0.8,
            kv_role=draw.choice(("kv_both",) * 14 + ("kv_producer", "kv_consumer")),
            save_decode=draw.random() < 0.7,
            min_retrieve=draw.choice((0, 0, 0, 0, 0, CHUNK + 1)),
            lookup_delay=draw.choice((0.0, 0.0, 0.5)),
            num_drafts=draw.choice((0, 0, 0, 3)) * (not is_async),
            layerwise=draw.random() < 0.4 and GOES_LAYER_BY_LAYER,
            window=draw.choice((0, 0, 0, 0, CHUNK + 1)),
            waited_for=draw.choice((0.0, 0.0, 0.5, 1.0)),
        )

    def but(self, **changes: object) -> Settings:
        """These settings with some changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@functools.cache
def _base(num_drafts: int) -> VllmConfig:
    # What the engine resolves by itself takes a second: once, for all engines.
    return EngineArgs(
        model=str(MODEL),
        dtype="float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        # With a connector vLLM keeps one group of layers.
        kv_transfer_config=_transfer(Settings()),
        speculative_config=(
            num_drafts
            and {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_max": 2}
        )
        or None,
    ).create_engine_config()


def _transfer(settings: Settings) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="LMCacheConnectorV1Dynamic",
        kv_connector_module_path="lmcache_rs.vllm_v1",
        kv_role=settings.kv_role,
        engine_id=f"model-{next(_engine_ids)}",
        kv_load_failure_policy="recompute" if settings.recompute else "fail",
        kv_connector_extra_config={
            "lmcache.chunk_size": CHUNK,
            "lmcache.max_local_cpu_size": settings.pool_chunks * CHUNK_BYTES / 2**30,
            "lmcache.save_decode_cache": settings.save_decode,
            "lmcache.min_retrieve_tokens": settings.min_retrieve,
            # Leases end by what happens, not by how fast this machine is.
            "lmcache.lease_timeout_ms": 3_600_000,
            "lmcache.log_requests": False,
            # What is copied here says nothing of time: all loads are worth waiting for, or none.
            "lmcache.refuse_slow_loads": False,
            "lmcache.max_sync_load_ms": 0.0 if settings.waited_for == 1 else 1e6,
            "lmcache.lookup_timeout_ms": settings.lookup_ms,
            **({"lmcache.storage_backends": {"shelf": "shelf:Shelf"}} if settings.shelf else {}),
            **({"lmcache.use_layerwise": True} if settings.layerwise else {}),
        },
    )


def vllm_config(settings: Settings) -> VllmConfig:
    """A configuration of its own for each engine."""
    config = copy.copy(_base(settings.num_drafts))
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.block_size = BLOCK
    config.cache_config.num_gpu_blocks = settings.num_blocks
    config.cache_config.enable_prefix_caching = settings.caching
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.max_num_batched_tokens = settings.budget
    config.scheduler_config.max_num_seqs = settings.max_seqs
    config.scheduler_config.policy = "priority" if settings.priority else "fcfs"
    config.scheduler_config.async_scheduling = settings.is_async
    # Both halves in this process: every lookup is answered at once, and so repeatably.
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.distributed_executor_backend = "uni"
    config.kv_transfer_config = _transfer(settings)
    return config


def kv_cache_config(settings: Settings) -> KVCacheConfig:
    """One group of layers."""
    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1}
    spec: KVCacheSpec = FullAttentionSpec(**shape, dtype=torch.float32)
    if settings.window:
        spec = SlidingWindowSpec(**shape, dtype=torch.float32, sliding_window=settings.window)
    # Fields that came with 0.32 are given where there are any.
    known = {field.name for field in dataclasses.fields(KVCacheConfig)}
    newer = {"kv_cache_layout": "LBHNC", "hash_block_size": BLOCK}
    return KVCacheConfig(
        num_blocks=settings.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(LAYER_NAMES, spec)],
        **{name: value for name, value in newer.items() if name in known},
    )
