"""Roles: who stores, and who only loads."""

from __future__ import annotations

from dataclasses import replace

from checks import Baseline, Prompts, check
from harness import EngineSpec

from conftest import Engines

SPEC = EngineSpec()
CONSUMER = replace(SPEC, kv_role="kv_consumer")
PRODUCER = replace(SPEC, kv_role="kv_producer")
NUM_TOKENS = 199
STORED = 192


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
