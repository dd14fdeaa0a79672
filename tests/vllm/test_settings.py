"""Bad input to a real vLLM: it stops with a line that helps, or serves without us."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checks import Baseline, Prompts, chunk_bytes, differences
from harness import Engine, EngineSpec, EngineStartError

SPEC = EngineSpec(num_blocks=40, max_model_len=512)
PLAIN = replace(SPEC, connector="plain")


def serve_twice(spec: EngineSpec, baseline: Baseline, name: str) -> tuple[list[int], str]:
    """Asks a prompt twice around a reset; the external hits of each, and the log."""
    prompt = Prompts(name).fresh(199)
    with Engine(spec) as engine:
        replies = []
        for _ in range(2):
            reply = engine.ask([prompt])
            assert not differences(reply.answers, baseline.ask([prompt], 4))
            replies.append(reply)
            engine.reset()
        return [reply.external_tokens for reply in replies], engine.log()


@pytest.mark.parametrize("layout", ["inproc", "mp"])
def test_chunk_size_that_is_no_multiple_of_the_block_stops_start_up(layout: str) -> None:
    with pytest.raises(EngineStartError) as stop:
        Engine(replace(PLAIN, chunk_size=80, layout=layout)).close()
    lines = [line for line in str(stop.value).splitlines() if "chunk_size" in line]
    wanted = ("80", "64", "96")
    assert any(all(size in line for size in wanted) for line in lines), lines


def test_unknown_key_stops_start_up_and_names_the_nearest() -> None:
    with pytest.raises(EngineStartError) as stop:
        Engine(replace(PLAIN, extra=(("lmcache.max_local_cpu_sise", 1.0),))).close()
    assert "max_local_cpu_sise" in str(stop.value)
    assert "max_local_cpu_size" in str(stop.value)


def test_foreign_keys_and_builtin_hash_get_one_line_each(baseline: Baseline) -> None:
    spec = replace(
        PLAIN,
        extra=(
            ("lmcache.enable_p2p", True),
            ("lmcache.pre_caching_hash_algorithm", "builtin"),
            ("lmcache.save_unfull_chunk", True),
        ),
    )
    hits, log = serve_twice(spec, baseline, "foreign keys")
    assert hits == [0, 192]
    assert log.count("enable_p2p") >= 1
    assert log.count("save_unfull_chunk has no effect") == 1
    assert [line for line in log.splitlines() if "builtin" in line and "sha256_cbor" in line]


def test_pool_smaller_than_one_chunk_serves_without_it(baseline: Baseline) -> None:
    spec = replace(PLAIN, pool_bytes=chunk_bytes(PLAIN) // 2)
    hits, log = serve_twice(spec, baseline, "tiny pool")
    assert hits == [0, 0]
    loud = [line for line in log.splitlines() if "lmcache" in line.lower()]
    assert any("WARN" in line or "ERROR" in line for line in loud), loud


def test_switched_off_by_the_environment(baseline: Baseline) -> None:
    spec = replace(PLAIN, env=(("LMCACHE_RS_DISABLE", "1"),))
    hits, log = serve_twice(spec, baseline, "disabled")
    assert hits == [0, 0]
    assert "LMCACHE_RS_DISABLE" in log


@pytest.mark.parametrize("layout", ["inproc", "mp"])
def test_registered_name_hits(baseline: Baseline, layout: str) -> None:
    spec = replace(PLAIN, layout=layout, spawned=True)
    hits, _ = serve_twice(spec, baseline, f"registered {layout}")
    assert hits == [0, 192]


@pytest.mark.parametrize("layout", ["inproc", "mp"])
def test_two_engines_in_one_process_share_nothing(baseline: Baseline, layout: str) -> None:
    prompt = Prompts(f"twins {layout}").fresh(199)
    (wanted,) = baseline.ask([prompt], 4)
    with Engine(replace(PLAIN, layout=layout)) as engine:
        try:
            engine.start_twin()
        except EngineStartError as stop:
            refusal = str(stop)
        else:
            refusal = ""
        if refusal:
            # vLLM keeps one worker connector per process: refusing is fair, if it is said.
            assert layout == "inproc"
            assert "lmcache_rs" in refusal
            assert "one process" in refusal
            assert not differences([engine.ask_of(0, prompt)], [wanted])
            return
        # Asked in turn; the second must not find what the first has stored.
        answers = [engine.ask_of(which, prompt) for which in (0, 1, 0, 1)]
    assert not differences(answers, [wanted] * 4)
    assert [answer.cached_tokens for answer in answers[:2]] == [0, 0]
    if layout == "mp":
        assert [answer.cached_tokens for answer in answers[2:]] == [192, 192]
