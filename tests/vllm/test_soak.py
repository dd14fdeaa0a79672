"""Many hours' worth of traffic in one: set ``KV_TEST_SOAK`` to run it (``make soak`` does).

``KV_TEST_SOAK=200x64`` asks each of 200 prompts 64 times, 64 requests at once, over a pool
that holds a quarter of their chunks.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import psutil
import pytest
from checks import Baseline, Prompts, chunk_bytes, differences
from harness import Answer, Engine, EngineSpec, Prompt
from probe_names import LIGHT_VARIABLE

SIZE = os.environ.get("KV_TEST_SOAK", "")
AT_ONCE = 64
MAX_TOKENS = 8
CHUNK = 64
SPEC = EngineSpec(
    layout="async",
    max_model_len=512,
    num_blocks=300,
    max_num_seqs=AT_ONCE,
    # Every repeated prompt asks the connector.
    prefix_caching=False,
    env=((LIGHT_VARIABLE, "1"),),
)

pytestmark = pytest.mark.skipif(not SIZE, reason="long: KV_TEST_SOAK=200x64 runs it")


def resident_bytes(engine: Engine) -> int:
    """The memory of the engine's processes."""
    process = psutil.Process(engine.pid)
    return sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))


def test_what_is_asked_together_equals_what_is_asked_one_by_one(baseline: Baseline) -> None:
    """Under constant eviction; and memory does not grow once all was seen."""
    num_prompts, repeats = map(int, SIZE.split("x"))
    source = Prompts("soak")
    trunks = [source.fresh(260) for _ in range(10)]
    prompts = [source.fork(trunks[n % 10], 16 * (n % 13), 70 + n % 210) for n in range(num_prompts)]
    num_chunks = len({p.tokens[:end] for p in prompts for end in range(CHUNK, len(p) + 1, CHUNK)})
    spec = replace(SPEC, pool_bytes=max(8, num_chunks // 4) * chunk_bytes(SPEC))

    with Engine(spec) as engine:
        serial = [engine.ask([prompt], MAX_TOKENS).answers[0] for prompt in prompts]
    found = differences(serial, baseline.ask(prompts, MAX_TOKENS))
    assert not found, "\n".join(found)

    with Engine(spec) as engine:
        sizes = ask_all(engine, prompts, repeats, serial)
        report = engine.idle_report()
        report.assert_no_faults()
        assert report.counters["loaded_chunks"] > num_prompts, report
        # Far more was stored than the pool holds.
        assert report.counters["stored_chunks"] > 2 * num_chunks, report
    # vLLM's worker takes more and more for a while, by as much as this: what is ours is the rest.
    with Engine(replace(spec, connector=None)) as engine:
        alone = ask_all(engine, prompts, repeats, serial)
    growth, growth_alone = (each[-1] / each[0] - 1 for each in (sizes, alone))
    print(
        f"soak {SIZE}: {num_prompts * repeats} requests, {report.counters}, resident "
        f"{[size >> 20 for size in sizes]} MiB, {growth:+.2%}; vLLM alone "
        f"{[size >> 20 for size in alone]} MiB, {growth_alone:+.2%}",
        file=sys.stderr,
    )
    assert growth <= growth_alone + 0.05


def ask_all(engine: Engine, prompts: list[Prompt], repeats: int, serial: list[Answer]) -> list[int]:
    """Asks each prompt so often, in four parts; the memory after each."""
    sizes = []
    for part in range(4):
        rounds = repeats // 4 + (part < repeats % 4)
        answers = engine.script(
            "scripted:ask_repeatedly", prompts, rounds, AT_ONCE, MAX_TOKENS, timeout=3600
        )
        assert len(answers) == rounds * len(prompts)
        found = differences([a for _, a in answers], [serial[n] for n, _ in answers])
        assert not found, "\n".join(found[:20])
        sizes.append(resident_bytes(engine))
    return sizes
