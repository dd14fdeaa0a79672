"""Fingerprints: the same for copies of one model, different for every other."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmcache_rs import fingerprint
from lmcache_rs.fingerprint import adapter_digest, adapter_stamp, model_fingerprint, weights_of

HEAD, SIDE = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_model(folder: Path) -> Path:
    """Some real tensors in two files, large and small ones."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(7)
    tensors = {
        "embed": torch.randn(512, 256, generator=generator),
        **{f"layers.{n}.w": torch.randn(256, 256, generator=generator) for n in range(6)},
        **{f"layers.{n}.norm": torch.randn(64, generator=generator) for n in range(6)},
    }
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:6]}, folder / HEAD)
    save_file({name: tensors[name] for name in names[6:]}, folder / SIDE)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "one" / "llama")


@pytest.fixture(params=["whole", "windows"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small models are read whole, large ones in windows; here a small one in both ways."""
    if request.param == "windows":
        monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 0)
        monkeypatch.setattr(fingerprint, "WINDOWS", 64)
    return str(request.param)


def test_copies_elsewhere_with_other_times_are_the_same_weights(
    model: Path, tmp_path: Path, reading: str
) -> None:
    there = tmp_path / "other" / "place"
    shutil.copytree(model, there)
    for number, file in enumerate(there.iterdir()):
        os.utime(file, (number + 1, number + 1))
    (there / "README.md").write_text("no weights")
    assert weights_of(there) == weights_of(model)
    assert weights_of(model).startswith("files:")


def changed(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_training_any_single_tensor_is_seen(model: Path, reading: str) -> None:
    seen = {weights_of(model)}
    for file in (model / HEAD, model / SIDE):
        for name in load_file(file):
            changed(file, lambda tensors, name=name: tensors[name].mul_(1.0001))  # type: ignore[misc]
            seen.add(weights_of(model))
    assert len(seen) == 14, "the first, and one more for each of 13 tensors"


def test_one_changed_byte_is_seen_where_files_are_read_whole(model: Path) -> None:
    size = (model / HEAD).stat().st_size
    seen = {weights_of(model)}
    places = random.Random(1).sample(range(size - 262_144, size), 20)
    for place in places:
        flip(model / HEAD, place)
        seen.add(weights_of(model))
    assert len(seen) == 21


def flip(file: Path, place: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(place)
        (byte,) = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte ^ 1]))


def test_every_window_of_a_large_file_is_read_and_every_tensor_has_some(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 0)
    monkeypatch.setattr(fingerprint, "WINDOWS", 64)
    file = model / HEAD
    size = file.stat().st_size
    total = sum(each.stat().st_size for each in model.iterdir())
    descriptor = os.open(file, os.O_RDONLY)
    windows = list(fingerprint._windows_of(descriptor, file, size, total))
    spans = fingerprint._tensors(descriptor, size)
    os.close(descriptor)
    assert spans
    for start, end in spans:
        inside = [w for w in windows if start <= w.start and w.start + w.length <= end]
        whole = sum(w.length for w in inside) == end - start
        assert whole or len(inside) >= fingerprint.MIN_WINDOWS
    seen = {weights_of(model)}
    for window in windows:
        for place in (window.start, window.start + window.length - 1):
            if place >= spans[0][0]:
                flip(file, place)
                seen.add(weights_of(model))
    assert len(seen) == 1 + 2 * (len(windows) - 1), "all but the header's"


def test_what_the_header_says_is_part_of_it(model: Path, reading: str) -> None:
    before = weights_of(model)
    changed(model / HEAD, lambda tensors: tensors.update(embed=tensors["embed"].reshape(256, 512)))
    reshaped = weights_of(model)
    changed(model / HEAD, lambda tensors: tensors.update(embed=tensors["embed"].to(torch.float16)))
    assert len({before, reshaped, weights_of(model)}) == 3


@pytest.mark.parametrize("suffix", [".bin", ".gguf", ".safetensors"])
def test_files_of_unknown_structure_are_read_all_over(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 0)
    file = tmp_path / f"model{suffix}"
    file.write_bytes(random.Random(2).randbytes(1 << 20))
    seen = {weights_of(file), weights_of(tmp_path)}
    assert len(seen) == 1, "the name of a single file says nothing"
    file.write_bytes(random.Random(3).randbytes(1 << 20))
    seen.add(weights_of(file))
    file.write_bytes(file.read_bytes() + b"\0")
    seen.add(weights_of(file))
    assert len(seen) == 3


def test_a_shortened_file_and_a_missing_one_are_seen(model: Path, reading: str) -> None:
    seen = {weights_of(model)}
    (model / SIDE).write_bytes((model / SIDE).read_bytes()[:-4096])
    seen.add(weights_of(model))
    (model / SIDE).unlink()
    seen.add(weights_of(model))
    assert len(seen) == 3
    (model / HEAD).unlink()
    with pytest.raises(FileNotFoundError, match="safetensors"):
        weights_of(model)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "data_offsets": "?"}},
        ["no", "map"],
    ],
)
def test_a_header_that_does_not_account_for_all_bytes_is_not_believed(
    tmp_path: Path, header: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 0)
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(32))
    before = weights_of(file)
    for place in range(file.stat().st_size - 32, file.stat().st_size):
        flip(file, place)
        assert weights_of(file) != before


# A model hub's local cache.

COMMITS = ("a" * 40, "b" * 40)


def snapshot(cache: Path, commit: str, model: Path) -> Path:
    folder = cache / "models--org--llama" / "snapshots" / commit
    blobs = cache / "models--org--llama" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for number, file in enumerate(sorted(model.iterdir())):
        blob = blobs / f"{commit[:8]}{number:056x}"
        shutil.copy(file, blob)
        (folder / file.name).symlink_to(f"../../blobs/{blob.name}")
    return folder


def test_a_snapshot_is_its_commit_wherever_it_lies(model: Path, tmp_path: Path) -> None:
    here, there = (snapshot(tmp_path / host, COMMITS[0], model) for host in ("h1", "h2"))
    other = snapshot(tmp_path / "h1", COMMITS[1], model)
    assert weights_of(here) == weights_of(there) == f"commit:{COMMITS[0]}"
    assert weights_of(other) == f"commit:{COMMITS[1]}", "another revision"
    assert weights_of(here, COMMITS[0]) == weights_of(here)


def test_a_snapshot_that_was_meddled_with_is_not_its_commit(model: Path, tmp_path: Path) -> None:
    folder = snapshot(tmp_path / "cache", COMMITS[0], model)
    target = (folder / HEAD).resolve()
    (folder / HEAD).unlink()
    shutil.copy(target, folder / HEAD)
    assert weights_of(folder) == weights_of(model)


SIDE_FILES = [
    "hf_quant_config.json",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "modeling_own.py",
]


@pytest.mark.parametrize("name", SIDE_FILES)
def test_every_byte_beside_the_weights_counts_however_large_these_are(
    model: Path, reading: str, name: str
) -> None:
    # Far longer than the windows of a small file in a large model.
    lines = [f"layer {number} stays as it is" for number in range(20_000)]
    (model / name).write_text("\n".join(lines))
    before = weights_of(model)
    assert weights_of(model) == before
    lines[7001] = "layer 7001 stays as 4 bit"
    (model / name).write_text("\n".join(lines))
    assert weights_of(model) != before
    (model / name).unlink()
    assert weights_of(model) != before


def test_a_snapshot_whose_quantisation_was_written_by_hand_is_not_its_commit(
    model: Path, tmp_path: Path
) -> None:
    (model / "hf_quant_config.json").write_text("4 bit")
    folder = snapshot(tmp_path / "cache", COMMITS[0], model)
    assert weights_of(folder) == f"commit:{COMMITS[0]}"
    (folder / "hf_quant_config.json").unlink()
    (folder / "hf_quant_config.json").write_text("8 bit")
    assert weights_of(folder).startswith("files:")


# The configuration.

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "hidden_size": 64,
    "quantization_config": None,
}


def of(config: Mapping[str, Any] = CONFIG, dtype: str = "torch.float32", weights: str = "w") -> str:
    return model_fingerprint({"config": config, "dtype": dtype}, weights)


def test_each_setting_of_a_model_changes_its_fingerprint() -> None:
    others = [
        of(),
        of(weights="v"),
        of(dtype="torch.bfloat16"),
        of({**CONFIG, "rope_theta": 500000.0}),
        of({**CONFIG, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        of({**CONFIG, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}),
        of({**CONFIG, "quantization_config": {"quant_method": "fp8"}}),
        of({**CONFIG, "quantization_config": {"quant_method": "awq", "bits": 4}}),
        of({**CONFIG, "hidden_size": 65}),
    ]
    assert len(set(others)) == len(others)


def test_where_a_configuration_came_from_is_not_part_of_it() -> None:
    placed = {
        **CONFIG,
        "_name_or_path": "/models/llama",
        "transformers_version": "9.9",
        "_commit_hash": "c" * 40,
        "text_config": {"_name_or_path": "/x"},
    }
    assert of(placed) == of({**CONFIG, "text_config": {}})
    assert of(dict(reversed(CONFIG.items()))) == of()
    assert of({**CONFIG, "x": torch.float16}) != of({**CONFIG, "x": torch.float32})
    assert of({**CONFIG, "x": object()}) == of({**CONFIG, "x": object()})
    assert of({**CONFIG, "x": {"b", "a", "c"}}) == of({**CONFIG, "x": {"c", "b", "a"}})
    assert of({**CONFIG, "x": 1}) != of({**CONFIG, "x": "1"})


def test_what_a_configuration_holds_in_objects_is_part_of_it() -> None:
    class Inner:
        def __init__(self, theta: float) -> None:
            self.theta = theta

        def to_dict(self) -> dict[str, float]:
            return {"theta": self.theta}

    @dataclasses.dataclass
    class Rope:
        theta: float

    for make in (Inner, Rope, lambda theta: torch.full((2,), theta)):
        assert of({**CONFIG, "x": make(1.0)}) == of({**CONFIG, "x": make(1.0)})
        assert of({**CONFIG, "x": make(1.0)}) != of({**CONFIG, "x": make(2.0)})


# Adapters.


def write_adapter(folder: Path, scale: float, alpha: int = 8) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": torch.full((8, 64), scale)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": alpha}))
    return folder


def test_adapters_are_told_apart_by_weights_and_configuration(tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one", 1.0)
    copy = write_adapter(tmp_path / "elsewhere" / "copy", 1.0)
    other = write_adapter(tmp_path / "two", 2.0)
    scaled = write_adapter(tmp_path / "three", 1.0, alpha=16)
    (copy / "README.md").write_text("a card")
    assert adapter_digest(one) == adapter_digest(copy)
    assert len({adapter_digest(each) for each in (one, other, scaled)}) == 3


def test_every_byte_of_an_adapters_configuration_counts_however_large_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "ADAPTER_WHOLE_BYTES", 0)
    monkeypatch.setattr(fingerprint, "WINDOWS", 1)
    folder = write_adapter(tmp_path / "one", 1.0)
    ranks = {f"layers.{number}.q_proj": 8 for number in range(5000)}
    digests = set()
    for rank in (8, 9):
        ranks["layers.1777.q_proj"] = rank
        (folder / "adapter_config.json").write_text(json.dumps({"rank_pattern": ranks}))
        digests.add(adapter_digest(folder))
    assert len(digests) == 2


def test_an_adapter_that_was_touched_is_noticed(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", 1.0)
    stamp = adapter_stamp(folder)
    assert adapter_stamp(folder) == stamp
    write_adapter(folder, 2.0)
    assert adapter_stamp(folder) != stamp
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds no adapter"):
        adapter_stamp(folder)
