"""`StorageManager` over L1 and tiers below it."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import DEADLINE_S, PAGE, DictBackend, chain, example, key

from lmcache_rs import (
    CacheEngineKey,
    LMCacheEngineConfig,
    MemoryFormat,
    MemoryObj,
    StorageManager,
    _native,
)
from lmcache_rs.layouts import StoredForm
from lmcache_rs.storage import LocalCPUBackend, MemoryObjMetadata, StorageBackend
from lmcache_rs.storage.tier import BackendTier

L1 = "LocalCPUBackend"


def manager(*backends: StorageBackend, pages: int = 64, **changes: Any) -> StorageManager:
    """L1, and tiers named `t0`, `t1` …; a second in all for one call."""
    added = {
        name: changes.pop(name) for name in ("deadline_s", "max_queued_bytes") if name in changes
    }
    settings = {"max_local_cpu_size": pages * PAGE / 2**30, **changes}
    store = StorageManager(LMCacheEngineConfig.from_defaults(**settings))
    for number, backend in enumerate(backends):
        store.add_backend(f"t{number}", backend, **{"deadline_s": DEADLINE_S, **added})
    return store


def put(store: StorageManager, keys: Sequence[CacheEngineKey], *payloads: bytes) -> None:
    objects = store.batched_allocate([len(payload) for payload in payloads])
    assert objects is not None
    for memory_obj, payload in zip(objects, payloads, strict=True):
        memoryview(memory_obj)[:] = payload  # type: ignore[arg-type]
    store.batched_put(keys, objects)
    assert store.flush(DEADLINE_S)


def got(store: StorageManager, *keys: CacheEngineKey, location: str | None = None) -> list[Any]:
    objects = store.batched_get(keys, location)
    assert all(each is None or each.sealed for each in objects)
    return [each and each.to_bytes() for each in objects]


def forget_in_l1(store: StorageManager, *keys: CacheEngineKey) -> None:
    for each in keys:
        assert store.backends[L1].remove(each)


def assert_all_free(store: StorageManager) -> None:
    gc.collect()
    store.clear()
    pool = store._pool
    assert pool is not None
    books = pool.audit()
    assert books["free_bytes"] == books["capacity_bytes"]
    assert store.close(DEADLINE_S)


class Spy(DictBackend):
    """Notes what it is asked, and by which thread; waits in `put` and `get` while told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, CacheEngineKey]] = []
        self.threads: set[str] = set()
        self.go_on = threading.Event()
        self.go_on.set()
        self.entered = threading.Event()

    def note(self, verb: str, key: CacheEngineKey) -> None:
        self.asked.append((verb, key))
        self.threads.add(threading.current_thread().name)
        if verb in ("put", "get"):
            self.entered.set()
            assert self.go_on.wait(DEADLINE_S)

    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        self.note("put", key)
        super().put(key, data, metadata)

    def get(self, key: CacheEngineKey) -> tuple[bytes, bytes] | None:
        self.note("get", key)
        return super().get(key)

    def contains(self, key: CacheEngineKey) -> bool:
        self.note("contains", key)
        return super().contains(key)

    def remove(self, key: CacheEngineKey) -> bool:
        self.note("remove", key)
        return super().remove(key)


def test_what_arrives_whole_from_below_is_in_l1_from_then_on() -> None:
    store = manager(DictBackend())
    put(store, chain(1, 2), b"1", b"2")
    forget_in_l1(store, *chain(1, 2))
    assert store.contains(key(1)) == "t0"
    assert got(store, *chain(1, 2)) == [b"1", b"2"]
    assert [store.contains(each) for each in chain(1, 2)] == [L1, L1]
    assert_all_free(store)


def test_what_arrives_in_part_is_given_and_not_written_back() -> None:
    backend = DictBackend()
    store = manager(backend)
    put(store, chain(1, 2, 3), b"1", b"2", b"3")
    forget_in_l1(store, *chain(1, 2, 3))
    del backend.chunks[key(3)]
    assert got(store, *chain(1, 2, 3)) == [b"1", b"2", None]
    assert store.contains(key(1)) == "t0"
    assert_all_free(store)


def test_one_load_may_come_from_several_tiers_and_each_is_asked_for_its_own() -> None:
    first, second = Spy(), Spy()
    store = manager(first, second)
    keys = chain(1, 2, 3, 4, 5)
    put(store, keys, b"1", b"2", b"3", b"4", b"5")
    forget_in_l1(store, key(2), key(4), key(5))
    del first.chunks[key(4)]
    del second.chunks[key(2)]
    chunks = [(each, at * 8, at * 8 + 8) for at, each in enumerate(keys)]
    assert store.get_block_mapping(chunks) == {
        L1: [chunks[0], chunks[2]],
        "t0": [chunks[1]],
        "t1": [chunks[3], chunks[4]],
    }
    assert store.batched_contains([*keys, key(9)]) == 5
    first.asked.clear()
    second.asked.clear()
    assert got(store, *keys) == [b"1", b"2", b"3", b"4", b"5"]
    # A tier is asked up to the next chunk that L1 has, and no further than its own first gap.
    assert [each for verb, each in first.asked if verb == "get"] == [key(2), key(4)]
    assert [each for verb, each in second.asked if verb == "get"] == [key(4), key(5)]
    assert [store.contains(each) for each in keys] == [L1] * 5
    assert_all_free(store)


def test_one_tier_may_be_asked_alone() -> None:
    store = manager(DictBackend())
    put(store, chain(1), b"1")
    assert got(store, key(1), location="t0") == [b"1"]
    forget_in_l1(store, key(1))
    assert got(store, key(1), location=L1) == [None]
    with pytest.raises(ValueError, match=r"no tier 'disk'; there are LocalCPUBackend, t0"):
        store.batched_get(chain(1), "disk")


def test_calls_into_a_backend_come_from_one_thread_and_never_the_callers() -> None:
    backend = Spy()
    store = manager(backend)
    before = threading.active_count()
    assert backend.threads == set(), "and none before the first call"
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda at: put(store, chain(at), b"x"), range(8)))
        list(threads.map(lambda at: store.contains(key(at + 100)), range(8)))
    forget_in_l1(store, *chain(*range(8)))
    assert got(store, *chain(*range(8))) == [b"x"] * 8
    assert backend.threads == {"lmcache_rs-t0"}
    assert threading.active_count() == before + 1
    assert store.close(DEADLINE_S)
    assert threading.active_count() == before


def test_calls_into_a_backend_hold_no_lock_of_ours() -> None:
    class Curious(DictBackend):
        """Has another thread use every verb of the store while it is in a call of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.answered: list[bool] = []

        def look(self) -> None:
            def use() -> None:
                store.stats()
                store.backends[L1].contains(key(1))
                objects = store.batched_allocate([1])
                assert objects is not None
                store.batched_put(chain(1000 + len(self.answered)), objects)

            other = threading.Thread(target=use)
            other.start()
            other.join(5)
            self.answered.append(not other.is_alive())

        def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
            if len(self.answered) < 3:
                self.look()
            super().put(key, data, metadata)

        def get(self, key: CacheEngineKey) -> tuple[bytes, bytes] | None:
            self.look()
            return super().get(key)

        def keys(self) -> list[CacheEngineKey]:
            self.look()
            return super().keys()

    backend = Curious()
    store = manager(backend)
    put(store, chain(1), b"1")
    forget_in_l1(store, key(1))
    assert got(store, key(1)) == [b"1"]
    store.clear()
    assert len(backend.answered) >= 3
    assert all(backend.answered)
    store.close(DEADLINE_S)


def test_puts_wait_for_nobody_and_the_queue_is_bounded_in_bytes() -> None:
    backend = Spy()
    store = manager(backend, max_queued_bytes=3 * PAGE)
    backend.go_on.clear()
    objects = store.batched_allocate([PAGE] * 8)
    assert objects is not None
    store.batched_put(chain(*range(4)), objects[:4])
    assert backend.entered.wait(DEADLINE_S), "one is being made"
    store.batched_put(chain(*range(4, 8)), objects[4:])
    stats = store.stats()["t0"]
    # Up to three wait. The first batch may have begun to be made before its last was offered.
    assert stats["queued_bytes"] == stats["queued_chunks"] * PAGE
    assert stats["queued_chunks"] in (3, 4)
    assert stats["queued_chunks"] + stats["dropped_chunks"] == 8
    backend.go_on.set()
    assert store.flush(DEADLINE_S)
    assert len(backend.chunks) == stats["queued_chunks"]
    assert store.batched_contains(chain(*range(8))) == 8, "L1 has all of them"
    assert store.stats()["t0"]["queued_bytes"] == 0


def test_a_chunk_that_is_queued_is_not_queued_again() -> None:
    backend = Spy()
    store = manager(backend)
    backend.go_on.clear()
    objects = store.batched_allocate([PAGE] * 4)
    assert objects is not None
    store.batched_put(chain(1, 2), objects[:2])
    assert backend.entered.wait(DEADLINE_S)
    store.batched_put(chain(2, 3), objects[2:])
    assert store.stats()["t0"]["queued_chunks"] == 3
    backend.go_on.set()
    assert store.flush(DEADLINE_S)
    assert sum(verb == "put" for verb, _ in backend.asked) == 3
    tier = store.backends["t0"]
    assert isinstance(tier, BackendTier)
    assert tier.lane._queued_bytes == 0, "what is counted is what waits"


def test_what_waits_for_a_put_is_leased_until_it_is_done() -> None:
    backend = Spy()
    store = manager(backend, pages=4, max_queued_bytes=4 * PAGE)
    backend.go_on.clear()
    objects = store.batched_allocate([PAGE] * 2)
    assert objects is not None
    for value, memory_obj in enumerate(objects):
        memoryview(memory_obj)[:] = bytes([value]) * PAGE  # type: ignore[arg-type]
    store.batched_put(chain(0, 1), objects)
    del objects, memory_obj
    gc.collect()
    # Nothing of them may go to make room.
    assert store.batched_allocate([PAGE] * 3) is None
    pool = store._pool
    assert pool is not None
    assert pool.audit()["leased_bytes"] == 2 * PAGE
    (held,) = store.batched_get(chain(1))
    assert held is not None
    assert held.ref_count == 4, "L1's, this one's, the queue's and that of its handle"
    backend.go_on.set()
    assert store.flush(DEADLINE_S)
    assert [data for data, _ in backend.chunks.values()] == [b"\0" * PAGE, b"\1" * PAGE]
    del held
    gc.collect()
    assert pool.audit()["leased_bytes"] == 0
    assert store.batched_allocate([PAGE] * 4) is not None


def test_without_l1_objects_are_staged_and_nothing_is_written_back() -> None:
    store = manager(DictBackend(), local_cpu=False)
    put(store, chain(1, 2), b"1", b"2")
    assert got(store, *chain(1, 2)) == [b"1", b"2"]
    assert store.contains(key(1)) == "t0"
    assert_all_free(store)


def test_a_tier_with_memory_of_its_own_gets_a_copy() -> None:
    store = manager()
    other = _native.LocalCpu(8 * PAGE, 1000)
    store.add_backend("other", LocalCPUBackend(other))
    put(store, chain(1, 2), b"1" * PAGE, b"2" * PAGE)
    assert other.audit()["cached_bytes"] == 2 * PAGE
    forget_in_l1(store, *chain(1, 2))
    assert got(store, *chain(1, 2)) == [b"1" * PAGE, b"2" * PAGE]
    assert store.contains(key(1)) == L1
    put(store, chain(*range(10, 30)), *[b"x" * PAGE] * 20)
    assert other.audit()["cached_bytes"] == 8 * PAGE, "as far as there is room"
    assert_all_free(store)


FORMS = [
    (MemoryFormat.KV_T2D, (3, 5, 2, 8)),
    (MemoryFormat.KV_2LTD, (2, 3, 5, 8)),
    (MemoryFormat.KV_MLA_FMT, (3, 5, 8)),
]


@pytest.mark.parametrize(("fmt", "shape"), FORMS)
@pytest.mark.parametrize("kind", ["dict", "files"])
def test_what_an_object_is_and_its_positions_stay_with_it_in_every_tier(
    kind: str, fmt: MemoryFormat, shape: tuple[int, ...], tmp_path: Path
) -> None:
    backend = DictBackend() if kind == "dict" else example("python_backend").FolderBackend(tmp_path)
    store = manager(backend)
    positions = [torch.arange(5) + 2**40, torch.arange(5).flip(0)]
    objects = store.batched_allocate(shape, torch.bfloat16, fmt, 2, cached_positions=positions)
    assert objects is not None
    values = torch.randn(2, *shape).to(torch.bfloat16)
    for memory_obj, value in zip(objects, values, strict=True):
        memory_obj.tensor.copy_(value)
    store.batched_put(chain(1, 2), objects)
    stored = [bytes(memory_obj.to_bytes()) for memory_obj in objects]
    del objects, memory_obj
    store.close(DEADLINE_S)
    # What the next manager knows, it knows from the backend alone.
    again = manager(backend)
    for _ in ("from below", "from L1"):
        for at, found in enumerate(again.batched_get(chain(1, 2))):
            assert found is not None
            assert found.to_bytes() == stored[at]
            assert (found.fmt, found.dtype, found.num_tokens) == (fmt.stored, torch.bfloat16, 5)
            assert found.cached_positions is not None
            assert torch.equal(found.cached_positions, positions[at])
        assert again.contains(key(1)) == L1
    found = None
    assert_all_free(again)


def test_positions_are_one_int64_a_token() -> None:
    store = manager()
    for wrong in (torch.arange(4), torch.arange(5.0), torch.arange(5, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"give int64 \[5\]"):
            store.batched_allocate(
                (3, 5, 8), torch.float32, MemoryFormat.KV_MLA_FMT, cached_positions=[wrong]
            )


def test_positions_of_metadata_given_by_hand_stay_with_the_memory() -> None:
    store = manager(DictBackend())
    positions = torch.arange(5) + 7
    shape, fmt = (3, 5, 8), MemoryFormat.KV_MLA_FMT
    metadata = MemoryObjMetadata(shape, torch.float32, fmt, cached_positions=positions)
    raw = store.batched_allocate([metadata.nbytes])
    assert raw is not None
    store.batched_put(chain(1), [MemoryObj(raw[0], metadata)])
    assert store.flush(DEADLINE_S)
    for _ in ("from L1", "from below"):
        (found,) = store.batched_get(chain(1))
        assert found is not None
        assert found.cached_positions is not None
        assert torch.equal(found.cached_positions, positions)
        forget_in_l1(store, key(1))


def test_mere_bytes_with_positions_come_back_from_below() -> None:
    store = manager(DictBackend())
    objects = store.batched_allocate([16])
    assert objects is not None
    objects[0].set_positions([4, 5])
    store.batched_put(chain(1), objects)
    assert store.flush(DEADLINE_S)
    stored = objects[0].to_bytes()
    forget_in_l1(store, key(1))
    (found,) = store.batched_get(chain(1))
    assert found is not None
    assert (found.to_bytes(), found.positions) == (stored, objects[0].positions)


@pytest.mark.parametrize("tier", [L1, "t0"])
def test_mere_bytes_are_given_whatever_else_their_namespace_holds(tier: str) -> None:
    store = manager(DictBackend())
    put(store, chain(1), b"123")
    if tier != L1:
        forget_in_l1(store, key(1))
    objects = store.batched_allocate((3, 5, 8), torch.float32, MemoryFormat.KV_MLA_FMT)
    assert objects is not None
    store.batched_put(chain(2), objects)
    assert got(store, *chain(1, 2)) == [b"123", objects[0].to_bytes()]
    (found,) = store.batched_get(chain(1))
    assert found is not None
    assert found.metadata is None


def test_chunks_are_read_layer_by_layer_from_any_tier() -> None:
    store = manager(DictBackend())
    objects = store.batched_allocate((4, 5, 2, 8), torch.float32, MemoryFormat.KV_T2D, 3)
    assert objects is not None
    values = torch.randn(3, 4, 5, 2, 8)
    for memory_obj, value in zip(objects, values, strict=True):
        memory_obj.tensor.copy_(value)
    keys = chain(1, 2, 3)
    store.batched_put(keys, objects)
    assert store.flush(DEADLINE_S)
    del objects, memory_obj
    forget_in_l1(store, key(2))
    by_layer = [list(layer) for layer in zip(*(each.split_layers(4) for each in keys), strict=True)]
    for asked in (keys, by_layer):
        layers = list(store.layerwise_batched_get(asked))
        assert len(layers) == 4
        for layer_id, views in enumerate(layers):
            for at, view in enumerate(views):
                assert view is not None
                assert view.shape == (5, 2, 8)
                assert torch.equal(view.tensor, values[at, layer_id])
                assert bytes(view.data) == values[at, layer_id].numpy().tobytes()
                with pytest.raises(RuntimeError, match="sealed"):
                    view.tensor.zero_()
                with pytest.raises(TypeError, match="read-only"):
                    view.data[0] = 1
    del layers, views, view
    assert_all_free(store)


def test_a_layer_that_is_missing_is_none_and_wrong_layers_are_named() -> None:
    store = manager()
    put(store, chain(1, 3), bytes(32), bytes(32))
    by_layer = [
        list(layer) for layer in zip(*(key(at).split_layers(4) for at in (1, 2, 3)), strict=True)
    ]
    for views in store.layerwise_batched_get(by_layer):
        assert [view and view.nbytes for view in views] == [8, None, None]
    assert list(store.layerwise_batched_get([])) == []
    assert list(store.layerwise_batched_get(chain(7))) == []
    form = StoredForm(MemoryFormat.KV_MLA_FMT, 4, 8, "float32")
    told = StorageManager(store._config, form=form)
    assert list(told.layerwise_batched_get(chain(7, 8))) == [[None, None]] * 4
    with pytest.raises(RuntimeError, match="no shape"):
        list(store.layerwise_batched_get(chain(1)))
    with pytest.raises(ValueError, match="different chunks"):
        list(store.layerwise_batched_get([chain(1), chain(2)]))
    (found,) = store.batched_get(chain(1))
    assert found is not None
    for layer, num_layers, match in ((4, 4, "none of 4"), (0, 3, "32 bytes"), (0, -1, "one of -1")):
        with pytest.raises(ValueError, match=match):
            found.layer(layer, num_layers)


def test_a_prefix_is_cleared_in_every_tier() -> None:
    store = manager(DictBackend())
    keys = [key(1, request_configs={"lmcache.tag.t": name}) for name in ("a", "ab", "b")]
    put(store, keys, b"a", b"ab", b"b")
    assert store.clear(keys[0].namespace) == 2
    assert [store.contains(each) for each in keys] == [None, L1, L1]
    assert store.retain(keys[1].namespace) == 2
    forget_in_l1(store, keys[1])
    assert [store.contains(each) for each in keys] == [None, "t0", None]
    assert store.clear() == 1
    assert_all_free(store)


def test_a_clear_takes_what_waits_to_be_put() -> None:
    backend = Spy()
    store = manager(backend)
    backend.go_on.clear()
    objects = store.batched_allocate([PAGE] * 3)
    assert objects is not None
    store.batched_put(chain(1, 2, 3), objects)
    assert backend.entered.wait(DEADLINE_S)
    with ThreadPoolExecutor(1) as threads:
        clearing = threads.submit(store.clear)
        while store.stats()["t0"]["queued_chunks"] > 1:
            pass
        backend.go_on.set()
        clearing.result(DEADLINE_S)
    assert store.flush(DEADLINE_S)
    assert backend.chunks == {}


def test_what_was_read_before_a_clear_does_not_come_back_by_it() -> None:
    backend = Spy()
    store = manager(backend)
    put(store, chain(1), b"1")
    forget_in_l1(store, key(1))
    backend.entered.clear()
    backend.go_on.clear()
    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(got, store, key(1))
        assert backend.entered.wait(DEADLINE_S)
        clearing = threads.submit(store.clear)
        while store._num_clears == 0:
            pass
        backend.go_on.set()
        assert reading.result(DEADLINE_S) == [b"1"]
        assert clearing.result(DEADLINE_S) == 1
    assert store.contains(key(1)) is None


def test_a_backend_that_lists_no_keys_is_said_not_to_be_cleared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Silent(DictBackend):
        def keys(self) -> Any:
            return StorageBackend.keys(self)

    store = manager(Silent())
    put(store, chain(1), b"1")
    with caplog.at_level(logging.WARNING, "lmcache_rs"):
        assert store.clear() == 1
    assert "write its keys()" in caplog.text
    assert store.stats()["t0"]["faults_not_cleared"] == 1
    assert store.contains(key(1)) == "t0"


def test_backends_are_added_under_names_of_their_own() -> None:
    store = manager(DictBackend())
    with pytest.raises(ValueError, match="already"):
        store.add_backend("t0", DictBackend())
    with pytest.raises(TypeError, match="StorageBackend, not dict"):
        store.add_backend("x", {})  # type: ignore[arg-type]
    for wrong in ({"deadline_s": 0}, {"deadline_s": float("nan")}, {"max_queued_bytes": 0}):
        with pytest.raises(ValueError, match="above 0"):
            store.add_backend("x", DictBackend(), **wrong)  # type: ignore[arg-type]
    store.close(DEADLINE_S)
    with pytest.raises(RuntimeError, match="closed"):
        store.add_backend("x", DictBackend())


def test_a_backend_is_one_tier_so_that_one_thread_calls_it() -> None:
    backend, tier = DictBackend(), LocalCPUBackend(_native.LocalCpu(4 * PAGE, 1000))
    store = manager(backend)
    store.add_backend("tier", tier)
    for again, name in ((backend, "t0"), (tier, "tier")):
        with pytest.raises(ValueError, match=f"is tier '{name}' already"):
            store.add_backend("again", again)
    assert store.close(DEADLINE_S)


def test_a_store_that_is_dropped_takes_its_threads_along() -> None:
    before = threading.active_count()
    store = manager()
    store.add_backend("dropped", DictBackend())
    put(store, chain(1), b"1")
    (thread,) = [each for each in threading.enumerate() if each.name == "lmcache_rs-dropped"]
    assert threading.active_count() == before + 1
    del store
    gc.collect()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_tier_raises_in_a_fork() -> None:
    store = manager(DictBackend())
    put(store, chain(1), b"1")
    tier = store.backends["t0"]
    child = os.fork()
    if child == 0:
        code = 0
        for use in (lambda: tier.contains(key(1)), lambda: tier.flush(1), lambda: tier.close(1)):
            try:
                use()
                code = 1
            except RuntimeError as error:
                code |= "spawn" not in str(error)
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert tier.contains(key(1))
    assert store.close(DEADLINE_S)


def test_references_are_taken_and_given_back_by_their_handle() -> None:
    store = manager()
    (memory_obj,) = store.batched_allocate([PAGE]) or []
    memory_obj.ref_count_up()
    assert memory_obj.ref_count == 2
    store.batched_put(chain(1), [memory_obj])
    assert memory_obj.ref_count == 3, "L1's, this handle's and the one it took"
    other = MemoryObj(memory_obj)
    with pytest.raises(RuntimeError, match="ref_count_up once for each"):
        other.ref_count_down()
    other.ref_count_up()
    other.ref_count_up()
    (found,) = store.batched_get(chain(1))
    assert found is not None
    assert found.ref_count == 6
    del other
    assert found.ref_count == 4, "what a handle took ends with it"
    memory_obj.ref_count_down()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="took no reference"):
            memory_obj.ref_count_down()
    assert found.ref_count == memory_obj.ref_count == 3
    del memory_obj, found
    assert_all_free(store)
