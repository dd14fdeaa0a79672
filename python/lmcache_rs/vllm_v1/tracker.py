"""What the scheduler half knows about one request: `RequestTracker`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_rs import lookup
from lmcache_rs.vllm_v1 import compat
from lmcache_rs.vllm_v1.identity import Chain, LoadedAdapter, NoExtraKeys
from lmcache_rs.vllm_v1.metadata import LoadSpec

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class RequestTracker:
    """What is known about one request.

    Args:
        request: vLLM's own object.
        namespace: Where its chunks live; None when the request does not use the cache.
        can_save: Whether its KV may be stored.
        epoch: The cache's epoch when it was first seen, or looked up last.
        adapter: The adapter it is computed with, as it was then.
        chain: Its prefix chain, extended as tokens appear; each token is hashed once.
        extra_keys: What besides the tokens enters the chain.
        saved_tokens: Tokens handed to the worker for saving, or loaded from the store.
        computed_tokens: Tokens computed after the last step.
        last_save_step: The last step whose saves may go on behind it; 0 if there is none.
        load_spec: A promise made to the scheduler and not yet given to the worker.
        granted_block_ids: The block table at the moment blocks were granted for that promise.
        awaited_end: End of the tokens that it waits for, or has waited for, since it was admitted.
        tried_after: Its preemptions when it last waited for a load; -1 before that.
        looked_up_from: The chunk from which on it is looked up, where host memory lacks chunks
            before it that the engine has; else 0.
        is_streamed: Whether a load of it may go past host memory still.
    """

    request: Request
    namespace: str | None
    can_save: bool
    epoch: str
    adapter: LoadedAdapter | None
    chain: Chain
    extra_keys: compat.ExtraKeys | NoExtraKeys
    saved_tokens: int = 0
    computed_tokens: int = 0
    last_save_step: int = 0
    load_spec: LoadSpec | None = None
    granted_block_ids: list[int] = field(default_factory=list)
    awaited_end: int = 0
    tried_after: int = -1
    looked_up_from: int = 0
    is_streamed: bool = False
    local_tokens: int = 0
    external_tokens: int = 0
    stored_tokens: dict[lookup.Rank, int] = field(default_factory=dict)
    # Of the last lookup, until the request is admitted.
    asked_tokens: int = 0
    first_seen: float = field(default_factory=time.monotonic)

    def extend_chain(self, num_tokens: int, chunk_size: int) -> None:
        """Hashes the request's tokens up to `num_tokens`, as far as they are known."""
        known = self.chain.num_tokens
        end = min(num_tokens, len(self.request.all_token_ids))
        if end <= known:
            return
        start = self.chain.num_chunks * chunk_size
        num_chunks = (end - start) // chunk_size
        extra, next_mm_item = self.extra_keys.of_chunks(start, num_chunks, chunk_size)
        self.chain.extend(self.request.all_token_ids[known:end], extra)
        # Only now: had the tokens been refused, the items would belong to them still.
        self.extra_keys.next_mm_item = next_mm_item
