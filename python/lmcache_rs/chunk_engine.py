"""The engine as a connector drives it: chunks by their hashes, between the engine's tensors and the
pool. `LMCacheEngine` puts a prompt's tokens on top.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from lmcache_rs import _native
from lmcache_rs.config import LMCacheEngineConfig, LMCacheMetadata
from lmcache_rs.gpu_connector import RegisteredCache, identity, register
from lmcache_rs.key import HASH_BYTES, Namespaces
from lmcache_rs.layouts import Layout, LayoutError, require_layout
from lmcache_rs.token_database import ChunkedTokenDatabase
from lmcache_rs.transfers import Transfer

if TYPE_CHECKING:
    import torch

    from lmcache_rs.storage import StorageManager

logger = logging.getLogger("lmcache_rs")


class Stored(NamedTuple):
    """What a store did: chunks, tokens and bytes newly stored, and chunks that memory refused."""

    chunks: int
    tokens: int
    bytes: int
    refused_chunks: int


class Loaded(NamedTuple):
    """What a load did: every token below `end` is there now; tokens and bytes written."""

    end: int
    tokens: int
    bytes: int


class _Registration(NamedTuple):
    """Tensors and what names their bytes, in one value: no call may mix those of two."""

    which: tuple[object, ...]
    cache: RegisteredCache
    namespaces: Namespaces


class ChunkEngine:
    """A pool, the tiers below it, and the engine's tensors. Arguments as for `LMCacheEngine`."""

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        *,
        layout: Layout | None = None,
        num_readers: int = 0,
    ) -> None:
        self.config = config
        self.metadata = metadata
        self.layout: Layout = layout or "split"
        require_layout(self.layout)
        self.token_database = ChunkedTokenDatabase(config, metadata)
        self.chunk_size = config.chunk_size
        self._registration: _Registration | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._storage_manager: StorageManager | None = None
        # What of the pool a GPU reaches by itself; 0 without one.
        self.page_locked_bytes = 0
        self._has_warned = False
        self._transfers = _native.TransferQueue()
        # Another process's pool: loads begun in the background come from there instead.
        self.reads_from: _native.RegionReader | None = None
        self.local_cpu: _native.LocalCpu | None = None
        if config.local_cpu:
            self.local_cpu = _native.LocalCpu(
                config.max_local_cpu_bytes,
                config.lease_timeout_ms,
                config.cache_policy,
                num_readers,
            )
        if config.wants_lower_tiers:
            # Now and not when it is first used: `strict` stops the start.
            self._make_storage_manager()

    # --- the store and its end ----------------------------------------------------------------

    def release(self, lookup_id: str) -> bool:
        """Gives back what `lookup_id` leases; whether it leased anything."""
        return self.local_cpu is not None and self.local_cpu.release(lookup_id)

    def is_healthy(self) -> bool:
        """Whether loads are to be trusted."""
        return not self._closed

    @property
    def storage_manager(self) -> StorageManager:
        """The tiers, for callers that move whole objects: one store as long as the engine lives.

        Raises:
            RuntimeError: The engine is closed.
        """
        with self._lock:
            storage_manager = self._storage_manager or self._make_storage_manager()
        if self.registered is not None:
            storage_manager.form = self.registered.form
        return storage_manager

    def _make_storage_manager(self) -> StorageManager:
        from lmcache_rs.storage import StorageManager

        self._require_open()
        self._storage_manager = StorageManager(self.config, local_cpu=self.local_cpu)
        return self._storage_manager

    @property
    def _lower(self) -> StorageManager | None:
        """The store, if it has any tier below host memory."""
        storage_manager = self._storage_manager
        if storage_manager is None or not storage_manager.has_lower_tiers:
            return None
        return self.storage_manager

    def clear(self, prefix: str | None = None) -> int:
        """Removes every stored chunk, or those whose namespace begins with `prefix`; how many.

        Leased chunks stay for whoever holds them, and are found no more. See
        `StorageManager.clear`.
        """
        self._require_open()
        return self.storage_manager.clear(prefix)

    def close(self, deadline_s: float = 10.0) -> None:
        """Ends the engine: later calls raise RuntimeError. Transfers under way, and puts that wait
        for tiers below host memory, are done first, the latter within `deadline_s` seconds;
        transfers that nobody has begun are called off. Idempotent."""
        with self._lock:
            self._closed = True
            storage_manager = self._storage_manager
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.cache.settle()
        self._transfers.close()
        if storage_manager is not None:
            storage_manager.close(deadline_s)
        if self.reads_from is not None:
            self.reads_from.close()
        if self.local_cpu is not None:
            self.local_cpu.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- what a connector calls ----------------------------------------------------------------

    def register_kv_caches(
        self, kvcaches: Sequence[torch.Tensor], *, block_tokens: int | None = None
    ) -> RegisteredCache:
        """Registers the engine's KV tensors for good, once, before the first store or load.

        Raises:
            LayoutError: The tensors cannot have the engine's layout, or are stored in another form
                than the metadata states.
        """
        registered = register(
            kvcaches,
            self.layout,
            block_tokens=block_tokens,
            copy_threads=self.config.copy_threads,
        )
        stored_form = registered.form.fmt.name
        if self.metadata.stored_form not in (None, stored_form):
            raise LayoutError(
                f"the metadata state stored_form {self.metadata.stored_form}, these tensors are "
                f"stored as {stored_form} ({registered.fallback_reason or registered.layout}); "
                "make the engine with the layout that they have"
            )
        # The tensors' own form is part of every key, whatever the metadata states.
        own = {
            "registered_dtype": registered.kv_dtype,
            "registered_layers": str(registered.num_layers),
            "registered_layout": registered.layout_id,
        }
        metadata = replace(self.metadata, stored_form=stored_form)
        named = replace(self.token_database.identity(own), metadata=metadata)
        namespaces = Namespaces(named)
        self._lock_pool(registered)
        self._registration = _Registration(identity(kvcaches), registered, namespaces)
        return registered

    def _lock_pool(self, registered: RegisteredCache) -> None:
        """Page-locks the pool for the GPU of the tensors, with one warning if it cannot."""
        if registered.device is None or self.local_cpu is None:
            return
        self.page_locked_bytes, refusal = registered.device.lock_pool(self.local_cpu)
        if refusal is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "lmcache_rs: the pool of %d bytes cannot be page-locked (%s); KV is copied by the "
                "copy engines through the driver's own buffers, which is slow and makes calls "
                "wait. Make max_local_cpu_size smaller, or raise the limit on locked memory",
                self.local_cpu.capacity_bytes,
                refusal,
            )

    @property
    def registered(self) -> RegisteredCache | None:
        """The KV tensors registered last."""
        return None if self._registration is None else self._registration.cache

    def store_chunks(
        self, namespace: str, hashes: bytes, block_ids: Sequence[int], *, first: int = 0
    ) -> Stored:
        """Stores full chunks that lie in the given blocks; see `store`.

        From a GPU they become visible once their copies are done, which this does not wait for.
        """
        num_tokens = len(hashes) // HASH_BYTES * self.chunk_size
        registered = self._require_registered().cache
        return self._store(
            registered,
            namespace,
            hashes,
            wait=False,
            num_tokens=num_tokens,
            blocks=block_ids,
            first=first,
        )

    def load_chunks(
        self, lookup_id: str, namespace: str, hashes: bytes, block_ids: Sequence[int], *, skip: int
    ) -> Loaded:
        """Writes the tokens from `skip` on of full chunks into the given blocks; see `retrieve`."""
        num_tokens = len(hashes) // HASH_BYTES * self.chunk_size
        registered = self._require_registered().cache
        return self._load(
            registered,
            namespace,
            hashes,
            lookup_id=lookup_id,
            num_tokens=num_tokens,
            blocks=block_ids,
            skip=skip,
        )

    def begin_store_chunks(
        self, namespace: str, hashes: bytes, block_ids: Sequence[int], *, first: int = 0
    ) -> Transfer[Stored]:
        """As `store_chunks`, without waiting for the copy.

        Memory is reserved when this returns, so that what is cleared from then on stays cleared;
        chunks are found once they are copied. The blocks must stay as they are until then.
        """
        registered = self._require_registered().cache
        ticket = None
        if self.local_cpu is not None and not self._closed:
            ticket = registered.begin_store(
                self._transfers,
                self.local_cpu,
                namespace,
                hashes,
                chunk_size=self.chunk_size,
                num_tokens=len(hashes) // HASH_BYTES * self.chunk_size,
                blocks=block_ids,
                first=first,
            )
        return Transfer(ticket, Stored, Stored(0, 0, 0, 0))

    def begin_load_chunks(
        self,
        lookup_id: str,
        namespace: str,
        hashes: bytes,
        block_ids: Sequence[int],
        *,
        skip: int,
        end: int | None = None,
        source: _native.LocalCpu | _native.RegionReader | None = None,
    ) -> Transfer[Loaded]:
        """As `load_chunks`, without waiting for the copy; full chunks up to token `end`, if given;
        out of another pool than the engine's own, if one is given.

        What is loaded is held when this returns, in place of the lease. The blocks must not be used
        until the copy is done.
        """
        registered = self._require_registered().cache
        if end is not None:
            hashes = hashes[: end // self.chunk_size * HASH_BYTES]
        ticket = None
        source = source or self.reads_from or self.local_cpu
        if source is not None and not self._closed:
            ticket = registered.begin_load(
                self._transfers,
                source,
                lookup_id,
                namespace,
                hashes,
                chunk_size=self.chunk_size,
                num_tokens=len(hashes) // HASH_BYTES * self.chunk_size,
                blocks=block_ids,
                skip=skip,
            )
        return Transfer(ticket, Loaded, Loaded(skip, 0, 0))

    def layerwise_step(self) -> _native.LayerwiseStep | _native.CudaLayerwiseStep | None:
        """Loads and saves of requests that share a forward pass, a layer at a time.

        None if there is nothing to load from and to store in. Saves from a GPU become visible once
        their copies are done, which a commit does not wait for.
        """
        return self._layerwise_step(self._require_registered().cache, wait=False)

    # --- inside -------------------------------------------------------------------------------

    def _layerwise_step(
        self, registered: RegisteredCache, *, wait: bool = True
    ) -> _native.LayerwiseStep | _native.CudaLayerwiseStep | None:
        """A step over these tensors; None if there is no memory to store in."""
        if self.local_cpu is None or self._closed:
            return None
        return registered.layerwise_step(self.local_cpu, self.chunk_size, wait=wait)

    def _store(
        self,
        registered: RegisteredCache,
        namespace: str,
        hashes: bytes,
        *,
        wait: bool = True,
        **where: Any,
    ) -> Stored:
        if self.local_cpu is None or self._closed:
            return Stored(0, 0, 0, 0)
        return Stored(
            *registered.store(
                self.local_cpu,
                namespace,
                hashes,
                chunk_size=self.chunk_size,
                wait=wait,
                **where,
            )
        )

    def _load(
        self,
        registered: RegisteredCache,
        namespace: str,
        hashes: bytes,
        *,
        lookup_id: str,
        skip: int,
        **where: Any,
    ) -> Loaded:
        if self.local_cpu is None or self._closed:
            return Loaded(skip, 0, 0)
        return Loaded(
            *registered.load(
                self.local_cpu,
                lookup_id,
                namespace,
                hashes,
                chunk_size=self.chunk_size,
                skip=skip,
                **where,
            )
        )

    def _register(self, kvcaches: Sequence[torch.Tensor]) -> _Registration:
        which = identity(kvcaches)
        with self._lock:
            if self._registration is None or self._registration.which != which:
                self.register_kv_caches(kvcaches, block_tokens=self.metadata.block_size)
            return self._require_registered()

    def _require_registered(self) -> _Registration:
        if self._registration is None:
            raise RuntimeError("no KV tensors are registered; call register_kv_caches first")
        return self._registration

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LMCacheEngine is closed; make a new one")
