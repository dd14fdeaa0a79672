"""Which model an engine runs: alike on every host that has it, and on no other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lmcache_rs.vllm_v1 import model_identity


def model_config(folder: Path, served: str | None = None, **changes: Any) -> Any:
    config = {"architectures": ["LlamaForCausalLM"], "rope_theta": 1e4, **changes}
    model = SimpleNamespace(
        model=str(folder),
        served_model_name=served or str(folder),
        hf_config=SimpleNamespace(architectures=config["architectures"], to_dict=lambda: config),
        dtype=torch.float32,
        quantization=None,
        max_model_len=1024,
        seed=0,
    )
    return SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        cache_config=SimpleNamespace(),
        speculative_config=None,
    )


def weights(folder: Path, scale: float = 1.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.full((64,), scale)}, folder / "model.safetensors")
    return folder


def test_hosts_with_a_model_in_different_places_name_it_alike(tmp_path: Path) -> None:
    one, two = (model_config(weights(tmp_path / host / "llama")) for host in ("x", "y"))
    prints = [model_identity.fingerprint_of(each, "start") for each in (one, two)]
    assert prints[0] == prints[1]
    assert model_identity.model_name_of(one) == model_identity.model_name_of(two)
    assert model_identity.model_name_of(model_config(tmp_path, "prod")) == "prod"


def test_weights_rope_quantisation_and_dummies_each_are_another_model(tmp_path: Path) -> None:
    folder = weights(tmp_path / "one")
    yarn = {"rope_type": "yarn", "factor": 4.0}
    configs = [
        model_config(folder),
        model_config(weights(tmp_path / "two", 1.5)),
        model_config(folder, rope_theta=5e5),
        model_config(folder, rope_scaling=yarn),
        model_config(folder, rope_scaling=yarn),
        model_config(folder),
        model_config(folder),
        model_config(folder),
    ]
    configs[4].model_config.max_model_len = 2048
    configs[5].model_config.quantization = "fp8"
    configs[6].load_config.load_format = "dummy"
    configs[7].load_config.load_format = "dummy"
    configs[7].model_config.seed = 1
    prints = [model_identity.fingerprint_of(each, "start") for each in configs]
    assert len(set(prints)) == len(prints)
    longer = model_config(folder)
    longer.model_config.max_model_len = 4096
    assert model_identity.fingerprint_of(longer, "start") == prints[0], "no scaling, no matter"
    drafted = model_config(folder)
    drafted.speculative_config = SimpleNamespace(draft_model_config=configs[1].model_config)
    assert model_identity.fingerprint_of(drafted, "start") not in prints


def test_a_revision_is_told_by_the_loaders_commit(tmp_path: Path) -> None:
    def remote(commit: str | None) -> Any:
        config = model_config(tmp_path / "none")
        config.model_config.model = "org/llama"
        config.model_config.hf_config._commit_hash = commit
        return config

    prints = [model_identity.fingerprint_of(remote(c * 40), "start") for c in "aab"]
    assert prints[0] == prints[1] != prints[2]
    assert model_identity.model_name_of(remote("a" * 40)) != "LlamaForCausalLM"


def test_weights_that_nobody_can_see_are_this_starts_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = model_config(tmp_path / "empty")
    config.model_config.model = "s3://bucket/llama"
    prints = [model_identity.fingerprint_of(config, start) for start in ("one", "one", "two")]
    assert prints[0] == prints[1] != prints[2]
