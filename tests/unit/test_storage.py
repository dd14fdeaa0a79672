"""Memory objects and the tiers as one store."""

from __future__ import annotations

import gc
import os

import pytest

from lmcache_rs import (
    CacheEngineKey,
    LMCacheEngineConfig,
    MemoryObj,
    StorageManager,
    _native,
)

PAGE = 4096


def manager(pages: int = 8, **changes: object) -> StorageManager:
    settings = {"max_local_cpu_size": pages * PAGE / 2**30, **changes}
    return StorageManager(LMCacheEngineConfig.from_defaults(**settings))


def key(number: int, **changes: object) -> CacheEngineKey:
    return CacheEngineKey("m", 1, 0, bytes([number]) * 32, "float32", **changes)  # type: ignore[arg-type]


def filled(store: StorageManager, *values: int) -> list[MemoryObj]:
    objects = store.batched_allocate([PAGE] * len(values))
    assert objects is not None
    for memory_obj, value in zip(objects, values, strict=True):
        memoryview(memory_obj)[:] = bytes([value]) * PAGE
    return objects


def test_what_is_put_is_got_and_sealed() -> None:
    store = manager()
    objects = filled(store, 1, 2)
    assert not objects[0].sealed
    store.batched_put([key(1), key(2)], objects)
    assert all(memory_obj.sealed for memory_obj in objects)
    got = store.batched_get([key(1), key(2)])
    assert [memory_obj.to_bytes()[:1] for memory_obj in got if memory_obj] == [b"\1", b"\2"]
    assert got[0] is not None
    assert got[0].nbytes == PAGE
    with pytest.raises(TypeError, match="read-only"):
        memoryview(got[0])[0] = 9


def test_put_names_the_way_in() -> None:
    with pytest.raises(RuntimeError, match="batched_put"):
        manager().put(key(1), None)


def test_memory_is_put_once_and_not_under_a_writer() -> None:
    store = manager()
    (memory_obj,) = filled(store, 1)
    writer = memoryview(memory_obj)
    with pytest.raises(BufferError, match="release"):
        store.batched_put([key(1)], [memory_obj])
    writer.release()
    store.batched_put([key(1)], [memory_obj])
    with pytest.raises(RuntimeError, match="put or released before"):
        store.batched_put([key(2)], [memory_obj])


def test_a_known_key_keeps_what_it_has() -> None:
    store = manager()
    first, second = filled(store, 1, 2)
    store.batched_put([key(1)], [first])
    store.batched_put([key(1)], [second])
    (got,) = store.batched_get([key(1)])
    assert got is not None
    assert got.to_bytes()[:1] == b"\1"
    assert second.to_bytes()[:1] == b"\1", "the handle shows what the key holds"


def test_allocation_is_all_or_nothing() -> None:
    store = manager(pages=3)
    assert store.batched_allocate([PAGE] * 4) is None
    held = store.batched_allocate([PAGE] * 3)
    assert held is not None
    assert store.batched_allocate([1]) is None
    del held
    gc.collect()
    assert store.batched_allocate([PAGE] * 3) is not None


def test_a_gap_ends_the_answer_in_every_verb() -> None:
    store = manager()
    store.batched_put([key(1), key(3)], filled(store, 1, 3))
    keys = [key(1), key(2), key(3)]
    assert store.batched_contains(keys) == 1
    assert store.batched_get(keys)[1:] == [None, None]
    chunks = [(each, at * 8, at * 8 + 8) for at, each in enumerate(keys)]
    assert store.get_block_mapping(chunks) == {"LocalCPUBackend": chunks[:1]}
    assert store.contains(key(3)) == "LocalCPUBackend"
    assert store.contains(key(2)) is None


def test_namespaces_are_apart() -> None:
    store = manager()
    store.batched_put([key(1)], filled(store, 1))
    assert store.contains(key(1, request_configs={"lmcache.tag.t": "a"})) is None
    assert store.contains(key(1, facts={"layout": "x"})) is None


def test_what_is_held_outlives_eviction_and_clear() -> None:
    store = manager(pages=2)
    store.batched_put([key(1)], filled(store, 1))
    (held,) = store.batched_get([key(1)])
    assert held is not None
    for number in range(2, 9):
        objects = store.batched_allocate([PAGE])
        if objects is not None:
            store.batched_put([key(number)], objects)
    assert store.contains(key(1)) is not None, "held, so not evicted"
    assert store.clear() == 2
    assert held.to_bytes() == b"\1" * PAGE


def test_a_closed_store_is_empty_and_stays_so() -> None:
    store = manager()
    store.batched_put([key(1)], filled(store, 1))
    store.close()
    store.close()
    assert store.batched_allocate([1]) is None
    assert store.contains(key(1)) is None


def test_without_host_memory_there_is_no_tier() -> None:
    store = manager(local_cpu=False)
    assert store.batched_allocate([1]) is None
    assert store.batched_get([key(1)]) == [None]
    assert (store.batched_contains([key(1)]), store.clear()) == (0, 0)


def test_a_pool_that_cannot_be_had_is_a_memory_error_with_numbers() -> None:
    with pytest.raises(MemoryError, match="max_local_cpu_size"):
        _native.LocalCpu(1 << 50, 1000)
    with pytest.raises(ValueError, match="smaller than one page"):
        _native.LocalCpu(100, 1000)


def test_wrong_hashes_are_refused_with_their_length() -> None:
    pool = _native.LocalCpu(PAGE, 1000)
    for verb in (pool.get, pool.longest_prefix):
        with pytest.raises(ValueError, match="32 bytes each, got 33"):
            verb("ns", bytes(33))
    with pytest.raises(ValueError, match="hash must be 32 bytes"):
        pool.remove("ns", b"")


def test_every_handle_raises_in_a_fork_and_dies_there_in_silence() -> None:
    pool = _native.LocalCpu(4 * PAGE, 1000)
    (memory_obj,) = pool.allocate([PAGE]) or []
    child = os.fork()
    if child == 0:
        code = 0
        for use in (pool.audit, pool.close, memory_obj.to_bytes, lambda: memory_obj.nbytes):
            try:
                use()
                code = 1
            except RuntimeError:
                pass
        del pool, memory_obj
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.put("ns", bytes(32), memory_obj)
    assert pool.audit()["cached_bytes"] == PAGE
