"""Random requests over too little of everything: whatever happens, the words are right.

Forks, repeats, resets, chunked prefill, preemption and eviction meet in orders that
nobody would write down. The seeds are fixed, so a failure comes again.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from checks import Baseline, Prompts, check, chunk_bytes
from harness import EngineSpec, Prompt

from conftest import Engines

SPEC = EngineSpec(max_model_len=512, max_num_seqs=16)
LONGEST = 380
BATCHES = 12
# Blocks of the engine, chunk, chunks in the pool, tokens in a step, vLLM's own cache.
TIGHT_SPOTS = [(34, 64, 5, 96, True), (60, 96, 20, 2048, False), (24, 32, 40, 200, True)]


def next_prompt(rng: random.Random, source: Prompts, known: list[Prompt]) -> Prompt:
    """A prompt asked before, one that forks from it, or a new one; it becomes known."""
    old = rng.choice(known)
    luck = rng.random()
    if luck < 0.4:
        return old
    if luck < 0.8:
        at = rng.randrange(1, len(old) + 1)
        prompt = source.fork(old, at, min(LONGEST, at + rng.randrange(1, 150)))
    else:
        prompt = source.fresh(rng.randrange(1, LONGEST))
    known.append(prompt)
    return prompt


@pytest.mark.parametrize(
    ("num_blocks", "chunk_size", "pool_chunks", "budget", "prefix_caching"), TIGHT_SPOTS
)
def test_answers_stay_right_whatever_is_asked(
    engines: Engines,
    baseline: Baseline,
    num_blocks: int,
    chunk_size: int,
    pool_chunks: int,
    budget: int,
    prefix_caching: bool,
) -> None:
    sized = replace(SPEC, chunk_size=chunk_size)
    engine = engines.get(
        replace(
            sized,
            num_blocks=num_blocks,
            max_num_batched_tokens=budget,
            prefix_caching=prefix_caching,
            pool_bytes=pool_chunks * chunk_bytes(sized),
        )
    )
    name = f"walk {num_blocks} {chunk_size}"
    rng, source = random.Random(name), Prompts(name)
    known = [source.fresh(rng.randrange(1, LONGEST)) for _ in range(6)]
    external = 0
    for _ in range(BATCHES):
        batch = [next_prompt(rng, source, known) for _ in range(rng.randrange(1, 14))]
        reply, _ = check(engine, baseline, batch, max_tokens=rng.choice([1, 4, 60]))
        external += reply.external_tokens
        if rng.random() < 0.4:
            engine.cool()
    assert external > 0
