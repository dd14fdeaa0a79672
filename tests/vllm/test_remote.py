"""A tier on a server in real engines: what one has computed serves another, and is never wrong.

As in test_disk, the engine's memory is overwritten with noise before a hit, and host memory is
emptied, so that what is loaded was on the server.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from checks import Baseline, Prompts, check
from harness import Engine, EngineSpec, Prompt

import redis_servers
from redis_servers import Server

CHUNK = 64
SPEC = EngineSpec()
LENGTHS = (199, 300, 129)
TTL_S = 3600
# After so long a server that is back is used again.
RECOVERY_S = 30.0


def over(server: Server, spec: EngineSpec = SPEC) -> EngineSpec:
    """An engine over a server."""
    remote = (
        ("lmcache.remote_url", server.url),
        ("lmcache.remote_ttl", TTL_S),
        # What the tests wait for must not hang on how busy this machine is.
        ("lmcache.lookup_timeout_ms", 60_000),
    )
    return replace(spec, extra=(*spec.extra, *remote))


def stored(prompt: Prompt) -> int:
    return len(prompt) // CHUNK * CHUNK


def forget(engine: Engine) -> None:
    """Nobody but the server has a chunk."""
    engine.cool()
    engine.worker("probe_forget")


def names(server: Server) -> list[bytes]:
    """The names of all values."""
    found: list[bytes] = server.ask("KEYS", "*")
    return found


def faults(engine: Engine) -> dict[str, int]:
    """Faults of the tier since the start, by reason."""
    counters, prefix = engine.report().counters, "RemoteBackend_faults_"
    return {
        name.removeprefix(prefix): count
        for name, count in counters.items()
        if name.startswith(prefix) and count
    }


def served(engine: Engine, baseline: Baseline, prompts: Sequence[Prompt]) -> float:
    """Seconds until every prompt is a hit from the server, each answer on the way right."""
    began = time.monotonic()
    for prompt in prompts:
        while True:
            forget(engine)
            reply, _ = check(engine, baseline, [prompt])
            if reply.external_tokens == stored(prompt):
                break
            assert time.monotonic() - began < 120, f"{reply.external_tokens} of {stored(prompt)}"
    return time.monotonic() - began


class Filled:
    """A server that an engine has filled and left, its prompts, and what it was seen to store."""

    def __init__(self, folder: Path, baseline: Baseline) -> None:
        self.server, self.seen = Server(), str(folder / "seen")
        source = Prompts("remote")
        self.prompts = [source.fresh(n) for n in LENGTHS]
        with Engine(over(self.server, replace(SPEC, layout="mp"))) as engine:
            check(engine, baseline, self.prompts)
            engine.worker("probe_keep_seen", self.seen)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, baseline: Baseline) -> Iterator[Filled]:
    """The server of this file."""
    redis_servers.require()
    made = Filled(tmp_path_factory.mktemp("remote"), baseline)
    yield made
    made.server.close()


@pytest.fixture(scope="module")
def engine(filled: Filled) -> Iterator[Engine]:
    """An engine of another process than the one that has stored."""
    with Engine(over(filled.server)) as engine:
        engine.worker("probe_take_seen", filled.seen)
        yield engine


def test_an_engine_is_served_what_another_has_computed(
    filled: Filled, engine: Engine, baseline: Baseline
) -> None:
    assert len(names(filled.server)) == sum(stored(prompt) // CHUNK for prompt in filled.prompts)
    for prompt in filled.prompts:
        check(engine, baseline, [prompt], [(0, stored(prompt))])
    assert "tiers: local_cpu healthy, RemoteBackend healthy" in engine.log()
    assert faults(engine) == {}


def test_two_identities_on_one_server_never_meet(
    filled: Filled, engine: Engine, baseline: Baseline
) -> None:
    prompts = filled.prompts[:2]
    spec = replace(SPEC, options='{"served_model_name": "another"}')
    with Engine(over(filled.server, spec)) as stranger:
        reply, _ = check(stranger, baseline, prompts, [(0, 0), (0, 0)])
        assert reply.external_tokens == 0
        served(stranger, baseline, prompts)
    # And what was there before is there still.
    for prompt in prompts:
        forget(engine)
        check(engine, baseline, [prompt], [(0, stored(prompt))])


def test_what_has_ended_is_a_miss(filled: Filled, engine: Engine, baseline: Baseline) -> None:
    ends = [filled.server.ask("PTTL", name) for name in names(filled.server)]
    assert ends
    assert all(0 < end <= TTL_S * 1000 for end in ends)
    forget(engine)
    for name in names(filled.server):
        filled.server.ask("PEXPIRE", name, 1)
    redis_servers.wait_until("all have ended", lambda: names(filled.server) == [])
    for prompt in filled.prompts:
        check(engine, baseline, [prompt], [(0, 0)])
    assert faults(engine) == {}
    served(engine, baseline, filled.prompts)


def test_a_server_that_is_gone_and_comes_back_costs_misses_and_no_more(
    filled: Filled, engine: Engine, baseline: Baseline
) -> None:
    filled.server.kill()
    for _ in range(2):
        for prompt in filled.prompts:
            forget(engine)
            check(engine, baseline, [prompt], [(0, 0)])
    assert faults(engine).keys() <= {"unreachable", "timeout", "deadline"}
    assert engine.report().counters["RemoteBackend_out_of_reach"] == 1
    began = time.monotonic()
    filled.server.start()
    redis_servers.wait_until(
        "it is used again",
        lambda: engine.report().counters["RemoteBackend_out_of_reach"] == 0,
    )
    assert time.monotonic() - began < RECOVERY_S
    served(engine, baseline, filled.prompts)
