"""Which model an engine runs: alike on every host that has it, and on no other."""

from __future__ import annotations

from dataclasses import dataclass
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


def test_all_that_makes_other_kv_of_the_same_files_is_another_model(tmp_path: Path) -> None:
    folder = weights(tmp_path / "one")
    torch.save({}, folder / "pytorch_model.bin")

    def of(settings: dict[str, Any], **changes: Any) -> str:
        config = model_config(folder, **changes)
        for name, value in settings.items():
            setattr(config.model_config, name, value)
        return model_identity.fingerprint_of(config, "start")

    @dataclass
    class Online:
        ignore: list[str]

    def items(**settings: object) -> dict[str, Any]:
        return {"multimodal_config": SimpleNamespace(**settings)}

    prints = [
        of({}),
        of({"quantization_config": {"linear": "fp8"}}),
        of({"quantization_config": Online(["lm_head"])}),
        of({"quantization_config": Online(["layers.0"])}),
        of({"model_impl": "transformers"}),
        of({"model_class_overrides": {"LlamaForCausalLM": "mine:Llama"}}),
        of(items()),
        of(items(mm_processor_kwargs={"max_pixels": 1000})),
        of(items(mm_processor_kwargs={"max_pixels": 2000})),
        of(items(video_pruning_rate=0.5)),
        # Its attention temperature goes by the longest prompt.
        of({}, model_type="llama4"),
        of({"max_model_len": 65536}, model_type="llama4"),
    ]
    assert len(set(prints)) == len(prints)

    def loaded_as(load_format: str, start: str = "start") -> str:
        config = model_config(folder)
        config.load_config.load_format = load_format
        return model_identity.fingerprint_of(config, start)

    assert loaded_as("safetensors") == loaded_as("fastsafetensors") == prints[0]
    assert len({*prints, loaded_as("pt"), loaded_as("mistral")}) == len(prints) + 2
    assert loaded_as("tensorizer") != loaded_as("tensorizer", "another"), "weights from elsewhere"


def test_a_quantisation_that_is_kept_elsewhere_is_told_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = weights(tmp_path / "one"), []
    for place, text in (("a", "4 bit"), ("b", "4 bit"), ("a", "8 bit")):
        file = tmp_path / f"{place}.json"
        file.write_text(text)
        overrides = {"quantization_config_file": str(file)}
        config = model_config(folder, **overrides)
        config.model_config.hf_overrides = overrides
        found.append(model_identity.fingerprint_of(config, "start"))
    assert found[0] == found[1] != found[2]
    plain = model_identity.fingerprint_of(model_config(folder), "start")
    monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"bits": 4}')
    assert model_identity.fingerprint_of(model_config(folder), "start") != plain


def test_what_the_engine_makes_of_adapters_is_told_by_its_settings() -> None:
    def of(**settings: object) -> str:
        lora = SimpleNamespace(**{"lora_dtype": torch.bfloat16, "target_modules": None, **settings})
        return model_identity.adapter_settings_of(SimpleNamespace(lora_config=lora))  # type: ignore[arg-type]

    ours = of(max_loras=1)
    assert ours == of(max_loras=8), "how many there may be changes none of them"
    others = [
        of(lora_dtype=torch.float16),
        of(target_modules=["q_proj"]),
        of(enable_moe_shared_loras=True),
    ]
    assert len({ours, *others}) == 4
    assert of(target_modules=["q", "v"]) == of(target_modules=["v", "q"])


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
