"""The edges of vLLM's connector contract, each with answers equal to vLLM's alone.

Preemption, another connector beside ours, drafts, generated tokens, sliding windows. After each
check nothing is held any more, without any further request.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from checks import Baseline, Prompts, check
from harness import Engine, EngineSpec, EngineStartError, Prompt

from conftest import Engines

BLOCK = 32
CHUNK = 64
SPEC = EngineSpec()
# 33 usable blocks for requests of up to 10 each: vLLM must take blocks back.
FEW_BLOCKS = EngineSpec(max_model_len=512, num_blocks=34, max_num_seqs=16)
SAVES_DECODE = EngineSpec(extra=(("lmcache.save_decode_cache", True),))
NGRAM = replace(
    SAVES_DECODE,
    options=json.dumps(
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 4,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        }
    ),
)
RECORDER = "recorder:Recorder"
OURS_FIRST = replace(SPEC, connector=f"probe+{RECORDER}")
OURS_SECOND = replace(SPEC, connector=f"{RECORDER}+probe")


def full_chunks(num_tokens: int) -> int:
    return num_tokens // CHUNK * CHUNK


def in_store(num_tokens: int) -> int:
    """Tokens a whole stored prompt can give back: its full chunks, but never its last."""
    return min(full_chunks(num_tokens), num_tokens - 1)


# Preemption.


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_requests_go_on_with_what_is_stored(
    engines: Engines, baseline: Baseline, prefix_caching: bool
) -> None:
    engine = engines.get(replace(FEW_BLOCKS, prefix_caching=prefix_caching))
    source = Prompts(f"preempted {prefix_caching}")
    prompts = [source.fresh(150 + 5 * n) for n in range(10)]
    prompts += [source.fork(prompts[0], at, 170) for at in (70, 128, 150)]
    for number in range(2):
        reply, report = check(engine, baseline, prompts, max_tokens=100)
        assert reply.preemptions >= 3, reply.preemptions
        # Cold, too: what was preempted finds its prompt again, and never a token that was never
        # computed.
        assert number == 0 or report.probe["loads"] > 0
        engine.cool()


def test_a_preempted_request_finds_its_own_output(engines: Engines, baseline: Baseline) -> None:
    """The lookup after a preemption is a new one, over the prompt and what came since."""
    engine = engines.get(SAVES_DECODE)
    prompt = Prompts("own output").fresh(CHUNK + 20)
    answer, hit_tokens = engine.script("scripted:preempt_after", prompt, 3 * CHUNK, 2 * CHUNK)
    report = engine.idle_report()
    report.assert_no_faults()
    report.assert_bytes_right()
    (wanted,) = baseline.ask([prompt], 3 * CHUNK)
    assert answer.tokens == wanted.tokens
    # All but vLLM's own cache knows of it: that is emptied in between.
    assert hit_tokens == full_chunks(len(prompt) + 2 * CHUNK - 1)


# Another connector.


def test_the_first_of_two_connectors_loads_and_both_save(
    engines: Engines, baseline: Baseline
) -> None:
    """The other one is told of our loads with no external token, and real blocks."""
    engine = engines.get(OURS_FIRST)
    engine.script("recorder:offer", True)
    source = Prompts("ours first")
    prompts = [source.fresh(n) for n in (199, 192, 130, 31)]
    check(engine, baseline, prompts, [(0, 0)] * 4)
    engine.cool()
    engine.script("recorder:take_seen")
    check(engine, baseline, prompts[:3], [(0, in_store(len(p))) for p in prompts[:3]])
    seen = engine.script("recorder:take_seen")
    assert seen["not_chosen"] == 3
    assert not seen["not_chosen_without_blocks"]
    assert "loaded_blocks" not in seen
    # We have nothing of the short one: the other connector loads it.
    engine.cool()
    longer = Prompt(prompts[3].tokens + source.fresh(10).tokens)
    check(engine, baseline, [longer])
    engine.cool()
    reply, report = check(engine, baseline, [longer])
    assert reply.external_tokens == BLOCK
    assert engine.script("recorder:take_seen")["loaded_blocks"] == 1
    assert not report.probe.get("loads")


def test_not_chosen_we_load_nothing_lease_nothing_and_save_all(
    engines: Engines, baseline: Baseline
) -> None:
    engine = engines.get(OURS_SECOND)
    source = Prompts("ours second")
    prompts = [source.fresh(n) for n in (199, 192, 130)]
    # The other one offers nothing: we are chosen.
    engine.script("recorder:offer", False)
    check(engine, baseline, prompts, [(0, 0)] * 3)
    engine.cool()
    check(engine, baseline, prompts, [(0, in_store(len(p))) for p in prompts])
    engine.cool()
    # It offers the same and more: what we found is not asked for.
    engine.script("recorder:offer", True)
    engine.script("recorder:take_seen")
    reply, report = check(engine, baseline, prompts)
    seen = engine.script("recorder:take_seen")
    assert seen["chosen"] == 3
    assert reply.external_tokens == sum(min(len(p) // BLOCK * BLOCK, len(p) - 1) for p in prompts)
    assert not report.probe.get("loads")
    # Its head, the engine's tail: we store both.
    longer = [Prompt(p.tokens + source.fresh(150).tokens) for p in prompts]
    engine.cool()
    _, report = check(engine, baseline, longer)
    assert engine.script("recorder:take_seen")["chosen"] == 3
    assert not report.probe.get("loads")
    engine.script("recorder:offer", False)
    engine.cool()
    check(engine, baseline, longer, [(0, in_store(len(p))) for p in longer])


def test_beside_another_connector_a_reset_empties_both(
    engines: Engines, baseline: Baseline
) -> None:
    engine = engines.get(OURS_SECOND)
    prompt = Prompts("two resets").fresh(199)
    for _ in range(2):
        check(engine, baseline, [prompt], [(0, 0)])
        assert engine.reset_connector()
        assert engine.idle_report().memory["cached_bytes"] == 0


# Generated tokens.


def next_turns(
    engine: Engine, baseline: Baseline, name: str, num_generated: int
) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts that were answered, and what may be asked next: prompt, answer and a question."""
    source = Prompts(name)
    prompts = [source.fresh(n) for n in (20, 50, 64, 65, 120, 199)]
    prompts.append(source.fork(prompts[-1], 140, 180))
    answers = baseline.ask(prompts, num_generated)
    if engine.spec.options != "{}":
        texts = [p.tokens + a.tokens for p, a in zip(prompts, answers, strict=True)]
        engine.script("scripted:guess_drafts", texts, name)
    check(engine, baseline, prompts, max_tokens=num_generated)
    return prompts, [
        Prompt(prompt.tokens + answer.tokens + source.fresh(20).tokens)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def test_without_decode_saving_no_stored_chunk_holds_a_generated_token(
    engines: Engines, baseline: Baseline
) -> None:
    engine = engines.get(SPEC)
    assert engine.reset_connector()
    before = engine.report().counters["stored_chunks"]
    prompts, turns = next_turns(engine, baseline, "decode off", 150)
    # By count: the prompts' chunks, each once, and no tail.
    chunks = {p.tokens[:end] for p in prompts for end in range(CHUNK, len(p) + 1, CHUNK)}
    assert engine.report().counters["stored_chunks"] - before == len(chunks)
    # And by what is found.
    for prompt, turn in zip(prompts, turns, strict=True):
        engine.cool()
        check(engine, baseline, [turn], [(0, full_chunks(len(prompt)))], max_tokens=1)


@pytest.mark.parametrize("spec", [SAVES_DECODE, NGRAM], ids=["plain", "with drafts"])
def test_with_decode_saving_the_next_turn_finds_the_answer(
    engines: Engines, baseline: Baseline, spec: EngineSpec
) -> None:
    engine = engines.get(spec)
    prompts, turns = next_turns(engine, baseline, "decode on", 150)
    for prompt, turn in zip(prompts, turns, strict=True):
        # The last token that was generated was never computed.
        known = full_chunks(len(prompt) + 150 - 1)
        engine.cool()
        check(engine, baseline, [turn], [(0, known)], max_tokens=1)


def test_drafts_change_no_answer_and_only_accepted_ones_are_stored(
    engines: Engines, baseline: Baseline
) -> None:
    """A chunk with the KV of a refused draft would differ from what is computed later."""
    engine = engines.get(NGRAM)
    source = Prompts("drafts")
    prompts = [source.fresh(60 + 19 * n) for n in range(8)]
    answers = baseline.ask(prompts, 140)
    texts = [p.tokens + a.tokens for p, a in zip(prompts, answers, strict=True)]
    engine.script("scripted:guess_drafts", texts, "guesses")
    drafted = accepted = 0
    for _ in range(2):
        reply, report = check(engine, baseline, prompts, max_tokens=140)
        drafted += reply.drafted_tokens
        accepted += reply.accepted_tokens
        engine.cool()
    assert accepted > 50, (drafted, accepted)
    assert drafted - accepted > 50, (drafted, accepted)
    assert report.probe["loads"] > 0


# Models with windows.


def test_prompts_longer_than_the_sliding_window(engines: Engines, baseline: Baseline) -> None:
    """Its window is 64 tokens; vLLM gives it one group of blocks, as we do not ask for several."""
    engine = engines.get(replace(SPEC, model="tiny-swa"))
    source = Prompts("window")
    prompts = [source.fresh(n) for n in (63, 64, 65, 130, 199, 400, 640)]
    prompts.append(source.fork(prompts[-1], 300, 500))
    check(engine, baseline, prompts, max_tokens=70)
    for order in (prompts, prompts[::-1]):
        engine.cool()
        reply, _ = check(engine, baseline, order, max_tokens=70)
        assert reply.external_tokens > 0
    for prompt in prompts:
        engine.cool()
        check(engine, baseline, [prompt], [(0, in_store(len(prompt)))])


def test_more_than_one_group_stops_start_up_with_one_line() -> None:
    spec = EngineSpec(connector="several_groups:SeveralGroups", model="tiny-swa")
    with pytest.raises(EngineStartError) as stop:
        Engine(spec).close()
    lines = [line for line in str(stop.value).splitlines() if "one KV cache group" in line]
    assert lines
    assert all("--disable-hybrid-kv-cache-manager" in line for line in lines)
