"""What the scheduler half tells the worker half each step, and what comes back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_rs.lookup import Rank
from lmcache_rs.storage.reads import TierRead
from lmcache_rs.vllm_v1.events import RankReport
from lmcache_rs.vllm_v1.prefetches import PrefetchOrders
from lmcache_rs.vllm_v1.saves import SaveFences
from lmcache_rs.vllm_v1.streams import StreamSpec

ONLY_RANK = Rank(0, 0, 0)
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
        is_async: Whether the request waits for the load while others compute. Then the worker says
            when it is done; otherwise the tokens are there when the step computes.
        stream: How it goes past host memory, where that has no room for it; only if `is_async`.
    """

    vllm_cached_tokens: int
    lmcache_cached_tokens: int
    can_load: bool = False
    computed_from: int | None = None
    is_async: bool = False
    stream: StreamSpec | None = None


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
        lookup_ids: The workers' stores that the scheduler half knows.
        failures_seen: Each rank's reports of failed loads that the scheduler half has taken in.
        prefetches: What is to be brought from lower tiers, and what is not needed any more.
        fences: Which saves of earlier steps are waited for, and by whom.
        is_timed: Whether the worker half is to say that it is done with the step.
    """

    engine_start: str
    requests: list[ReqMeta] = field(default_factory=list)
    unloadable_block_ids: set[int] = field(default_factory=set)
    lookup_ids: dict[Rank, str] = field(default_factory=dict)
    failures_seen: dict[Rank, int] = field(default_factory=dict)
    prefetches: PrefetchOrders | None = None
    fences: SaveFences = field(default_factory=SaveFences)
    is_timed: bool = False

    def promised_block_ids(self, block_tokens: int) -> set[int]:
        """Every block that is to hold loaded tokens when the step computes."""
        promised = set(self.unloadable_block_ids)
        for req in self.requests:
            spec = req.load_spec
            if spec is not None and spec.can_load and not spec.is_async:
                start, end = spec.vllm_cached_tokens, spec.lmcache_cached_tokens
                promised |= failed_blocks(req.block_ids, block_tokens, start, end)
        return promised

    @property
    def tokens_loaded_in_step(self) -> int:
        """Tokens whose loads the step waits for."""
        specs = [req.load_spec for req in self.requests if req.load_spec is not None]
        return sum(
            spec.lmcache_cached_tokens - spec.vllm_cached_tokens
            for spec in specs
            if not spec.is_async
        )

    def async_loads(self) -> list[ReqMeta]:
        """Requests that wait until their load is said to be done."""
        return [req for req in self.requests if req.load_spec and req.load_spec.is_async]


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
    """What one rank has to say after a step, and with it what others have.

    Args:
        outcomes: What was stored and loaded, by request id.
        lookup_ids: Where each rank's store can be asked, until the scheduler half knows.
        failures: Reports of failed loads so far.
        load_bytes_per_second: How fast bytes get into the engine's blocks; 0 while unknown.
        has_lower_tiers: Whether there are tiers below host memory.
        lower_tiers: Their names, where they are known to be there.
        prefetched: Requests whose chunks have been brought from there, as far as they are there.
        streamable: Of those, chunks from the first asked for on that could be streamed.
        tier_reads: What reading them took.
        timed_step: The step that is over and was to be timed.
        saves_ended: The last step that, with all before it, has no save under way; None if there
            is nothing new to say of it.
        event_reports: What the rank stored and gave up, where no other channel carries it.
        rank: Who says all this.
        others: What other ranks say.
    """

    outcomes: dict[str, RequestOutcome] = field(default_factory=dict)
    lookup_ids: dict[Rank, str] = field(default_factory=dict)
    failures: int = 0
    load_bytes_per_second: float = 0.0
    has_lower_tiers: bool = False
    lower_tiers: tuple[str, ...] = ()
    prefetched: set[str] = field(default_factory=set)
    streamable: dict[str, int] = field(default_factory=dict)
    tier_reads: list[TierRead] = field(default_factory=list)
    timed_step: int | None = None
    saves_ended: int | None = None
    event_reports: list[RankReport] = field(default_factory=list)
    rank: Rank = ONLY_RANK
    others: list[LMCacheWorkerMetadata] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> LMCacheWorkerMetadata:
        """Nothing is put together here: a rank that has nothing new to say is not among them."""
        assert isinstance(other, LMCacheWorkerMetadata)
        return dataclasses.replace(self, others=[*self.others, *other.of_ranks()])

    def of_ranks(self) -> list[LMCacheWorkerMetadata]:
        """What each rank says that says anything."""
        return [dataclasses.replace(self, others=[]), *self.others]
