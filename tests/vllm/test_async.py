"""The asynchronous engine, as servers use it: clients that leave, resets, and an end in between.

Its core and its worker are processes of their own. Nothing may be held afterwards, without any
further request.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import psutil
from checks import Baseline, Prompts, check, chunk_bytes, differences
from harness import Answer, Engine, EngineSpec, Prompt
from server import Server

from conftest import Engines

CHUNK = 64
# Blocks for a few requests, memory for half of what they store: all limits are met.
SPEC = EngineSpec(layout="async", max_model_len=512, num_blocks=60, max_num_seqs=16)
SERVED = replace(SPEC, layout="mp", max_num_batched_tokens=512)
TIGHT = replace(SPEC, pool_bytes=20 * chunk_bytes(SPEC))


def assert_right(
    got: list[tuple[int, Answer]], prompts: list[Prompt], baseline: Baseline, max_tokens: int
) -> None:
    wanted = baseline.ask(prompts, max_tokens)
    found = differences([answer for _, answer in got], [wanted[number] for number, _ in got])
    assert not found, "\n".join(found)


def is_running(process: psutil.Process) -> bool:
    """Not ended, whether or not its end was noticed by its parent."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def family(name: str) -> list[Prompt]:
    """Prompts of all lengths, half of which share their beginnings."""
    source = Prompts(name)
    trunk = source.fresh(300)
    prompts = [source.fork(trunk, 20 * n, 60 + 20 * n) for n in range(1, 12)]
    return [*prompts, *(source.fresh(40 + 23 * n) for n in range(11))]


def test_a_thousand_requests_that_are_aborted_at_random_moments_leave_nothing(
    engines: Engines, baseline: Baseline
) -> None:
    engine = engines.get(TIGHT)
    prompts = family("aborted")
    ended, answers = engine.script(
        "scripted:abort_at_random", prompts, 1000, 24, "moments", timeout=400
    )
    assert sum(ended.values()) == 1000
    assert ended["at some moment"] >= 300, ended
    assert ended["after some tokens"] >= 100, ended
    report = engine.idle_report()
    report.assert_no_faults()
    report.assert_bytes_right()
    assert report.probe["loads"] > 20, report
    assert report.counters["stored_chunks"] > 50, report
    assert_right(answers, prompts, baseline, 12)
    engine.cool()
    check(engine, baseline, prompts)


def test_resets_in_the_middle_of_traffic(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    prompts = family("reset")
    answers = engine.script("scripted:ask_repeatedly", prompts, 6, 8, 6, 30)
    assert len(answers) == 6 * len(prompts)
    report = engine.idle_report()
    report.assert_no_faults()
    report.assert_bytes_right()
    assert report.probe["loads"] > 0
    assert_right(answers, prompts, baseline, 6)
    assert engine.reset_connector()
    assert engine.idle_report().memory["cached_bytes"] == 0
    # A reset forgets; it does not switch off.
    prompt = Prompts("after a reset").fresh(199)
    check(engine, baseline, [prompt], [(0, 0)])
    engine.cool()
    check(engine, baseline, [prompt], [(0, 192)])


def test_an_end_in_the_middle_of_traffic_is_a_clean_end() -> None:
    """Prompts are being computed, loaded and stored when the engine is told to end."""
    source = Prompts("ended")
    prompts = [source.fresh(100 + n) for n in range(32)]
    with tempfile.TemporaryDirectory(prefix="kv-run-") as folder:
        with Engine(replace(SPEC, env=(("XDG_RUNTIME_DIR", folder),))) as engine:
            engine.ask(prompts[:16], 1)
            sockets = list(Path(folder).glob("lmcache-rs-*/*"))
            assert sockets
            children = psutil.Process(engine.pid).children(recursive=True)
            under_way = engine.script("scripted:shut_down_in_traffic", prompts)
            assert under_way >= 16
            psutil.wait_procs(children, timeout=20)
            assert not [child for child in children if is_running(child)]
            log = engine.log()
        assert not [path for path in sockets if path.exists()]
    assert "lmcache_rs: fault" not in log
    assert "panicked" not in log


def test_a_server_with_streaming_clients_that_leave(baseline: Baseline) -> None:
    """vLLM's OpenAI server, asked by 32 clients, a third of whose requests are cancelled."""
    prompts = family("server")
    with Server(SERVED) as server:
        streams = server.stream(prompts, 12, num_clients=32, each=6, leaving=0.35)
        report = server.idle_report()
        left = sum(tokens is None for _, tokens in streams)
        assert left >= 40
        report.assert_no_faults()
        report.assert_bytes_right()
        assert report.probe["loads"] > 20, report
        wanted = baseline.ask(prompts, 12)
        wrong = [n for n, tokens in streams if tokens not in (None, wanted[n].tokens)]
        assert not wrong
        assert list(server.sockets.glob("*/*.sock"))
        assert server.close() in (0, -15)
        log = server.log()
    assert "lmcache_rs: fault" not in log
    assert "panicked" not in log
