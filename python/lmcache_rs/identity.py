"""Everything but a request's tokens and tags that decides a chunk's bytes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_rs.model_facts import UNSTATED, LMCacheMetadata

if TYPE_CHECKING:
    from lmcache_rs.config import LMCacheEngineConfig
    from lmcache_rs.key import CacheEngineKey

NONE = "none"
"""Stands in a key for what a request or engine does without: no adapter, no reset so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What keys are made of. No field has a default: one that is left out is an error.

    Args:
        metadata: The model, and this worker's share of it.
        chunk_size: Tokens of a chunk: a hash at a chunk's end does not say where the chunk begins.
        chain: Whose hashes the keys bear: `own`, or `engine`.
        hash_algorithm: What they were made with.
        hash_block: Tokens from one link of the chain to the next.
        none_hash: 64 hex digits of what stands before the first chunk.
        adapter: Digest of the adapter's files; `none` without one, `unstated` where the caller
            keeps adapters apart by other means.
        epoch: Random, drawn anew each time the cache was reset; `none` before.
        registered: What the engine's tensors themselves say about the stored form.
    """

    metadata: LMCacheMetadata
    chunk_size: int
    chain: str
    hash_algorithm: str
    hash_block: int
    none_hash: str
    adapter: str
    epoch: str
    registered: Mapping[str, str]

    def facts(self) -> dict[str, str]:
        """Every fact by name, as text."""
        own = {
            field.name: str(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in ("metadata", "registered")
        }
        return {**self.metadata.facts(), **own, **self.registered}


def file_name(key: CacheEngineKey) -> str:
    """A name of 64 hex digits for a key: SHA-256 of its text form.

    For folders, whose file systems end names at 255 bytes and may fold their case. The text itself
    belongs into what is stored there, so that a reader can check it.
    """
    return hashlib.sha256(key.to_string().encode()).hexdigest()


def identity_of(
    config: LMCacheEngineConfig,
    metadata: LMCacheMetadata,
    *,
    chain: str,
    none_hash: bytes,
    registered: Mapping[str, str],
) -> Identity:
    """The identity where the caller names adapters by `extra_keys` and nobody resets.

    Hashes that an engine hands in are its own business: how it makes them is left unstated.
    """
    is_foreign = config.chain == "engine"
    return Identity(
        metadata=metadata,
        chunk_size=config.chunk_size,
        chain="engine" if is_foreign else chain,
        hash_algorithm=UNSTATED if is_foreign else config.pre_caching_hash_algorithm,
        hash_block=config.chunk_size,
        none_hash=UNSTATED if is_foreign else none_hash.hex(),
        adapter=UNSTATED,
        epoch=NONE,
        registered=registered,
    )
