"""The engine: stores a prompt's KV, finds it again, and writes it back.

`LMCacheEngine` is what an inference engine drives, with its own KV tensors. The vLLM connector uses
the same engine through `store_chunks` and `load_chunks`, which take hashes made elsewhere, and
through `begin_store_chunks` and `begin_load_chunks`, which do not wait for the copy.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_rs import _native, layerwise
from lmcache_rs.chunk_engine import ChunkEngine, Loaded, Stored
from lmcache_rs.config import LMCacheEngineConfig, LMCacheMetadata
from lmcache_rs.gpu_connector import RegisteredCache, slots_of
from lmcache_rs.key import HASH_BYTES, keys_of
from lmcache_rs.layouts import Layout
from lmcache_rs.tier_walk import TierWalk
from lmcache_rs.token_database import mask_bytes, token_buffer

if TYPE_CHECKING:
    import torch

    from lmcache_rs.storage import MemoryObj
    from lmcache_rs.token_database import Mask, Tokens

__all__ = ["LMCacheEngine", "Loaded", "Stored"]

_NO_LOOKUP = ""


class _Asked(NamedTuple):
    """A call's arguments, checked and made native."""

    registered: RegisteredCache
    namespace: str
    hashes: bytes
    where: dict[str, Any]


class LMCacheEngine(ChunkEngine):
    """A KV cache beside an inference engine.

    Args:
        config: Settings.
        metadata: Facts of the model; part of every key.
        layout: What the axes of the KV tensors mean: `split` (`[2, blocks, block, heads, head]`,
            the default), another layout of addressable tokens, or `opaque` (whole blocks;
            `metadata.block_size` says how many tokens each). docs/layouts.md has all of them.
        num_readers: Other processes that read the pool; each takes its share of what a lookup
            leases.

    With tiers below host memory (`local_disk`, `storage_manager.add_backend`) a prompt is stored in
    those too, and found there.

    Tensors are registered when they are first given. The registration is tried on them: a few
    blocks are overwritten and restored, so nothing else may use the tensors during that call.

    Raises:
        ValueError: The layout is unknown.
        MemoryError: The pool (`max_local_cpu_size`) cannot be had.
        OSError: `strict`, and a tier below host memory cannot be had.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        *,
        layout: Layout | None = None,
        num_readers: int = 0,
    ) -> None:
        super().__init__(config, metadata, layout=layout, num_readers=num_readers)
        self._save_unfull_chunk = config.saves_unfull_chunk(alone=False)

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
        """Stores the full chunks of a prompt that are not in host memory yet.

        They are offered to the tiers below, which write them behind the caller's back. Of a prompt
        that is larger than the pool the rest goes to those alone, through the pool a piece at a
        time; that waits for their writing, and ends early if they take too long.

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
        known = self._known_chunks(asked)
        stored = self._store(asked.registered, asked.namespace, asked.hashes, **asked.where)
        return stored.tokens + self._store_below(asked, known, stored)

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
        stores nothing. The tiers below host memory are offered what it stores; of a prompt larger
        than the pool the rest is not stored.

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

        What host memory lacks is read from the tiers below, a window at a time, so that a prompt
        larger than the pool is loaded whole. This waits for those reads; a chunk that does not come
        within its tier's deadline ends the prefix. On a GPU it returns before the copies are done,
        and torch's current stream waits for them.

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
        end = self._load(asked.registered, asked.namespace, asked.hashes, **asked.where).end
        walk = self._walk(asked) if end < asked.where["num_tokens"] else None
        if walk is not None:
            end = walk.load_from(end, skip=asked.where["skip"])
        return self._ret_mask(len(tokens), asked, end)

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
        writes no further layer and gives back what it held. What host memory lacks is read from the
        tiers below in the first step, as far as half of the pool goes.

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
        """Length in tokens of the longest stored prefix, in whichever tiers its chunks are; 0 until
        tensors are registered, which decide what their bytes are called.

        With `lookup_id` what host memory has of it, up to half of the pool, is leased until a
        `retrieve` with that `req_id`, a `release`, or the deadline (`lease_timeout_ms`); a repeated
        lookup renews the lease. All else may be gone by the time of the `retrieve`, which then
        loads what comes before it. Unlike LMCache's, a lookup pins nothing below host memory.

        Raises:
            RuntimeError: The engine is closed.
        """
        self._require_open()
        registration = self._registration
        if registration is None:
            return 0
        _, registered, namespaces = registration
        hashes, covered = self._chain(registered, tokens, extra_keys)
        namespace = namespaces.text(request_configs)
        if self.local_cpu is None:
            hit_chunks = 0
        elif lookup_id is None:
            hit_chunks = self.local_cpu.longest_prefix(namespace, hashes)
        else:
            hit_chunks, _ = self.local_cpu.lookup(lookup_id, namespace, hashes)
        rest = hashes[hit_chunks * HASH_BYTES :]
        lower = self._lower
        if lower is not None and rest:
            hit_chunks += lower.batched_contains(keys_of(namespace, rest))
        return min(hit_chunks * self.chunk_size, covered)

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
        """What a store does; None if there is nothing to store in."""
        self._require_open()
        if self.local_cpu is None and self._lower is None:
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
        if (self.local_cpu is None and self._lower is None) or not self.is_healthy():
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

    def _walk(self, asked: _Asked) -> TierWalk | None:
        """The prompt's walk through the tiers below host memory; None if there are none."""
        lower = self._lower
        if lower is None:
            return None
        return TierWalk(
            lower,
            asked.registered,
            asked.namespace,
            asked.hashes,
            chunk_size=self.chunk_size,
            num_tokens=asked.where["num_tokens"],
            slots=asked.where["slots"],
        )

    def _known_chunks(self, asked: _Asked) -> int:
        """How many chunks of the prompt host memory has already, from its first one on."""
        if self.local_cpu is None or self._lower is None:
            return 0
        return self.local_cpu.longest_prefix(asked.namespace, asked.hashes)

    def _store_below(self, asked: _Asked, known: int, stored: Stored) -> int:
        """Has the tiers below take what a store has brought into host memory, and what it had no
        room for: tokens of the latter."""
        in_memory, first = self.local_cpu, asked.where["first"]
        if in_memory is not None and not stored.chunks and not stored.refused_chunks:
            return 0
        walk = self._walk(asked)
        if walk is None:
            return 0
        if in_memory is None:
            return walk.store_from(first, is_queue_full=False)
        if stored.chunks:
            walk.write_through(max(first, known))
        if not stored.refused_chunks:
            return 0
        return walk.store_from(first, is_queue_full=True)

    def _write_through(self, asked: _Asked, known: int) -> None:
        """Offers what was stored behind the `known` chunks to the tiers below."""
        walk = self._walk(asked)
        if walk is not None:
            walk.write_through(max(asked.where["first"], known))

    def _bring(self, asked: _Asked) -> list[MemoryObj]:
        """Brings what host memory lacks of a load from the tiers below, as far as it has room. It
        stays there as long as what is returned is held."""
        first = asked.where["skip"] // self.chunk_size
        hashes = asked.hashes[first * HASH_BYTES :]
        walk = None if self.local_cpu is None else self._walk(asked)
        if walk is None or self.local_cpu is None:
            return []
        here = self.local_cpu.longest_prefix(asked.namespace, hashes)
        return [] if here == len(hashes) // HASH_BYTES else walk.bring(first)

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
