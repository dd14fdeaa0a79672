"""A tier on an object store in real engines: what one has computed serves another, never wrong.

The server is moto's, which loses what it has when it ends: a restart is a proxy that breaks all
connections, refuses new ones, and comes back.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from checks import Baseline, Prompts, check
from harness import EngineSpec
from test_remote import CHUNK, SPEC, Engine, faults, forget, served, stored

import s3_server
from redis_servers import wait_until
from s3_server import Proxy

LENGTHS = (199, 300)


class Filled:
    """A store that an engine has filled and left, its prompts, and what it was seen to store."""

    def __init__(self, folder: Path, baseline: Baseline) -> None:
        self.server = s3_server.shared_server()
        self.proxy = Proxy(self.server.port)
        self.prefix, self.seen = secrets.token_hex(8), str(folder / "seen")
        source = Prompts("remote s3")
        self.prompts = [source.fresh(n) for n in LENGTHS]
        with Engine(self.over(replace(SPEC, layout="mp"))) as engine:
            check(engine, baseline, self.prompts)
            engine.worker("probe_keep_seen", self.seen)

    def over(self, spec: EngineSpec = SPEC, *extra: tuple[str, object]) -> EngineSpec:
        """An engine over the store."""
        remote = (
            ("lmcache.remote_url", self.proxy.url(self.prefix)),
            # What the tests wait for must not hang on how busy this machine is.
            ("lmcache.lookup_timeout_ms", 60_000),
        )
        return replace(spec, extra=(*spec.extra, *remote, *extra))

    def names(self) -> list[str]:
        return self.server.names(self.prefix)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, baseline: Baseline) -> Iterator[Filled]:
    """The store of this file."""
    s3_server.require()
    with s3_server.credentials():
        made = Filled(tmp_path_factory.mktemp("s3"), baseline)
        yield made
        made.proxy.stop()


def test_an_engine_is_served_what_another_has_computed_across_a_restart_of_the_store(
    filled: Filled, baseline: Baseline
) -> None:
    chunks = sum(stored(prompt) // CHUNK for prompt in filled.prompts)
    assert len(filled.names()) == chunks
    filled.proxy.stop()
    filled.proxy.start()
    with Engine(filled.over()) as engine:
        engine.worker("probe_take_seen", filled.seen)
        for prompt in filled.prompts:
            check(engine, baseline, [prompt], [(0, stored(prompt))])
        assert "tiers: local_cpu healthy, RemoteBackend healthy" in engine.log()
        assert faults(engine) == {}
        # And under a running engine: misses while it is gone, hits when it is back.
        filled.proxy.stop()
        for prompt in filled.prompts:
            forget(engine)
            check(engine, baseline, [prompt], [(0, 0)])
        assert faults(engine).keys() <= {"unreachable", "timeout", "deadline"}
        filled.proxy.start()
        wait_until(
            "it is used again",
            lambda: engine.report().counters["RemoteBackend_out_of_reach"] == 0,
        )
        served(engine, baseline, filled.prompts)
    assert len(filled.names()) == chunks


def test_two_identities_in_one_store_never_meet(filled: Filled, baseline: Baseline) -> None:
    before = set(filled.names())
    spec = replace(SPEC, options='{"served_model_name": "another"}')
    with Engine(filled.over(spec)) as stranger:
        reply, _ = check(stranger, baseline, filled.prompts, [(0, 0)] * len(filled.prompts))
        assert reply.external_tokens == 0
        served(stranger, baseline, filled.prompts)
    assert len(filled.names()) == 2 * len(before)
    assert before <= set(filled.names())


def test_packed_chunks_are_served_and_never_meet_others(filled: Filled, baseline: Baseline) -> None:
    before = set(filled.names())
    with Engine(filled.over(SPEC, ("lmcache.remote_serde", "lossless"))) as engine:
        reply, _ = check(engine, baseline, filled.prompts, [(0, 0)] * len(filled.prompts))
        assert reply.external_tokens == 0
        served(engine, baseline, filled.prompts)
        counters = engine.report().counters
        assert counters["RemoteBackend_sent_bytes"] > 0
        assert faults(engine) == {}
    packed = set(filled.names()) - before
    assert len(packed) == sum(stored(prompt) // CHUNK for prompt in filled.prompts)
    assert all("/lmcache_rs.v2/" in name for name in packed)
