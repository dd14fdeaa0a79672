"""L1 as a tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from lmcache_rs import _native
from lmcache_rs._native import LocalCpu
from lmcache_rs.key import HASH_BYTES
from lmcache_rs.storage.backend import StorageBackendInterface
from lmcache_rs.storage.memory_obj import MemoryObj, tokens_of

if TYPE_CHECKING:
    from lmcache_rs.key import CacheEngineKey

T = TypeVar("T")


class LocalCPUBackend(StorageBackendInterface):
    """L1: host memory. Evicts by the policy it was made with, never what somebody holds."""

    def __init__(self, local_cpu: LocalCpu) -> None:
        self.local_cpu = local_cpu

    def __str__(self) -> str:
        return "LocalCPUBackend"

    @property
    def allocator(self) -> LocalCpu:
        """The pool itself: what is put here is published where it lies."""
        return self.local_cpu

    def submit_put_task(self, key: CacheEngineKey, memory_obj: _native.MemoryObj) -> bool:
        """Seals and publishes memory that this pool allocated; false if the key was known."""
        num_tokens = tokens_of(memory_obj)
        return self.local_cpu.put(key.namespace, key.chunk_hash, memory_obj, num_tokens)

    def contains(self, key: CacheEngineKey) -> bool:
        """Whether the chunk is stored."""
        return self.local_cpu.longest_prefix(key.namespace, key.chunk_hash) == 1

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many chunks are stored, from the first to the first gap."""
        count = 0
        for namespace, hashes in runs(keys):
            found = self.local_cpu.longest_prefix(namespace, hashes)
            count += found
            if found < len(hashes) // HASH_BYTES:
                break
        return count

    def batched_async_contains(self, keys: Sequence[CacheEngineKey]) -> Future[int]:
        """As `batched_contains`; the future is done."""
        return _done(self.batched_contains(keys))

    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """The objects from the first to the first gap; None from there on."""
        found: list[MemoryObj | None] = []
        for namespace, hashes in runs(keys):
            objects = self.local_cpu.get(namespace, hashes)
            found += (MemoryObj(raw) for raw in objects)
            if len(objects) < len(hashes) // HASH_BYTES:
                break
        return found + [None] * (len(keys) - len(found))

    def batched_get_non_blocking(
        self, keys: Sequence[CacheEngineKey]
    ) -> Future[list[MemoryObj | None]]:
        """As `batched_get_blocking`; the future is done."""
        return _done(self.batched_get_blocking(keys))

    def remove(self, key: CacheEngineKey) -> bool:
        """Forgets a chunk; whether it was there."""
        return self.local_cpu.remove(key.namespace, key.chunk_hash)

    def clear(self, prefix: str | None = None) -> int:
        """Removes every chunk, or those whose namespace begins with `prefix`; how many."""
        return self.local_cpu.clear(prefix)

    def retain(self, prefix: str) -> int:
        """Removes the chunks whose namespace does not begin with `prefix`; how many."""
        return self.local_cpu.retain(prefix)

    def flush(self, deadline_s: float) -> bool:
        """A put is done when it returns."""
        return True

    def stats(self) -> dict[str, int]:
        """The pool's books, walked entry by entry."""
        return self.local_cpu.audit()

    def close(self, deadline_s: float = 0.0) -> bool:
        """Empties the pool for good."""
        self.local_cpu.close()
        return True


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def runs(keys: Sequence[CacheEngineKey]) -> Iterable[tuple[str, bytes]]:
    """Neighbouring keys of one namespace as packed hashes, so that each run is one call."""
    start = 0
    while start < len(keys):
        namespace = keys[start].namespace
        end = start + 1
        while end < len(keys) and keys[end].namespace == namespace:
            end += 1
        yield namespace, b"".join(key.chunk_hash for key in keys[start:end])
        start = end
