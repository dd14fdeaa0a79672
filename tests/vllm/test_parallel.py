"""Several workers: tensor and pipeline parallel ranks, replicas, and two engines on one host.

Each rank holds its part of every chunk. As everywhere here, vLLM's cache is reset between a request
and its hit and the KV memory of every rank overwritten with noise; what is restored on each rank is
compared with what that rank had computed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from checks import Baseline, Prompts, check, chunk_bytes, differences
from harness import Engine, EngineSpec, Prompt, Report
from server import Server
from test_events import Names, Subscriber

from conftest import Engines

CHUNK, POOL_CHUNKS = 64, 64
MAX_TOKENS = 4
# The ranks of an engine share the host's cores.
CORES = ("VLLM_CPU_OMP_THREADS_BIND", "0|1")
TENSOR = EngineSpec(
    layout="mp", options=json.dumps({"tensor_parallel_size": 2}), env=(CORES,), num_blocks=128
)
# As vLLM runs it by itself: the stages' graphs are compiled.
PIPELINE = EngineSpec(
    layout="mp",
    options=json.dumps({"pipeline_parallel_size": 2, "enforce_eager": False}),
    env=(CORES, ("TORCHDYNAMO_DISABLE", "0")),
    num_blocks=128,
    max_num_batched_tokens=256,
    start_timeout_s=500.0,
)
# Every rank holds the same: one latent vector a token, of 3 layers of 512 + 64 numbers of 4 bytes.
LATENT = EngineSpec(
    layout="mp",
    model="tiny-mla",
    options=json.dumps({"tensor_parallel_size": 2}),
    env=(CORES,),
    block_size=16,
    num_blocks=320,
    prefix_caching=False,
)
LATENT_CHUNK_BYTES = CHUNK * 3 * 576 * 4
soak = pytest.mark.skipif(not os.environ.get("KV_TEST_SOAK"), reason="long: `make soak` runs it")


def stored(prompt: Prompt) -> int:
    return len(prompt) // CHUNK * CHUNK


def ask(engine: Engine, baseline: Baseline, prompts: list[Prompt], hit_tokens: int) -> list[Report]:
    """Asks, and holds the answers against vLLM's own, each rank's bytes against what it stored."""
    reply = engine.ask(prompts, MAX_TOKENS)
    reports = engine.reports()
    assert reply.external_tokens == hit_tokens, (reply, hit_tokens)
    for report in reports:
        report.assert_no_faults()
        report.assert_bytes_right()
    wanted = baseline.ask(prompts, MAX_TOKENS, model=engine.spec.model)
    found = differences(reply.answers, wanted)
    assert not found, "\n".join(found)
    return reports


def exercise(engine: Engine, baseline: Baseline, name: str, num_ranks: int) -> list[Report]:
    """Cold, warm beside vLLM's own cache, and warm without it; the ranks' last reports."""
    source = Prompts(name)
    prompts = [source.fresh(n) for n in (199, 300, 128, 640)]
    prompts += [source.fresh(63)]
    fork = source.fork(prompts[3], 200, 400)
    assert len(ask(engine, baseline, [*prompts, fork], 0)) == num_ranks
    for order in (prompts, prompts[::-1]):
        engine.cool()
        reports = ask(engine, baseline, order, sum(map(stored, order)))
        for report in reports:
            assert report.probe["loads"] == report.probe["async_loads"] == len(prompts) - 1
    engine.cool()
    # Alone: beside what it is a fork of it may come so late that vLLM has what they share.
    ask(engine, baseline, [fork], stored(fork))
    engine.cool()
    ask(engine, baseline, [Prompt(prompts[3].tokens[:97])], 64)
    last = ask(engine, baseline, [prompts[3]], stored(prompts[3]) - 96)
    loaded = {report.counters["loaded_bytes"] for report in last}
    assert len(loaded) == 1, loaded
    assert loaded.pop() > 0
    return last


@pytest.fixture(scope="module")
def tensor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Subscriber]]:
    endpoint = f"ipc://{tmp_path_factory.mktemp('events')}/socket"
    subscriber = Subscriber(endpoint)
    # Half of a chunk is a rank's.
    pool_bytes = POOL_CHUNKS * chunk_bytes(TENSOR) // 2
    with Engine(replace(TENSOR, events_endpoint=endpoint, pool_bytes=pool_bytes)) as engine:
        yield engine, subscriber
    subscriber.close()


Tensor = tuple[Engine, Subscriber]


def test_tensor_parallel_ranks_each_load_their_part(tensor: Tensor, baseline: Baseline) -> None:
    engine, _ = tensor
    exercise(engine, baseline, "tensor parallel", 2)
    assert "GB in total on 2 ranks" in engine.log()


def test_tokens_are_counted_once_and_bytes_on_each_rank(tensor: Tensor, baseline: Baseline) -> None:
    engine, _ = tensor
    prompt = Prompts("counted").fresh(199)
    before = engine.metrics()
    ask(engine, baseline, [prompt], 0)
    engine.cool()
    ask(engine, baseline, [prompt], 192)
    engine.idle_step()
    after = engine.metrics()
    moved = {name: after[name] - before.get(name, 0) for name in after}
    assert (moved["stored_tokens"], moved["loaded_tokens"], moved["hit_tokens"]) == (192, 192, 192)
    assert (moved["stored_chunks"], moved["loaded_chunks"]) == (2 * 3, 2 * 3)
    assert moved["loaded_bytes"] == moved["stored_bytes"] == 3 * chunk_bytes(TENSOR)


def test_what_is_published_is_what_both_ranks_hold(tensor: Tensor, baseline: Baseline) -> None:
    engine, subscriber = tensor
    source, names = Prompts("published"), Names()
    prompts = [source.fresh(640) for _ in range(6)]
    names.learn(prompts)
    for prompt in prompts:
        engine.ask([prompt], 1)
    until = time.monotonic() + 20
    while True:
        engine.idle_step()
        subscriber.take_in()
        held = [set(chunks) for chunks in engine.workers("probe_chunks")]
        known = [each & names.blocks.keys() for each in held]
        wanted = {block for chunk in known[0] & known[1] for block in names.blocks[chunk]}
        told = subscriber.held.get("CPU", set())
        if wanted <= told and len(told) == sum(2 for _ in held[0] & held[1]):
            break
        assert time.monotonic() < until, (len(wanted), len(told), len(held[0] & held[1]))
    assert len(wanted) > POOL_CHUNKS
    assert subscriber.removed > 0, "nothing was evicted"


def test_a_load_that_fails_on_one_rank_is_computed_again_on_both(
    tensor: Tensor, baseline: Baseline
) -> None:
    """One rank's part is lost under the promise; what the other has loaded is not used either."""
    engine, _ = tensor
    engine.cool()
    prompt = Prompts("one rank fails").fresh(640)
    ask(engine, baseline, [prompt], 0)
    engine.cool()
    assert engine.workers("probe_break_loads_of", 1, "vanish", 1) == [False, True]
    reply = engine.ask([prompt], MAX_TOKENS)
    reports = engine.reports()
    assert [report.counters["failed_loads"] for report in reports] == [0, 1]
    for report in reports:
        report.assert_bytes_right()
    found = differences(reply.answers, baseline.ask([prompt], MAX_TOKENS))
    assert not found, "\n".join(found)
    engine.cool()
    reply = engine.ask([prompt], MAX_TOKENS)
    assert reply.external_tokens == stored(prompt), "what was computed again is stored again"
    found = differences(reply.answers, baseline.ask([prompt], MAX_TOKENS))
    assert not found, "\n".join(found)
    for report in engine.reports():
        report.assert_bytes_right()


def test_the_first_rank_of_an_mla_model_keeps_what_ranks_of_any_number_load(
    baseline: Baseline, tmp_path: Path
) -> None:
    """Stored by the first of two ranks and loaded by both, out of its memory and off its disk; and
    after that by the only rank of another engine, off the same disk."""
    disk = (("lmcache.local_disk", str(tmp_path)), ("lmcache.max_local_disk_size", 0.25))
    spec, seen = replace(LATENT, extra=disk), str(tmp_path / "seen")
    source = Prompts("latent")
    prompts = [source.fresh(n) for n in (199, 300, 128, 640)]
    num_chunks = sum(len(prompt) // CHUNK for prompt in prompts)
    hit_tokens = num_chunks * CHUNK
    with Engine(spec) as engine:
        ask(engine, baseline, prompts, 0)
        for _ in range(2):
            engine.cool()
            reports = ask(engine, baseline, prompts, hit_tokens)
            assert [report.probe["async_loads"] for report in reports] == [4, 4]
        engine.cool()
        engine.workers("probe_forget")
        reports = ask(engine, baseline, prompts, hit_tokens)
        counters = [report.counters for report in reports]
        assert [of["stored_chunks"] for of in counters] == [num_chunks, 0]
        loaded = 3 * num_chunks * LATENT_CHUNK_BYTES
        assert [of["loaded_bytes"] for of in counters] == [loaded, loaded]
        assert [report.memory["chunks"] for report in reports] == [num_chunks, 0]
        assert "on 1 rank, each read by 1 more" in engine.log()
        engine.worker("probe_keep_seen", seen)
    with Engine(replace(spec, layout="inproc", options="{}")) as engine:
        engine.worker("probe_take_seen", seen)
        check(engine, baseline, prompts, [(0, min(stored(p), len(p) - 1)) for p in prompts])


@soak
def test_pipeline_parallel_stages_each_load_their_layers(
    engines: Engines, baseline: Baseline
) -> None:
    engine = engines.get(PIPELINE)
    exercise(engine, baseline, "pipeline parallel", 2)


@soak
def test_replicas_each_load_what_they_stored(baseline: Baseline) -> None:
    spec = EngineSpec(layout="mp", num_blocks=128, env=(CORES,))
    source = Prompts("data parallel")
    prompts = [source.fresh(n) for n in (199, 300)]
    right = [answer.tokens for answer in baseline.ask(prompts, MAX_TOKENS)]
    with Server(spec, {"--data-parallel-size": "2"}) as server:
        for round_number in range(2):
            for replica in range(2):
                said = [server.complete(prompt, MAX_TOKENS, replica) for prompt in prompts]
                assert said == right, (replica, round_number)
            if not round_number:
                assert not any(server.metrics("loaded_bytes").values())
                server.reset()
                server.worker("probe_poison", 1)
        until = time.monotonic() + 10
        wanted = sum(map(stored, prompts)) // CHUNK * chunk_bytes(spec)
        while server.metrics("loaded_bytes") != {0: wanted, 1: wanted}:
            assert time.monotonic() < until, server.metrics("loaded_bytes")
            time.sleep(0.1)
        assert server.metrics("lookup_errors") == {0: 0, 1: 0}


def test_two_engines_of_one_user_with_default_settings_do_not_meet(baseline: Baseline) -> None:
    spec = EngineSpec(layout="mp", num_blocks=128)
    source = Prompts("two engines")
    of_each = [[source.fresh(n) for n in (199, 300)] for _ in range(2)]
    with Engine(spec) as one, Engine(spec) as two:
        engines = (one, two)
        for engine, prompts in zip(engines, of_each, strict=True):
            ask(engine, baseline, prompts, 0)
        for engine in engines:
            engine.cool()
        for engine, prompts in zip(engines, of_each, strict=True):
            (report,) = ask(engine, baseline, prompts, sum(map(stored, prompts)))
            assert report.counters["loaded_bytes"] == 7 * chunk_bytes(spec)
        # What only the other one has is no hit here.
        for engine, prompts in zip(engines, of_each[::-1], strict=True):
            ask(engine, baseline, prompts, 0)
