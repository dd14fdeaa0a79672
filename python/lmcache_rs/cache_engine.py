"""The engine: stores a prompt's KV, finds it again, and writes it back.

`LMCacheEngine` is what an inference engine drives, with its own KV tensors. The vLLM connector uses
the same engine through `store_chunks` and `load_chunks`, which take hashes made elsewhere, and
through `begin_store_chunks` and `begin_load_chunks`, which do not wait for the copy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from lmcache_rs import _native, layerwise
from lmcache_rs.config import LMCacheEngineConfig, LMCacheMetadata
from lmcache_rs.gpu_connector import RegisteredCache, identity, register, slots_of
from lmcache_rs.key import HASH_BYTES, Namespaces
from lmcache_rs.layouts import Layout, LayoutError, require_layout
from lmcache_rs.token_database import ChunkedTokenDatabase, mask_bytes, token_buffer
from lmcache_rs.transfers import Transfer

if TYPE_CHECKING:
    import torch

    from lmcache_rs.storage import StorageManager
    from lmcache_rs.token_database import Mask, Tokens

logger = logging.getLogger("lmcache_rs")
_NO_LOOKUP = ""


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


class _Asked(NamedTuple):
    """A call's arguments, checked and made native."""

    registered: RegisteredCache
    namespace: str
    hashes: bytes
    where: dict[str, Any]


class LMCacheEngine:
    """A KV cache beside an inference engine.

    Args:
        config: Settings.
        metadata: Facts of the model; part of every key.
        layout: What the axes of the KV tensors mean: `split` (`[2, blocks, block, heads, head]`,
            the default), another layout of addressable tokens, or `opaque` (whole blocks;
            `metadata.block_size` says how many tokens each). docs/layouts.md has all of them.
        num_readers: Other processes that read the pool; each takes its share of what a lookup
            leases.

    Tensors are registered when they are first given. The registration is tried on them: a few
    blocks are overwritten and restored, so nothing else may use the tensors during that call.

    Raises:
        ValueError: The layout is unknown.
        MemoryError: The pool (`max_local_cpu_size`) cannot be had.
    """

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
        self._save_unfull_chunk = config.saves_unfull_chunk(alone=False)
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

    # --- what an engine developer calls -------------------------------------------------------

    def store(
        self,
        tokens: Tokens,
        mask: Mask | None = None,
        *,
        kvcaches: Sequence[torch.Tensor],
        slot_mapping: torch.Tensor | Sequence[int],
        extra_keys: object = None,
        request_configs: Mapping[str, Any] | None = None,
        req_id: str | None = None,
    ) -> int:
        """Stores the full chunks of a prompt that are not stored yet.

        Args:
            tokens: Token ids of the whole prompt, from its first token on.
            mask: One bool a token, False then True: chunks wholly in the run of False
                are skipped.
            kvcaches: One tensor a layer, in the engine's layout.
            slot_mapping: int64, one slot a token (block * tokens per block + offset); a chunk with
                a slot of -1 is not stored, nor are those behind it.
            extra_keys: What besides the tokens decides the KV.
            request_configs: The request's configs, whose `lmcache.tag.*` keep requests apart.
            req_id: The request's name, for logs.

        Returns:
            Number of tokens newly stored; 0 when all were there. Memory ending early is a success.
            From a GPU too they are there when it returns.

        Raises:
            ValueError, TypeError: The arguments contradict each other or the layout.
            RuntimeError: The engine is closed.
        """
        asked = self._to_store(tokens, mask, kvcaches, slot_mapping, extra_keys, request_configs)
        if asked is None:
            return 0
        registered, namespace, hashes, where = asked
        return self._store(registered, namespace, hashes, **where).tokens

    def store_layer(
        self,
        tokens: Tokens,
        mask: Mask | None = None,
        *,
        kvcaches: Sequence[torch.Tensor],
        slot_mapping: torch.Tensor | Sequence[int],
        extra_keys: object = None,
        request_configs: Mapping[str, Any] | None = None,
        req_id: str | None = None,
        sync: bool = False,
    ) -> Generator[None]:
        """As `store`, a layer at a time: a generator of N + 1 steps for N layers.

        The first step reserves memory for what is new; the step after it copies layer 0, the next
        one layer 1, and so on. With the last one the chunks are stored, all at once. Every step
        yields None, and there are as many when nothing is stored. A generator that is closed early
        stores nothing.

        Args and errors as for `store`, the latter at the first step. KV on a GPU is copied behind
        what torch's current stream had been given by the step, and its blocks must not be written
        before the last one, which waits for the copies; `sync` adds nothing to that.
        """
        return layerwise.store_layer(
            self, tokens, mask, kvcaches, slot_mapping, extra_keys, request_configs
        )

    def retrieve(
        self,
        tokens: Tokens,
        mask: Mask | None = None,
        *,
        kvcaches: Sequence[torch.Tensor],
        slot_mapping: torch.Tensor | Sequence[int],
        extra_keys: object = None,
        request_configs: Mapping[str, Any] | None = None,
        req_id: str | None = None,
    ) -> torch.Tensor:
        """Writes the longest stored prefix into the engine's KV tensors.

        On a GPU it returns before that is done, and torch's current stream waits for it.

        Args:
            tokens: Token ids of the whole prompt, from its first token on.
            mask: One bool a token, False then True. False: the engine holds the token, its slot is
                not written. Any count of False is right where tokens have addresses; with the
                opaque layout the part of a block behind it is not loaded.
            kvcaches: One tensor a layer, in the engine's layout.
            slot_mapping: int64, one slot a token; -1 is not written.
            extra_keys: As given to `store`.
            request_configs: As given to `store`.
            req_id: The lookup id under which `lookup` leased what is loaded now.

        Returns:
            `ret_mask`, a bool tensor of `[num_tokens]`: True where the token was loaded.

        Raises:
            ValueError, TypeError: The arguments contradict each other or the layout.
            RuntimeError: The engine is closed.
        """
        asked = self._to_load(
            tokens, mask, kvcaches, slot_mapping, extra_keys, request_configs, req_id
        )
        if asked is None:
            return self._ret_mask(len(tokens), None, 0)
        loaded = self._load(asked.registered, asked.namespace, asked.hashes, **asked.where)
        return self._ret_mask(len(tokens), asked, loaded.end)

    def retrieve_layer(
        self,
        tokens: Tokens,
        mask: Mask | None = None,
        *,
        kvcaches: Sequence[torch.Tensor],
        slot_mapping: torch.Tensor | Sequence[int],
        extra_keys: object = None,
        request_configs: Mapping[str, Any] | None = None,
        req_id: str | None = None,
        sync: bool = False,
    ) -> Generator[int | torch.Tensor | None]:
        """As `retrieve`, a layer at a time: a generator of N + 3 steps for N layers.

        The first step yields the number of tokens that will be loaded. Each of the next N writes a
        layer and yields None. One more yields None once all is written, and the last one yields
        `ret_mask`. There are as many steps when nothing is found. A generator that is closed early
        writes no further layer and gives back what it held.

        Args and errors as for `retrieve`, the latter at the first step. On a GPU a layer's step
        lets torch's current stream wait for the layer; with `sync` the last step but one waits
        itself.
        """
        return layerwise.retrieve_layer(
            self, tokens, mask, kvcaches, slot_mapping, extra_keys, request_configs, req_id, sync
        )

    def lookup(
        self,
        tokens: Tokens,
        *,
        lookup_id: str | None = None,
        extra_keys: object = None,
        request_configs: Mapping[str, Any] | None = None,
    ) -> int:
        """Length in tokens of the longest stored prefix.

        With `lookup_id` it is leased until a `retrieve` with that `req_id`, a `release`, or the
        deadline (`lease_timeout_ms`); a repeated lookup renews the lease.

        Raises:
            RuntimeError: The engine is closed.
        """
        self._require_open()
        registration = self._registration
        if self.local_cpu is None or registration is None:
            return 0
        _, registered, namespaces = registration
        hashes, covered = self._chain(registered, tokens, extra_keys)
        namespace = namespaces.text(request_configs)
        if lookup_id is None:
            hit_chunks = self.local_cpu.longest_prefix(namespace, hashes)
        else:
            hit_chunks, _ = self.local_cpu.lookup(lookup_id, namespace, hashes)
        return min(hit_chunks * self.chunk_size, covered)

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
        from lmcache_rs.storage import StorageManager

        with self._lock:
            if self._storage_manager is None:
                self._require_open()
                self._storage_manager = StorageManager(self.config, local_cpu=self.local_cpu)
        if self.registered is not None:
            self._storage_manager.form = self.registered.form
        return self._storage_manager

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

    # --- what a connector calls that hashes elsewhere -----------------------------------------

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

    def _to_store(
        self,
        tokens: Tokens,
        mask: Mask | None,
        kvcaches: Sequence[torch.Tensor],
        slot_mapping: torch.Tensor | Sequence[int],
        extra_keys: object,
        request_configs: Mapping[str, Any] | None,
    ) -> _Asked | None:
        """What a store does; None if there is no memory to store in."""
        self._require_open()
        if self.local_cpu is None:
            return None
        _, registered, namespaces = self._register(kvcaches)
        num_tokens = len(tokens)
        slots = slots_of(slot_mapping, num_tokens)
        first = 0
        if mask is not None:
            first = _native.leading_false(mask_bytes(mask), num_tokens) // self.chunk_size
        hashes, covered = self._chain(registered, tokens, extra_keys)
        where = {"num_tokens": covered, "slots": slots, "first": first}
        return _Asked(registered, namespaces.text(request_configs), hashes, where)

    def _to_load(
        self,
        tokens: Tokens,
        mask: Mask | None,
        kvcaches: Sequence[torch.Tensor],
        slot_mapping: torch.Tensor | Sequence[int],
        extra_keys: object,
        request_configs: Mapping[str, Any] | None,
        req_id: str | None,
    ) -> _Asked | None:
        """What a load does; None if nothing is to be loaded."""
        self._require_open()
        num_tokens = len(tokens)
        skip = 0
        if mask is not None:
            skip = _native.leading_false(mask_bytes(mask), num_tokens)
        slots = slots_of(slot_mapping, num_tokens)
        if self.local_cpu is None or not self.is_healthy():
            return None
        _, registered, namespaces = self._register(kvcaches)
        if registered.layout == "opaque":
            skip = -(-skip // registered.block_tokens) * registered.block_tokens
        hashes, covered = self._chain(registered, tokens, extra_keys)
        where = {
            "lookup_id": req_id or _NO_LOOKUP,
            "num_tokens": covered,
            "slots": slots,
            "skip": min(skip, num_tokens),
        }
        return _Asked(registered, namespaces.text(request_configs), hashes, where)

    def _ret_mask(self, num_tokens: int, asked: _Asked | None, loaded_end: int) -> torch.Tensor:
        """True where a load has written the token; `asked` is None if there was none."""
        import torch

        ret_mask = torch.zeros(num_tokens, dtype=torch.bool)
        if asked is None:
            return ret_mask
        slots, skip = asked.where["slots"], asked.where["skip"]
        ret_mask[skip:loaded_end] = True
        if loaded_end > skip and -1 in slots[skip:loaded_end]:
            ret_mask[skip:loaded_end] = torch.as_tensor(slots[skip:loaded_end]) != -1
        return ret_mask

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

    def _chain(
        self, registered: RegisteredCache, tokens: Tokens, extra_keys: object
    ) -> tuple[bytes, int]:
        """Packed hashes of the prompt's chunks, and the tokens they cover."""
        with_tail = self._save_unfull_chunk and registered.layout != "opaque"
        extra = None if extra_keys is None else _native.encode_extra_keys(extra_keys)
        chain = self.token_database.new_chain()
        chain.extend(token_buffer(tokens), extra)
        hashes = chain.hashes()
        covered = chain.num_chunks * self.chunk_size
        if with_tail and covered < chain.num_tokens:
            ((_, covered, tail_hash),) = chain.spans(covered, True, extra)
            hashes += tail_hash
        return hashes, covered

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
