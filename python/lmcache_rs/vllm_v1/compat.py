"""What this package needs to know about vLLM, version by version, in one place."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from platform import machine
from typing import TYPE_CHECKING, Any

import vllm.envs
import vllm.platforms
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from lmcache_rs import _native
from lmcache_rs.config import LMCacheMetadata
from lmcache_rs.engine_versions import BROKEN_VERSIONS, TESTED_VERSIONS
from lmcache_rs.layouts import Layout, MemoryFormat
from lmcache_rs.lookup import Rank

# What loaded tokens count as; vLLM has asked for it since 0.32.
HOST_HIT_SOURCE: Any
try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    HOST_HIT_SOURCE = None
else:
    HOST_HIT_SOURCE = CacheHitSource.HOST

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# vLLM formats and shows the records of its own loggers only; ours is a child of them, in name.
logger = logging.getLogger("vllm.lmcache_rs")

TOKEN_ADDRESSED_BACKENDS = frozenset({"CPU_MLA", "AMX_MLA"})
"""Attention backends that read and write their cache as a plain table `[slots, dim]`.

No other may be added for the looks of its tensors: CPU_ATTN declares `[B, H, N, 2 * D]` and keeps,
inside each (block, head), a plane of K packed across tokens and then a plane of V.
"""


class UnsupportedEngineError(RuntimeError):
    """This engine or model cannot be served rightly; start-up stops."""


def engine_verdict() -> str:
    """`supported` or `untested`, with vLLM's version.

    Raises:
        UnsupportedEngineError: The version is known to be broken.
    """
    version = vllm.__version__.split("+")[0]
    if version in BROKEN_VERSIONS:
        raise UnsupportedEngineError(
            f"lmcache_rs cannot serve vLLM {version}: {BROKEN_VERSIONS[version]}; "
            f"use {TESTED_VERSIONS[-1]}"
        )
    verdict = "supported" if version in TESTED_VERSIONS else "untested"
    return f"vLLM {version} ({verdict})"


def require_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Stops for what would be served wrongly.

    Raises:
        UnsupportedEngineError: Names the feature and what to change.
    """
    parallel = vllm_config.parallel_config
    modes = {
        "decode_context_parallel_size": "decode context",
        "prefill_context_parallel_size": "prefill context",
    }
    for setting, mode in modes.items():
        size = getattr(parallel, setting, 1)
        if size > 1:
            raise UnsupportedEngineError(
                f"lmcache_rs does not serve {mode} parallelism yet: {setting} is {size}; "
                "set it to 1"
            )
    if parallel.local_world_size != parallel.world_size:
        raise UnsupportedEngineError(
            f"lmcache_rs does not serve engines whose workers are on several hosts: "
            f"{parallel.local_world_size} of {parallel.world_size} are on this one; lower "
            "tensor_parallel_size and pipeline_parallel_size, or use data parallelism across hosts"
        )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise UnsupportedEngineError(
            f"lmcache_rs serves models with one KV cache group, this one has {len(groups)} "
            f"({kinds}); start vLLM with --disable-hybrid-kv-cache-manager or without it"
        )
    tensor_parallel = parallel.tensor_parallel_size
    is_on_host = vllm.platforms.current_platform.is_cpu()
    if tensor_parallel > 1 and is_latent(kv_cache_config) and not is_on_host:
        raise UnsupportedEngineError(
            "lmcache_rs does not serve MLA models under tensor parallelism on GPUs yet: "
            f"tensor_parallel_size is {tensor_parallel}; set it to 1, and pipeline_parallel_size "
            "or data_parallel_size instead"
        )


def engine_start_of(vllm_config: VllmConfig) -> str:
    """Names this start of the engine, the same in all its processes.

    The engine id alone may be the operator's, and two engines may be given one.
    """
    transfer = vllm_config.kv_transfer_config
    engine_id = None if transfer is None else transfer.engine_id
    return f"{engine_id}/{vllm_config.instance_id}"


def ranks_of(vllm_config: VllmConfig) -> list[Rank]:
    """The workers of this scheduler: every tensor parallel rank of every pipeline stage."""
    parallel = vllm_config.parallel_config
    return [
        Rank(parallel.data_parallel_rank, pp, tp)
        for pp in range(parallel.pipeline_parallel_size)
        for tp in range(parallel.tensor_parallel_size)
    ]


def is_latent(kv_cache_config: KVCacheConfig) -> bool:
    """Whether all tensor parallel ranks hold the same KV: MLA's latent of all heads."""
    return isinstance(kv_cache_config.kv_cache_groups[0].kv_cache_spec, MLAAttentionSpec)


def storing_ranks_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[Rank]:
    """The workers that keep KV: where tensor parallel ranks hold the same, each stage's first."""
    ranks = ranks_of(vllm_config)
    return [rank for rank in ranks if rank.tp == 0] if is_latent(kv_cache_config) else ranks


def owner_of(kv_cache_config: KVCacheConfig, rank: Rank) -> Rank:
    """The worker that keeps what this one loads."""
    return rank._replace(tp=0) if is_latent(kv_cache_config) else rank


def rank_of(vllm_config: VllmConfig) -> Rank:
    """Which of them runs in this process."""
    return ranks_of(vllm_config)[rank_number_of(vllm_config)]


def rank_number_of(vllm_config: VllmConfig) -> int:
    """Its place in `ranks_of`."""
    # vLLM numbers them stage by stage, and may go on from one data parallel replica to the next.
    return vllm_config.parallel_config.rank % len(ranks_of(vllm_config))


def num_local_pools(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Workers on this host that keep KV, as far as is known here, those of replicas too.

    vLLM does not tell the replicas of a model without experts of each other, but numbers them: each
    counts those before it. So of replicas that are too many for the host, the last are.
    """
    parallel = vllm_config.parallel_config
    of_replica = len(storing_ranks_of(vllm_config, kv_cache_config))
    of_replica = -(-of_replica * parallel.local_world_size // parallel.world_size)
    number = getattr(parallel, "data_parallel_rank_local", None) or 0
    return of_replica * max(1, parallel.data_parallel_size_local, number + 1)


def is_in_scheduler_process(vllm_config: VllmConfig) -> bool:
    """Whether the worker runs in the scheduler's process."""
    return vllm_config.parallel_config.distributed_executor_backend == "uni"


def block_size_of(kv_cache_config: KVCacheConfig) -> int:
    """Tokens of a block, as the engine resolved it; the user's flag may say otherwise."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def hash_block_size_of(kv_cache_config: KVCacheConfig) -> int:
    """Tokens between two of the engine's own hashes; before 0.32 a block's, of a single group."""
    told = getattr(kv_cache_config, "hash_block_size", None)
    return int(told or block_size_of(kv_cache_config))


def keeps_all_blocks(kv_cache_config: KVCacheConfig) -> bool:
    """Whether a request's block table holds all its tokens, and not those of a window alone."""
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return type(spec) in (FullAttentionSpec, MLAAttentionSpec)


def recovers_from_sync_load(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether vLLM has a right answer to a load that fails in the step that computes on it.

    It has none where the next step is described before the failure is heard of and nobody's request
    is failed for it: what that step computes on the failed blocks is delivered. Nor where blocks
    behind a window are gone: what is to be computed again would need them.
    """
    transfer = vllm_config.kv_transfer_config
    recomputes = transfer is not None and transfer.kv_load_failure_policy == "recompute"
    is_ahead = bool(vllm_config.scheduler_config.async_scheduling)
    return keeps_all_blocks(kv_cache_config) and not (is_ahead and recomputes)


def layer_names_of(kv_cache_config: KVCacheConfig) -> list[str]:
    """The names of the layers that keep KV, in the engine's order."""
    return list(kv_cache_config.kv_cache_groups[0].layer_names)


def has_windows(kv_cache_config: KVCacheConfig) -> bool:
    """Whether requests may lose blocks while they live, which the engine tells nobody.

    By exact type: of what is not known it is to be expected.
    """
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return type(spec) not in (FullAttentionSpec, MLAAttentionSpec)


def block_bytes_of(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of one block of one layer, as the engine declares them."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes)


def layout_of(kv_cache_config: KVCacheConfig) -> Layout:
    """How the engine's declaration says its KV can be copied: `mla` by token, else in whole blocks.

    Both halves ask, and only one of them sees tensors; what the declaration promises the worker
    half holds against the attention backends and the tensors (`require_backends`).
    """
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    # By exact type: its subclasses keep other things. Packed or padded states are no plain table.
    is_plain_table = (
        type(spec) is MLAAttentionSpec
        and spec.tokens_per_state == 1
        and spec.num_heads == 1
        and spec.state_content_bytes is None
        and spec.page_size_padded is None
    )
    return "mla" if is_plain_table else "opaque"


def require_backends(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Stops where tokens are to be copied one by one out of a cache that is not known as a table.

    Raises:
        UnsupportedEngineError: Names the layer, its attention backend and what to change.
    """
    if layout_of(kv_cache_config) == "opaque":
        return
    layers = vllm_config.compilation_config.static_forward_context
    for name in layer_names_of(kv_cache_config):
        backend = layers[name].get_attn_backend().get_name() if name in layers else "unknown"
        if backend not in TOKEN_ADDRESSED_BACKENDS:
            raise UnsupportedEngineError(
                f"lmcache_rs does not know how attention backend {backend} of layer {name} keeps "
                "its tokens; choose one of "
                f"{', '.join(sorted(TOKEN_ADDRESSED_BACKENDS))} with --attention-backend, or start "
                "vLLM without this connector"
            )


def metadata_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, rank: Rank | None = None
) -> LMCacheMetadata:
    """The facts of the model that enter every key, with a worker's place; the scheduler half is at
    the first one's, and leaves it out of what it names (ranks.py)."""
    ranks = ranks_of(vllm_config)
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    dtype = str(getattr(spec, "dtype", vllm_config.model_config.dtype)).removeprefix("torch.")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype != "auto":
        dtype = f"{cache_dtype}-{dtype}"
    if layout_of(kv_cache_config) == "mla":
        # Names the stored form alone: any block size and order of axes can load it.
        stored_form = MemoryFormat.KV_MLA_FMT.name
        layout_id = f"{stored_form}-1x{getattr(spec, 'head_size', 0)}"
    else:
        stored_form = MemoryFormat.OPAQUE.name
        layout = kv_cache_config.kv_cache_layout or "undeclared"
        content = _block_content(vllm_config, spec)
        layout_id = f"{type(spec).__name__}-{layout}-{spec.page_size_bytes}-{content}"
    return LMCacheMetadata(
        model_name=vllm_config.model_config.model,
        # A replica of the whole model holds the same, and may any tensor parallel rank.
        world_size=1 if is_latent(kv_cache_config) else len(ranks),
        worker_id=0 if is_latent(kv_cache_config) else ranks.index(rank or ranks[0]),
        kv_dtype=dtype,
        stored_form=stored_form,
        layout_id=layout_id,
        block_size=spec.block_size,
        num_layers=len(group.layer_names),
    )


def _block_content(vllm_config: VllmConfig, spec: Any) -> str:
    """Whatever decides how an attention backend arranges the bytes inside a block.

    Its layout does not say: a backend may interleave or pack K and V as it likes, differently in
    another release or on another processor. Both halves must know it, and only one sees tensors.
    """
    platform = vllm.platforms.current_platform
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    parts = [f"vllm{vllm.__version__}", platform.device_type, getattr(backend, "name", "auto")]
    if platform.is_cpu():
        parts += [machine(), _cpu_packing(vllm_config, spec)]
    else:
        if getattr(vllm.envs, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", False):
            parts.append("shuffled")
        # Where the backend is chosen automatically, it is chosen by this.
        parts.append(str(platform.get_device_capability()))
    return "-".join(parts)


def _cpu_packing(vllm_config: VllmConfig, spec: Any) -> str:
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        dtype: Any = vllm_config.model_config.dtype  # resolved by now
        return _get_attn_isa(
            dtype,
            spec.block_size,
            spec.head_size,
            vllm_config.cache_config.cache_dtype,
        )
    except Exception as error:
        # Another release: this start then is alone with its blocks.
        logger.warning("lmcache_rs: vLLM does not say how its CPU attention packs KV: %s", error)
        return engine_start_of(vllm_config)


def kv_tensors(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig
) -> list[torch.Tensor]:
    """The registered tensors in the engine's order of layers, their block axis certified.

    What must be certain is where a block begins and ends: the first axis counts the engine's
    blocks, and one step of it holds as many bytes as the engine says; in one run, where whole
    blocks are copied.

    Raises:
        UnsupportedEngineError: It is not certain.
    """
    import torch

    names = layer_names_of(kv_cache_config)
    missing = [name for name in names if name not in kv_caches]
    if missing:
        raise UnsupportedEngineError(
            f"lmcache_rs found no KV tensor for layer {missing[0]}, which shares or hides its KV; "
            "start vLLM without this connector"
        )
    tensors = []
    num_blocks = kv_cache_config.num_blocks
    block_bytes = block_bytes_of(kv_cache_config)
    by_token = layout_of(kv_cache_config) != "opaque"
    for name in names:
        tensor = kv_caches[name]
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedEngineError(
                f"lmcache_rs cannot copy the KV of layer {name}: it is a {type(tensor).__name__}"
            )
        found = tensor[0].numel() * tensor.element_size() if tensor.shape[0] else 0
        whole = tensor.shape[0] == num_blocks and (by_token or tensor[0].is_contiguous())
        if not whole or found != block_bytes:
            raise UnsupportedEngineError(
                f"lmcache_rs cannot certify the block axis of layer {name}: {num_blocks} blocks of "
                f"{block_bytes} bytes declared, tensor {list(tensor.shape)} with strides "
                f"{list(tensor.stride())} found; use a KV layout with the block outside heads and "
                "tokens"
            )
        tensors.append(tensor)
    return tensors


class ExtraKeys:
    """What besides the tokens enters a request's chunks, as vLLM's own function forms it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.next_mm_item = 0
        # Without any of these, vLLM's function gives None for every block.
        self._is_plain = (
            request.lora_request is None
            and not request.mm_features
            and not request.cache_salt
            and request.prompt_embeds is None
        )

    def of_chunks(
        self, start: int, num_chunks: int, chunk_size: int
    ) -> tuple[list[bytes | None] | None, int]:
        """Encoded extra keys of consecutive chunks, the first of which begins at token `start`.

        Chunks are asked for in order: multimodal items are walked along. The second item is what
        `next_mm_item` becomes once these chunks are hashed.
        """
        next_mm_item = self.next_mm_item
        if self._is_plain:
            return None, next_mm_item
        encoded: list[bytes | None] = []
        for chunk_start in range(start, start + num_chunks * chunk_size, chunk_size):
            keys, next_mm_item = generate_block_hash_extra_keys(
                self._request, chunk_start, chunk_start + chunk_size, next_mm_item
            )
            encoded.append(None if keys is None else _native.encode_extra_keys(keys))
        return encoded, next_mm_item


def block_table(scheduler_output: SchedulerOutput, req_id: str) -> list[int]:
    """The request's current block table; empty if the engine does not say."""
    state = scheduler_output.kv_connector_block_state
    tables = None if state is None else state.get_block_ids(req_id)
    return list(tables[0]) if tables else []


def has_loads_in_step(scheduler_output: SchedulerOutput) -> bool:
    """Whether the step computes on what connectors load for it; where vLLM does not say, it may."""
    return bool(getattr(scheduler_output, "has_sync_kv_loads", True))


def granted_block_ids(blocks: KVCacheBlocks) -> list[int]:
    """The block table that vLLM granted a request."""
    return list(blocks.get_block_ids()[0])


def recompute_from(request: Request, num_tokens: int) -> None:
    """Lets the engine compute a request's KV anew from there on, as it does after a failed load.

    Not while a step of the request is under way: the engine counts its tokens in when it is done.
    """
    if request.num_in_flight_tokens == 0:
        request.num_computed_tokens = min(request.num_computed_tokens, num_tokens)


def bypass_reason(request: Request) -> str | None:
    """Why a request must not use the cache, if it must not."""
    if getattr(request, "resumable", False):
        # Each piece of a streamed prompt replaces tokens behind what is computed.
        return "its prompt is streamed in, and its tokens may change"
    if request.prompt_embeds is not None and request.prompt_token_ids is not None:
        # vLLM hashes ids and embeddings, and not which of the two a position is computed from.
        return "its prompt mixes tokens and embeddings, and vLLM's hashes do not say which is where"
    return None


def request_configs_of(request: Request) -> dict[str, Any]:
    """The `lmcache.*` entries of the request's kv_transfer_params.

    Raises:
        TypeError: These are no names with values.
    """
    params: object = request.kv_transfer_params or {}
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise TypeError("its kv_transfer_params are no names with values")
    return {name: value for name, value in params.items() if name.startswith("lmcache.")}


def require_hashable(request: Request) -> None:
    """Refuses texts that can be no part of a hash, before any chunk is asked for.

    Raises:
        ValueError: A salt, identifier or name has a lone surrogate; the text is not shown.
    """
    adapter = request.lora_request
    texts = [request.cache_salt, *(item.identifier for item in request.mm_features or ())]
    if adapter is not None:
        texts += [adapter.lora_name, adapter.lora_path]
    for text in texts:
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise ValueError("its salt, or the name of an item or adapter, is no text") from None
