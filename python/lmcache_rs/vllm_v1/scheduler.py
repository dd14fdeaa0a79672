"""The scheduler half: which tokens are stored, which blocks get them, what is saved.

Lives in vLLM's scheduler and owns no bytes. A request has one `RequestTracker` from the first time
it is seen to its end; everything promised to the scheduler stands on a lease that the worker half
holds under the request's id.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmcache_rs import _native, lookup
from lmcache_rs.key import HASH_BYTES
from lmcache_rs.vllm_v1 import compat
from lmcache_rs.vllm_v1.identity import (
    Chain,
    Identities,
    LoadedAdapter,
    NoExtraKeys,
    RequestIdentity,
)
from lmcache_rs.vllm_v1.load_choice import LoadChoice
from lmcache_rs.vllm_v1.metadata import (
    NULL_BLOCK,
    ONLY_RANK,
    LMCacheConnectorMetadata,
    LMCacheWorkerMetadata,
    LoadSpec,
    ReqMeta,
    SaveSpec,
    failed_blocks,
)
from lmcache_rs.vllm_v1.prefetches import AskedPrefetches
from lmcache_rs.vllm_v1.ranks import RankBooks, RankNames
from lmcache_rs.vllm_v1.saves import SaveFences

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from lmcache_rs.config import LMCacheEngineConfig, LMCacheMetadata
    from lmcache_rs.vllm_v1.events import KVEventStream
    from lmcache_rs.vllm_v1.faults import Faults

LOG_LINES_PER_SECOND = 20
STEPS_IN_FLIGHT = 2
"""Steps that vLLM describes at most before it hears of the first one's outcome."""


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


class LMCacheSchedulerHalf:
    """See the module's description.

    Args:
        config: Settings, with the chunk size that suits the engine.
        metadata: Facts of the model.
        engine_start: The start of the engine whose blocks these are.
        kv_role: `kv_both`, `kv_producer` (never loads) or `kv_consumer` (never saves).
        faults: Where faults of ours are noted.
        identities: What requests' chunks are called; None for an engine that was told nothing more.
        load_choice: Which loads the step waits for; None for all of them.
        ranks: The engine's workers, each of which has to load what a request is promised.
        storing: Those of them that keep KV, which the others read; None for all.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        engine_start: str,
        kv_role: str,
        faults: Faults,
        identities: Identities | None = None,
        load_choice: LoadChoice | None = None,
        ranks: Sequence[lookup.Rank] = (ONLY_RANK,),
        storing: Sequence[lookup.Rank] | None = None,
    ) -> None:
        self._config = config
        self._load_choice = load_choice or LoadChoice(config.max_sync_load_ms, token_bytes=0)
        # Where there are tiers below host memory.
        self._prefetches: AskedPrefetches | None = None
        # Promises with blocks, and who got blocks without one, until the next step is described.
        self._granted: dict[str, RequestTracker] = {}
        self._unpromised: list[RequestTracker] = []
        # Steps to come that save nothing: another connector's load may turn out to have failed.
        self._doubtful_steps = 0
        self._engine_start = engine_start
        self._chunk_size = config.chunk_size
        self._identities = identities or Identities(config, metadata)
        self._block_tokens = metadata.block_size or 1
        self._loads = kv_role != "kv_producer"
        self._saves = kv_role != "kv_consumer"
        self._saves_all = kv_role == "kv_producer"
        self._trackers: dict[str, RequestTracker] = {}
        # Finished; their last outcome is still on its way from the workers.
        self._finished: dict[str, RequestTracker] = {}
        # Layer by layer, saves are done in their step.
        self._saves_lag = not config.use_layerwise
        # The step described last.
        self._step = 0
        # Ended requests that the worker half is to be asked about, and all that vLLM waits for.
        self._to_ask: set[str] = set()
        self._awaited: set[str] = set()
        # Steps that were described, and whose outcome is not known.
        self._open_steps = 0
        # Until every worker has said where its store is, no request has a hit.
        self._client: lookup.LookupClient | None = None
        self._has_several_ranks = len(ranks) > 1
        self._books = RankBooks(ranks, storing)
        self._names = RankNames.of_no_rank(metadata)
        # When requests go on without them; None before the first request.
        self._workers_due: float | None = None
        self._evict_blocks: Callable[[set[int]], None] | None = None
        # Block tables of the last steps by request, each with whether the step loaded anything.
        self._last_tables: collections.deque[tuple[bool, dict[str, list[int]]]]
        self._last_tables = collections.deque(maxlen=STEPS_IN_FLIGHT)
        self._log_allowance = float(LOG_LINES_PER_SECOND)
        self._log_time = time.monotonic()
        self.counts = {
            "requested_tokens": 0,
            "promised_tokens": 0,
            "hit_tokens": 0,
            "stored_tokens": 0,
            "bypassed_requests": 0,
        }
        # Set where vLLM publishes what the cache holds.
        self.event_stream: KVEventStream | None = None
        self.faults = faults

    # --- lookup -------------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those the engine has, None if that is not known yet; and
        whether the request waits for them while others compute.

        The last token of a request is always computed, as vLLM needs it for the logits. Where the
        request waits, vLLM leaves it out of the promise by itself.
        """
        tracker = self._track(request, is_lookup=True)
        tracker.load_spec = None
        tracker.local_tokens = num_computed_tokens
        tracker.asked_tokens = tracker.awaited_end = 0
        if not self._loads or tracker.namespace is None or request.skip_reading_prefix_cache:
            return 0, False
        tracker.asked_tokens = request.num_tokens - num_computed_tokens
        # vLLM asks again when nothing of a load is there. What failed might fail for ever.
        has_failed = tracker.tried_after == request.num_preemptions
        num_missing = request.num_tokens - 1 - num_computed_tokens
        if has_failed or num_missing < self._config.min_retrieve_tokens:
            return self._promise_nothing(request.request_id)
        tracker.extend_chain(request.num_tokens, self._chunk_size)
        hashes = tracker.chain.hashes()
        if not hashes:
            return 0, False
        if self._client is None:
            return (None if self._awaits_workers() else 0), False
        hit_chunks = self._lookup(self._client, tracker, tracker.namespace, hashes)
        if hit_chunks is None:
            return None, False
        hit_tokens = hit_chunks * self._chunk_size
        num_new = min(hit_tokens, request.num_tokens - 1) - num_computed_tokens
        if num_new <= 0 or num_new < self._config.min_retrieve_tokens:
            return self._promise_nothing(request.request_id)
        # A rank cannot tell from its own load whether another rank's has failed. Had the step been
        # computed already, what it computed there would have reached this rank through the layers
        # they compute together or in turn, and be saved here as if it were right.
        is_async = self._has_several_ranks or self._load_choice.is_async(num_new)
        tracker.load_spec = LoadSpec(num_computed_tokens, hit_tokens, is_async=is_async)
        if is_async and self._load_choice.may_load_last_token:
            num_new = hit_tokens - num_computed_tokens
        return num_new, is_async

    def _lookup(
        self, client: lookup.LookupClient, tracker: RequestTracker, namespace: str, hashes: bytes
    ) -> int | None:
        """Chunks that host memory holds, once what lower tiers have is there, too."""
        req_id = tracker.request.request_id
        hit_chunks = client.lookup(hashes, req_id, namespace)
        prefetches = self._prefetches
        if prefetches is None or hit_chunks is None or hit_chunks * HASH_BYTES == len(hashes):
            return hit_chunks
        if prefetches.is_pending(req_id, namespace, hashes):
            if prefetches.is_new(req_id):
                self._note_contents(tracker, len(hashes) // HASH_BYTES)
            return None
        if prefetches.settle(req_id):
            # Asked before the chunks were there; the lease stays, and is renewed.
            client.end(req_id, release=False)
            hit_chunks = client.lookup(hashes, req_id, namespace)
        return hit_chunks

    def _awaits_workers(self) -> bool:
        """Whether the engine has just started over tiers that may hold what is asked for: its
        first step, which vLLM makes for a request that has no answer, tells where they are."""
        if not self._config.wants_lower_tiers:
            return False
        now = time.monotonic()
        if self._workers_due is None:
            self._workers_due = now + self._config.lookup_timeout_ms / 1e3
        return now < self._workers_due

    def _promise_nothing(self, req_id: str) -> tuple[int, bool]:
        # The record ends too: when the request is asked about again, more may be stored.
        self._end_lookup(req_id, release=True)
        return 0, False

    def _end_lookup(self, req_id: str, *, release: bool) -> None:
        if self._client is not None:
            self._client.end(req_id, release=release)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Blocks were granted: the load goes ahead, or, with 0 tokens, is off."""
        req_id = request.request_id
        tracker = self._track(request)
        self.counts["requested_tokens"] += tracker.asked_tokens
        tracker.asked_tokens = 0
        if self._prefetches is not None:
            self._prefetches.end(req_id)
        if num_external_tokens == 0:
            tracker.load_spec = None
            self._unpromised.append(tracker)
            self._end_lookup(req_id, release=True)
            return
        # First of all, so that no fault below can lose the promise: the engine counts on it.
        promised_end = tracker.local_tokens + num_external_tokens
        spec = tracker.load_spec or LoadSpec(tracker.local_tokens, promised_end, is_async=True)
        spec.can_load = True
        spec.computed_from = promised_end
        tracker.load_spec = spec
        tracker.granted_block_ids = compat.granted_block_ids(blocks)
        tracker.external_tokens = num_external_tokens
        self._granted[req_id] = tracker
        if not spec.is_async:
            self._load_choice.take(num_external_tokens)
        self.counts["promised_tokens"] += num_external_tokens
        self._end_lookup(req_id, release=False)

    # --- the step -----------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> LMCacheConnectorMetadata:
        """What the worker half loads before and saves after this step.

        Whatever fails here, each promise of the step reaches the worker half, if only as failed:
        vLLM computes on its blocks, or waits for it.
        """
        metadata = LMCacheConnectorMetadata(
            self._engine_start,
            lookup_ids=self._books.lookup_ids,
            failures_seen=self._books.failures,
        )
        granted, self._granted = self._granted, {}
        try:
            self._describe_step(metadata, scheduler_output, granted)
        except Exception as error:
            self.faults.note("build_connector_meta", error)
            metadata.fences.copies_all_first = True
            for tracker in granted.values():
                self._describe_failed(metadata, scheduler_output, tracker)
        # They are on their way to the worker half only from here on.
        self._to_ask -= metadata.fences.awaited
        return metadata

    def _describe_step(
        self,
        metadata: LMCacheConnectorMetadata,
        scheduler_output: SchedulerOutput,
        granted: Mapping[str, RequestTracker],
    ) -> None:
        metadata.fences = self._fences(scheduler_output)
        if self._prefetches is not None:
            metadata.prefetches = self._prefetches.take_orders()
        step = scheduler_output.num_scheduled_tokens
        if not self._open_steps:
            # vLLM may say no more: the outcome of a step without tokens reaches nobody.
            self._log_finished()
        self._open_steps += bool(step)
        others_load = self._others_load(scheduler_output)
        if others_load:
            self._doubtful_steps = STEPS_IN_FLIGHT
        for req_id, waiting in granted.items():
            spec = waiting.load_spec
            # vLLM's word: a request that waits for its load has blocks and computes nothing.
            if spec is not None and spec.is_async and req_id in step:
                spec.is_async = False
            elif spec is not None and spec.is_async:
                metadata.requests.append(self._describe_async_load(waiting, spec))
        for req_id, num_scheduled in step.items():
            tracker = self._trackers.get(req_id)
            if tracker is None or tracker.namespace is None:
                continue
            # A promise must reach the worker whatever happens to the rest.
            load_spec, tracker.load_spec = tracker.load_spec, None
            if load_spec is not None and not load_spec.can_load:
                load_spec = None
            block_ids, tracker.granted_block_ids = tracker.granted_block_ids, []
            if load_spec is not None and self._has_several_ranks:
                # All ranks know of it alike: none loads, and none saves the step.
                metadata.unloadable_block_ids |= self._promised_blocks(load_spec, block_ids)
                load_spec = None
            try:
                block_ids = compat.block_table(scheduler_output, req_id) or block_ids
                drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(req_id, ()))
                req = self._describe(
                    tracker, load_spec, block_ids, num_scheduled - drafts, metadata.fences
                )
            except Exception as error:
                self.faults.note("build_connector_meta", error)
                if load_spec is not None:
                    metadata.unloadable_block_ids |= self._promised_blocks(load_spec, block_ids)
                continue
            if req is not None:
                metadata.requests.append(req)
        if step:
            self._doubtful_steps = max(0, self._doubtful_steps - 1)
        loads = any(req.load_spec and not req.load_spec.is_async for req in metadata.requests)
        loads |= others_load
        tables: dict[str, list[int]] = {}
        if loads or any(loaded for loaded, _ in self._last_tables):
            # What is computed on a load that will have failed must be found again.
            tables = {req_id: compat.block_table(scheduler_output, req_id) for req_id in step}
        self._last_tables.append((loads, tables))
        self._load_choice.begin_step(others_run=bool(step))

    def _others_load(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether another connector beside ours loads what this very step computes on.

        If that fails, our worker half is not told, and the scheduler half not before the step has
        ended: it would have saved what was computed on nothing.
        """
        unpromised, self._unpromised = self._unpromised, []
        return compat.has_loads_in_step(scheduler_output) and any(
            tracker.request.num_computed_tokens > max(tracker.local_tokens, tracker.awaited_end)
            for tracker in unpromised
        )

    def _promised_blocks(self, spec: LoadSpec, block_ids: list[int]) -> set[int]:
        start, end = spec.vllm_cached_tokens, spec.lmcache_cached_tokens
        return failed_blocks(block_ids, self._block_tokens, start, end)

    def _describe_failed(
        self,
        metadata: LMCacheConnectorMetadata,
        scheduler_output: SchedulerOutput,
        tracker: RequestTracker,
    ) -> None:
        """What was promised to a request and has not reached the description is not loaded."""
        spec, tracker.load_spec = tracker.load_spec, None
        if spec is None:
            return
        req_id, block_ids = tracker.request.request_id, tracker.granted_block_ids
        if req_id in scheduler_output.num_scheduled_tokens:
            metadata.unloadable_block_ids |= self._promised_blocks(spec, block_ids)
        else:
            metadata.requests.append(ReqMeta(req_id, 0, b"", block_ids, "", load_spec=spec))
            tracker.tried_after = tracker.request.num_preemptions

    def _describe_async_load(self, tracker: RequestTracker, spec: LoadSpec) -> ReqMeta:
        tracker.load_spec = None
        block_ids, tracker.granted_block_ids = tracker.granted_block_ids, []
        chunk_size, end = self._chunk_size, spec.lmcache_cached_tokens
        # As if computed: if it fails, vLLM's own count comes out lower.
        tracker.saved_tokens = end // chunk_size * chunk_size
        tracker.computed_tokens = min(end, tracker.request.num_tokens - 1)
        tracker.awaited_end = end
        tracker.tried_after = tracker.request.num_preemptions
        hashes = b""
        try:
            hashes = tracker.chain.hashes(end // chunk_size)
        except Exception as error:
            # Without hashes it loads nothing, and that is said: vLLM waits for an answer.
            self.faults.note("build_connector_meta", error)
        return ReqMeta(
            req_id=tracker.request.request_id,
            num_tokens=0,
            hashes=hashes,
            block_ids=block_ids,
            namespace=tracker.namespace or "",
            load_spec=spec,
        )

    def _fences(self, scheduler_output: SchedulerOutput) -> SaveFences:
        """What saves of earlier steps have to do with this step."""
        self._step += 1
        preempted = set(scheduler_output.preempted_req_ids or ())
        for req_id in preempted:
            if (tracker := self._trackers.get(req_id)) is not None:
                # When the step begins they are done.
                tracker.last_save_step = 0
        copied_first = preempted
        if not scheduler_output.num_scheduled_tokens:
            # Nothing is held up, and vLLM would only come back for them again and again.
            copied_first = preempted | self._awaited
        return SaveFences(self._step, copied_first, awaited=set(self._to_ask))

    def _describe(
        self,
        tracker: RequestTracker,
        load_spec: LoadSpec | None,
        block_ids: list[int],
        num_new_tokens: int,
        fences: SaveFences,
    ) -> ReqMeta | None:
        chunk_size = self._chunk_size
        computed = tracker.request.num_computed_tokens + num_new_tokens
        if load_spec is not None:
            # What is loaded is stored; what was handed out before may have been evicted since.
            tracker.saved_tokens = load_spec.lmcache_cached_tokens // chunk_size * chunk_size
        elif tracker.request.num_computed_tokens < tracker.computed_tokens:
            # A failed load or a preemption took tokens back: they are computed, and saved, again.
            valid = tracker.request.num_computed_tokens // chunk_size * chunk_size
            tracker.saved_tokens = min(tracker.saved_tokens, valid)
            # What others have saved of these blocks is written anew, too.
            fences.copies_all_first = True
        tracker.computed_tokens = computed
        save_end = 0 if self._doubtful_steps else self._save_end(tracker, computed, block_ids)
        save_spec = None
        if save_end > tracker.saved_tokens:
            skip = 0 if self._saves_all else tracker.saved_tokens
            save_spec = SaveSpec(skip_leading_tokens=skip, can_save=True)
            tracker.saved_tokens = save_end
            tracker.last_save_step = self._step if self._saves_lag else 0
        if load_spec is None and save_spec is None:
            return None
        load_end = 0 if load_spec is None else load_spec.lmcache_cached_tokens
        if save_spec is not None:
            self._note_contents(tracker, save_end // chunk_size)
        return ReqMeta(
            req_id=tracker.request.request_id,
            num_tokens=save_end if save_spec else 0,
            hashes=tracker.chain.hashes(max(load_end, save_end) // chunk_size),
            block_ids=block_ids,
            namespace=tracker.namespace or "",
            load_spec=load_spec,
            save_spec=save_spec,
        )

    def _note_contents(self, tracker: RequestTracker, num_chunks: int) -> None:
        """What these chunks hold, for whoever is told that they are stored."""
        if self.event_stream is None:
            return
        hashes = tracker.chain.hashes(num_chunks)
        try:
            self.event_stream.note(tracker.request, tracker.namespace or "", hashes)
        except Exception as error:
            self.faults.note("note_contents", error)

    def _save_end(self, tracker: RequestTracker, computed: int, block_ids: list[int]) -> int:
        """End of the full chunks that may be saved after this step, in tokens."""
        if not self._saves or not tracker.can_save:
            return 0
        request, chunk_size = tracker.request, self._chunk_size
        # Positions past the known tokens hold drafts, or tokens the scheduler has not seen yet.
        end = min(computed, len(request.all_token_ids))
        if not self._config.save_decode_cache:
            end = min(end, request.num_prompt_tokens)
        end = end // chunk_size * chunk_size
        if end <= tracker.saved_tokens:
            return 0
        if not self._identities.is_current(tracker.epoch, tracker.adapter):
            # From here on its KV is neither the old weights' nor the new ones'.
            tracker.can_save = False
            return 0
        if NULL_BLOCK in block_ids:
            block_tokens = self._block_tokens
            hole = block_ids.index(NULL_BLOCK) * block_tokens
            end = min(end, hole // chunk_size * chunk_size)
        end = min(end, len(block_ids) * self._block_tokens // chunk_size * chunk_size)
        tracker.extend_chain(end, chunk_size)
        return min(end, tracker.chain.num_chunks * chunk_size)

    # --- the end ------------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Nothing that is stored now is ever found again, and host memory is empty; whether it is.

        Requests under way keep the names they have: they save nothing more, and are new to the
        cache when they are looked up again.
        """
        self._identities.new_epoch()
        for req_id, tracker in self._trackers.items():
            # What was granted is on its way to the worker, which loads it by its lease.
            if tracker.load_spec is None or not tracker.load_spec.can_load:
                tracker.load_spec = None
                self._end_lookup(req_id, release=True)
        # Until the worker half is known, nothing is stored.
        is_empty = self._client is None or self._client.clear()
        compat.logger.info(
            "lmcache_rs: reset: what was stored is not found any more%s",
            "" if is_empty else ", but host memory could not be emptied in time",
        )
        return is_empty

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes in what the workers did."""
        self._open_steps = max(0, self._open_steps - 1)
        # First: as long as one is awaited, vLLM rather waits for its blocks than takes others.
        self._awaited -= connector_output.finished_sending or set()
        if connector_output.invalid_block_ids:
            try:
                self._take_back_failed(connector_output.invalid_block_ids)
            except Exception as error:
                self.faults.note("update_connector_output", error)
        outcome = connector_output.kv_connector_worker_meta
        if isinstance(outcome, LMCacheWorkerMetadata):
            self._take_in(outcome.of_ranks())
        self._log_finished()

    def _take_in(self, told_by_ranks: list[LMCacheWorkerMetadata]) -> None:
        known = self._books.lookup_ids
        for told in told_by_ranks:
            self._books.take_in(told)
            for req_id, of_request in told.outcomes.items():
                tracker = self._trackers.get(req_id) or self._finished.get(req_id)
                if tracker is not None:
                    before = tracker.stored_tokens.get(told.rank, 0)
                    tracker.stored_tokens[told.rank] = before + of_request.stored_tokens
        if self._books.lookup_ids != known:
            try:
                self._find_workers()
            except Exception as error:
                # Without them no request has a hit; the next outcome tells of them again.
                self._books.lookup_ids = {}
                self.faults.note("update_connector_output", error)
        if self._prefetches is not None:
            for told in told_by_ranks:
                self._prefetches.done(told.rank, told.prefetched)
        self._load_choice.measured(self._books.load_bytes_per_second)
        self.counts["hit_tokens"] = self._books.loaded_tokens
        self.counts["stored_tokens"] = self._books.stored_tokens

    def _find_workers(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        self._prefetches = None
        if self._books.are_all_known:
            deadline_ms = self._config.lookup_timeout_ms
            self._client = lookup.connect_ranks(self._books.stores, deadline_ms=deadline_ms)
            if self._books.with_lower_tiers:
                self._prefetches = AskedPrefetches(deadline_ms / 1e3, self._books.with_lower_tiers)

    def bind_evict_blocks(self, evict_blocks: Callable[[set[int]], None]) -> None:
        """Takes in vLLM's own way to forget cached blocks."""
        self._evict_blocks = evict_blocks

    def _take_back_failed(self, invalid_block_ids: set[int]) -> None:
        """Makes vLLM forget failed blocks, and what was computed on them.

        It enters a request's blocks in its own prefix cache when it grants them, before they are
        loaded, and leaves them there if it recomputes: if the request ends before that, the next
        one would find them. And of the requests that share a failed block it lets one compute the
        block again; the others would go on with what they had from that one, even if it ends now.
        """
        failed = set(invalid_block_ids)
        newest: dict[str, list[int]] = {}
        for _, tables in self._last_tables:
            newest |= tables
            for table in tables.values():
                failed.update(table[_first_of(invalid_block_ids, table) :])
        for req_id, table in newest.items():
            # An older table may name blocks that are somebody else's by now.
            first = _first_of(invalid_block_ids, table)
            tracker = self._trackers.get(req_id)
            if tracker is not None and first < len(table):
                compat.recompute_from(tracker.request, first * self._block_tokens)
        failed.discard(NULL_BLOCK)
        if self._evict_blocks is not None:
            self._evict_blocks(failed)

    def request_finished(self, request: Request) -> bool:
        """Forgets the request, whatever its state; its lease goes back.

        Whether a save of it may be under way: vLLM then keeps its blocks until the worker half says
        that there is none.
        """
        req_id = request.request_id
        tracker = self._trackers.pop(req_id, None)
        awaits = tracker is not None and tracker.last_save_step > self._books.saves_ended
        if tracker is not None:
            self._finished[req_id] = tracker
        if awaits:
            self._to_ask.add(req_id)
            self._awaited.add(req_id)
        # From here on nothing may fail: vLLM takes a fault for "nobody is awaited".
        try:
            if self._prefetches is not None:
                self._prefetches.end(req_id)
            self._end_lookup(req_id, release=True)
        except Exception as error:
            self.faults.note("request_finished", error)
        return awaits

    @property
    def is_awaiting_saves(self) -> bool:
        """Whether vLLM keeps blocks of ended requests until they are saved."""
        return bool(self._awaited)

    def _log_finished(self) -> None:
        done = [req_id for req_id in self._finished if req_id not in self._awaited]
        for req_id in done:
            tracker = self._finished.pop(req_id)
            if not self._config.log_requests or not self._may_log():
                continue
            compat.logger.info(
                "lmcache_rs: request %s prompt %d tokens, %d from the engine, %d from lmcache_rs, "
                "%d stored, %.0f ms",
                req_id,
                tracker.request.num_prompt_tokens,
                tracker.local_tokens,
                tracker.external_tokens,
                self._books.least_stored(tracker.stored_tokens),
                (time.monotonic() - tracker.first_seen) * 1e3,
            )

    def _may_log(self) -> bool:
        now = time.monotonic()
        earned = (now - self._log_time) * LOG_LINES_PER_SECOND
        self._log_allowance = min(self._log_allowance + earned, LOG_LINES_PER_SECOND)
        self._log_time = now
        if self._log_allowance < 1:
            return False
        self._log_allowance -= 1
        return True

    def lookup_counts(self) -> Mapping[str, int]:
        """The lookup client's counters."""
        return {} if self._client is None else self._client.counts()

    def take_round_trips(self) -> list[float]:
        """Seconds that lookups took since the last call, where they go to another process."""
        return [] if self._client is None else self._client.take_round_trips()

    def counters(self) -> dict[str, Any]:
        """What has happened since the start."""
        return {
            **self.counts,
            **({} if self._client is None else self._client.stats()),
            "hashed_bytes": _native.hashed_bytes(),
            "tracked_requests": len(self._trackers),
        }

    def shutdown(self) -> None:
        """Ends the half; leases end by their deadlines."""
        if self._client is not None:
            self._client.close()
        self._trackers.clear()

    # --- inside -------------------------------------------------------------------------------

    def _track(self, request: Request, *, is_lookup: bool = False) -> RequestTracker:
        tracker = self._trackers.get(request.request_id)
        known = len(request.all_token_ids)
        if (
            tracker is not None
            and tracker.request is request
            and tracker.chain.num_tokens <= known
            # Looked up, it is computed from its first token on, whatever was before a reset.
            and not (is_lookup and not self._identities.is_current(tracker.epoch, tracker.adapter))
        ):
            return tracker
        try:
            identity = self._identities.of(request)
        except (TypeError, ValueError) as error:
            # What cannot be part of a key must not be left out of it.
            identity = RequestIdentity(
                None, can_save=False, epoch=self._identities.epoch, adapter=None
            )
            self.counts["bypassed_requests"] += 1
            if self._may_log():
                compat.logger.warning(
                    "lmcache_rs: request %s bypasses the cache: %s", request.request_id, error
                )
        chain, extra_keys = self._identities.chain(request)
        tracker = RequestTracker(
            request=request,
            namespace=identity.namespace and self._names.of(identity.namespace),
            can_save=identity.can_save,
            epoch=identity.epoch,
            adapter=identity.adapter,
            chain=chain,
            extra_keys=extra_keys,
        )
        self._trackers[request.request_id] = tracker
        return tracker


def _first_of(block_ids: set[int], table: list[int]) -> int:
    """Where the first of these blocks is in a block table; its end if none is."""
    return next((at for at, block in enumerate(table) if block in block_ids), len(table))
