"""What each step loads and saves: `StepDescriber`, for the scheduler half.

From what the requests were promised, and how far they are computed, to the lists that the worker
half goes through.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from lmcache_rs.vllm_v1 import compat
from lmcache_rs.vllm_v1.metadata import (
    NULL_BLOCK,
    LMCacheConnectorMetadata,
    LoadSpec,
    ReqMeta,
    SaveSpec,
    failed_blocks,
)
from lmcache_rs.vllm_v1.saves import SaveFences

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from lmcache_rs.config import LMCacheEngineConfig
    from lmcache_rs.vllm_v1.events import KVEventStream
    from lmcache_rs.vllm_v1.faults import Faults
    from lmcache_rs.vllm_v1.identity import Identities
    from lmcache_rs.vllm_v1.load_choice import LoadChoice
    from lmcache_rs.vllm_v1.tracker import RequestTracker

STEPS_IN_FLIGHT = 2
"""Steps that vLLM describes at most before it hears of the first one's outcome."""


class StepDescriber:
    """See the module's description.

    Args:
        config: Settings, with the chunk size that suits the engine.
        block_tokens: Tokens of the engine's block.
        kv_role: `kv_both`, `kv_producer` (never loads) or `kv_consumer` (never saves).
        faults: Where faults of ours are noted.
        identities: What requests' chunks are called.
        load_choice: Which loads the step waits for.
        has_several_ranks: Whether several workers load and save their parts.
        trackers: The requests, by id; the scheduler half adds and removes them.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        block_tokens: int,
        kv_role: str,
        faults: Faults,
        identities: Identities,
        load_choice: LoadChoice,
        *,
        has_several_ranks: bool,
        trackers: Mapping[str, RequestTracker],
    ) -> None:
        self._config = config
        self._chunk_size = config.chunk_size
        self._block_tokens = block_tokens
        self._saves = kv_role != "kv_consumer"
        # What only stages has let go of what was saved before.
        self._saves_all = kv_role == "kv_producer" and config.local_cpu
        # Layer by layer, saves are done in their step.
        self._saves_lag = not config.use_layerwise
        self._faults = faults
        self._identities = identities
        self._load_choice = load_choice
        self._has_several_ranks = has_several_ranks
        self._trackers = trackers
        # Promises with blocks, and who got blocks without one, until the next step is described.
        self._granted: dict[str, RequestTracker] = {}
        self._unpromised: list[RequestTracker] = []
        # Steps to come that save nothing: another connector's load may turn out to have failed.
        self._doubtful_steps = 0
        # The step described last.
        self._step = 0
        # Block tables of the last steps by request, each with whether the step loaded anything.
        self._last_tables: collections.deque[tuple[bool, dict[str, list[int]]]]
        self._last_tables = collections.deque(maxlen=STEPS_IN_FLIGHT)
        # Set where vLLM publishes what the cache holds.
        self.event_stream: KVEventStream | None = None

    def grant(self, tracker: RequestTracker) -> None:
        """The request has blocks for what it was promised."""
        self._granted[tracker.request.request_id] = tracker

    def grant_without_promise(self, tracker: RequestTracker) -> None:
        """The request has blocks, and nothing of it is loaded."""
        self._unpromised.append(tracker)

    def describe(
        self,
        metadata: LMCacheConnectorMetadata,
        scheduler_output: SchedulerOutput,
        *,
        to_ask: Set[str],
        awaited: Set[str],
    ) -> None:
        """Adds to `metadata` what the worker half loads before and saves after this step.

        Whatever fails here, each promise of the step reaches the worker half, if only as failed:
        vLLM computes on its blocks, or waits for it.

        Args:
            metadata: The description, empty so far.
            scheduler_output: vLLM's own.
            to_ask: Ended requests that the worker half is to be asked about.
            awaited: Ended requests whose blocks vLLM keeps until they are saved.
        """
        granted, self._granted = self._granted, {}
        try:
            metadata.fences = self._fences(scheduler_output, to_ask, awaited)
            self._describe_step(metadata, scheduler_output, granted)
        except Exception as error:
            self._faults.note("build_connector_meta", error)
            metadata.fences.copies_all_first = True
            for tracker in granted.values():
                self._describe_failed(metadata, scheduler_output, tracker)

    def _describe_step(
        self,
        metadata: LMCacheConnectorMetadata,
        scheduler_output: SchedulerOutput,
        granted: Mapping[str, RequestTracker],
    ) -> None:
        step = scheduler_output.num_scheduled_tokens
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
            is_streamed = load_spec is not None and load_spec.stream is not None
            if load_spec is not None and (self._has_several_ranks or is_streamed):
                # All ranks know of it alike: none loads, and none saves the step. Nor is anything
                # streamed that the step waits for.
                metadata.unloadable_block_ids |= self._promised_blocks(load_spec, block_ids)
                load_spec = None
            try:
                block_ids = compat.block_table(scheduler_output, req_id) or block_ids
                drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(req_id, ()))
                req = self._describe(
                    tracker, load_spec, block_ids, num_scheduled - drafts, metadata.fences
                )
            except Exception as error:
                self._faults.note("build_connector_meta", error)
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
            self._faults.note("build_connector_meta", error)
        return ReqMeta(
            req_id=tracker.request.request_id,
            num_tokens=0,
            hashes=hashes,
            block_ids=block_ids,
            namespace=tracker.namespace or "",
            load_spec=spec,
        )

    def _fences(
        self, scheduler_output: SchedulerOutput, to_ask: Set[str], awaited: Set[str]
    ) -> SaveFences:
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
            copied_first = preempted | awaited
        return SaveFences(self._step, copied_first, awaited=set(to_ask))

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
            self.note_contents(tracker, save_end // chunk_size)
        return ReqMeta(
            req_id=tracker.request.request_id,
            num_tokens=save_end if save_spec else 0,
            hashes=tracker.chain.hashes(max(load_end, save_end) // chunk_size),
            block_ids=block_ids,
            namespace=tracker.namespace or "",
            load_spec=load_spec,
            save_spec=save_spec,
        )

    def note_contents(self, tracker: RequestTracker, num_chunks: int) -> None:
        """What these chunks hold, for whoever is told that they are stored."""
        if self.event_stream is None:
            return
        hashes = tracker.chain.hashes(num_chunks)
        try:
            self.event_stream.note(tracker.request, tracker.namespace or "", hashes)
        except Exception as error:
            self._faults.note("note_contents", error)

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

    def tables_with(self, block_ids: Set[int]) -> tuple[set[int], dict[str, list[int]]]:
        """What the last steps computed on these blocks: the blocks from the first of them on, in
        every table; and the newest table of each request.

        They are kept only where a step has loaded.
        """
        behind: set[int] = set()
        newest: dict[str, list[int]] = {}
        for _, tables in self._last_tables:
            newest |= tables
            for table in tables.values():
                behind.update(table[first_of(block_ids, table) :])
        return behind, newest


def first_of(block_ids: Set[int], table: list[int]) -> int:
    """Where the first of these blocks is in a block table; its end if none is."""
    return next((at for at, block in enumerate(table) if block in block_ids), len(table))
