"""Memory objects and the tiers as one store."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch

from lmcache_rs import (
    CacheEngineKey,
    LMCacheEngineConfig,
    MemoryFormat,
    MemoryObj,
    StorageManager,
    _native,
)
from lmcache_rs.storage import MemoryObjMetadata

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


def test_memory_of_another_pool_is_refused_and_stays_writable() -> None:
    home, other = _native.LocalCpu(4 * PAGE, 1000), _native.LocalCpu(4 * PAGE, 1000)
    (memory_obj,) = home.allocate([PAGE]) or []
    with pytest.raises(ValueError, match="another pool"):
        other.put("ns", bytes(32), memory_obj)
    assert other.audit()["free_bytes"] == 4 * PAGE
    assert home.put("ns", bytes(32), memory_obj)


def test_a_batch_is_put_whole_or_not_at_all() -> None:
    store = manager()
    objects = filled(store, 1, 2)
    exported = memoryview(objects[1])
    keys = [key(1), key(2)]
    with pytest.raises(BufferError, match="exported"):
        store.batched_put(keys, objects)
    exported.release()
    with pytest.raises(ValueError, match="2 keys for 1"):
        store.batched_put(keys, objects[:1])
    with pytest.raises(RuntimeError, match="twice"):
        store.batched_put(keys, [objects[0], objects[0]])
    (foreign,) = filled(manager(), 3)
    with pytest.raises(ValueError, match="another pool"):
        store.batched_put(keys, [objects[0], foreign])
    assert store.batched_contains(keys) == 0
    store.batched_put(keys, objects)
    assert store.batched_contains(keys) == 2


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


def test_sizes_beyond_all_memory_are_refused_and_leave_the_books_alone() -> None:
    pool = _native.LocalCpu(8 * PAGE, 1000)
    for nbytes in (2**64 - 1, 2**64 - 4095, 2**63, 2**40):
        assert pool.allocate([nbytes]) is None
    assert pool.audit()["free_bytes"] == 8 * PAGE
    cache = torch.zeros(2, dtype=torch.uint8)
    size = {"block_tokens": 1, "block_bytes": 1, "block_stride": 1}
    paged = _native.PagedCache.opaque([(cache.data_ptr(), 2)] * 2, 2, keep_alive=cache, **size)
    with pytest.raises(ValueError, match="address"):
        paged.chunk_bytes(2**63)
    size["block_stride"] = 2**62
    with pytest.raises(ValueError, match="address"):
        _native.PagedCache.opaque([(4096, 2**63)], 2**62, keep_alive=cache, **size)
    for slots in ([2**63 - 1] * 2, [2**63 - 2, 2**63 - 1]):
        where = {"chunk_size": 2, "num_tokens": 2, "slots": slots}
        with pytest.raises(ValueError, match="outside the registered cache"):
            _native.store(pool, paged, "ns", bytes(32), **where)  # type: ignore[arg-type]


def test_arrays_of_another_byte_order_are_refused() -> None:
    for order, dtype in ((">", "i4"), (">", "i8"), (">", "u4")):
        swapped = np.arange(32).astype(order + dtype)
        with pytest.raises(ValueError, match="byte order"):
            _native.Chain(16, bytes(32)).extend(swapped)
    assert _native.Chain(16, bytes(32)).extend(np.arange(32, dtype="<i4")) == 2
    pool, cache = _native.LocalCpu(8 * PAGE, 1000), torch.zeros(32, dtype=torch.uint8)
    size = {"block_tokens": 1, "block_bytes": 1, "block_stride": 1}
    paged = _native.PagedCache.opaque([(cache.data_ptr(), 32)], 32, keep_alive=cache, **size)
    where = {"chunk_size": 16, "num_tokens": 16, "slots": np.arange(16).astype(">i8")}
    with pytest.raises(ValueError, match="byte order"):
        _native.store(pool, paged, "ns", bytes(32), **where)  # type: ignore[arg-type]


def _resident_mib() -> int:
    with open("/proc/self/status") as status:
        lines = [line.split() for line in status if line.startswith(("RssAnon", "RssShmem"))]
    return sum(int(kib) for _, kib, _ in lines) // 1024


def test_a_close_gives_the_memory_back_at_once() -> None:
    before = _resident_mib()
    pool = _native.LocalCpu(64 * 2**20, 1000)
    assert _resident_mib() - before >= 60
    pool.close()
    assert _resident_mib() - before < 5
    assert pool.audit()["cached_bytes"] == 0


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


# --- objects with a shape -----------------------------------------------------------------------

FORMATS = [
    (MemoryFormat.KV_T2D, (3, 5, 2, 8)),
    (MemoryFormat.KV_2LTD, (2, 3, 5, 8)),
    (MemoryFormat.KV_MLA_FMT, (3, 5, 8)),
    (MemoryFormat.OPAQUE, (3, 5, 8)),
]


def shaped(
    store: StorageManager, fmt: MemoryFormat, shape: tuple[int, ...], count: int = 1
) -> list[MemoryObj]:
    objects = store.batched_allocate(shape, torch.bfloat16, fmt, count)
    assert objects is not None
    return objects


@pytest.mark.parametrize(("fmt", "shape"), FORMATS)
def test_a_tensor_is_the_memory_itself(fmt: MemoryFormat, shape: tuple[int, ...]) -> None:
    (memory_obj,) = shaped(manager(), fmt, shape)
    assert (memory_obj.shape, memory_obj.fmt, memory_obj.num_tokens) == (shape, fmt, 5)
    assert memory_obj.dtype == torch.bfloat16
    values = torch.randn(shape).to(torch.bfloat16)
    memory_obj.tensor.copy_(values)
    assert torch.equal(memory_obj.tensor, values)
    stored = values.permute(1, 2, 0, 3) if fmt is MemoryFormat.KV_2LTD else values
    assert memory_obj.to_bytes() == stored.contiguous().view(torch.uint8).numpy().tobytes()
    memoryview(memory_obj)[:] = bytes(memory_obj.nbytes)
    assert not memory_obj.tensor.any()


@pytest.mark.parametrize(("fmt", "shape"), FORMATS)
def test_sealed_memory_is_not_written_through_any_tensor(
    fmt: MemoryFormat, shape: tuple[int, ...]
) -> None:
    store = manager()
    (memory_obj,) = shaped(store, fmt, shape)
    writer = memory_obj.tensor
    writer.fill_(3)
    with pytest.raises(BufferError, match="memoryview and tensor"):
        store.batched_put([key(1)], [memory_obj])
    del writer
    store.batched_put([key(1)], [memory_obj])
    (got,) = store.batched_get([key(1)])
    assert got is not None
    for sealed in (memory_obj, got):
        tensor = sealed.tensor
        assert bool((tensor == 3).all())
        writes = [
            tensor.zero_,
            tensor[0].zero_,
            tensor.unbind(0)[0].zero_,
            lambda of=tensor: of[1:].__setitem__(0, 1),
            lambda of=tensor: of.__iadd__(1),
            lambda of=tensor: of.data.mul_(2),
            lambda of=tensor: torch.add(of, 1, out=of),
        ]
        for write in writes:
            with pytest.raises(RuntimeError, match="sealed"):
                write()
        # What is computed from it is the caller's own.
        assert bool((tensor + 1).zero_().eq(0).all())
        assert bool(torch.empty_like(tensor.clone()).copy_(tensor).eq(3).all())
    assert bool((got.tensor == 3).all())


def test_a_tensor_outlives_its_object_and_the_store() -> None:
    store = manager()
    (memory_obj,) = shaped(store, MemoryFormat.KV_T2D, (3, 5, 2, 8))
    memory_obj.tensor.fill_(7)
    store.batched_put([key(1)], [memory_obj])
    (got,) = store.batched_get([key(1)])
    assert got is not None
    tensor = got.tensor
    del memory_obj, got
    store.close()
    gc.collect()
    assert bool((tensor == 7).all())


def test_what_a_namespace_holds_is_known_of_what_is_got() -> None:
    store = manager()
    objects = shaped(store, MemoryFormat.KV_2LTD, (2, 3, 5, 8)) + shaped(
        store, MemoryFormat.KV_T2D, (3, 2, 2, 8)
    )
    store.batched_put([key(1), key(2)], objects)
    first, second = store.batched_get([key(1), key(2)])
    assert first is not None
    assert second is not None
    # One stored form for both; they differ in their number of tokens alone.
    assert (first.shape, first.fmt) == ((3, 5, 2, 8), MemoryFormat.KV_T2D)
    assert (second.shape, second.num_tokens) == ((3, 2, 2, 8), 2)
    (other,) = shaped(store, MemoryFormat.KV_MLA_FMT, (3, 5, 8))
    with pytest.raises(ValueError, match="this namespace holds"):
        store.batched_put([key(3)], [other])
    store.batched_put([key(3, facts={"form": "other"})], [other])


def test_positions_stay_with_the_handle() -> None:
    positions = [torch.arange(5), torch.arange(5, 10)]
    store = manager()
    objects = store.batched_allocate(
        (3, 5, 8), torch.float32, MemoryFormat.KV_MLA_FMT, 2, cached_positions=positions
    )
    assert objects is not None
    assert [memory_obj.cached_positions for memory_obj in objects] == positions


def test_shapes_that_are_none_of_a_format_are_named() -> None:
    store = manager()
    for fmt, shape in (
        (MemoryFormat.KV_T2D, (3, 5, 8)),
        (MemoryFormat.KV_T2D, (2, 3, 5, 8)),
        (MemoryFormat.KV_2LTD, (3, 5, 2, 8)),
        (MemoryFormat.KV_MLA_FMT, (3, 5, 2, 8)),
    ):
        with pytest.raises(ValueError, match=f"none of {fmt.name}"):
            store.batched_allocate(shape, torch.float32, fmt)
    with pytest.raises(ValueError, match="holds nothing"):
        store.batched_allocate((3, 0, 8), torch.float32, MemoryFormat.KV_MLA_FMT)
    with pytest.raises(TypeError, match="dtype and fmt together"):
        store.batched_allocate((3, 5, 8), torch.float32)  # type: ignore[call-overload]
    (raw,) = store.batched_allocate([PAGE]) or []
    with pytest.raises(RuntimeError, match="allocated in bytes"):
        _ = raw.tensor
    with pytest.raises(ValueError, match="of 4096 bytes cannot be"):
        MemoryObj(raw, MemoryObjMetadata((1, 2, 3), torch.float32, MemoryFormat.KV_MLA_FMT))
