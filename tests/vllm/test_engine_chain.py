"""The engine's own hashes as keys, and a reset that crosses processes: vLLM's default layout."""

from __future__ import annotations

from checks import Baseline, Prompts, check
from harness import EngineSpec, Prompt

from conftest import Engines

SPEC = EngineSpec(layout="mp", extra=(("lmcache.chain", "engine"),))
NUM_TOKENS = 199
STORED = 192


def test_salts_isolate_and_a_reset_reaches_the_workers_process(
    engines: Engines, baseline: Baseline
) -> None:
    engine = engines.get(SPEC)
    tokens = Prompts("engine chain").fresh(NUM_TOKENS).tokens
    kin = [Prompt(tokens, salt=salt) for salt in ("a", "b", None)]
    for hits in (0, STORED):
        for prompt in kin:
            engine.cool()
            check(engine, baseline, [prompt], [(0, hits)])
    assert engine.reset_connector()
    assert engine.report().memory["cached_bytes"] == 0
    for hits in (0, STORED):
        for prompt in kin:
            engine.cool()
            check(engine, baseline, [prompt], [(0, hits)])


def test_a_prompt_that_forks_shares_what_comes_before(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    prompts = Prompts("engine fork")
    trunk = prompts.fresh(NUM_TOKENS)
    check(engine, baseline, [trunk], [(0, 0)])
    engine.cool()
    check(engine, baseline, [prompts.fork(trunk, 130, NUM_TOKENS)], [(0, 128)])


def test_what_follows_from_the_choice_is_logged_once(engines: Engines) -> None:
    log = engines.get(SPEC).log()
    assert log.count("chain engine: keys are vLLM's sha256 hashes") == 1
