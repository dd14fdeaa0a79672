"""What the scheduler half tells the worker half each step, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_rs.vllm_v1.events import RankReport

NULL_BLOCK = 0
"""vLLM's placeholder in a block table: it holds no KV."""


@dataclass
class LoadSpec:
    """What to load for a request.

    Args:
        vllm_cached_tokens: Tokens the engine holds itself; their slots are left alone.
        lmcache_cached_tokens: End of the prefix to load, in tokens.
        can_load: Whether the engine has granted blocks for it.
        computed_from: The first token that the engine computes itself, once blocks are granted. It
            may lie before the end: the last token of a prompt is always computed.
    """

    vllm_cached_tokens: int
    lmcache_cached_tokens: int
    can_load: bool = False
    computed_from: int | None = None


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
        engine_start: The start of the engine whose blocks are meant; no two starts share one.
        requests: Requests that load or save.
        unloadable_block_ids: Blocks that were promised a load which could not be described; the
            worker reports them as failed.
        lookup_id: The worker's store that the scheduler half asks; empty while it knows none.
        failures_seen: The worker's reports of failed loads that the scheduler half has taken in.
    """

    engine_start: str
    requests: list[ReqMeta] = field(default_factory=list)
    unloadable_block_ids: set[int] = field(default_factory=set)
    lookup_id: str = ""
    failures_seen: int = 0

    def promised_block_ids(self, block_tokens: int) -> set[int]:
        """Every block that is to hold loaded tokens after the step's loads."""
        promised = set(self.unloadable_block_ids)
        for req in self.requests:
            spec = req.load_spec
            if spec is not None and spec.can_load:
                start, end = spec.vllm_cached_tokens, spec.lmcache_cached_tokens
                promised |= failed_blocks(req.block_ids, block_tokens, start, end)
        return promised


def failed_blocks(
    block_ids: list[int], block_tokens: int, loaded_end: int, promised_end: int
) -> set[int]:
    """Ids of the blocks that hold any token from `loaded_end` to `promised_end`.

    The placeholder of tokens that a sliding window has left behind is not one of them: it stands in
    the tables of requests that have nothing to do with the failure.
    """
    if loaded_end >= promised_end:
        return set()
    first = loaded_end // block_tokens
    last = -(-promised_end // block_tokens)
    return set(block_ids[first:last]) - {NULL_BLOCK}


@dataclass
class RequestOutcome:
    """Tokens that one request stored and loaded in a step, on one rank."""

    stored_tokens: int = 0
    loaded_tokens: int = 0


@dataclass
class LMCacheWorkerMetadata(KVConnectorWorkerMetadata):
    """What the workers have to say after a step.

    Args:
        outcomes: What was stored and loaded, by request id.
        lookup_ids: Where each rank's store can be asked, until the scheduler half knows.
        failures: Reports of failed loads so far.
        event_reports: What ranks stored and gave up, where no other channel carries it.
    """

    outcomes: dict[str, RequestOutcome] = field(default_factory=dict)
    lookup_ids: dict[int, str] = field(default_factory=dict)
    failures: int = 0
    event_reports: list[RankReport] = field(default_factory=list)

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
        lookup_ids = {**self.lookup_ids, **other.lookup_ids}
        return LMCacheWorkerMetadata(
            merged,
            lookup_ids,
            max(self.failures, other.failures),
            self.event_reports + other.event_reports,
        )
