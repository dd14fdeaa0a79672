"""Tiny models with weights of a real scale.

vLLM's dummy weights are within ±1e-3: every logprob is then -ln(vocab), and a KV
cache that is zeroed or swapped gives the same tokens. The models made here attend
sharply, so a wrong block changes what is said.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "models"
INITIALIZER_RANGE = 0.25
SEED = 20_261
VOCAB_SIZE = 1024
LORA_RANK = 8
# Raised whenever the same config would be written with other weights.
_RECIPE = 2


def cache_folder() -> Path:
    """The folder that keeps generated models between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lmcache-rs" / "test-models"


def tiny_model(name: str) -> Path:
    """The folder of a tiny model in float32, made on first use.

    ``name`` is a folder of ``tests/vllm/models``: ``tiny-llama`` (dense),
    ``tiny-mla`` (MLA and experts) or ``tiny-swa`` (sliding window and full
    attention). The folder holds ``config.json`` and ``model.safetensors``.
    """
    text = (CONFIGS / name / "config.json").read_text(encoding="utf-8")
    digest = _digest("model", text, str(INITIALIZER_RANGE), str(SEED))
    return _made_once(f"{name}-{digest}", lambda folder: _write_model(text, folder))


def lora_adapter(name: str, seed: int) -> Path:
    """The folder of a PEFT adapter for ``tiny-llama``, made on first use.

    Rank 8 on q_proj and v_proj of every layer, strong enough to change the output.
    """
    text = (CONFIGS / "tiny-llama" / "config.json").read_text(encoding="utf-8")
    digest = _digest("lora", text, str(seed), str(LORA_RANK))
    return _made_once(f"lora-{name}-{digest}", lambda folder: _write_adapter(text, seed, folder))


def tokenizer() -> Path:
    """The folder of a tokenizer whose words are ``t0`` to ``t1023``, for servers that want one."""
    return _made_once(f"tokenizer-{_digest('tokenizer', str(VOCAB_SIZE))}", _write_tokenizer)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({f"t{n}": n for n in range(VOCAB_SIZE)}, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="t0", bos_token="t1", eos_token="t2"
    ).save_pretrained(folder)


def _digest(*parts: str) -> str:
    import torch
    import transformers

    state = hashlib.sha256()
    for part in (str(_RECIPE), torch.__version__, transformers.__version__, *parts):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part.encode())
    return state.hexdigest()[:16]


def _made_once(name: str, write: Callable[[Path], None]) -> Path:
    """Makes a folder beside its final place and renames it: never half a model."""
    target = cache_folder() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    try:
        write(scratch)
        # Another process may have been faster; its folder is as good as ours.
        with contextlib.suppress(OSError):
            scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not target.is_dir():
        raise RuntimeError(f"cannot make {target}: check that {target.parent} is writable")
    return target


def _write_model(config_text: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    wanted = json.loads(config_text)
    wanted |= {"torch_dtype": "float32", "initializer_range": INITIALIZER_RANGE}
    (folder / "config.json").write_text(json.dumps(wanted), encoding="utf-8")
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range = INITIALIZER_RANGE
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        make: Callable[..., Any] = AutoModelForCausalLM.from_config
        model = make(config, dtype=torch.float32)
    model.save_pretrained(folder, safe_serialization=True)
    # vLLM is given the config as the repository has it, not as transformers rewrites it.
    (folder / "config.json").write_text(json.dumps(wanted), encoding="utf-8")


def _write_adapter(config_text: str, seed: int, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    config = json.loads(config_text)
    hidden = config["hidden_size"]
    widths = {
        "q_proj": config["num_attention_heads"] * config["head_dim"],
        "v_proj": config["num_key_value_heads"] * config["head_dim"],
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for target, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(
                LORA_RANK, hidden, generator=generator
            ).mul_(0.25)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(
                width, LORA_RANK, generator=generator
            ).mul_(0.25)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-llama",
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")
