"""A tier that gives its bytes at a rate: a dictionary behind a token bucket."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lmcache_rs.storage import StorageBackend

if TYPE_CHECKING:
    from lmcache_rs import CacheEngineKey


class Bucket(StorageBackend):
    """See the module's description. The newest one is the engine's own."""

    newest: Bucket

    def __init__(self) -> None:
        self._chunks: dict[str, tuple[bytes, bytes]] = {}
        self.bytes_per_second = float("inf")
        self._burst_bytes = 0.0
        self._tokens = 0.0
        self._filled = time.monotonic()
        Bucket.newest = self

    def slow_to(self, bytes_per_second: float, burst_bytes: float) -> None:
        """From here on it gives so much; at once, no more than the burst."""
        self.bytes_per_second = bytes_per_second
        self._burst_bytes = self._tokens = burst_bytes
        self._filled = time.monotonic()

    def _take(self, num_bytes: int) -> None:
        now = time.monotonic()
        if self.bytes_per_second == float("inf"):
            return
        earned = (now - self._filled) * self.bytes_per_second
        self._tokens = min(self._burst_bytes, self._tokens + earned) - num_bytes
        self._filled = now
        if self._tokens < 0:
            time.sleep(-self._tokens / self.bytes_per_second)

    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        self._chunks[str(key)] = bytes(data), metadata

    def get(self, key: CacheEngineKey) -> tuple[bytes, bytes] | None:
        found = self._chunks.get(str(key))
        if found is not None:
            self._take(len(found[0]))
        return found

    def contains(self, key: CacheEngineKey) -> bool:
        return str(key) in self._chunks

    def remove(self, key: CacheEngineKey) -> bool:
        return self._chunks.pop(str(key), None) is not None
