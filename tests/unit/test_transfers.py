"""Stores and loads that are handed over: what is there when, and what is left at the end."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from lmcache_rs import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata, _native
from lmcache_rs.cache_engine import Loaded, Stored

BLOCKS, BLOCK, CHUNK, LAYERS = 32, 4, 8, 2
HASHES = bytes(range(64))
FROM, TO = [1, 2, 3, 4], [11, 12, 13, 14]
STORE_BYTES = LAYERS * len(FROM) * 2 * BLOCK * 6 * 4


@pytest.fixture
def engine() -> Iterator[LMCacheEngine]:
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, max_local_cpu_size=64 * 4096 / 2**30
    )
    metadata = LMCacheMetadata("m", 1, 0, "float32", block_size=BLOCK)
    with LMCacheEngine(config, metadata, layout="opaque") as engine:
        caches = [torch.randn(BLOCKS, 2, BLOCK, 6) for _ in range(LAYERS)]
        engine.register_kv_caches(caches, block_tokens=BLOCK)
        engine.caches = caches  # type: ignore[attr-defined]
        yield engine


def slow_down(engine: LMCacheEngine, bytes_per_second: int) -> None:
    engine._transfers = _native.TransferQueue(bytes_per_second)


def books(engine: LMCacheEngine) -> dict[str, int]:
    assert engine.local_cpu is not None
    return engine.local_cpu.audit()


def found(engine: LMCacheEngine) -> int:
    assert engine.local_cpu is not None
    return engine.local_cpu.longest_prefix("ns", HASHES)


def test_a_store_and_a_load_end_as_if_they_had_been_waited_for(engine: LMCacheEngine) -> None:
    store = engine.begin_store_chunks("ns", HASHES, FROM)
    assert store.wait()
    assert store.is_done()
    assert store.outcome() == Stored(2, 16, STORE_BYTES, 0)
    assert found(engine) == 2
    load = engine.begin_load_chunks("r", "ns", HASHES, TO, skip=BLOCK)
    assert load.wait(60_000)
    assert load.outcome() == Loaded(16, 12, STORE_BYTES * 3 // 4)
    for cache in engine.caches:  # type: ignore[attr-defined]
        assert torch.equal(cache[TO[1:]], cache[FROM[1:]])
        assert not torch.equal(cache[TO[0]], cache[FROM[0]])
    short = engine.begin_load_chunks("r", "ns", HASHES, TO, skip=0, end=2 * CHUNK - 1)
    assert short.wait()
    assert short.outcome().end == CHUNK


def test_memory_and_leases_are_taken_at_once_and_chunks_seen_when_copied(
    engine: LMCacheEngine,
) -> None:
    slow_down(engine, STORE_BYTES * 20)
    assert engine.local_cpu is not None
    store = engine.begin_store_chunks("ns", HASHES, FROM)
    assert not store.is_done()
    assert books(engine)["reserved_bytes"] > 0
    assert found(engine) == 0
    with pytest.raises(RuntimeError, match="has not ended"):
        store.outcome()
    assert not store.wait(1)
    assert store.wait()
    assert found(engine) == 2
    engine.local_cpu.lookup("r", "ns", HASHES)
    load = engine.begin_load_chunks("r", "ns", HASHES, TO, skip=0)
    assert books(engine)["leases"] == 0
    assert books(engine)["leased_bytes"] > 0
    engine.local_cpu.clear()
    assert load.wait()
    assert load.outcome().end == 16
    assert books(engine)["free_bytes"] == books(engine)["capacity_bytes"]


def test_what_is_cleared_under_its_copy_does_not_come_back(engine: LMCacheEngine) -> None:
    slow_down(engine, STORE_BYTES * 20)
    store = engine.begin_store_chunks("ns", HASHES, FROM)
    engine.clear()
    assert store.wait()
    assert store.outcome() == Stored(0, 0, 0, 0)
    assert found(engine) == 0
    assert books(engine)["reserved_bytes"] == 0


def test_a_dropped_handle_leaves_a_whole_store(engine: LMCacheEngine) -> None:
    slow_down(engine, STORE_BYTES * 20)
    engine.begin_store_chunks("ns", HASHES, FROM)
    while found(engine) < 2:
        time.sleep(0.001)
    assert books(engine)["reserved_bytes"] == 0


def test_a_close_waits_for_the_copy_and_calls_off_what_waits(engine: LMCacheEngine) -> None:
    slow_down(engine, STORE_BYTES * 20)
    first = engine.begin_store_chunks("ns", HASHES[:32], FROM)
    others = [engine.begin_store_chunks("ns", bytes([at]) * 32, TO) for at in range(3)]
    while books(engine)["reserved_bytes"] and not first.is_done():
        time.sleep(0.001)
    engine.close()
    assert first.is_done()
    assert first.outcome().chunks == 1
    assert all(other.is_done() for other in others)
    assert others[-1].outcome() == Stored(0, 0, 0, 0)
    with pytest.raises(RuntimeError, match="registered"):
        engine.begin_store_chunks("ns", HASHES, FROM)


def test_waiting_leaves_the_interpreter_to_others(engine: LMCacheEngine) -> None:
    slow_down(engine, STORE_BYTES * 5)
    engine.begin_store_chunks("ns", bytes(32), TO)
    store = engine.begin_store_chunks("ns", HASHES, FROM)
    waiting = threading.Thread(target=store.wait)
    waiting.start()
    turns = 0
    while waiting.is_alive():
        turns += 1
    waiting.join()
    assert turns > 1
    assert store.is_done()


def use_in_fork(engine: LMCacheEngine, store: object) -> None:
    for use in (
        store.is_done,  # type: ignore[attr-defined]
        lambda: engine.begin_store_chunks("ns", HASHES, FROM),
    ):
        with pytest.raises(RuntimeError, match="fork"):
            use()


def test_a_fork_may_not_use_a_transfer(engine: LMCacheEngine) -> None:
    store = engine.begin_store_chunks("ns", HASHES, FROM)
    child = multiprocessing.get_context("fork").Process(target=use_in_fork, args=(engine, store))
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_an_engine_without_memory_has_nothing_to_wait_for() -> None:
    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, local_cpu=False)
    metadata = LMCacheMetadata("m", 1, 0, "float32", block_size=BLOCK)
    with LMCacheEngine(config, metadata, layout="opaque") as engine:
        caches = [torch.randn(BLOCKS, 2, BLOCK, 6) for _ in range(LAYERS)]
        engine.register_kv_caches(caches, block_tokens=BLOCK)
        store = engine.begin_store_chunks("ns", HASHES, FROM)
        assert store.is_done()
        assert store.wait()
        assert store.outcome() == Stored(0, 0, 0, 0)
        assert engine.begin_load_chunks("r", "ns", HASHES, TO, skip=4).outcome() == Loaded(4, 0, 0)
