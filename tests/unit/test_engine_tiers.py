"""The engine over the tiers below host memory: written through, counted, and read in windows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_storage import DictBackend

from lmcache_rs import CacheEngineKey, LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata

LAYERS, BLOCKS, BLOCK, HEADS, HEAD, CHUNK = 3, 160, 4, 2, 8, 8
# A chunk takes one: 3 layers x 8 tokens x 2 planes x 2 heads x 8 x 4 bytes = 3072.
PAGE = 4096
META = LMCacheMetadata("m", 1, 0, "float32")
LONG_S = 20.0


def make(path: Path | None, num_pages: int = 64, **changes: object) -> LMCacheEngine:
    settings = {"chunk_size": CHUNK, "max_local_cpu_size": num_pages * PAGE / 2**30, **changes}
    if path is not None:
        settings |= {"local_disk": str(path), "max_local_disk_size": 0.1}
    meta = changes.pop("metadata", META)
    return LMCacheEngine(LMCacheEngineConfig.from_defaults(**settings), meta)  # type: ignore[arg-type]


@pytest.fixture
def caches() -> list[torch.Tensor]:
    return [torch.randn(2, BLOCKS, BLOCK, HEADS, HEAD) for _ in range(LAYERS)]


def slots(num_tokens: int, seed: int = 0) -> torch.Tensor:
    order = torch.randperm(BLOCKS * BLOCK, generator=torch.Generator().manual_seed(seed))
    return order[:num_tokens].to(torch.int64)


def kv(caches: list[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    return torch.stack([cache[:, slots // BLOCK, slots % BLOCK] for cache in caches])


def flushed(engine: LMCacheEngine) -> None:
    assert engine.storage_manager.flush(LONG_S)


def disk(engine: LMCacheEngine) -> dict[str, int]:
    return engine.storage_manager.stats()["LocalDiskBackend"]


def assert_idle(engine: LMCacheEngine) -> None:
    pool = engine.storage_manager._pool
    assert pool is not None
    books = pool.audit()
    assert (books["leased_bytes"], books["reserved_bytes"], books["leases"]) == (0, 0, 0)
    assert books["free_bytes"] + books["cached_bytes"] == books["capacity_bytes"], books


def round_trip(
    engine: LMCacheEngine, caches: list[torch.Tensor], num_tokens: int, mask: Any = None
) -> torch.Tensor:
    """Loads `range(num_tokens)` over zeros: what was loaded has the caches' bytes, all else none.
    `ret_mask`."""
    where = slots(num_tokens)
    target = [torch.zeros_like(cache) for cache in caches]
    tokens = list(range(num_tokens))
    ret_mask = engine.retrieve(tokens, mask, kvcaches=target, slot_mapping=where)
    wanted = kv(caches, where) * ret_mask[None, None, :, None, None]
    assert torch.equal(kv(target, where), wanted)
    return ret_mask


def stored(engine: LMCacheEngine, caches: list[torch.Tensor], num_tokens: int, **more: Any) -> int:
    where = slots(num_tokens)
    tokens = list(range(num_tokens))
    return engine.store(tokens, kvcaches=caches, slot_mapping=where, **more)


def registered(path: Path | None, caches: list[torch.Tensor], **changes: Any) -> LMCacheEngine:
    engine = make(path, **changes)
    engine.register_kv_caches(caches)
    return engine


@pytest.mark.parametrize("num_false", [0, 3, 8, 13, 40])
def test_a_prompt_is_found_and_loaded_after_a_restart(
    tmp_path: Path, caches: list[torch.Tensor], num_false: int
) -> None:
    with make(tmp_path) as engine:
        assert stored(engine, caches, 43) == 40
        assert stored(engine, caches, 43) == 0
    with registered(tmp_path, caches) as engine:
        assert disk(engine)["chunks"] == 5
        assert engine.lookup(list(range(43))) == 40
        assert engine.lookup([*range(24), 99, *range(25, 43)]) == 24
        assert disk(engine)["got_chunks"] == 0, "a lookup reads nothing"
        mask = torch.arange(43) >= num_false
        assert round_trip(engine, caches, 43, mask).tolist() == [
            num_false <= at < 40 for at in range(43)
        ]
        # Chunks wholly below the mask are not read, and what came is in host memory from then on.
        assert disk(engine)["got_chunks"] == 5 - num_false // CHUNK
        assert round_trip(engine, caches, 43, mask).sum() == 40 - num_false
        assert disk(engine)["got_chunks"] == 5 - num_false // CHUNK
        assert_idle(engine)


@pytest.mark.parametrize("local_cpu", [True, False])
@pytest.mark.parametrize("num_pages", [8, 24, 200])
def test_a_prompt_larger_than_the_pool_is_stored_and_loaded_whole(
    tmp_path: Path, caches: list[torch.Tensor], num_pages: int, local_cpu: bool
) -> None:
    num_tokens = 80 * CHUNK
    changes = {"num_pages": num_pages, "local_cpu": local_cpu}
    with registered(tmp_path, caches, **changes) as engine:
        assert stored(engine, caches, num_tokens) == num_tokens
        flushed(engine)
        assert engine.lookup(list(range(num_tokens))) == num_tokens
        assert disk(engine)["chunks"] == 80
        for _ in range(2):
            assert round_trip(engine, caches, num_tokens).all()
        assert stored(engine, caches, num_tokens) == 0 or local_cpu
        flushed(engine)
        assert disk(engine)["chunks"] == disk(engine)["put_chunks"] == 80
        assert_idle(engine)
    with registered(tmp_path, caches, **changes) as engine:
        assert round_trip(engine, caches, num_tokens).all()
        assert round_trip(engine, caches, num_tokens, torch.arange(num_tokens) >= 101).sum() == (
            num_tokens - 101
        )
        assert_idle(engine)


def test_the_beginning_of_a_prompt_larger_than_the_pool_stays_in_host_memory(
    tmp_path: Path, caches: list[torch.Tensor]
) -> None:
    with registered(tmp_path, caches, num_pages=24) as engine:
        assert stored(engine, caches, 80 * CHUNK) == 80 * CHUNK
    with registered(tmp_path, caches, num_pages=24) as engine:
        for _ in range(3):
            assert round_trip(engine, caches, 80 * CHUNK).all()
        assert engine.local_cpu is not None
        hashes, _ = engine._chain(engine._require_registered().cache, list(range(80 * CHUNK)), None)
        namespace = engine._require_registered().namespaces.text()
        assert engine.local_cpu.longest_prefix(namespace, hashes) == 12, "half of the pool"


def test_a_damaged_chunk_ends_what_is_loaded(tmp_path: Path, caches: list[torch.Tensor]) -> None:
    with make(tmp_path) as engine:
        assert stored(engine, caches, 80) == 80
    files = sorted(tmp_path.glob("lmcache_rs.v1/[0-3]?/*"))
    assert len(files) == 10
    with registered(tmp_path, caches) as engine:
        hashes, _ = engine._chain(engine._require_registered().cache, list(range(80)), None)
        damaged = [file for file in files if file.name.startswith(hashes[6 * 32 : 7 * 32].hex())]
        data = bytearray(damaged[0].read_bytes())
        data[5000] ^= 1
        damaged[0].write_bytes(data)
        assert engine.lookup(list(range(80))) == 80, "nobody has looked into it yet"
        assert round_trip(engine, caches, 80).tolist() == [at < 48 for at in range(80)]
        assert disk(engine)["faults_checksum"] == 1
        assert engine.lookup(list(range(80))) == 48
        # Stored again it is whole again.
        assert stored(engine, caches, 80) == 80 - 48
        assert round_trip(engine, caches, 80).all()
        assert_idle(engine)


def test_chunks_of_several_tiers_make_one_prefix(caches: list[torch.Tensor]) -> None:
    upper, lower = DictBackend(), DictBackend()
    with registered(None, caches) as engine:
        storage = engine.storage_manager
        storage.add_backend("upper", upper)
        storage.add_backend("lower", lower)
        assert stored(engine, caches, 80) == 80
        flushed(engine)
        assert engine.local_cpu is not None
        for at, key in enumerate(list(upper.chunks)):
            # In host memory, above, below, and everywhere from the eighth on.
            if at < 8:
                if at % 3 != 0:
                    engine.local_cpu.remove(key.namespace, key.chunk_hash)
                if at % 3 != 1:
                    del upper.chunks[key]
                if at % 3 != 2:
                    del lower.chunks[key]
        assert engine.lookup(list(range(80))) == 80
        assert round_trip(engine, caches, 80, torch.arange(80) >= 12).sum() == 68
        assert round_trip(engine, caches, 80).all()
        assert storage.stats()["upper"]["got_chunks"] == 3
        assert storage.stats()["lower"]["got_chunks"] == 2
        assert_idle(engine)


def test_a_lookup_leases_what_host_memory_has_and_the_rest_may_go(
    tmp_path: Path, caches: list[torch.Tensor]
) -> None:
    tokens = list(range(80))
    with registered(tmp_path, caches) as engine:
        assert stored(engine, caches, 80) == 80
        flushed(engine)
        assert engine.local_cpu is not None
        namespace = engine._require_registered().namespaces.text()
        hashes, _ = engine._chain(engine._require_registered().cache, tokens, None)
        for at in range(4, 10):
            engine.local_cpu.remove(namespace, hashes[at * 32 :][:32])
        assert engine.lookup(tokens, lookup_id="r") == 80
        assert engine.local_cpu.audit()["leased_bytes"] == 4 * PAGE
        assert engine.storage_manager.backends["LocalDiskBackend"].clear() == 10
        target = [torch.zeros_like(cache) for cache in caches]
        where = slots(80)
        ret_mask = engine.retrieve(tokens, kvcaches=target, slot_mapping=where, req_id="r")
        assert ret_mask.tolist() == [at < 32 for at in range(80)]
        assert torch.equal(kv(target, where[:32]), kv(caches, where[:32]))
        assert_idle(engine)


def test_unfull_tails_and_holes_are_as_in_host_memory(
    tmp_path: Path, caches: list[torch.Tensor]
) -> None:
    holed = slots(80)
    holed[76] = -1
    with make(tmp_path, save_unfull_chunk=True) as engine:
        assert stored(engine, caches, 43) == 43
        assert engine.store(list(range(100, 180)), kvcaches=caches, slot_mapping=holed) == 72
    with registered(tmp_path, caches, save_unfull_chunk=True, num_pages=8) as engine:
        assert round_trip(engine, caches, 43).all()
        assert engine.lookup(list(range(100, 180))) == 72
        where = {"kvcaches": caches, "slot_mapping": holed}
        assert engine.store(list(range(200, 280)), **where) == 72  # type: ignore[arg-type]
        ret_mask = engine.retrieve(list(range(200, 280)), **where)  # type: ignore[arg-type]
        assert ret_mask.tolist() == [at < 72 for at in range(80)]
        partly = slots(43)
        partly[20:22] = -1
        target = [torch.zeros_like(cache) for cache in caches]
        ret_mask = engine.retrieve(list(range(43)), kvcaches=target, slot_mapping=partly)
        assert ret_mask.tolist() == [at not in (20, 21) for at in range(43)]
        assert_idle(engine)


def test_opaque_blocks_pass_the_tiers_whole(tmp_path: Path) -> None:
    meta = LMCacheMetadata("m", 1, 0, "float32", block_size=BLOCK)
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK,
        max_local_cpu_size=8 * PAGE / 2**30,
        local_disk=str(tmp_path),
        max_local_disk_size=0.1,
    )
    caches = [torch.randn(40, HEADS, BLOCK, 2 * HEAD) for _ in range(LAYERS)]
    tokens, where = list(range(160)), torch.arange(160)
    with LMCacheEngine(config, meta, layout="opaque") as engine:
        assert engine.store(tokens, kvcaches=caches, slot_mapping=where) == 160
    target = [torch.zeros_like(cache) for cache in caches]
    with LMCacheEngine(config, meta, layout="opaque") as engine:
        mask = torch.arange(160) >= 6
        ret_mask = engine.retrieve(tokens, mask, kvcaches=target, slot_mapping=where)
        # Tokens 6 and 7 share a block with tokens that the engine holds: they are left alone.
        assert ret_mask.tolist() == [at >= 8 for at in range(160)]
        for cache, came in zip(caches, target, strict=True):
            assert not came[:2].any()
            assert torch.equal(came[2:], cache[2:])
        assert_idle(engine)


@pytest.mark.parametrize("num_pages", [24, 64])
def test_layer_by_layer_the_tiers_are_used_as_far_as_memory_goes(
    tmp_path: Path, caches: list[torch.Tensor], num_pages: int
) -> None:
    num_tokens, where = 40 * CHUNK, slots(40 * CHUNK)
    tokens = list(range(num_tokens))
    with registered(tmp_path, caches, num_pages=num_pages) as engine:
        assert len(list(engine.store_layer(tokens, kvcaches=caches, slot_mapping=where))) == 4
        flushed(engine)
        num_stored = min(40, num_pages)
        assert disk(engine)["chunks"] == num_stored
    with registered(tmp_path, caches, num_pages=num_pages) as engine:
        target = [torch.zeros_like(cache) for cache in caches]
        first, *_, ret_mask = engine.retrieve_layer(tokens, kvcaches=target, slot_mapping=where)
        loaded = min(num_stored, num_pages // 2) * CHUNK
        assert first == loaded
        assert isinstance(ret_mask, torch.Tensor)
        assert ret_mask.tolist() == [at < loaded for at in range(num_tokens)]
        assert torch.equal(kv(target, where[:loaded]), kv(caches, where[:loaded]))
        assert_idle(engine)


class SlowBackend(DictBackend):
    """Puts wait until they are let through."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.entered = threading.Event()

    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        self.entered.set()
        assert self.open.wait(LONG_S)
        super().put(key, data, metadata)


@pytest.fixture
def slow() -> Iterator[SlowBackend]:
    backend = SlowBackend()
    yield backend
    backend.open.set()


def test_a_store_that_fits_waits_for_no_tier(caches: list[torch.Tensor], slow: SlowBackend) -> None:
    with registered(None, caches) as engine:
        engine.storage_manager.add_backend("slow", slow, max_queued_bytes=1 << 20)
        # The backend is let through after this: were it waited for, nobody came back.
        assert stored(engine, caches, 80) == 80
        assert slow.entered.wait(LONG_S)
        assert not slow.chunks
        slow.open.set()
        flushed(engine)
        assert len(slow.chunks) == 10
        assert_idle(engine)


def test_a_store_larger_than_the_pool_ends_where_a_tier_stands_still(
    caches: list[torch.Tensor], slow: SlowBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_rs.tier_walk.WAIT_S", 0.01)
    with registered(None, caches, num_pages=16) as engine:
        engine.storage_manager.add_backend("slow", slow, max_queued_bytes=1 << 20, deadline_s=0.2)
        assert stored(engine, caches, 80 * CHUNK) == 16 * CHUNK
        slow.open.set()
        flushed(engine)
        assert_idle(engine)


def test_faults_of_a_backend_cost_what_it_has_and_raise_nothing(
    caches: list[torch.Tensor],
) -> None:
    class Broken(DictBackend):
        def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
            raise OSError("full")

        def get(self, key: CacheEngineKey) -> tuple[bytes, bytes] | None:
            return b"short", b"no metadata"

        def contains(self, key: CacheEngineKey) -> bool:
            return True

    with registered(None, caches, num_pages=16) as engine:
        engine.storage_manager.add_backend("broken", Broken())
        assert stored(engine, caches, 80) == 80
        flushed(engine)
        assert round_trip(engine, caches, 80).all()
        assert not round_trip(engine, [cache + 1 for cache in caches], 0).any()
        tokens = list(range(500, 580))
        assert engine.lookup(tokens) == 80, "it says so"
        where = {"kvcaches": caches, "slot_mapping": slots(80)}
        assert not engine.retrieve(tokens, **where).any()  # type: ignore[arg-type]
        assert_idle(engine)


def test_a_chunk_of_another_size_under_the_name_ends_what_is_loaded(
    caches: list[torch.Tensor],
) -> None:
    lower = DictBackend()
    with registered(None, caches) as engine:
        storage = engine.storage_manager
        storage.add_backend("lower", lower)
        assert stored(engine, caches, 80) == 80
        flushed(engine)
        keys = list(lower.chunks)
        engine.clear()
        lower.chunks.clear()
        objects = storage.batched_allocate([3072, 3072, 3072 // 2, 3072])
        assert objects is not None
        for memory_obj in objects:
            memoryview(memory_obj)[:] = bytes(memory_obj.nbytes)  # type: ignore[arg-type]
        assert storage.put_below(keys[:4], objects) == 4
        del objects
        flushed(engine)
        zeros = [torch.zeros_like(cache) for cache in caches]
        assert round_trip(engine, zeros, 80).tolist() == [at < 16 for at in range(80)]


def test_without_a_tier_that_can_be_used_host_memory_serves_alone(
    tmp_path: Path, caches: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with make(tmp_path / "file") as engine:
        assert "SERVING WITHOUT THE LOCAL DISK TIER" in caplog.text
        assert stored(engine, caches, 80) == 80
        assert round_trip(engine, caches, 80).all()
    with pytest.raises(OSError, match="make folders"):
        make(tmp_path / "file", strict=True)


def test_a_clear_is_of_every_tier(tmp_path: Path, caches: list[torch.Tensor]) -> None:
    with make(tmp_path) as engine:
        assert stored(engine, caches, 80) == 80
        flushed(engine)
        assert engine.clear() == 20
        assert engine.lookup(list(range(80))) == 0
        assert not round_trip(engine, caches, 80).any()


def test_stores_and_loads_of_several_threads_pass_one_small_pool(
    tmp_path: Path, caches: list[torch.Tensor]
) -> None:
    """Each thread has tensors' slots of its own; all share pool, queues and folder."""
    with registered(tmp_path, caches, num_pages=48) as engine:
        wrong: list[str] = []

        def work(number: int) -> None:
            tokens = [number * 1000 + at for at in range(30 * CHUNK)]
            mine = torch.arange(BLOCKS * BLOCK)[number * 240 : number * 240 + 240]
            before = kv(caches, mine).clone()
            for _ in range(4):
                engine.store(tokens, kvcaches=caches, slot_mapping=mine)
                ret_mask = engine.retrieve(tokens, kvcaches=caches, slot_mapping=mine)
                if not torch.equal(kv(caches, mine), before):
                    wrong.append(f"{number} has other bytes")
                if not ret_mask[: 8 * CHUNK].any():
                    wrong.append(f"{number} has lost all")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        flushed(engine)
        assert_idle(engine)
