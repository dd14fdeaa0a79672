"""The tiers of an engine: one store, cleared by prefix, ended with the engine."""

from __future__ import annotations

import threading

import pytest
import torch

from lmcache_rs import CacheEngineKey, LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata
from lmcache_rs.storage import StorageBackend

CHUNK = 8


class DictBackend(StorageBackend):
    def __init__(self) -> None:
        self.chunks: dict[CacheEngineKey, tuple[bytes, bytes]] = {}
        self.closed = False

    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        self.chunks[key] = bytes(data), metadata

    def get(self, key: CacheEngineKey) -> tuple[bytes, bytes] | None:
        return self.chunks.get(key)

    def contains(self, key: CacheEngineKey) -> bool:
        return key in self.chunks

    def remove(self, key: CacheEngineKey) -> bool:
        return self.chunks.pop(key, None) is not None

    def close(self) -> None:
        self.closed = True


def made() -> tuple[LMCacheEngine, dict[str, object]]:
    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, max_local_cpu_size=0.002)
    engine = LMCacheEngine(config, LMCacheMetadata("m", 1, 0, "float32"))
    caches = [torch.randn(2, 8, 4, 1, 8) for _ in range(2)]
    return engine, {"kvcaches": caches, "slot_mapping": torch.arange(16)}


def test_the_store_is_one_as_long_as_the_engine() -> None:
    engine, _ = made()
    backend = DictBackend()
    store = engine.storage_manager
    store.add_backend("mine", backend)
    assert engine.storage_manager is store
    assert "mine" in engine.storage_manager.backends
    key = CacheEngineKey("x", 1, 0, bytes(32), "float32")
    (memory_obj,) = store.batched_allocate([100]) or []
    store.batched_put([key], [memory_obj])
    engine.close()
    assert (key in backend.chunks, backend.closed) == (True, True), "pending puts are done first"
    assert "lmcache_rs-mine" not in {thread.name for thread in threading.enumerate()}


def test_a_clear_of_a_prefix_forgets_one_tenant_and_no_other() -> None:
    engine, where = made()
    tokens = list(range(16))
    tenants = [{"lmcache.tag.tenant": name} for name in ("a", "ab")]
    for tenant in tenants:
        assert engine.store(tokens, request_configs=tenant, **where) == 16  # type: ignore[arg-type]
    assert engine._registration is not None
    namespace = engine._registration.namespaces.text(tenants[0])
    assert engine.clear(namespace) == 2
    assert [engine.lookup(tokens, request_configs=tenant) for tenant in tenants] == [0, 16]
    assert engine.clear("model=m") == 2
    assert engine.clear() == 0
    engine.close()


def test_a_closed_engine_is_not_cleared_and_makes_no_store() -> None:
    engine, _ = made()
    engine.close()
    for use in (engine.clear, lambda: engine.storage_manager):
        with pytest.raises(RuntimeError, match="closed"):
            use()
