"""What must not be shared: tenants' salts, LoRA adapters, engines, roles."""

from __future__ import annotations

from dataclasses import replace

from checks import Baseline, Prompts, check
from harness import EngineSpec, Prompt

from conftest import Engines

SPEC = EngineSpec()
WITH_LORA = EngineSpec(lora=True)
CONSUMER = replace(SPEC, kv_role="kv_consumer")
PRODUCER = replace(SPEC, kv_role="kv_producer")
NUM_TOKENS = 199
STORED = 192


def assert_apart(engines: Engines, baseline: Baseline, spec: EngineSpec, kin: list[Prompt]) -> None:
    """Each of the prompts misses at first, whatever was asked before, and hits later."""
    engine = engines.get(spec)
    for prompt in kin:
        engine.cool()
        check(engine, baseline, [prompt], [(0, 0)])
    for prompt in kin:
        engine.cool()
        check(engine, baseline, [prompt], [(0, STORED)])
    engine.cool()
    # Of prompts with and without an adapter vLLM's CPU backend makes one batch in which
    # all have one; salts may share a step.
    together = [prompt for prompt in kin if prompt.lora == kin[0].lora]
    check(engine, baseline, together, [(0, STORED)] * len(together))


def test_salts_never_mix_and_each_repeats_as_a_hit(engines: Engines, baseline: Baseline) -> None:
    tokens = Prompts("salts").fresh(NUM_TOKENS).tokens
    kin = [Prompt(tokens, salt=salt) for salt in ("a", "b", None, "A", "ab")]
    assert_apart(engines, baseline, SPEC, kin)
    engine = engines.get(SPEC)
    secret = "a-salt-nobody-may-read"
    check(engine, baseline, [Prompt(tokens, salt=secret)], [(0, 0)])
    assert secret not in engine.log()


def test_adapters_never_mix_and_each_repeats_as_a_hit(engines: Engines, baseline: Baseline) -> None:
    tokens = Prompts("adapters").fresh(NUM_TOKENS).tokens
    kin = [Prompt(tokens, lora=name) for name in ("one", "two", None)]
    said = {answer.tokens for answer in baseline.ask(kin, 4, lora=True)}
    assert len(said) == 3, "the adapters change nothing: the test could not fail"
    assert_apart(engines, baseline, WITH_LORA, [*kin, Prompt(tokens, lora="one", salt="a")])


def test_consumer_never_stores(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(CONSUMER)
    prompt = Prompts("consumer").fresh(NUM_TOKENS)
    for _ in range(2):
        _, report = check(engine, baseline, [prompt], [(0, 0)])
        engine.cool()
    assert report.counters["stored_chunks"] == 0
    assert report.memory["cached_bytes"] == 0


def test_producer_stores(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(PRODUCER)
    prompt = Prompts("producer").fresh(NUM_TOKENS)
    _, report = check(engine, baseline, [prompt], [(0, 0)])
    assert report.counters["stored_chunks"] == STORED // 64
    engine.cool()
    check(engine, baseline, [prompt])
