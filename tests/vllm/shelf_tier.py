"""A tier below host memory for engines under test: a dictionary in the worker's process."""

from __future__ import annotations

from lmcache_rs import CacheEngineKey
from lmcache_rs.storage import StorageBackend


class Shelf(StorageBackend):
    """See the module's description."""

    def __init__(self) -> None:
        self._chunks: dict[str, tuple[bytes, bytes]] = {}

    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        self._chunks[str(key)] = bytes(data), metadata

    def get(self, key: CacheEngineKey) -> tuple[bytes, bytes] | None:
        return self._chunks.get(str(key))

    def contains(self, key: CacheEngineKey) -> bool:
        return str(key) in self._chunks

    def remove(self, key: CacheEngineKey) -> bool:
        return self._chunks.pop(str(key), None) is not None
