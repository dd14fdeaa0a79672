"""The tiers as one store: `StorageManager`, and the memory objects that move through it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lmcache_rs._native import LocalCpu, MemoryObj
from lmcache_rs.config import LMCacheEngineConfig

if TYPE_CHECKING:
    from lmcache_rs.key import CacheEngineKey

__all__ = ["LocalCPUBackend", "MemoryFormat", "MemoryObj", "StorageManager"]


class MemoryFormat(enum.Enum):
    """What the bytes of a chunk are, layer by layer."""

    KV_T2D = "tokens, 2, hidden"
    KV_MLA_FMT = "tokens, hidden"
    OPAQUE = "engine blocks"


class LocalCPUBackend:
    """L1: host memory. Evicts by the policy it was made with, never what somebody holds."""

    def __init__(self, local_cpu: LocalCpu) -> None:
        self.local_cpu = local_cpu

    def __str__(self) -> str:
        return "LocalCPUBackend"

    def contains(self, key: CacheEngineKey) -> bool:
        """Whether the chunk is stored."""
        return self.local_cpu.longest_prefix(key.namespace, key.chunk_hash) == 1

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many chunks are stored, from the first to the first gap."""
        count = 0
        for namespace, hashes in _runs(keys):
            found = self.local_cpu.longest_prefix(namespace, hashes)
            count += found
            if found < len(hashes) // 32:
                break
        return count

    def submit_put_task(self, key: CacheEngineKey, memory_obj: MemoryObj) -> bool:
        """Seals and publishes memory that this backend allocated; false if the key was known."""
        return self.local_cpu.put(key.namespace, key.chunk_hash, memory_obj)

    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """The objects in order, `None` where a chunk is not stored."""
        found = (self.local_cpu.get(key.namespace, key.chunk_hash) for key in keys)
        return [objects[0] if objects else None for objects in found]

    def remove(self, key: CacheEngineKey) -> bool:
        """Forgets a chunk; whether it was there."""
        return self.local_cpu.remove(key.namespace, key.chunk_hash)


class StorageManager:
    """The tiers in order, as one store.

    Args:
        config: Settings.
        local_cpu: The pool to use; None makes one of `max_local_cpu_size`.
    """

    def __init__(self, config: LMCacheEngineConfig, *, local_cpu: LocalCpu | None = None) -> None:
        if local_cpu is None and config.local_cpu:
            local_cpu = LocalCpu(
                config.max_local_cpu_bytes, config.lease_timeout_ms, config.cache_policy
            )
        self._local_cpu = local_cpu
        self.backends: dict[str, LocalCPUBackend] = {}
        if local_cpu is not None:
            self.backends["LocalCPUBackend"] = LocalCPUBackend(local_cpu)

    def batched_allocate(self, nbytes: Sequence[int]) -> list[MemoryObj] | None:
        """Writable memory of these sizes in bytes: all of it, or None."""
        return None if self._local_cpu is None else self._local_cpu.allocate(nbytes)

    def put(self, *_: object, **__: object) -> None:
        """There is one way in, and it takes many.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("put is not available; use batched_put, which takes lists")

    def batched_put(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]) -> None:
        """Seals the objects and publishes each under its key. A known key keeps what it has.

        Raises:
            ValueError: Not as many objects as keys.
            RuntimeError: An object was put before.
        """
        for key, memory_obj in zip(keys, memory_objs, strict=True):
            for backend in self.backends.values():
                backend.submit_put_task(key, memory_obj)

    def batched_get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """The objects in order; None from the first chunk on that no tier has."""
        found: list[MemoryObj | None] = []
        for backend in self.backends.values():
            found = backend.batched_get_blocking(keys)
        gap = found.index(None) if None in found else len(found)
        return [*found[:gap], *([None] * (len(keys) - gap))]

    def contains(self, key: CacheEngineKey) -> str | None:
        """The name of the first tier that has the chunk."""
        holders = (name for name, backend in self.backends.items() if backend.contains(key))
        return next(holders, None)

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many chunks are stored in some tier, from the first to the first gap."""
        return sum(len(chunks) for chunks in self._prefix_by_tier(keys).values())

    def get_block_mapping(
        self, chunks: Iterable[tuple[CacheEngineKey, int, int]]
    ) -> dict[str, list[tuple[CacheEngineKey, int, int]]]:
        """The stored prefix of `(key, start, end)` chunks, by name of the tier that has them."""
        chunks = list(chunks)
        by_tier = self._prefix_by_tier([key for key, _, _ in chunks])
        return {name: [chunks[position] for position in of] for name, of in by_tier.items()}

    def _prefix_by_tier(self, keys: Sequence[CacheEngineKey]) -> dict[str, list[int]]:
        mapping: dict[str, list[int]] = {}
        position = 0
        while position < len(keys):
            for name, backend in self.backends.items():
                count = backend.batched_contains(keys[position:])
                if count:
                    mapping.setdefault(name, []).extend(range(position, position + count))
                    position += count
                    break
            else:
                break
        return mapping

    def clear(self) -> int:
        """Removes every chunk of every tier; how many there were."""
        return 0 if self._local_cpu is None else self._local_cpu.clear()

    def close(self) -> None:
        """Empties the tiers for good. Idempotent."""
        if self._local_cpu is not None:
            self._local_cpu.close()


def _runs(keys: Sequence[CacheEngineKey]) -> Iterable[tuple[str, bytes]]:
    """Neighbouring keys of one namespace as packed hashes, so that each run is one call."""
    start = 0
    while start < len(keys):
        namespace = keys[start].namespace
        end = start + 1
        while end < len(keys) and keys[end].namespace == namespace:
            end += 1
        yield namespace, b"".join(key.chunk_hash for key in keys[start:end])
        start = end
