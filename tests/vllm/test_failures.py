"""Loads that fail, and starts that fail: answers stay right, and the engine stays up.

A load fails here because its chunks vanish under it (``vanish``) or because the copy itself cannot
be done, however often it is tried (``raise``).
"""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import checks
import pytest
from checks import Baseline, Prompts, differences
from harness import Answer, Engine, EngineSpec, EngineStartError
from test_settings import PLAIN, serve_twice

from conftest import Engines

CHUNK = 64
SPEC = EngineSpec(max_num_seqs=16)
POLICY_FAIL = replace(SPEC, load_failure_policy="fail")
NUM_TOKENS = 4 * CHUNK + 7
# The tests share an engine, and its counters know of every load that has failed so far.
check = functools.partial(checks.check, may_fail=True)


def assert_right(got: list[Answer | None], wanted: list[Answer]) -> None:
    found = differences([answer for answer in got if answer is not None], wanted)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("how", ["vanish", "raise"])
def test_one_load_in_five_fails_and_every_answer_is_right(
    engines: Engines, baseline: Baseline, how: str
) -> None:
    engine = engines.get(SPEC)
    source = Prompts(f"one in five {how}")
    trunk = source.fresh(NUM_TOKENS)
    prompts = [trunk, *(source.fork(trunk, at, NUM_TOKENS) for at in (70, 130, 200))]
    prompts += [source.fresh(100 + 23 * n) for n in range(10)]
    check(engine, baseline, prompts)
    engine.worker("probe_break_loads", how, 5)
    broken = loads = 0
    for _ in range(6):
        source.shuffle(prompts)
        engine.cool()
        _, report = check(engine, baseline, prompts, max_tokens=8)
        broken += report.probe.get("broken_loads", 0)
        loads += report.probe.get("loads", 0)
    engine.worker("probe_break_loads", "nothing")
    assert broken >= 5, (broken, loads)
    assert broken < loads / 2, (broken, loads)
    assert report.counters["failed_loads"] >= broken
    for _ in range(2):
        engine.cool()
        check(engine, baseline, prompts)


@pytest.mark.parametrize("event", ["nothing", "abort", "preempt"])
@pytest.mark.parametrize("fork", [False, True])
def test_after_a_failed_load_the_next_one_to_ask_is_answered_right(
    engines: Engines, baseline: Baseline, event: str, fork: bool
) -> None:
    """vLLM enters blocks into its own cache before they are loaded: it must forget them again.

    With a fork, another request found those blocks there, in the step that failed.
    """
    engine = engines.get(SPEC)
    source = Prompts(f"failed load, then {event} {fork}")
    prompt = source.fresh(NUM_TOKENS)
    prompts = [prompt, *([source.fork(prompt, 3 * CHUNK, NUM_TOKENS)] if fork else [])]
    check(engine, baseline, [prompt])
    engine.cool()
    engine.worker("probe_break_loads", "vanish", 1, 1)
    answers = engine.script("scripted:after_failed_load", prompts, event, 8)
    engine.worker("probe_break_loads", "nothing")
    report = engine.idle_report()
    assert report.probe["broken_loads"] == 1
    assert report.counters["dropped_saves"] > 0 or not fork
    wanted = baseline.ask([*prompts, prompt], 8)
    if event == "abort":
        assert answers[0] is None or answers[0].finish_reason == "abort"
        answers, wanted = answers[1:], wanted[1:]
    assert_right(answers, wanted)
    # And what is stored now is right as well.
    engine.cool()
    check(engine, baseline, prompts)


def test_what_a_failing_step_computed_is_not_stored(engines: Engines, baseline: Baseline) -> None:
    """Behind the failed load the step computed on noise: its chunks must not be found again."""
    engine = engines.get(SPEC)
    source = Prompts("failing step")
    stored = source.fresh(3 * CHUNK)
    longer = source.fork(stored, 3 * CHUNK, 6 * CHUNK + 5)
    check(engine, baseline, [stored])
    engine.cool()
    before = engine.report().counters["dropped_saves"]
    engine.worker("probe_break_loads", "vanish", 1, 1)
    # Aborted, it does not get to store anew what the failing step computed.
    engine.script("scripted:after_failed_load", [longer], "abort", 1)
    engine.worker("probe_break_loads", "nothing")
    assert engine.idle_report().counters["dropped_saves"] > before
    for _ in range(2):
        engine.cool()
        check(engine, baseline, [longer])


def test_a_chunk_that_cannot_be_loaded_leaves_the_store_before_that_is_reported(
    engines: Engines, baseline: Baseline
) -> None:
    """Found again, it would be promised again, for ever where loads are asynchronous."""
    engine = engines.get(SPEC)
    prompt = Prompts("cannot be loaded").fresh(NUM_TOKENS)
    check(engine, baseline, [prompt])
    before = engine.report().counters["failed_loads"]
    engine.cool()
    engine.worker("probe_break_loads", "raise", 1)
    num_steps, answer = engine.script("scripted:ask_in_steps", prompt, 4, 200)
    assert answer is not None, f"no answer in {num_steps} steps"
    assert_right([answer], baseline.ask([prompt], 4))
    report = engine.idle_report()
    # The probe looked when the failure was reported.
    report.assert_bytes_right()
    assert report.counters["failed_loads"] == before + 1
    engine.worker("probe_break_loads", "nothing")
    # It was stored anew when it was recomputed, or is not found: never is it a load that fails.
    engine.cool()
    check(engine, baseline, [prompt])
    assert engine.report().counters["failed_loads"] == before + 1


def test_policy_fail_fails_the_request_of_the_load_and_no_other(
    engines: Engines, baseline: Baseline
) -> None:
    engine = engines.get(POLICY_FAIL)
    assert "kv_load_failure_policy is 'fail'" in engine.log()
    source = Prompts("policy fail")
    prompts = [source.fresh(NUM_TOKENS) for _ in range(4)]
    check(engine, baseline, prompts)
    engine.cool()
    engine.worker("probe_break_loads", "vanish", 1, 1)
    answers = engine.ask(prompts, 4).answers
    engine.worker("probe_break_loads", "nothing")
    engine.idle_report()
    failed = [number for number, answer in enumerate(answers) if answer.finish_reason == "error"]
    assert len(failed) == 1
    wanted = baseline.ask(prompts, 4)
    others = [number for number in range(4) if number not in failed]
    assert_right([answers[n] for n in others], [wanted[n] for n in others])
    # Asked again at once, with vLLM's own cache as the failure left it.
    check(engine, baseline, prompts)
    engine.cool()
    check(engine, baseline, prompts)


# Starts.


def without_folder(strict: bool) -> tuple[EngineSpec, tempfile.TemporaryDirectory[str]]:
    """An engine whose socket has no place to be: where its folder belongs there is a file."""
    folder = tempfile.TemporaryDirectory(prefix="kv-run-")
    (Path(folder.name) / f"lmcache-rs-{os.geteuid()}").touch()
    spec = replace(PLAIN, layout="mp", env=(("XDG_RUNTIME_DIR", folder.name),))
    return replace(spec, extra=(("lmcache.strict", strict),)), folder


def test_without_a_place_for_its_socket_the_engine_serves_without_a_cache(
    baseline: Baseline,
) -> None:
    spec, folder = without_folder(strict=False)
    with folder:
        hits, log = serve_twice(spec, baseline, "no socket")
    assert hits == [0, 0]
    assert "THE ENGINE SERVES WITHOUT A CACHE" in log
    assert "is a link or a file" in log


def test_with_a_pool_larger_than_memory_the_engine_serves_without_a_cache(
    baseline: Baseline,
) -> None:
    hits, log = serve_twice(replace(PLAIN, pool_bytes=1 << 50), baseline, "large pool")
    assert hits == [0, 0]
    assert "THE ENGINE SERVES WITHOUT A CACHE" in log
    assert str(1 << 50) in log


@pytest.mark.parametrize("fault", ["pool", "socket"])
def test_strict_makes_either_a_stop(fault: str) -> None:
    spec, folder = without_folder(strict=True)
    if fault == "pool":
        spec = replace(spec, env=(), layout="inproc", pool_bytes=1 << 50)
    with folder, pytest.raises(EngineStartError) as stop:
        Engine(spec).close()
    wanted = str(1 << 50) if fault == "pool" else "is a link or a file"
    assert wanted in str(stop.value)
