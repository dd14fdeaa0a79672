"""The scheduler half: which tokens are stored, which blocks get them, what is saved.

Lives in vLLM's scheduler and owns no bytes. A request has one `RequestTracker` from the first time
it is seen to its end; everything promised to the scheduler stands on a lease that the worker half
holds under the request's id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_rs import _native, lookup
from lmcache_rs.key import HASH_BYTES
from lmcache_rs.vllm_v1 import compat
from lmcache_rs.vllm_v1.identity import (
    Identities,
    RequestIdentity,
)
from lmcache_rs.vllm_v1.load_choice import LoadChoice
from lmcache_rs.vllm_v1.load_costs import NEVER, SHORTEST_WAIT_S, LoadCosts, Verdict
from lmcache_rs.vllm_v1.metadata import (
    NULL_BLOCK,
    ONLY_RANK,
    LMCacheConnectorMetadata,
    LMCacheWorkerMetadata,
    LoadSpec,
)
from lmcache_rs.vllm_v1.prefetches import AskedPrefetches, Brought
from lmcache_rs.vllm_v1.ranks import RankBooks, RankNames
from lmcache_rs.vllm_v1.steps import StepDescriber, first_of
from lmcache_rs.vllm_v1.streams import StreamSpec
from lmcache_rs.vllm_v1.tracker import RequestTracker

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from lmcache_rs.config import LMCacheEngineConfig, LMCacheMetadata
    from lmcache_rs.vllm_v1.events import KVEventStream
    from lmcache_rs.vllm_v1.faults import Faults

LOG_LINES_PER_SECOND = 20


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
        recomputes: Whether vLLM computes what a load has failed to bring, and fails no request for
            it: else nothing is promised but what host memory holds.
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
        *,
        recomputes: bool = False,
    ) -> None:
        self._config = config
        self._recomputes = recomputes
        self._load_choice = load_choice or LoadChoice(config.max_sync_load_ms, token_bytes=0)
        # Where there are tiers below host memory.
        self._prefetches: AskedPrefetches | None = None
        self._costs = LoadCosts(config.chunk_size) if config.refuse_slow_loads else None
        self._engine_start = engine_start
        self._chunk_size = config.chunk_size
        self._identities = identities or Identities(config, metadata)
        self._block_tokens = metadata.block_size or 1
        self._loads = kv_role != "kv_producer"
        self._trackers: dict[str, RequestTracker] = {}
        # Finished; their last outcome is still on its way from the workers.
        self._finished: dict[str, RequestTracker] = {}
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
        self._log_allowance = float(LOG_LINES_PER_SECOND)
        self._log_time = time.monotonic()
        self.counts = {
            "requested_tokens": 0,
            "promised_tokens": 0,
            "hit_tokens": 0,
            "stored_tokens": 0,
            "bypassed_requests": 0,
            "refused_loads": 0,
            "given_up_loads": 0,
            "probes": 0,
            "streamed_loads": 0,
        }
        self.faults = faults
        self._steps = StepDescriber(
            config,
            self._block_tokens,
            kv_role,
            faults,
            self._identities,
            self._load_choice,
            has_several_ranks=self._has_several_ranks,
            trackers=self._trackers,
        )

    @property
    def event_stream(self) -> KVEventStream | None:
        """Where vLLM publishes what the cache holds; set once there is one."""
        return self._steps.event_stream

    @event_stream.setter
    def event_stream(self, stream: KVEventStream | None) -> None:
        self._steps.event_stream = stream

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
        streamed_chunks = self._streamable_chunks(request.request_id)
        is_streamed = streamed_chunks > hit_chunks
        hit_tokens = max(hit_chunks, streamed_chunks) * self._chunk_size
        num_new = min(hit_tokens, request.num_tokens - 1) - num_computed_tokens
        if num_new <= 0 or num_new < self._config.min_retrieve_tokens:
            return self._promise_nothing(request.request_id)
        # A rank cannot tell from its own load whether another rank's has failed. Had the step been
        # computed already, what it computed there would have reached this rank through the layers
        # they compute together or in turn, and be saved here as if it were right.
        is_async = is_streamed or self._has_several_ranks or self._load_choice.is_async(num_new)
        tracker.load_spec = LoadSpec(num_computed_tokens, hit_tokens, is_async=is_async)
        if is_streamed:
            tracker.load_spec.stream = self._stream_spec(num_new)
        if is_async and self._load_choice.may_load_last_token:
            num_new = hit_tokens - num_computed_tokens
        return num_new, is_async

    def _lookup(
        self, client: lookup.LookupClient, tracker: RequestTracker, namespace: str, hashes: bytes
    ) -> int | None:
        """Chunks that host memory holds, once what lower tiers have is there, too; those that the
        engine has itself need not be held."""
        req_id, first = tracker.request.request_id, tracker.local_tokens // self._chunk_size
        hit_chunks = self._held_chunks(client, tracker, namespace, hashes)
        prefetches = self._prefetches
        if prefetches is None or hit_chunks is None or hit_chunks * HASH_BYTES == len(hashes):
            return hit_chunks
        verdict = Verdict()
        if self._costs is not None and not prefetches.is_known(req_id, namespace, hashes, first):
            # What the engine has itself, it need not compute either.
            has_chunks = max(hit_chunks, tracker.local_tokens // self._chunk_size)
            verdict = self._costs.judge(max(1, len(hashes) // HASH_BYTES - has_chunks))
            if verdict.is_refused or prefetches.is_held_up:
                prefetches.refuse(req_id, namespace, hashes)
                self.counts["refused_loads"] += 1
            if verdict.refused_tiers and not prefetches.is_held_up:
                self._probe(prefetches, verdict, namespace, hashes, hit_chunks, first)
        of = verdict.least_chunks, verdict.compute_s, first
        if prefetches.is_pending(req_id, namespace, hashes, *of):
            if prefetches.is_new(req_id):
                self._steps.note_contents(tracker, len(hashes) // HASH_BYTES)
            return None
        if prefetches.settle(req_id):
            # Asked before the chunks were there; the lease stays, and is renewed.
            client.end(req_id, release=False)
            found = hit_chunks
            hit_chunks = self._held_chunks(client, tracker, namespace, hashes)
            if hit_chunks and self._costs is not None and self._costs.cuts_a_chunk:
                hit_chunks = max(found, hit_chunks - 1)
        return hit_chunks

    def _held_chunks(
        self, client: lookup.LookupClient, tracker: RequestTracker, namespace: str, hashes: bytes
    ) -> int | None:
        """End of the chunks that host memory holds, and are leased now, or that the engine has."""
        req_id, first = tracker.request.request_id, tracker.local_tokens // self._chunk_size
        if tracker.looked_up_from != first or not first:
            hit_chunks = client.lookup(hashes, req_id, namespace)
            if hit_chunks is None or hit_chunks >= first:
                return hit_chunks
            # It lacks some that the engine has: those behind them may be there all the same.
            tracker.looked_up_from = first
        hit_chunks = client.lookup(hashes[first * HASH_BYTES :], req_id, namespace)
        return None if hit_chunks is None else first + hit_chunks

    def _streamable_chunks(self, req_id: str) -> int:
        """End of the chunks that can be loaded past host memory; 0 if there are none."""
        prefetches = self._prefetches
        if prefetches is None or not self._recomputes or not self._books.all_have_lower_tiers:
            return 0
        num_chunks = prefetches.streamable(req_id)
        if num_chunks and self._costs is not None and self._costs.cuts_a_chunk:
            num_chunks -= 1
        return num_chunks

    def _stream_spec(self, num_tokens: int) -> StreamSpec:
        if self._costs is None:
            return StreamSpec()
        verdict = self._costs.judge(max(1, num_tokens // self._chunk_size))
        within_s = max(SHORTEST_WAIT_S, verdict.compute_s)
        return StreamSpec(within_s, tuple(verdict.refused_tiers))

    def _probe(
        self,
        prefetches: AskedPrefetches,
        verdict: Verdict,
        namespace: str,
        hashes: bytes,
        hit_chunks: int,
        first: int,
    ) -> None:
        """Has a little of what is refused read in the background, if that is due."""
        assert self._costs is not None
        num_missing, now = len(hashes) // HASH_BYTES - hit_chunks, time.monotonic()
        due = self._costs.begin_probe(verdict, num_missing, now)
        if due is None:
            return
        tier, num_chunks = due
        self.counts["probes"] += 1
        # No request of vLLM's is called so.
        probe_id = f"\0probe {self.counts['probes']}"
        others = {other: NEVER for other in self._costs.all_tiers() if other != tier}
        end = (hit_chunks + num_chunks) * HASH_BYTES
        prefetches.probe(probe_id, namespace, hashes[:end], others, first)
        self._costs.start_probe(tier, probe_id, now)

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
            self._steps.grant_without_promise(tracker)
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
        self._steps.grant(tracker)
        if not spec.is_async:
            self._load_choice.take(num_external_tokens)
        self.counts["promised_tokens"] += num_external_tokens
        self.counts["streamed_loads"] += spec.stream is not None
        tracker.is_streamed = tracker.is_streamed or spec.stream is not None
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
        step = scheduler_output.num_scheduled_tokens
        try:
            self._begin_step(metadata, is_empty=not step)
        except Exception as error:
            self.faults.note("build_connector_meta", error)
        self._steps.describe(metadata, scheduler_output, to_ask=self._to_ask, awaited=self._awaited)
        # They are on their way to the worker half only from here on.
        self._to_ask -= metadata.fences.awaited
        if self._costs is not None and self._prefetches is not None:
            number, num_tokens = metadata.fences.step, sum(step.values())
            load_s = self._load_choice.seconds(metadata.tokens_loaded_in_step)
            now = time.monotonic()
            metadata.is_timed = self._costs.begin_step(number, num_tokens, now, load_s=load_s)
        return metadata

    def _begin_step(self, metadata: LMCacheConnectorMetadata, *, is_empty: bool) -> None:
        if self._prefetches is not None:
            metadata.prefetches = self._prefetches.take_orders()
        if not self._open_steps:
            # vLLM may say no more: the outcome of a step without tokens reaches nobody.
            self._log_finished()
        self._open_steps += not is_empty

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
        if self._costs is not None:
            self._costs.note_outcome(time.monotonic())
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
                brought = self._prefetches.done(told.rank, told.prefetched, told.streamable)
                if self._costs is not None:
                    self._learn(self._costs, told, brought)
        self._load_choice.measured(self._books.load_bytes_per_second)
        self.counts["hit_tokens"] = self._books.loaded_tokens
        self.counts["stored_tokens"] = self._books.stored_tokens

    def _learn(self, costs: LoadCosts, told: LMCacheWorkerMetadata, brought: list[Brought]) -> None:
        now = time.monotonic()
        costs.has_tiers(told.rank, told.lower_tiers)
        if told.timed_step is not None:
            costs.end_step(told.timed_step, now)
        waits = {each.req_id: each.seconds for each in brought if each.is_alone}
        costs.take_in(told.rank, told.tier_reads, waits)
        for each in brought:
            costs.end_probe(each.req_id, now)
        costs.copied_chunk_s = self._load_choice.seconds(self._chunk_size)

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
        behind, newest = self._steps.tables_with(invalid_block_ids)
        failed = invalid_block_ids | behind
        for req_id, table in newest.items():
            # An older table may name blocks that are somebody else's by now.
            first = first_of(invalid_block_ids, table)
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
                if tracker is not None and tracker.is_streamed:
                    self._prefetches.stop_stream(req_id)
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

    def chunk_seconds(self) -> Mapping[str, float]:
        """Seconds of a chunk by where it comes from, as far as they are known."""
        return {} if self._costs is None else self._costs.chunk_seconds()

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
