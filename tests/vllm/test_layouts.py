"""vLLM's default layout: the scheduler in one process, the worker in another.

What one process stored the other must find; a store local to a process would look
healthy and never hit.
"""

from __future__ import annotations

import os
from dataclasses import replace

from checks import Baseline, Prompts, check, differences
from harness import EngineSpec, Prompt
from test_hits import BLOCK, CHUNK, THREE_CHUNKS, head, in_store, shared

from conftest import Engines

SPEC = EngineSpec(layout="mp")
TIGHT = replace(SPEC, max_model_len=512, num_blocks=34, max_num_batched_tokens=96, max_num_seqs=16)


def test_scheduler_and_worker_are_two_processes(engines: Engines) -> None:
    here, apart = engines.get(EngineSpec()), engines.get(SPEC)
    assert here.report().pid == here.pid
    assert apart.report().pid not in (apart.pid, os.getpid())


def test_cold_hit_full_hit_and_short(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    source = Prompts("two processes")
    prompts = [source.fresh(n) for n in (THREE_CHUNKS, 192, 64, 63, 65, 500, 1)]
    check(engine, baseline, prompts, [(0, 0)] * 7)
    for order in (prompts, prompts[::-1]):
        engine.cool()
        check(engine, baseline, order, [(0, in_store(len(p))) for p in order])


def test_local_hit_beside_external_hit(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    prompt = Prompts("two processes, both hits").fresh(THREE_CHUNKS)
    check(engine, baseline, [prompt], [(0, 0)])
    for local in (32, 64, 96, 160):
        engine.cool()
        check(engine, baseline, [head(prompt, local + 1)], [(0, local // CHUNK * CHUNK)])
        check(engine, baseline, [prompt], [(local, 192 - local)])


def test_forks_and_again_after_reset(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    source = Prompts("two processes, forks")
    trunk = source.fresh(THREE_CHUNKS)
    family = [trunk, *(source.fork(trunk, at, 170) for at in (1, 63, 64, 65, 97, 160))]
    check(engine, baseline, family)
    for _ in range(2):
        engine.cool()
        # Which of them share a step is up to the processes' timing, and with it the
        # split between both caches. A sibling's blocks may reach further than chunks.
        reply, _ = check(engine, baseline, family)
        for prompt, answer in zip(family, reply.answers, strict=True):
            kin = max(shared(prompt, other) for other in family if other is not prompt)
            assert answer.cached_tokens in (
                in_store(len(prompt)),
                max(in_store(len(prompt)), min(kin, len(prompt) - 1) // BLOCK * BLOCK),
            )
        assert reply.external_tokens > 0
        family.reverse()


def test_fault_is_seen_across_processes(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    prompt = Prompts("two processes, fault").fresh(THREE_CHUNKS)
    check(engine, baseline, [prompt], [(0, 0)])
    engine.cool()
    engine.plant("nothing_loaded")
    reply = engine.ask([prompt])
    assert engine.settled_report().byte_faults()["wrong_blocks"] == 6
    assert differences(reply.answers, baseline.ask([prompt], 4))


def test_preemption_and_chunked_prefill(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(TIGHT)
    source = Prompts("two processes, tight")
    prompts = [source.fresh(150 + 7 * n) for n in range(10)]
    prompts.append(Prompt(prompts[0].tokens[:130] + source.fresh(40).tokens))
    for _ in range(2):
        reply, report = check(engine, baseline, prompts, max_tokens=100)
        assert reply.preemptions > 0
        engine.cool()
    assert report.probe["loads"] > 0
