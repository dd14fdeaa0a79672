"""One folder under engines that differ in what they compute: none finds another one's chunks.

The same prompts for all. Each engine is a process of its own over the folder that those before it
have filled, so whatever it found would be theirs; what it stores itself it finds again.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import models
import pytest
from checks import Prompts
from harness import Engine, EngineSpec, Prompt, Reply

CHUNK = 64
NAME = '{"served_model_name": "one"}'
SPEC = EngineSpec(dtype="float16", options=NAME)
COMMITS = ("a" * 40, "b" * 40)


def revision(cache: Path, commit: str) -> str:
    """The folder of a revision as the hub's cache keeps it; all have the same files."""
    repository = cache / "models--org--tiny"
    folder, blobs = repository / "snapshots" / commit, repository / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for number, file in enumerate(sorted(models.tiny_model("tiny-llama").iterdir())):
        blob = blobs / f"{number:064x}"
        if not blob.exists():
            shutil.copy(file, blob)
        (folder / file.name).symlink_to(blob)
    return str(folder)


def perturbed(folder: Path) -> str:
    """The model with one of its tensors changed: files of the same names and sizes."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(models.tiny_model("tiny-llama"), folder)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = -tensors[name]
    save_file(tensors, weights, metadata={"format": "pt"})
    return str(folder)


def over(folder: Path, spec: EngineSpec) -> EngineSpec:
    """An engine over the folder."""
    disk = (("lmcache.local_disk", str(folder)), ("lmcache.max_local_disk_size", 0.25))
    return replace(spec, extra=(*spec.extra, *disk))


def ask(engine: Engine, prompts: list[Prompt], hits: list[int]) -> Reply:
    """With nothing of them but on disk."""
    engine.cool()
    engine.worker("probe_forget")
    reply = engine.ask(prompts)
    report = engine.idle_report()
    report.assert_bytes_right()
    report.assert_no_faults()
    assert [answer.cached_tokens for answer in reply.answers] == hits
    return reply


def test_no_identity_finds_another_ones_chunks_and_each_finds_its_own(tmp_path: Path) -> None:
    cache, disk, seen = tmp_path / "hub", tmp_path / "disk", str(tmp_path / "seen")
    first, second = (revision(cache, commit) for commit in COMMITS)
    base = replace(SPEC, model_path=first)
    kinds = {
        "fp16": base,
        "bf16": replace(base, dtype="bfloat16"),
        "another revision": replace(base, model_path=second),
        "perturbed weights": replace(SPEC, model_path=perturbed(tmp_path / "perturbed")),
        "another name": replace(base, options=json.dumps({"served_model_name": "another"})),
    }
    source = Prompts("identities")
    prompts = [source.fresh(199), source.fresh(300)]
    missed, stored = [0, 0], [192, 256]
    said: dict[str, Reply] = {}
    for kind, spec in kinds.items():
        with Engine(over(disk, spec)) as engine:
            said[kind] = ask(engine, prompts, missed)
            ask(engine, prompts, stored)
            if kind == "fp16":
                engine.worker("probe_keep_seen", seen)
    tokens = {kind: [answer.tokens for answer in reply.answers] for kind, reply in said.items()}
    assert tokens["fp16"] != tokens["perturbed weights"], "or a mix-up could not be seen"
    assert tokens["fp16"] == tokens["another revision"] == tokens["another name"]
    # What the first one stored is there still, after all the others.
    with Engine(over(disk, base)) as engine:
        engine.worker("probe_take_seen", seen)
        ask(engine, prompts, stored)


@pytest.fixture(autouse=True)
def _float16_is_computed_here() -> None:
    import torch
    from vllm.platforms import current_platform

    if torch.float16 not in current_platform.supported_dtypes:
        pytest.skip("vLLM computes no float16 on this machine")
