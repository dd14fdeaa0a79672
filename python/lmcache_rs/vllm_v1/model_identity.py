"""Which model an engine runs, told from its configuration and its files."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_rs.fingerprint import Digest, model_fingerprint, weights_of
from vllm import envs

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from lmcache_rs.lookup import Rank
    from lmcache_rs.model_facts import LMCacheMetadata

logger = logging.getLogger("vllm.lmcache_rs")

# They differ in how fast they read the same files.
_SAME_FILES = frozenset({"auto", "safetensors", "fastsafetensors", "instanttensor", "ipc_cache"})
_ELSEWHERE = frozenset({"tensorizer", "modelexpress"})
"""Their settings name the weights; the model's folder need not hold these."""
# How an image becomes inputs, where its identifier, which a client may choose, does not say so.
_ITEM_SETTINGS = (
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
    "language_model_only",
)
_QUANTISATION_FILE = "quantization_config_file"
# Of vLLM's variables, those that say how weights are quantised.
_ENVIRONMENT = ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_INPUT_QUANT_CONFIG")
_ADAPTER_SETTINGS = (
    "lora_dtype",
    "target_modules",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)


def model_name_of(vllm_config: VllmConfig) -> str:
    """The name that the operator gave, else the model's on its hub, else its architecture's.

    Never a path: the fingerprint says which model it is, and hosts keep one in different places.
    """
    model = vllm_config.model_config
    served = model.served_model_name
    name = str(served[0] if isinstance(served, list) else served or model.model)
    if name == str(model.model) and os.path.exists(name):
        architectures = getattr(model.hf_config, "architectures", None) or ["local model"]
        return str(architectures[0])
    return name


def fingerprint_of(vllm_config: VllmConfig, engine_start: str) -> str:
    """Digest of configuration, quantisation, rope settings, dtype and weights.

    Where the weights cannot be looked at, the engine's start stands for them, and is said to: what
    is stored is then found by this start alone.
    """
    prints = [_of_model(vllm_config, vllm_config.model_config, engine_start)]
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else getattr(speculative, "draft_model_config", None)
    if draft is not None and draft is not vllm_config.model_config:
        # A draft model's layers may keep their KV in the same blocks.
        prints.append(_of_model(vllm_config, draft, engine_start))
    if len(prints) == 1:
        return prints[0]
    digest = Digest("models")
    for each in prints:
        digest.add("model", each.encode())
    return digest.hex()


def _of_model(vllm_config: VllmConfig, model: ModelConfig, engine_start: str) -> str:
    try:
        weights = _weights(vllm_config, model)
    except (OSError, ValueError) as error:
        logger.warning(
            "lmcache_rs: the weights of %s cannot be told from others (%s); what this server "
            "stores is found by itself alone, and not after a restart",
            model.model,
            error,
        )
        weights = f"start:{engine_start}"
    return model_fingerprint(_settings(vllm_config, model), weights)


def _settings(vllm_config: VllmConfig, model: ModelConfig) -> dict[str, Any]:
    config = model.hf_config.to_dict()
    overrides = getattr(model, "hf_overrides", None)
    if isinstance(overrides, dict) and overrides.get(_QUANTISATION_FILE):
        # Its place says nothing, and differs by host.
        file = Path(str(overrides[_QUANTISATION_FILE]))
        config = {**config, _QUANTISATION_FILE: hashlib.sha256(file.read_bytes()).hexdigest()}
    settings = {
        "config": config,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "quantization_config": getattr(model, "quantization_config", None),
        "model_impl": str(getattr(model, "model_impl", None)),
        "model_class_overrides": getattr(model, "model_class_overrides", None),
        "kv_cache_dtype_skip_layers": getattr(
            vllm_config.cache_config, "kv_cache_dtype_skip_layers", None
        ),
        "environment": {name: getattr(envs, name, None) for name in _ENVIRONMENT},
        "disable_sliding_window": getattr(model, "disable_sliding_window", None),
    }
    load_format = _load_format(vllm_config)
    if load_format not in _SAME_FILES:
        # Of a folder that holds several, it reads other files.
        settings["load_format"] = load_format
    items = getattr(model, "multimodal_config", None)
    if items is not None:
        settings["items"] = {name: getattr(items, name, None) for name in _ITEM_SETTINGS}
    if _scales_rope(config) or "llama4" in str(config.get("model_type")):
        # Some scalings, and Llama 4's attention temperature, go by the longest prompt that the
        # engine takes.
        settings["max_model_len"] = model.max_model_len
    return settings


def _load_format(vllm_config: VllmConfig) -> str:
    load_format = vllm_config.load_config.load_format
    return str(getattr(load_format, "value", load_format))


def adapter_settings_of(vllm_config: VllmConfig) -> str:
    """Digest of what the engine makes of any adapter's files: in which type, for which modules."""
    lora = getattr(vllm_config, "lora_config", None)
    settings = {name: getattr(lora, name, None) for name in _ADAPTER_SETTINGS}
    # A list of suffixes is a set.
    settings["target_modules"] = sorted(settings["target_modules"] or ()) or None
    return model_fingerprint(settings, "none")


def _scales_rope(config: object) -> bool:
    if not isinstance(config, dict):
        return False
    for name, value in config.items():
        if name in ("rope_scaling", "rope_parameters") and isinstance(value, dict):
            kinds = {value.get("rope_type", value.get("type", "default"))}
            kinds |= {
                inner.get("rope_type", "default")
                for inner in value.values()
                if isinstance(inner, dict)
            }
            if kinds != {"default"}:
                return True
        elif _scales_rope(value):
            return True
    return False


def _weights(vllm_config: VllmConfig, model: ModelConfig) -> str:
    load, load_format = vllm_config.load_config, _load_format(vllm_config)
    if load_format == "dummy":
        return f"dummy:{model.seed}"
    if load_format in _ELSEWHERE:
        raise FileNotFoundError(f"load format {load_format} takes them from somewhere else")
    place = Path(model.model)
    if place.exists():
        return weights_of(place)
    commit = getattr(model.hf_config, "_commit_hash", None)
    config_place = getattr(model, "hf_config_path", None) or model.model
    elsewhere = getattr(model, "model_weights", None) or model.model
    if commit is None or load_format == "gguf" or {config_place, elsewhere} != {model.model}:
        raise FileNotFoundError("they are not in a local folder, and their revision is not known")
    snapshot = _snapshot(str(model.model), str(commit), load.download_dir)
    return f"commit:{commit}" if snapshot is None else weights_of(snapshot, str(commit))


def _snapshot(repository: str, commit: str, cache: str | None) -> Path | None:
    """The folder of a commit in the hub's local cache, if it is there."""
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(
        repository, "config.json", cache_dir=cache, revision=commit
    )
    return Path(found).parent if isinstance(found, str) else None


def stated(
    metadata: LMCacheMetadata,
    vllm_config: VllmConfig,
    engine_start: str,
    rank: Rank | None = None,
) -> LMCacheMetadata:
    """The facts with the model's name and fingerprint and a worker's place, else the first's."""
    parallel = vllm_config.parallel_config
    # Where tensor parallel ranks hold the same, any width may load it.
    is_shared = metadata.world_size == 1
    return dataclasses.replace(
        metadata,
        model_name=model_name_of(vllm_config),
        model_fingerprint=fingerprint_of(vllm_config, engine_start),
        tensor_parallel_rank=rank.tp if rank and not is_shared else 0,
        tensor_parallel_size=1 if is_shared else parallel.tensor_parallel_size,
        pipeline_parallel_rank=rank.pp if rank else 0,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
    )
