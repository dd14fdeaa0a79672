"""A tier below host memory, for tests: a dictionary that keeps its promises."""

from __future__ import annotations

from lmcache_rs import CacheEngineKey
from lmcache_rs.storage import StorageBackend


class Shelf(StorageBackend):
    """See the module's description."""

    def __init__(self) -> None:
        self.chunks: dict[str, tuple[bytes, bytes]] = {}

    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        self.chunks[str(key)] = bytes(data), metadata

    def get(self, key: CacheEngineKey) -> tuple[bytes, bytes] | None:
        return self.chunks.get(str(key))

    def contains(self, key: CacheEngineKey) -> bool:
        return str(key) in self.chunks

    def remove(self, key: CacheEngineKey) -> bool:
        return self.chunks.pop(str(key), None) is not None
