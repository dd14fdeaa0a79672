"""A tier below host memory, for tests: a dictionary that counts, and stops when it is told to."""

from __future__ import annotations

import threading
from typing import ClassVar

from lmcache_rs import CacheEngineKey
from lmcache_rs.storage import StorageBackend


class Shelf(StorageBackend):
    """See the module's description. `newest` is the one that the last engine has made."""

    newest: ClassVar[Shelf]

    def __init__(self) -> None:
        self.chunks: dict[str, tuple[bytes, bytes]] = {}
        self.reads: list[str] = []
        self.is_open = threading.Event()
        self.is_open.set()
        type(self).newest = self

    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        self.chunks[str(key)] = bytes(data), metadata

    def get(self, key: CacheEngineKey) -> tuple[bytes, bytes] | None:
        self.is_open.wait()
        self.reads.append(str(key))
        return self.chunks.get(str(key))

    def contains(self, key: CacheEngineKey) -> bool:
        self.is_open.wait()
        return str(key) in self.chunks

    def remove(self, key: CacheEngineKey) -> bool:
        return self.chunks.pop(str(key), None) is not None
