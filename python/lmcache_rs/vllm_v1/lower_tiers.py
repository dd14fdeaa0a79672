"""The worker half's tiers below host memory: `LowerTiers`.

What is brought from them for a lookup (prefetches.py), what is streamed past host memory
(streams.py), and what is offered to them. With `local_cpu: false` host memory only stages: nothing
lies there for longer than it takes to get to a tier, or from one into the engine's blocks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from lmcache_rs import _native
from lmcache_rs.key import HASH_BYTES, keys_of
from lmcache_rs.storage.manager import L2
from lmcache_rs.storage.prefetch import Room
from lmcache_rs.storage.remote import RemoteBackend
from lmcache_rs.storage.staging import Staging
from lmcache_rs.tier_walk import whole_pages
from lmcache_rs.vllm_v1 import compat
from lmcache_rs.vllm_v1.prefetches import RunningPrefetches
from lmcache_rs.vllm_v1.streams import Stream, Streams, share_of

if TYPE_CHECKING:
    from lmcache_rs.cache_engine import LMCacheEngine
    from lmcache_rs.config import LMCacheEngineConfig
    from lmcache_rs.storage import StorageManager
    from lmcache_rs.storage.reads import TierRead
    from lmcache_rs.vllm_v1.faults import Faults
    from lmcache_rs.vllm_v1.metadata import ReqMeta
    from lmcache_rs.vllm_v1.prefetches import PrefetchOrders


class TierNews(NamedTuple):
    """What there is to say since the last time.

    Args:
        prefetched: Requests whose chunks have been brought, as far as they are there and fit.
        streamable: Of those, chunks from the first asked for on that could be streamed.
        reads: What reading took.
    """

    prefetched: set[str]
    streamable: dict[str, int]
    reads: list[TierRead]


class LowerTiers:
    """See the module's description.

    Args:
        config: Settings.
        own_name: The namespace under which this rank keeps what the scheduler half names.
        faults: Where faults of ours are noted.
        can_stream: Whether loads may be streamed: where others read this rank's memory they
            may not, as windows are gone before those come to them.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        own_name: Callable[[str], str],
        faults: Faults,
        *,
        can_stream: bool,
    ) -> None:
        self.is_staging = not config.local_cpu and config.wants_lower_tiers
        self._config = config
        self._own_name = own_name
        self._faults = faults
        self._can_stream = can_stream and config.wants_lower_tiers
        self._share_bytes = self._chunk_bytes = 0
        # Those that could not be made, with the reason.
        self._off: dict[str, str] = {}
        self.storage: StorageManager | None = None
        self._prefetches: RunningPrefetches | None = None
        self._streams: Streams | None = None

    # --- start-up -----------------------------------------------------------------------------

    def share(self, chunk_bytes: int) -> LMCacheEngineConfig:
        """The engine's settings: of its memory a share is left to streams, of chunks of so many
        bytes; and memory that only stages is memory."""
        config = self._config
        self._chunk_bytes = whole_pages(chunk_bytes)
        if self.is_staging:
            config = config.with_values("stages for the tiers below", local_cpu=True)
        if self._can_stream and config.local_cpu:
            pool_bytes = config.max_local_cpu_bytes
            self._share_bytes = share_of(pool_bytes // self._chunk_bytes) * self._chunk_bytes
            left = (pool_bytes - self._share_bytes) / 2**30
            config = config.with_values("less the share of streams", max_local_cpu_size=left)
        self._config = config
        return config

    def add_to(self, engine: LMCacheEngine) -> None:
        """Adds the tiers to the engine's store.

        Raises:
            RuntimeError: Host memory is no tier, and there is none below it.
            MemoryError: There is no memory for the share of streams.
        """
        if self._config.wants_lower_tiers:
            self._add_all(engine.storage_manager)
        if self.storage is None:
            if self.is_staging:
                raise RuntimeError("local_cpu is false, and there is no tier below host memory")
            return
        local_cpu, room = engine.local_cpu, None
        assert local_cpu is not None
        if self._share_bytes:
            self._streams = self._new_streams(engine, self.storage)
            room = Room(local_cpu, self._chunk_bytes, is_closed=self.is_staging)
        self._prefetches = RunningPrefetches(
            self.storage,
            self._faults,
            self._own_name,
            room=room,
            staged_in=local_cpu if self.is_staging else None,
        )

    def _add_all(self, storage: StorageManager) -> None:
        for name, error in storage.unavailable.items():
            self._faults.note("local_disk" if name == L2 else "remote", error)
            self._off[name] = str(error)
        for name, made_by in self._config.storage_backends.items():
            try:
                module, _, what = made_by.partition(":")
                storage.add_backend(name, getattr(importlib.import_module(module), what)())
            except Exception as error:
                if self._config.strict:
                    raise
                self._faults.note("storage_backends", error)
                self._off[name] = str(error)
                compat.logger.error(
                    "lmcache_rs: THE ENGINE SERVES WITHOUT TIER %s (%s): %s. `strict: true` makes "
                    "this a stop.",
                    name,
                    made_by,
                    error,
                )
        if storage.has_lower_tiers:
            self.storage = storage

    def _new_streams(self, engine: LMCacheEngine, storage: StorageManager) -> Streams:
        config = self._config
        pool = _native.LocalCpu(self._share_bytes, config.lease_timeout_ms, config.cache_policy)
        registered = engine.registered
        if registered is not None and registered.device is not None:
            # Where the driver refuses it, it has refused the pool, too, and that was said.
            registered.device.lock_pool(pool)
        return Streams(
            engine,
            Staging(storage, pool),
            max(1, self._share_bytes // self._chunk_bytes // 2),
            engine.chunk_size // (engine.metadata.block_size or 1),
            self._own_name,
            config.lookup_timeout_ms / 1e3,
            self._faults,
        )

    def states(self) -> list[str]:
        """The tiers below host memory in the order they are asked, each with its state."""
        off = [f"{name} off ({reason})" for name, reason in self._off.items()]
        tiers = {} if self.storage is None else self.storage.backends
        return [*(f"{name} {_state(tiers[name])}" for name in self.names), *off]

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are there."""
        return () if self.storage is None else tuple(self.storage.backends)[1:]

    # --- the step -----------------------------------------------------------------------------

    def follow(self, orders: PrefetchOrders | None) -> None:
        """Does what a step says."""
        if orders is None or self._prefetches is None:
            return
        if self._streams is not None:
            for req_id in orders.stopped:
                self._streams.stop(req_id)
        self._prefetches.follow(orders)

    def begin_stream(self, req: ReqMeta) -> Stream | None:
        """Starts a load past host memory; None if it cannot begin."""
        return None if self._streams is None else self._streams.begin(req)

    def take_stopped(self, req_id: str) -> bool:
        """Whether a request had gone before its stream ended; told once."""
        return self._streams is not None and self._streams.take_stopped(req_id)

    def poll(self) -> None:
        """To be called now and then."""
        if self._streams is not None:
            self._streams.poll()

    def offer(self, namespace: str, hashes: bytes) -> None:
        """Offers what was stored to the tiers below; they write when they come to it."""
        if self.storage is None:
            return
        self.storage.write_through(keys_of(namespace, hashes))
        if self._prefetches is not None and self.is_staging:
            self._prefetches.let_go(namespace, hashes)

    def lets_go_of_beginnings(self, num_chunks: int, pool_bytes: int) -> bool:
        """Whether of a prompt of so many chunks only what is new is to be saved.

        Else it is all from chunk 0 on, not from what is known to be stored: what was evicted since
        is stored anew, or the chunks behind it could not be reached. But where host memory is only
        on the way to the tiers below, as it just stages or the prompt has outgrown it, a beginning
        makes room for its end.
        """
        has_outgrown = num_chunks * self._chunk_bytes > pool_bytes
        return self.is_staging or (self.storage is not None and has_outgrown)

    def take_news(self) -> TierNews:
        """What there is to say since the last call."""
        if self.storage is None or self._prefetches is None:
            return TierNews(set(), {}, [])
        done = self._prefetches.take_done()
        # After those that are done: what they have read is among it.
        return TierNews(set(done), done, self.storage.reads.take())

    # --- for operators ------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """What the tiers have counted since the start."""
        counters: dict[str, int] = {}
        if self.storage is not None:
            for tier, stats in list(self.storage.stats().items())[1:]:
                counters |= {f"{tier}_{name}": count for name, count in stats.items()}
        if self._streams is not None:
            counters |= self._streams.counts
        return counters

    def with_share(self, books: dict[str, int]) -> dict[str, int]:
        """The books of host memory with those of the share."""
        if self._streams is None:
            return books
        share = self._streams.staging.pool.audit()
        return {name: count + share[name] for name, count in books.items()}

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Lets go of everything but the tiers themselves. Idempotent."""
        if self._streams is not None:
            self._streams.close()
        if self._prefetches is not None:
            self._prefetches.close()

    def close_share(self) -> None:
        """Gives the share of streams back. Idempotent."""
        if self._streams is not None:
            self._streams.staging.pool.close()


def hashes_of(hashes: bytes, first: int, end: int) -> bytes:
    """Packed hashes of the chunks from `first` to `end`."""
    return hashes[first * HASH_BYTES : end * HASH_BYTES]


def _state(tier: object) -> str:
    """Whether a tier serves, in words."""
    if isinstance(tier, RemoteBackend) and not tier.is_reached:
        return "out of reach"
    return "healthy"
