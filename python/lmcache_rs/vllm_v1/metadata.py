"""What the scheduler half tells the worker half each step, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class LoadSpec:
    """What to load for a request.

    Args:
        vllm_cached_tokens: Tokens the engine holds itself; their slots are left alone.
        lmcache_cached_tokens: End of the prefix to load, in tokens.
        can_load: Whether the engine has granted blocks for it.
    """

    vllm_cached_tokens: int
    lmcache_cached_tokens: int
    can_load: bool = False


@dataclass
class SaveSpec:
    """What to save of a request.

    Args:
        skip_leading_tokens: Tokens at the front known to be stored; a multiple of the chunk.
        can_save: Whether to save at all.
    """

    skip_leading_tokens: int
    can_save: bool


@dataclass
class ReqMeta:
    """One request of a step.

    Args:
        req_id: vLLM's request id, also the lookup id.
        num_tokens: Tokens whose KV is in the blocks once the step is done, of those to be saved.
        hashes: Packed 32-byte chain hashes of full chunks, from chunk 0 on.
        block_ids: vLLM's block table, from block 0 on.
        namespace: Everything but the tokens that decides the bytes.
        load_spec: Set when the request loads in this step.
        save_spec: Set when the request saves in this step.
    """

    req_id: str
    num_tokens: int
    hashes: bytes
    block_ids: list[int]
    namespace: str
    load_spec: LoadSpec | None = None
    save_spec: SaveSpec | None = None


@dataclass
class LMCacheConnectorMetadata(KVConnectorMetadata):
    """A step's requests.

    Args:
        engine_id: The engine whose blocks are meant.
        requests: Requests that load or save.
        unloadable_block_ids: Blocks that were promised a load which could not be described; the
            worker reports them as failed.
    """

    engine_id: str
    requests: list[ReqMeta] = field(default_factory=list)
    unloadable_block_ids: set[int] = field(default_factory=set)


@dataclass
class RequestOutcome:
    """Tokens that one request stored and loaded in a step, on one rank."""

    stored_tokens: int = 0
    loaded_tokens: int = 0


@dataclass
class LMCacheWorkerMetadata(KVConnectorWorkerMetadata):
    """What the workers did in a step, by request id."""

    outcomes: dict[str, RequestOutcome] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> LMCacheWorkerMetadata:
        """Merges two ranks: what is stored or loaded is what all of them did."""
        assert isinstance(other, LMCacheWorkerMetadata)
        merged: dict[str, RequestOutcome] = {}
        for req_id in self.outcomes.keys() | other.outcomes.keys():
            mine: Any = self.outcomes.get(req_id, RequestOutcome())
            theirs = other.outcomes.get(req_id, RequestOutcome())
            merged[req_id] = RequestOutcome(
                min(mine.stored_tokens, theirs.stored_tokens),
                min(mine.loaded_tokens, theirs.loaded_tokens),
            )
        return LMCacheWorkerMetadata(merged)
