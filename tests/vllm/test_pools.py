"""Connector memory that is too small: every answer right, all bytes accounted for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from checks import Baseline, Prompts, check, chunk_bytes
from harness import EngineSpec

from conftest import Engines

CHUNK = 64
CHUNK_BYTES = chunk_bytes(EngineSpec())
# Without vLLM's own prefix cache every repeated prompt asks the connector.
SPEC = EngineSpec(prefix_caching=False)
FOUR_CHUNKS = replace(SPEC, pool_bytes=4 * CHUNK_BYTES)
NUM_PROMPTS = 64
THREE_QUARTERS = replace(SPEC, pool_bytes=NUM_PROMPTS * 2 * 3 // 4 * CHUNK_BYTES)


def test_pool_of_four_chunks(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(FOUR_CHUNKS)
    assert engine.report().memory["capacity_bytes"] == 4 * CHUNK_BYTES
    source = Prompts("four chunks")
    seen: Counter[str] = Counter()
    previous = source.fresh(2 * CHUNK)
    for number in range(0, 200, 10):
        wave = [source.fresh(CHUNK + 13 * (number + n) % (2 * CHUNK + 20)) for n in range(9)]
        # Something that was asked last time, whole or as the head of something new.
        wave[0] = previous
        wave[4] = source.fork(previous, CHUNK + number % CHUNK, len(previous) + 30)
        # Every tenth is longer than the whole pool.
        wave.append(source.fresh(6 * CHUNK + number % 50))
        previous = wave[8]
        _, report = check(engine, baseline, wave, max_tokens=2)
        assert report.memory["cached_bytes"] <= 4 * CHUNK_BYTES
        seen.update(report.probe)
        # One more, so that the next wave finds something.
        _, report = check(engine, baseline, [previous], max_tokens=2)
        seen.update(report.probe)
    assert report.counters["refused_chunks"] > 0
    assert seen["loads"] > 0


def test_pool_of_three_quarters_of_all_chunks(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(THREE_QUARTERS)
    source = Prompts("three quarters")
    prompts = [source.fresh(2 * CHUNK + 1 + n % 60) for n in range(NUM_PROMPTS)]
    never_hit = set(prompts)
    rounds = 0
    while never_hit and rounds < 20:
        rounds += 1
        source.shuffle(prompts)
        reply, _ = check(engine, baseline, prompts, max_tokens=2)
        for prompt, answer in zip(prompts, reply.answers, strict=True):
            if answer.cached_tokens:
                assert answer.cached_tokens in (CHUNK, 2 * CHUNK)
                never_hit.discard(prompt)
        engine.cool()
    assert not never_hit, f"{len(never_hit)} prompts had no hit in {rounds} rounds"
