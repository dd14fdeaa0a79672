"""Local disks as a tier: chunks in folders, a file each, that outlive the process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_rs._native import LocalCpu, LocalDisk
from lmcache_rs.storage.native_tier import DEADLINE_S, NativeTier

if TYPE_CHECKING:
    from lmcache_rs.config import LMCacheEngineConfig


class LocalDiskBackend(NativeTier):
    """Local disks. Everything but the marshalling is native: see docs/local-disk.md.

    Args:
        paths: Folders; chunks are spread over them. Several processes may use the same ones.
        limit_bytes: Bytes that all of them together may take, whoever put them there.
        pool: Where chunks that are read are put.
        policy: Which chunk leaves when the limit is reached.
        threads: As many requests are under way at the disks.
        max_queued_bytes: Bytes of the puts that may wait; a quarter of the pool unless given.
        direct: Read and write past the page cache, where the file system can.
        delete_on_close: Remove what is stored at the close, if no other process uses it.
        deadline_s: Seconds after which a read is taken as a miss.

    Raises:
        OSError: A folder cannot be made or used.
        ValueError: The policy is unknown.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        limit_bytes: int,
        pool: LocalCpu,
        *,
        policy: str = "LRU",
        threads: int = 8,
        max_queued_bytes: int | None = None,
        direct: bool = True,
        delete_on_close: bool = False,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.local_disk = LocalDisk(
            [os.fspath(path) for path in paths],
            limit_bytes,
            pool,
            policy,
            threads=threads,
            max_queued_bytes=max_queued_bytes or max(1, pool.capacity_bytes // 4),
            direct=direct,
            delete_on_close=delete_on_close,
        )
        super().__init__("LocalDiskBackend", self.local_disk, deadline_s)

    @classmethod
    def from_config(cls, config: LMCacheEngineConfig, pool: LocalCpu) -> LocalDiskBackend:
        """The tier that `local_disk` and `max_local_disk_size` ask for."""
        return cls(
            config.local_disk_paths,
            config.max_local_disk_bytes,
            pool,
            policy=config.cache_policy,
            threads=config.local_disk_threads,
            direct=config.local_disk_direct_io,
            delete_on_close=config.local_disk_on_exit == "delete",
        )
