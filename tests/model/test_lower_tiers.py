"""A tier below host memory serves vLLM's requests: what it has is brought, and nobody waits for it.

The judge holds every byte and lease to the same rules as in the schedules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from engine import Engine, block_hasher
from settings import Settings
from shelf import Shelf
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from world import CHUNK

from lmcache_rs.storage.tier import BackendTier

TEXT = [at % 3 for at in range(4 * CHUNK)]
SETTINGS = Settings(shelf=True)


def request(name: str, num_tokens: int) -> Request:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    return Request(name, TEXT[:num_tokens], params, None, block_hasher=block_hasher)


Open = Callable[..., Engine]


@pytest.fixture(params=[0.0, 1.0], ids=["in step", "waited for"])
def opened(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Makes an engine over a shelf."""
    engines: list[Engine] = []

    def make(**changes: object) -> Engine:
        engines.append(Engine(SETTINGS.but(waited_for=request.param, **changes)))
        return engines[-1]

    yield make
    Shelf.newest.is_open.set()
    for engine in engines:
        engine.close()


def run(engine: Engine) -> None:
    deadline = time.monotonic() + 60
    while engine.scheduler.has_requests():
        assert time.monotonic() < deadline, "every request ends"
        engine.step()


def stored(engine: Engine, num_tokens: int) -> None:
    """The shelf has the chunks, and nobody else."""
    engine.add(request("first", num_tokens), "")
    run(engine)
    assert engine._store.storage_manager.flush(60)
    engine.pool.clear()
    engine.reset(preempt=False)
    engine.judge.seen.clear()


def test_what_host_memory_has_lost_comes_from_the_tier_below(opened: Open) -> None:
    stored(engine := opened(), 3 * CHUNK + 1)
    assert len(Shelf.newest.chunks) == 3
    engine.add(request("again", 3 * CHUNK + 1), "")
    run(engine)
    assert engine.judge.seen["promises"] == 1
    assert len(Shelf.newest.reads) == 3
    assert engine.judge.seen["pending answers"] > 0
    # Now it is in host memory again.
    engine.reset(preempt=False)
    engine.add(request("once more", 3 * CHUNK + 1), "")
    run(engine)
    assert engine.judge.seen["promises"] == 2
    assert len(Shelf.newest.reads) == 3
    engine.finish()


def test_only_what_is_missing_is_read(opened: Open) -> None:
    stored(engine := opened(), 3 * CHUNK + 1)
    engine.add(request("short", CHUNK + 1), "")
    run(engine)
    Shelf.newest.reads.clear()
    engine.reset(preempt=False)
    engine.add(request("long", 3 * CHUNK + 1), "")
    run(engine)
    assert len(Shelf.newest.reads) == 2
    assert engine.judge.seen["promises"] == 2
    engine.finish()


def test_what_the_tier_loses_meanwhile_ends_the_prefix(opened: Open) -> None:
    stored(engine := opened(), 3 * CHUNK + 1)
    lost = list(Shelf.newest.chunks)[1]
    data, metadata = Shelf.newest.chunks[lost]
    Shelf.newest.chunks[lost] = data[:-1] + bytes([data[-1] ^ 1]), metadata
    engine.add(request("again", 3 * CHUNK + 1), "")
    run(engine)
    assert engine.judge.seen["promises"] == 1
    assert lost not in Shelf.newest.chunks or Shelf.newest.chunks[lost][0] == data
    engine.finish()


def test_a_request_computes_when_the_tier_does_not_answer_in_time(opened: Open) -> None:
    stored(engine := opened(lookup_ms=50), 3 * CHUNK + 1)
    # It would answer in an hour.
    tier = engine._store.storage_manager.backends["shelf"]
    assert isinstance(tier, BackendTier)
    tier.lane._deadline_s = 3600
    Shelf.newest.is_open.clear()
    engine.add(request("again", 3 * CHUNK + 1), "")
    run(engine)
    assert engine.judge.seen["promises"] == 0
    assert engine.judge.seen["pending answers"] > 0
    Shelf.newest.is_open.set()
    engine.finish()


def test_a_request_that_goes_while_its_chunks_come_leaves_nothing_behind(opened: Open) -> None:
    stored(engine := opened(), 3 * CHUNK + 1)
    Shelf.newest.is_open.clear()
    engine.add(request("again", 3 * CHUNK + 1), "")
    for _ in range(3):
        engine.step()
    engine.abort("again")
    Shelf.newest.is_open.set()
    run(engine)
    engine.finish()


def test_a_store_that_stays_unwell_costs_each_request_one_load(opened: Open) -> None:
    """The tier brings back what the failed load took out of the index, again and again."""
    stored(engine := opened(), 3 * CHUNK + 1)
    engine._store.is_healthy = lambda: False  # type: ignore[method-assign]
    engine.add(request("again", 3 * CHUNK + 1), "")
    run(engine)
    assert engine.judge.seen["promises"] == 1
    del engine._store.is_healthy
    engine.finish()
