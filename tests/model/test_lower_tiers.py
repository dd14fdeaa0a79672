"""A tier below host memory serves vLLM's requests: what it has is brought, and nobody waits for it.

The judge holds every byte and lease to the same rules as in the schedules.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Iterator

import pytest
from engine import Engine, block_hasher
from lossy_shelf import LossyShelf, run
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


# --- more than host memory has room for -----------------------------------------------------------

LARGE = 5 * CHUNK + 1
SMALL = {"pool_chunks": 4}
"""Two chunks are for streams, and of the other two requests without blocks hold one."""


def streamed(engine: Engine) -> collections.Counter[str]:
    """What streams have done; nothing where the pool is too small to leave them a share."""
    assert engine.worker._manager.worker is not None
    streams = engine.worker._manager.worker._tiers._streams
    return collections.Counter({} if streams is None else streams.counts)


def long_request(name: str) -> Request:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    tokens = [at % 3 for at in range(LARGE)]
    return Request(name, tokens, params, None, block_hasher=block_hasher)


def small_over_long(opened: Open, **changes: object) -> Engine:
    """An engine with little memory, over a shelf that one with much has filled."""
    large = opened()
    large.add(long_request("first"), "")
    run(large)
    assert large._store.storage_manager.flush(60)
    large.close()
    chunks = Shelf.newest.chunks
    assert len(chunks) == LARGE // CHUNK
    engine = opened(**SMALL, **changes)
    Shelf.newest.chunks = chunks
    engine.judge._known_chunks |= large.judge._known_chunks
    return engine


def test_a_hit_larger_than_the_pool_comes_whole(opened: Open) -> None:
    engine = small_over_long(opened)
    before = streamed(engine)
    engine.add(long_request("again"), "")
    run(engine)
    assert engine.judge.seen["promises that are waited for"] == 1
    assert engine.judge.seen["full hits"] == 1
    assert engine.judge.seen["failed loads"] == 0
    assert (streamed(engine) - before) == {"streamed_loads": 1, "streamed_chunks": 5}
    assert len(Shelf.newest.reads) == 5, "each chunk once"
    engine.finish()


def test_what_the_engine_has_of_it_is_not_read(opened: Open) -> None:
    engine = small_over_long(opened)
    engine.add(request("short", 2 * CHUNK + 1), "")
    run(engine)
    Shelf.newest.reads.clear()
    engine.pool.clear()
    engine.add(long_request("again"), "")
    run(engine)
    assert len(Shelf.newest.reads) == 3, "the engine has two of five"
    engine.finish()


def test_a_stream_that_loses_a_chunk_on_the_way_ends_there(opened: Open) -> None:
    engine = small_over_long(opened)
    keys = list(Shelf.newest.chunks)
    data, metadata = Shelf.newest.chunks[keys[3]]
    Shelf.newest.chunks[keys[3]] = data[:-1] + bytes([data[-1] ^ 1]), metadata
    engine.add(long_request("again"), "")
    run(engine)
    assert engine.judge.seen["promises that are waited for"] == 1
    assert engine.judge.seen["failed loads that were waited for"] == 1
    engine.finish()


def until_streaming(engine: Engine, name: str) -> None:
    """The request waits for its stream, which waits for the shelf."""
    engine.add(long_request(name), "")
    deadline = time.monotonic() + 60
    while name not in engine.judge.waited_for:
        assert time.monotonic() < deadline, "the stream begins"
        engine.step()
    Shelf.newest.is_open.clear()
    for _ in range(3):
        engine.step()


def test_whoever_goes_in_the_middle_of_its_stream_leaves_nothing_behind(opened: Open) -> None:
    engine = small_over_long(opened)
    until_streaming(engine, "again")
    engine.abort("again")
    Shelf.newest.is_open.set()
    run(engine)
    # And the next one is served.
    engine.add(long_request("another"), "")
    run(engine)
    assert engine.judge.seen["full hits"] >= 1
    engine.finish()


def test_a_tier_that_hangs_in_the_middle_of_a_stream_is_given_up_on(opened: Open) -> None:
    engine = small_over_long(opened, lookup_ms=2000)
    tier = engine._store.storage_manager.backends["shelf"]
    assert isinstance(tier, BackendTier)
    tier.lane._deadline_s = 3600
    until_streaming(engine, "again")
    engine.add(long_request("behind it"), "")
    run(engine)
    # Nobody waits for the shelf any longer, and what comes later computes.
    engine.add(long_request("later"), "")
    run(engine)
    Shelf.newest.is_open.set()
    engine.finish()


def test_a_reset_in_the_middle_of_a_stream_harms_nobody(opened: Open) -> None:
    engine = small_over_long(opened)
    until_streaming(engine, "again")
    half = engine.connector._manager.scheduler
    assert half is not None
    assert half.reset_cache()
    Shelf.newest.is_open.set()
    run(engine)
    engine.add(long_request("another"), "")
    run(engine)
    assert engine.judge.seen["promises"] == 1, "what was stored before is not found"
    engine.finish()


def test_an_engine_that_is_closed_in_the_middle_of_a_stream_ends(opened: Open) -> None:
    engine = small_over_long(opened)
    until_streaming(engine, "again")
    engine.transfers.go_on()
    engine.close()


NUM_STREAM_SCHEDULES = int(os.environ.get("MODEL_STREAM_SCHEDULES", "300"))
seen: collections.Counter[str] = collections.Counter()


@pytest.mark.parametrize("first", range(0, NUM_STREAM_SCHEDULES, 100))
def test_every_schedule_over_a_small_pool_and_a_shelf_keeps_every_rule(first: int) -> None:
    for seed in range(first, min(first + 100, NUM_STREAM_SCHEDULES)):
        schedule = LossyShelf(seed)
        try:
            engine = schedule.run()
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error!r}") from error
        seen.update(engine.judge.seen, schedules=1)
        if schedule.settings.recompute:
            seen.update(streamed(engine))


def test_those_schedules_reach_what_they_are_meant_to() -> None:
    if not seen:
        pytest.skip("no schedule has run")
    print(dict(seen))
    for what, least in {
        "streamed_loads": 0.2,
        "streamed_chunks": 0.1,
        "failed loads that were waited for": 0.05,
        "aborts during a load": 0.02,
    }.items():
        assert seen[what] >= least * seen["schedules"], f"too few {what}: {seen[what]}"
