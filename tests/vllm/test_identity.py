"""Whose chunks are whose: adapters, salts, tags and resets in one real engine.

Each identity misses after all others have stored the same tokens, hits when it comes again, and
says what vLLM alone says for it. One request at a time: in a batch with an adapter vLLM's CPU
backend gives it to the others too.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
from checks import Baseline, Prompts, check
from harness import Engine, EngineSpec, Prompt

from conftest import Engines

SPEC = EngineSpec(lora=True)
NUM_TOKENS = 199
STORED = 192


def ask(engine: Engine, baseline: Baseline, prompt: Prompt, hits: int) -> None:
    """The prompt alone, with vLLM's own cache empty."""
    engine.cool()
    check(engine, baseline, [prompt], [(0, hits)])


def assert_apart(engine: Engine, baseline: Baseline, kin: Sequence[Prompt]) -> None:
    """Each misses at first, whatever was stored before, and hits later."""
    for hits in (0, STORED):
        for prompt in kin:
            ask(engine, baseline, prompt, hits)


def assert_told_apart(baseline: Baseline, kin: Sequence[Prompt]) -> None:
    """They get different answers, or a mix-up could not be seen."""
    said = {baseline.ask([prompt], 4, lora=True)[0].tokens for prompt in kin}
    assert len(said) == len(kin), "the adapters change nothing: the test could not fail"


def folder_of(name: str) -> str:
    return str(models.lora_adapter(name, sum(name.encode())))


def test_adapters_never_mix_and_each_repeats_as_a_hit(engines: Engines, baseline: Baseline) -> None:
    tokens = Prompts("adapters").fresh(NUM_TOKENS).tokens
    kin = [
        Prompt(tokens, lora="one"),
        Prompt(tokens, lora="two"),
        Prompt(tokens),
        # The name of one, in another place.
        Prompt(tokens, lora="one", lora_path=folder_of("three"), lora_id=9001),
    ]
    assert_told_apart(baseline, kin)
    assert_apart(engines.get(SPEC), baseline, [*kin, Prompt(tokens, lora="one", salt="a")])


def test_other_weights_under_an_old_name_and_path_find_nothing(
    engines: Engines, baseline: Baseline, tmp_path: Path
) -> None:
    engine = engines.get(SPEC)
    folder = tmp_path / "adapter"
    tokens = Prompts("weights").fresh(NUM_TOKENS).tokens
    said = set()
    for number, name in enumerate(("four", "five", "four")):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(folder_of(name), folder)
        loading = Prompt(tokens, lora="same", lora_path=str(folder), lora_id=9010 + number)
        ask(engine, baseline, loading, STORED if number == 2 else 0)
        ask(engine, baseline, loading, STORED)
        said.add(baseline.ask([loading], 4, lora=True)[0].tokens)
    assert len(said) == 2, "the weights change nothing: the test could not fail"


def test_salts_never_mix_and_none_is_shown(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    tokens = Prompts("salts").fresh(NUM_TOKENS).tokens
    secret = "a-salt-nobody-may-read"
    kin = [Prompt(tokens, salt=salt) for salt in ("a", "b", None, "A", "ab", secret)]
    assert_apart(engine, baseline, kin)
    ask(engine, baseline, Prompt(tokens, salt=""), STORED)
    engine.cool()
    # Salts may share a step.
    check(engine, baseline, kin, [(0, STORED)] * len(kin))
    for told in (engine.log(), repr(engine.report())):
        assert secret not in told


def configured(tokens: tuple[int, ...], **configs: Any) -> Prompt:
    named = {f"lmcache.{name.replace('__', '.')}": value for name, value in configs.items()}
    return Prompt(tokens, configs=tuple(named.items()))


def test_tags_never_mix_and_their_order_does_not_matter(
    engines: Engines, baseline: Baseline
) -> None:
    engine = engines.get(SPEC)
    tokens = Prompts("tags").fresh(NUM_TOKENS).tokens
    kin = [
        Prompt(tokens),
        configured(tokens, tag__team="a"),
        configured(tokens, tag__team="b"),
        configured(tokens, tag__team="a", tag__tier=1),
    ]
    assert_apart(engine, baseline, kin)
    ask(engine, baseline, configured(tokens, tag__tier=1, tag__team="a"), STORED)


def test_skip_save_stores_nothing_and_loads(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    tokens = Prompts("skip").fresh(NUM_TOKENS).tokens
    skipped = configured(tokens, skip_save=True)
    for _ in range(2):
        ask(engine, baseline, skipped, 0)
    ask(engine, baseline, Prompt(tokens), 0)
    ask(engine, baseline, skipped, STORED)
    ask(engine, baseline, configured(tokens, skip_sav=True), STORED)
    assert engine.log().count("'lmcache.skip_sav' is unknown") == 1


def test_after_a_reset_nothing_is_found_and_memory_is_empty(
    engines: Engines, baseline: Baseline
) -> None:
    engine = engines.get(SPEC)
    tokens = Prompts("reset").fresh(NUM_TOKENS).tokens
    kin = [Prompt(tokens), Prompt(tokens, salt="a"), Prompt(tokens, lora="one")]
    assert_apart(engine, baseline, kin)
    for _ in range(2):
        assert engine.reset_connector()
        assert engine.report().memory["cached_bytes"] == 0
        assert_apart(engine, baseline, kin)


def test_the_choice_of_chain_is_logged_once(engines: Engines) -> None:
    log = engines.get(SPEC).log()
    assert log.count("chain own: keys are sha256_cbor hashes") == 1
    assert log.count("model fingerprint ") == 1
