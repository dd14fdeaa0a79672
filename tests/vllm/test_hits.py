"""Answers, restored bytes and hit tokens, against vLLM alone and a count by hand.

Blocks of 32 tokens, chunks of 64 unless a test says otherwise. Expected hits are pairs:
tokens from vLLM's own cache, tokens from the connector. Between a request and its hit
vLLM's cache is reset and its memory overwritten with noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import cbor2
import pytest
from checks import Baseline, Prompts, check, chunk_bytes
from harness import EngineSpec, Prompt

from conftest import Engines

BLOCK = 32
CHUNK = 64
SPEC = EngineSpec()
SMALL_STEPS = replace(SPEC, max_num_batched_tokens=48, max_num_seqs=16)
NO_PREFIX_CACHE = replace(SPEC, prefix_caching=False)
# 33 usable blocks for requests of up to 10 each: vLLM must take blocks back.
FEW_BLOCKS = replace(SPEC, max_model_len=512, num_blocks=34)
DEFAULT_SIZES = replace(
    SPEC, block_size=128, chunk_size=None, max_model_len=2048, num_blocks=48, pool_bytes=512 << 20
)
# 199 tokens: three chunks and a tail.
THREE_CHUNKS = 3 * CHUNK + 7
FORKS = (1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 159, 160, 161, 191, 192, 193, 198)


def in_store(num_tokens: int, chunk: int = CHUNK) -> int:
    """Tokens a whole stored prompt can give back: its full chunks, but never its last."""
    return min(num_tokens // chunk * chunk, num_tokens - 1)


def head(prompt: Prompt, num_tokens: int) -> Prompt:
    return Prompt(prompt.tokens[:num_tokens])


def shared(one: Prompt, two: Prompt) -> int:
    """The length of the common prefix in tokens."""
    for place, (a, b) in enumerate(zip(one.tokens, two.tokens, strict=False)):
        if a != b:
            return place
    return min(len(one), len(two))


def hits_together(prompts: Sequence[Prompt], stored: Sequence[Prompt]) -> list[tuple[int, int]]:
    """The hits of prompts asked in one step of an emptied vLLM.

    A prompt finds the blocks of those before it in vLLM's own cache, even while they are
    still being loaded or computed in the same step.
    """
    pairs = []
    for number, prompt in enumerate(prompts):
        longest = max((shared(prompt, other) for other in prompts[:number]), default=0)
        local = min(longest, len(prompt) - 1) // BLOCK * BLOCK
        known = max((shared(prompt, other) // CHUNK * CHUNK for other in stored), default=0)
        pairs.append((local, max(0, min(known, len(prompt) - 1) - local)))
    return pairs


def test_cold_then_hit_after_reset(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    source = Prompts("cold, hit")
    prompts = [source.fresh(n) for n in (THREE_CHUNKS, 300, 130, 640)]
    check(engine, baseline, prompts, [(0, 0)] * 4)
    for _ in range(2):
        engine.cool()
        check(engine, baseline, prompts, [(0, in_store(len(p))) for p in prompts])


@pytest.mark.parametrize("local_blocks", range(7))
@pytest.mark.parametrize("stored_chunks", range(4))
def test_every_local_hit_beside_every_external_hit(
    engines: Engines, baseline: Baseline, local_blocks: int, stored_chunks: int
) -> None:
    engine = engines.get(SPEC)
    source = Prompts(f"pair {local_blocks} {stored_chunks}")
    prompt = source.fresh(THREE_CHUNKS)
    at = FORKS[(local_blocks * 4 + stored_chunks) % len(FORKS)]
    fork = source.fork(prompt, at, THREE_CHUNKS)
    if stored_chunks:
        check(engine, baseline, [head(prompt, stored_chunks * CHUNK + 1)], [(0, 0)])
        engine.cool()
    if local_blocks:
        # Fills vLLM's own cache. What this stores lies below the local hit.
        known = min(stored_chunks, local_blocks * BLOCK // CHUNK) * CHUNK
        check(engine, baseline, [head(prompt, local_blocks * BLOCK + 1)], [(0, known)])
    local = local_blocks * BLOCK
    check(
        engine,
        baseline,
        [prompt, fork],
        [(local, max(0, stored_chunks * CHUNK - local)), (at // BLOCK * BLOCK, 0)],
    )
    # Both are stored whole now; in one step, then each in a step of its own.
    both = [fork, prompt]
    engine.cool()
    check(engine, baseline, both, hits_together(both, both))
    engine.cool()
    pairs = hits_together(both, both)
    check(engine, baseline, [fork], pairs[:1])
    check(engine, baseline, [prompt], pairs[1:])


@pytest.mark.parametrize("reverse", [False, True])
def test_many_forks_in_one_step_and_again_after_reset(
    engines: Engines, baseline: Baseline, reverse: bool
) -> None:
    engine = engines.get(SPEC)
    source = Prompts(f"forks {reverse}")
    trunk = source.fresh(4 * CHUNK + 9)
    family = [trunk, *(source.fork(trunk, at, 3 * CHUNK + at % 70) for at in FORKS)]
    if reverse:
        family.reverse()
    check(engine, baseline, family, hits_together(family, []))
    for order in (family, family[::-1], family[1::2] + family[::2]):
        engine.cool()
        check(engine, baseline, order, hits_together(order, family))


@pytest.mark.parametrize(
    "num_tokens", sorted({edge + d for edge in range(BLOCK, 193, BLOCK) for d in (-1, 0, 1)})
)
def test_prompt_lengths_around_each_edge(
    engines: Engines, baseline: Baseline, num_tokens: int
) -> None:
    engine = engines.get(SPEC)
    prompt = Prompts(f"length {num_tokens}").fresh(num_tokens)
    check(engine, baseline, [prompt], [(0, 0)])
    # Without a reset vLLM has all whole blocks below the last token; a full last block
    # that lies in a stored chunk is loaded up to the last token but one.
    local = (num_tokens - 1) // BLOCK * BLOCK
    check(engine, baseline, [prompt], [(local, max(0, in_store(num_tokens) - local))])
    engine.cool()
    check(engine, baseline, [prompt], [(0, in_store(num_tokens))])
    # One token more or less than what is stored.
    longer = Prompt((*prompt.tokens, 7))
    shorter = head(prompt, num_tokens - 1)
    for other in (longer, shorter):
        engine.cool()
        known = shared(other, prompt) // CHUNK * CHUNK
        check(engine, baseline, [other], [(0, min(known, len(other) - 1))])


def test_full_hits_beside_each_other(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    source = Prompts("full hit")
    prompts = [source.fresh(n * CHUNK) for n in (1, 2, 3, 5)]
    prompts.append(source.fork(prompts[-1], 2 * CHUNK, 4 * CHUNK))
    prompts.append(prompts[2])
    check(engine, baseline, prompts, hits_together(prompts, []))
    engine.cool()
    # The last of the prompts is the third again: vLLM has all of it but the last block.
    check(engine, baseline, prompts, hits_together(prompts, prompts))


def test_same_tokens_after_another_prefix_are_another_chunk(
    engines: Engines, baseline: Baseline
) -> None:
    engine = engines.get(SPEC)
    source = Prompts("positions")
    one, two, three, tail = (source.fresh(n).tokens for n in (CHUNK, CHUNK, CHUNK, 7))
    stored = [Prompt(one + two + tail), Prompt(three + one + tail)]
    check(engine, baseline, stored, [(0, 0), (0, 0)])
    for chunks, known in (
        (three + two, CHUNK),
        (two + one, 0),
        (one + one, CHUNK),
        (two + two, CHUNK),
        (one + two + one, 2 * CHUNK),
    ):
        engine.cool()
        check(engine, baseline, [Prompt(chunks + tail)], [(0, known)])


def test_prompt_shorter_than_a_chunk_is_not_stored(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    before = engine.report()
    source = Prompts("short")
    prompts = [source.fresh(n) for n in (1, 2, 31, 33, 59)]
    check(engine, baseline, prompts, [(0, 0)] * 5)
    engine.cool()
    _, after = check(engine, baseline, prompts, [(0, 0)] * 5)
    assert after.counters["stored_bytes"] == before.counters["stored_bytes"]
    assert after.memory["cached_bytes"] == before.memory["cached_bytes"]


def test_second_identical_request_stores_nothing(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    start = engine.report().counters
    prompt = Prompts("identical").fresh(THREE_CHUNKS)
    _, first = check(engine, baseline, [prompt], [(0, 0)])
    assert first.counters["stored_bytes"] - start["stored_bytes"] == 3 * chunk_bytes(SPEC)
    assert first.counters["stored_chunks"] - start["stored_chunks"] == 3
    _, warm = check(engine, baseline, [prompt], [(192, 0)])
    engine.cool()
    _, second = check(engine, baseline, [prompt, prompt], [(0, 192), (192, 0)])
    assert warm.counters["stored_bytes"] == first.counters["stored_bytes"]
    assert second.counters["stored_bytes"] == first.counters["stored_bytes"]
    assert second.counters["loaded_bytes"] - first.counters["loaded_bytes"] == 3 * chunk_bytes(SPEC)


def test_decode_across_chunk_edges(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    source = Prompts("decode")
    prompts = [source.fresh(n) for n in (50, 60, 64, 120, THREE_CHUNKS)]
    check(engine, baseline, prompts, [(0, 0)] * 5, max_tokens=80)
    answers = baseline.ask(prompts, 80)
    # The next turn of a conversation: the prompt, its answer, and a new question.
    turns = [
        Prompt(prompt.tokens + answer.tokens + source.fresh(20).tokens)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    engine.cool()
    reply, _ = check(engine, baseline, turns)
    assert reply.local_tokens == 0
    for prompt, turn, answer in zip(prompts, turns, reply.answers, strict=True):
        # At least the prompt's chunks; at most those of all that was computed.
        assert len(prompt) // CHUNK * CHUNK <= answer.cached_tokens <= in_store(len(turn))


@pytest.mark.parametrize("num_tokens", [THREE_CHUNKS, 192, 500])
def test_chunked_prefill(engines: Engines, baseline: Baseline, num_tokens: int) -> None:
    engine = engines.get(SMALL_STEPS)
    source = Prompts(f"small steps {num_tokens}")
    prompt = source.fresh(num_tokens)
    check(engine, baseline, [prompt], [(0, 0)])
    engine.cool()
    check(engine, baseline, [prompt], [(0, in_store(num_tokens))])
    # A hit on the head, the rest in several steps.
    longer = source.fork(prompt, num_tokens - 20, num_tokens + 200)
    known = (num_tokens - 20) // CHUNK * CHUNK
    engine.cool()
    check(engine, baseline, [longer], [(0, known)])
    engine.cool()
    check(engine, baseline, [longer], [(0, in_store(len(longer)))])


def test_chunked_prefill_of_prompts_that_fork(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SMALL_STEPS)
    source = Prompts("small steps, forks")
    trunk = source.fresh(300)
    family = [trunk, *(source.fork(trunk, at, 250) for at in (63, 64, 97, 200))]
    # The steps decide how much of one the next finds: only rightness is asked here.
    check(engine, baseline, family)
    engine.cool()
    check(engine, baseline, family)
    for prompt in family:
        engine.cool()
        check(engine, baseline, [prompt], [(0, in_store(len(prompt)))])


def test_each_token_is_hashed_once_however_many_steps(engines: Engines, baseline: Baseline) -> None:
    prompt = Prompts("hash").fresh(500)
    # An entry of the chain is (32-byte parent, token ids, no extra keys).
    wanted = sum(
        len(cbor2.dumps((bytes(32), prompt.tokens[at : at + CHUNK], None), canonical=True))
        for at in range(0, 500 // CHUNK * CHUNK, CHUNK)
    )
    for spec in (SPEC, SMALL_STEPS):
        engine = engines.get(spec)
        engine.idle_step()
        before = engine.report().scheduler["hashed_bytes"]
        check(engine, baseline, [prompt], [(0, 0)])
        after = engine.report().scheduler["hashed_bytes"]
        assert after - before == wanted


def test_engine_prefix_caching_off(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(NO_PREFIX_CACHE)
    source = Prompts("no prefix cache")
    prompts = [source.fresh(n) for n in (THREE_CHUNKS, 192, 63, 65)]
    prompts.append(source.fork(prompts[0], 100, THREE_CHUNKS))
    check(engine, baseline, prompts, [(0, 0)] * 5)
    for order in (prompts, prompts[::-1]):
        # No reset is needed; the memory is spoiled all the same.
        check(engine, baseline, order, [(0, in_store(len(p))) for p in order])
        engine.cool()
        check(engine, baseline, order, [(0, in_store(len(p))) for p in order])


@pytest.mark.parametrize("chunked", [False, True])
def test_preemption(engines: Engines, baseline: Baseline, chunked: bool) -> None:
    spec = replace(FEW_BLOCKS, max_num_batched_tokens=96, max_num_seqs=16)
    engine = engines.get(spec if chunked else FEW_BLOCKS)
    source = Prompts("preemption")
    prompts = [source.fresh(150 + 5 * n) for n in range(10)]
    prompts += [source.fork(prompts[0], at, 170) for at in (70, 128, 150)]
    reply, _ = check(engine, baseline, prompts, max_tokens=100)
    assert reply.preemptions > 0
    for _ in range(2):
        engine.cool()
        reply, report = check(engine, baseline, prompts, max_tokens=100)
        assert reply.preemptions > 0
        assert report.probe["loads"] > 0


def test_default_sizes(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(DEFAULT_SIZES)
    source = Prompts("default sizes")
    prompts = [source.fresh(n) for n in (255, 256, 257, 511, 512, 513, 700, 1100)]
    check(engine, baseline, prompts, [(0, 0)] * 8)
    engine.cool()
    check(engine, baseline, prompts, [(0, in_store(len(p), 256)) for p in prompts])
    # A local hit inside a chunk: one block of 128 of the two in it.
    engine.cool()
    check(engine, baseline, [head(prompts[-1], 129)], [(0, 0)])
    check(engine, baseline, [prompts[-1]], [(128, 4 * 256 - 128)])
