"""Every load is one that its request waits for: answers, restored bytes and hit tokens.

As in test_hits, vLLM's cache is reset and its memory overwritten with noise between a request and
its hit. What is being loaded is not in vLLM's own cache yet, so prompts that are asked together and
share a beginning each load it; and of a whole prompt the last token is loaded, too.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from checks import Baseline, Prompts, check, chunk_bytes
from harness import Engine, EngineSpec, Prompt

from conftest import Engines

CHUNK = 64
SPEC = EngineSpec(extra=(("lmcache.max_sync_load_ms", 0.0),))
SPECS = {
    "inproc": SPEC,
    "processes": replace(SPEC, layout="mp"),
    "layerwise": replace(SPEC, layerwise=True),
    "small steps": replace(SPEC, max_num_batched_tokens=48, max_num_seqs=16),
    "no prefix cache": replace(SPEC, prefix_caching=False),
}
FEW_BLOCKS = replace(SPEC, max_model_len=512, num_blocks=34)
# A tier below host memory, in the worker's process, and room for few chunks in host memory.
SHELF = replace(
    EngineSpec(layout="mp"),
    extra=(("lmcache.storage_backends", '{"shelf": "shelf_tier:Shelf"}'),),
    pool_bytes=24 * chunk_bytes(SPEC),
)


def stored(prompt: Prompt) -> int:
    return len(prompt) // CHUNK * CHUNK


def await_puts(engine: Engine) -> None:
    """Until the tier below has taken what was offered to it; it is in nothing that is held."""
    until = time.monotonic() + 60
    while engine.idle_report().counters["shelf_queued_chunks"]:
        assert time.monotonic() < until, "the tier has taken nothing for a minute"
        time.sleep(0.05)


@pytest.mark.parametrize("kind", SPECS)
def test_cold_then_hit_after_reset(engines: Engines, baseline: Baseline, kind: str) -> None:
    engine = engines.get(SPECS[kind])
    source = Prompts(f"waited for {kind}")
    prompts = [source.fresh(n) for n in (199, 300, 128, 640)]
    prompts += [source.fresh(63)]
    if SPECS[kind].layout != "mp":
        # Over there it may come so late that vLLM has what the other one has loaded by then.
        prompts.insert(4, source.fork(prompts[3], 200, 400))
    check(engine, baseline, prompts)
    for order in (prompts, prompts[::-1]):
        engine.cool()
        reply, report = check(engine, baseline, order, [(0, stored(p)) for p in order])
        assert reply.local_tokens == 0
        assert report.probe["loads"] == len(prompts) - 1
    # Beside what vLLM has itself: only what is behind that is loaded.
    if SPECS[kind].prefix_caching:
        engine.cool()
        check(engine, baseline, [Prompt(prompts[3].tokens[:97])], [(0, 64)])
        check(engine, baseline, [prompts[3]], [(96, stored(prompts[3]) - 96)])


def test_preemption(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(FEW_BLOCKS)
    source = Prompts("waited for, preempted")
    prompts = [source.fresh(150 + 5 * n) for n in range(10)]
    prompts += [source.fork(prompts[0], at, 170) for at in (70, 128, 150)]
    for _ in range(3):
        reply, _ = check(engine, baseline, prompts, max_tokens=100)
        assert reply.preemptions > 0
        engine.cool()


@pytest.mark.parametrize("waited_for", [False, True])
def test_a_tier_below_gives_back_what_host_memory_has_lost(
    engines: Engines, baseline: Baseline, waited_for: bool
) -> None:
    extra = SPEC.extra if waited_for else ()
    engine = engines.get(replace(SHELF, extra=(*SHELF.extra, *extra)))
    source = Prompts(f"shelf {waited_for}")
    prompts = [source.fresh(n) for n in (199, 300, 129)]
    others = [source.fresh(640) for _ in range(4)]
    for prompt in prompts:
        check(engine, baseline, [prompt])
        # The tier takes what its queue has room for: a quarter of host memory.
        await_puts(engine)
    for _ in range(2):
        # More than host memory holds: the first prompts leave it.
        for other in others:
            check(engine, baseline, [other])
        for prompt in prompts:
            engine.cool()
            check(engine, baseline, [prompt], [(0, stored(prompt))])
