"""The memory of the rank that keeps what this one loads: `OwnersMemory`.

Where all tensor parallel ranks hold the same, the first keeps it. The others have no store; they
map that rank's memory, and copy out of it what its lookup server holds for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmcache_rs import _native, lookup
from lmcache_rs.config import WITHOUT_LOWER_TIERS
from lmcache_rs.vllm_v1 import compat

if TYPE_CHECKING:
    from lmcache_rs.config import LMCacheEngineConfig
    from lmcache_rs.vllm_v1.faults import Faults

NO_MEMORY = dict.fromkeys(
    (
        "capacity_bytes",
        "free_bytes",
        "cached_bytes",
        "reserved_bytes",
        "leased_bytes",
        "leases",
        "chunks",
        "evicted_chunks",
    ),
    0,
)
"""The books of a rank that keeps nothing."""


class UnreadOwnerError(RuntimeError):
    """Another rank's memory cannot be read, and the settings want that to be a stop."""


class OwnersMemory:
    """See the module's description.

    Args:
        owner: The rank that keeps what `rank` loads.
        rank: This one.
        config: Settings.
        faults: Where faults of ours are noted.
    """

    def __init__(
        self, owner: lookup.Rank, rank: lookup.Rank, config: LMCacheEngineConfig, faults: Faults
    ) -> None:
        self._owner = owner
        self._rank = rank
        self._config = config
        self._faults = faults
        self._has_failed = False
        self.reader: _native.RegionReader | None = None

    @staticmethod
    def without_store(config: LMCacheEngineConfig, owner: lookup.Rank) -> LMCacheEngineConfig:
        """The settings of a rank that keeps nothing itself."""
        return config.with_values(f"left to rank {owner}", local_cpu=False, **WITHOUT_LOWER_TIERS)

    def find(self, lookup_ids: Mapping[lookup.Rank, str]) -> _native.RegionReader | None:
        """Maps the memory as soon as the owner's name is among these; once.

        If that fails it is said, and the engine is served without a cache: the scheduler half
        promises nothing before this rank has said that it can read.

        Raises:
            UnreadOwnerError: It failed, and `strict` makes it a stop.
        """
        owner_id = lookup_ids.get(self._owner)
        if self.reader is not None or self._has_failed or owner_id is None:
            return self.reader
        try:
            path = lookup.lookup_socket_path(owner_id, self._owner)
            secret = lookup.reader_secret(owner_id)
            self.reader = _native.RegionReader(path, secret, self._config.lookup_timeout_ms)
        except Exception as error:
            self._has_failed = True
            self._faults.note("map_owner", error)
            problem = f"rank {self._rank} cannot read the memory of rank {self._owner}: {error}"
            compat.logger.error(
                "lmcache_rs: THE ENGINE SERVES WITHOUT A CACHE: %s. `strict: true` makes this a "
                "stop.",
                problem,
            )
            if self._config.strict:
                raise UnreadOwnerError(problem) from error
        return self.reader
