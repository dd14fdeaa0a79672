"""MLA: one latent vector a token, in a plain table, copied token by token.

On CPUs without AMX vLLM sets the block to 16 tokens for such models and turns its own prefix
cache and chunked prefill off: what hits, hits in the connector alone.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from checks import Baseline, Prompts, check, differences
from harness import Engine, EngineSpec, Prompt
from probe_names import FAULTS

from conftest import Engines

BLOCK = 16
CHUNK = 64
# 3 layers of 512 + 64 numbers of 4 bytes.
TOKEN_BYTES = 3 * 576 * 4
SPEC = EngineSpec(model="tiny-mla", block_size=BLOCK, num_blocks=320, prefix_caching=False)
FEW_BLOCKS = replace(SPEC, max_model_len=512, num_blocks=70)
THREE_CHUNKS = 3 * CHUNK + 7
# Blocks of an MLA cache hold no planes that could be swapped.
MLA_FAULTS = [fault for fault in FAULTS if fault != "kv_swapped"]


def in_store(num_tokens: int) -> int:
    """Tokens a whole stored prompt can give back: its full chunks, but never its last token."""
    return min(num_tokens // CHUNK * CHUNK, num_tokens - 1)


def banner(engine: Engine) -> str:
    """The line of the connector's banner that names the plan."""
    return next(
        line for line in engine.log().splitlines() if "lmcache_rs:" in line and "copied" in line
    )


def test_mla_is_copied_token_by_token(engines: Engines) -> None:
    engine = engines.get(SPEC)
    assert engine.report().layer_shape[1:] == [1, BLOCK, 576]
    said = banner(engine)
    assert "copied token by token" in said
    assert "KV_MLA_FMT-1x576" in said


def test_dense_attention_of_the_cpu_is_copied_in_whole_blocks() -> None:
    with Engine(EngineSpec(connector="plain", num_blocks=40, max_model_len=512)) as engine:
        said = banner(engine)
    assert "copied in whole blocks" in said
    assert "FullAttentionSpec" in said


def test_cold_then_hit(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    source = Prompts("mla cold, hit")
    prompts = [source.fresh(n) for n in (THREE_CHUNKS, 300, 130, 640, 192, 64, 63)]
    check(engine, baseline, prompts, [(0, 0)] * 7)
    for order in (prompts, prompts[::-1]):
        engine.cool()
        check(engine, baseline, order, [(0, in_store(len(p))) for p in order])


@pytest.mark.parametrize("edge", [BLOCK, CHUNK, 2 * CHUNK, 3 * CHUNK])
def test_prompt_lengths_around_each_edge(engines: Engines, baseline: Baseline, edge: int) -> None:
    engine = engines.get(SPEC)
    source = Prompts(f"mla edge {edge}")
    prompts = [source.fresh(edge + d) for d in (-1, 0, 1)]
    check(engine, baseline, prompts, [(0, 0)] * 3)
    engine.cool()
    check(engine, baseline, prompts, [(0, in_store(len(p))) for p in prompts])
    # One token more than what is stored.
    longer = [Prompt((*prompt.tokens, 7)) for prompt in prompts]
    engine.cool()
    known = [min(len(p) // CHUNK * CHUNK, len(p)) for p in prompts]
    check(engine, baseline, longer, [(0, hit) for hit in known])


def test_forks_in_one_step_and_again(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    source = Prompts("mla forks")
    trunk = source.fresh(4 * CHUNK + 9)
    forks = (1, 15, 16, 17, 63, 64, 65, 97, 128, 160, 191, 192)
    family = [trunk, *(source.fork(trunk, at, 3 * CHUNK + at % 70) for at in forks)]
    # More than a step holds: the later ones find what the first have stored.
    check(engine, baseline, family)
    for order in (family[::-1], family[1::2] + family[::2]):
        engine.cool()
        check(engine, baseline, order, [(0, in_store(len(p))) for p in order])
    # A prompt that shares a chunk and a half with one that is stored.
    late = source.fork(trunk, 96, THREE_CHUNKS)
    engine.cool()
    check(engine, baseline, [late], [(0, CHUNK)])


def test_second_identical_request_stores_nothing(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    start = engine.report().counters
    prompt = Prompts("mla identical").fresh(THREE_CHUNKS)
    _, first = check(engine, baseline, [prompt], [(0, 0)])
    assert first.counters["stored_bytes"] - start["stored_bytes"] == 192 * TOKEN_BYTES
    engine.cool()
    _, second = check(engine, baseline, [prompt, prompt], [(0, 192), (0, 192)])
    assert second.counters["stored_bytes"] == first.counters["stored_bytes"]
    assert second.counters["loaded_bytes"] - first.counters["loaded_bytes"] == 2 * 192 * TOKEN_BYTES


def test_decode_across_chunk_edges(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    source = Prompts("mla decode")
    prompts = [source.fresh(n) for n in (50, 60, 64, 120, THREE_CHUNKS)]
    check(engine, baseline, prompts, [(0, 0)] * 5, max_tokens=40)
    answers = baseline.ask(prompts, 40, model="tiny-mla")
    turns = [
        Prompt(prompt.tokens + answer.tokens + source.fresh(20).tokens)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    engine.cool()
    reply, _ = check(engine, baseline, turns)
    for prompt, turn, answer in zip(prompts, turns, reply.answers, strict=True):
        assert len(prompt) // CHUNK * CHUNK <= answer.cached_tokens <= in_store(len(turn))


@pytest.mark.parametrize("fault", MLA_FAULTS)
def test_fault_is_seen_in_bytes_and_in_answers(
    engines: Engines, baseline: Baseline, fault: str
) -> None:
    engine = engines.get(SPEC)
    source = Prompts(f"mla {fault}")
    prompts = [source.fresh(THREE_CHUNKS), source.fresh(THREE_CHUNKS)]
    check(engine, baseline, prompts, [(0, 0), (0, 0)])
    engine.cool()
    engine.plant(fault)
    reply = engine.ask(prompts)
    report = engine.settled_report()
    assert report.byte_faults().get("wrong_blocks"), report
    assert "stray_blocks" not in report.byte_faults(), report
    # Attention sums over its past in any order: chunks of one prompt may trade places unheard.
    if fault != "chunks_reordered":
        assert differences(reply.answers, baseline.ask(prompts, 4, model="tiny-mla"))
    engine.cool()
    check(engine, baseline, prompts, [(0, 192), (0, 192)])


def test_random_walk(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    source, dice = Prompts("mla walk"), random.Random("mla walk")
    known = [source.fresh(400)]
    for _ in range(6):
        asked = []
        for _ in range(dice.randint(1, 6)):
            old = dice.choice(known)
            at = dice.randrange(1, len(old))
            asked.append(source.fork(old, at, dice.randint(at + 1, at + 300)))
        known += asked
        engine.cool()
        check(engine, baseline, asked)


def test_preemption(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(FEW_BLOCKS)
    source = Prompts("mla preemption")
    prompts = [source.fresh(150 + 5 * n) for n in range(10)]
    reply, _ = check(engine, baseline, prompts, max_tokens=60)
    assert reply.preemptions > 0
    engine.cool()
    reply, report = check(engine, baseline, prompts, max_tokens=60)
    assert report.probe["loads"] > 0
