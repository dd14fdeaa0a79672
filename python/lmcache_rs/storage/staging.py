"""Chunks on their way from the tiers below L1 to whoever copies them on: `Staging`."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from lmcache_rs.storage.local_cpu import LocalCPUBackend, runs
from lmcache_rs.storage.manager import allocate_and_copy_objects
from lmcache_rs.storage.memory_obj import tokens_of
from lmcache_rs.storage.reads import TierRead

if TYPE_CHECKING:
    from lmcache_rs._native import LocalCpu
    from lmcache_rs.key import CacheEngineKey
    from lmcache_rs.storage.manager import StorageManager


class Staging:
    """A share of host memory that nothing but reads of lower tiers uses, and never for longer than
    until what was read is copied on: however full L1 is, there is room for them.

    One caller at a time.

    Args:
        storage: The tiers.
        pool: The share: a pool of its own, which no other tier and no lookup knows.
    """

    def __init__(self, storage: StorageManager, pool: LocalCpu) -> None:
        self.pool = pool
        self._storage = storage

    def num_held(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many of these chunks L1 has, from the first to the first gap."""
        local = self._local
        return 0 if local is None else local.batched_contains(keys)

    def read(
        self, lookup_id: str, keys: Sequence[CacheEngineKey], refused_tiers: Container[str] = ()
    ) -> int:
        """Reads chunks, up to the first that no tier gives or that L1 has; how many.

        They are found in the pool until `let_go`. Each read is noted as those of a prefetch are.

        Args:
            lookup_id: For whom.
            keys: The chunks of one chain, in order.
            refused_tiers: Names of tiers that are not to be read.
        """
        local = self._local
        if local is not None:
            has = (at for at, key in enumerate(keys) if local.contains(key))
            keys = keys[: next(has, len(keys))]
        num_read = before = 0
        while num_read < len(keys):
            for name, backend in self._storage.backends.items():
                if backend is local or name in refused_tiers:
                    continue
                rest = keys[num_read:]
                wanted = backend.batched_contains(rest)
                if not wanted:
                    continue
                began = time.perf_counter()
                arrived = self._storage._from_below(backend, rest[:wanted], self.pool)
                seconds = time.perf_counter() - began
                if any(each.sealed or not self.pool.owns(each) for each in arrived):
                    # Of a tier that has memory of its own.
                    arrived = list(allocate_and_copy_objects(self.pool, arrived))
                num_bytes = sum(each.nbytes for each in arrived)
                read = TierRead(lookup_id, name, wanted, len(arrived), num_bytes, seconds)
                self._storage.reads.note(read)
                for key, each in zip(rest, arrived, strict=False):
                    self.pool.put(key.namespace, key.chunk_hash, each, tokens_of(each))
                num_read += len(arrived)
                if arrived:
                    break
            if num_read == before:
                break
            before = num_read
        return num_read

    def let_go(self, keys: Sequence[CacheEngineKey]) -> None:
        """The pool forgets these chunks; whoever holds them holds them."""
        for namespace, hashes in runs(keys):
            step = len(keys[0].chunk_hash)
            for at in range(0, len(hashes), step):
                self.pool.remove(namespace, hashes[at : at + step])

    @property
    def _local(self) -> LocalCPUBackend | None:
        return self._storage._local
