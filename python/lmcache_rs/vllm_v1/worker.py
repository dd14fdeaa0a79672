"""The worker half: moves KV between the engine's blocks and the store.

Lives beside the model and owns the bytes. In bulk mode a step's loads are done before its forward
pass, so that no block is touched while vLLM may use it; its saves are handed over after it and go
on behind the step (saves.py). Loads that requests wait for (loads.py) run beside the steps, into
blocks that nobody else uses. Layer by layer (`use_layerwise`) loads and saves run beside the
forward pass, each layer's load done before its attention and its save behind it; the last hook of
the step ends them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_rs import _native, lookup
from lmcache_rs.cache_engine import LMCacheEngine, Loaded, Stored
from lmcache_rs.key import HASH_BYTES
from lmcache_rs.layouts import Layout, MemoryFormat
from lmcache_rs.vllm_v1 import compat, layerwise
from lmcache_rs.vllm_v1.load_choice import LoadSpeed
from lmcache_rs.vllm_v1.loads import AsyncLoads, FinishedLoad, RunningLoad
from lmcache_rs.vllm_v1.lookup_end import LookupEnd
from lmcache_rs.vllm_v1.lower_tiers import LowerTiers, hashes_of
from lmcache_rs.vllm_v1.metadata import (
    ONLY_RANK,
    LMCacheConnectorMetadata,
    LMCacheWorkerMetadata,
    ReqMeta,
    RequestOutcome,
    failed_blocks,
)
from lmcache_rs.vllm_v1.owners_memory import NO_MEMORY, OwnersMemory
from lmcache_rs.vllm_v1.ranks import RankNames
from lmcache_rs.vllm_v1.saves import BackgroundSaves, SavedPart

if TYPE_CHECKING:
    import torch

    from lmcache_rs.config import LMCacheEngineConfig, LMCacheMetadata
    from lmcache_rs.vllm_v1.faults import Faults


CLOSE_DEADLINE_S = 4.0
"""Seconds that a shutdown waits for puts into lower tiers: vLLM kills a worker that takes five."""


class PoolTooSmallError(ValueError):
    """The pool does not hold one chunk of this model."""


class LMCacheWorkerHalf:
    """See the module's description.

    Args:
        config: Settings, with the chunk size that suits the engine.
        metadata: Facts of the model.
        engine_start: The start of the engine whose blocks these are.
        in_scheduler_process: Whether the scheduler half is in this process: then it asks the store
            itself, and no socket is opened.
        faults: Where faults of ours are noted.
        rank: Which of the engine's workers this is.
        owner: Which of them keeps what this one loads: itself, or another on this host, whose
            memory it reads; then it keeps nothing.
        num_readers: Other workers that read what this one keeps.
        fails_whole_loads: Whether an asynchronous load that ends early is of no use at all, as the
            engine keeps no block that lies behind a window.
        recomputes: Whether vLLM computes what a load has failed to bring, and fails no request for
            it: else nothing is promised but what is certain.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        engine_start: str,
        *,
        in_scheduler_process: bool,
        faults: Faults,
        rank: lookup.Rank = ONLY_RANK,
        owner: lookup.Rank | None = None,
        num_readers: int = 0,
        fails_whole_loads: bool = False,
        recomputes: bool = False,
    ) -> None:
        # There where another rank keeps what this one loads.
        self._owners: OwnersMemory | None = None
        if owner is not None and owner != rank:
            self._owners = OwnersMemory(owner, rank, config, faults)
            config = OwnersMemory.without_store(config, owner)
        self._num_readers = num_readers
        self._config = config
        self._metadata = metadata
        self._engine_start = engine_start
        self.rank = rank
        self._lookups = LookupEnd(engine_start, rank, in_scheduler_process=in_scheduler_process)
        # The scheduler half names chunks without saying whose part of them is meant.
        self._names = RankNames.of_rank(metadata)
        self._is_known = False
        self._failures = 0
        self._faults = faults
        self._engine: LMCacheEngine | None = None
        self._failed_block_ids: set[int] = set()
        # Those of loads that nobody computes on before they are over.
        self._failed_async_block_ids: set[int] = set()
        self._async_loads = AsyncLoads(faults)
        self._fails_whole_loads = fails_whole_loads
        self._load_speed = LoadSpeed()
        can_stream = recomputes and not num_readers
        self._tiers = LowerTiers(config, self._names.of, faults, can_stream=can_stream)
        self._timed_step: int | None = None
        self._outcomes: dict[str, RequestOutcome] = {}
        self._block_tokens = metadata.block_size or 1
        self._layers: dict[str, int] = {}
        self._step: layerwise.LayerwiseStep | None = None
        self._copier: _native.Copier | None = None
        self._saves = BackgroundSaves(faults, self._count_stored)
        self._counts = dict.fromkeys(
            (
                "stored_chunks",
                "stored_bytes",
                "refused_chunks",
                "loaded_chunks",
                "loaded_tokens",
                "loaded_bytes",
                "failed_loads",
                "dropped_saves",
            ),
            0,
        )

    # --- start-up ---------------------------------------------------------------------------

    def register_kv_caches(
        self,
        tensors: list[torch.Tensor],
        block_bytes: int,
        layer_names: Sequence[str] = (),
        *,
        has_windows: bool = False,
    ) -> None:
        """Makes the pool, registers the engine's tensors, and opens for lookups.

        `layer_names` are the tensors' names in the hooks that go layer by layer; `has_windows` says
        whether requests may lose blocks while they live.

        Raises:
            PoolTooSmallError, MemoryError, OSError: The cache cannot serve; the engine can.
            LayoutError: The tensors are not what they are declared to be.
        """
        num_blocks = self._config.chunk_size // self._block_tokens
        chunk_bytes = block_bytes * len(tensors) * num_blocks
        pool_bytes = self._config.max_local_cpu_bytes
        keeps = self._config.local_cpu or self._tiers.is_staging
        if keeps and pool_bytes < chunk_bytes:
            raise PoolTooSmallError(
                f"max_local_cpu_size is {pool_bytes} bytes, but one chunk of "
                f"{self._config.chunk_size} tokens of this model takes {chunk_bytes}; "
                f"set it to at least {chunk_bytes / 2**30:.4f} (GB)"
            )
        self._config = self._tiers.share(chunk_bytes)
        # As both halves know it from the engine's declaration: it is part of every key.
        by_token = self._metadata.stored_form == MemoryFormat.KV_MLA_FMT.name
        layout: Layout = "mla" if by_token else "opaque"
        engine = LMCacheEngine(
            self._config, self._metadata, layout=layout, num_readers=self._num_readers
        )
        try:
            engine.register_kv_caches(tensors, block_tokens=self._block_tokens)
            if engine.local_cpu is not None:
                has_readers = self._num_readers > 0
                self._lookups.open(engine.local_cpu, self._names.fields, has_readers=has_readers)
        except BaseException:
            engine.close()
            raise
        self._engine = engine
        self._tiers.add_to(engine)
        self._layers = {name: layer for layer, name in enumerate(layer_names)}
        self._saves.has_windows = has_windows

    @property
    def is_registered(self) -> bool:
        """Whether an engine's tensors were taken in."""
        return self._engine is not None

    @property
    def plan(self) -> str:
        """How KV is copied, in words."""
        registered = self._engine and self._engine.registered
        by_token = registered and registered.layout != "opaque"
        plan = "copied token by token" if by_token else "copied in whole blocks"
        return f"{plan} {registered.copy_path}" if registered else plan

    def capacity(self) -> tuple[int, int]:
        """The pool in bytes, and in tokens of this model."""
        if self._engine is None or self._engine.local_cpu is None:
            return 0, 0
        capacity_bytes = self._engine.local_cpu.capacity_bytes
        return capacity_bytes, capacity_bytes // self._chunk_bytes * self._config.chunk_size

    def tiers(self) -> list[str]:
        """The tiers in the order they are asked, each with its state, in words."""
        host = "staging" if self._tiers.is_staging else "healthy" if self.capacity()[0] else "off"
        return [f"local_cpu {host}", *self._tiers.states()]

    @property
    def _chunk_bytes(self) -> int:
        registered = self._engine and self._engine.registered
        return registered.native.chunk_bytes(self._config.chunk_size) if registered else 0

    def is_healthy(self) -> bool:
        """Whether loads and saves are to be trusted."""
        return self._engine is not None and self._engine.is_healthy()

    # --- the step -----------------------------------------------------------------------------

    def handle_preemptions(self, metadata: LMCacheConnectorMetadata) -> None:
        """Returns once no copy of an earlier step reads what the step may overwrite."""
        if metadata.engine_start == self._engine_start:
            self._saves.hold_back(metadata)
        else:
            # It does not say what becomes of our blocks: a description that failed says nothing.
            self._saves.wait()

    def take_sent(self, metadata: LMCacheConnectorMetadata) -> set[str]:
        """Ended requests that vLLM keeps blocks for and whose saves are done; each once."""
        if metadata.engine_start != self._engine_start:
            # None of their saves was ever ours, and nobody else's request is this engine's.
            return metadata.fences.awaited
        return self._saves.take_sent(metadata)

    def start_load_kv(self, metadata: LMCacheConnectorMetadata) -> None:
        """Loads what the step's requests were promised; what fails is reported in the same step."""
        self._end_other_step(metadata)
        if metadata.engine_start != self._engine_start:
            # Another engine's blocks are not ours to write.
            self.fail_loads(metadata)
            return
        self._is_known = metadata.lookup_ids.get(self.rank) == self._lookups.lookup_id
        if self._owners is not None and self._engine is not None:
            self._engine.reads_from = self._owners.find(metadata.lookup_ids)
        if metadata.is_timed:
            self._timed_step = metadata.fences.step
        self._tiers.follow(metadata.prefetches)
        self._failed_block_ids |= metadata.unloadable_block_ids
        step = self._step_of(metadata)
        load = self._load if step is None else step.add_load
        for req in metadata.requests:
            if req.load_spec is None or not req.load_spec.can_load:
                continue
            if req.load_spec.is_async:
                self._async_loads.begin(req, self._begin_load)
                continue
            try:
                loaded = load(req)
            except Exception as error:
                self._faults.note("start_load_kv", error)
                loaded = Loaded(req.load_spec.vllm_cached_tokens, 0, 0)
            if step is None:
                self._count_loaded(req, loaded)
            if loaded.end < req.load_spec.lmcache_cached_tokens:
                # Layer by layer too this is known now: the bytes are held, and in memory.
                self._record_failed_blocks(req, loaded.end)
        if step is not None and step.loads_anything:
            if self._copier is None:
                self._copier = layerwise.new_copier()
            step.start_loads(self._copier)

    def _load(self, req: ReqMeta) -> Loaded:
        """Loads for one request; every token below the end it returns is in its block."""
        assert req.load_spec is not None
        skip, end = req.load_spec.vllm_cached_tokens, req.load_spec.lmcache_cached_tokens
        if self._engine is None or not self._engine.is_healthy():
            return Loaded(skip, 0, 0)
        hashes = req.hashes[: end // self._config.chunk_size * HASH_BYTES]
        began = time.perf_counter()
        loaded = self._engine.load_chunks(
            req.req_id, self._names.of(req.namespace), hashes, req.block_ids, skip=skip
        )
        self._load_speed.note(loaded.bytes, time.perf_counter() - began)
        return loaded

    def _begin_load(self, req: ReqMeta) -> RunningLoad | None:
        """Starts a load that its request waits for; None if there is nothing to load from."""
        assert req.load_spec is not None
        skip, end = req.load_spec.vllm_cached_tokens, req.load_spec.lmcache_cached_tokens
        hashes = req.hashes[: end // self._config.chunk_size * HASH_BYTES]
        if self._engine is None or not self._engine.is_healthy() or not hashes:
            return None
        stream = None if req.load_spec.stream is None else self._tiers.begin_stream(req)
        if stream is not None:
            return stream
        # Where a stream cannot begin, there is what host memory holds.
        # The owner puts its own place into the name.
        name = self._names.of(req.namespace) if self._owners is None else req.namespace
        return self._engine.begin_load_chunks(req.req_id, name, hashes, req.block_ids, skip=skip)

    def take_finished_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose loads are over, and those of them that have nothing of theirs.

        The blocks of a load that ended early are reported as failed in this step.
        """
        finished: set[str] = set()
        failed: set[str] = set()
        self._tiers.poll()
        for load in self._async_loads.take_finished():
            finished.add(load.req.req_id)
            is_whole = False
            try:
                is_whole = self._account_for(load)
            except Exception as error:
                self._faults.note("finish_load", error)
            if not is_whole and self._fails_whole_loads:
                failed.add(load.req.req_id)
        return finished, failed

    def _account_for(self, load: FinishedLoad) -> bool:
        """Whether all that was promised is there."""
        req, loaded = load.req, load.loaded
        assert req.load_spec is not None
        if loaded.end < req.load_spec.lmcache_cached_tokens:
            self._record_failed_blocks(req, loaded.end)
            return False
        self._count_loaded(req, loaded)
        if req.load_spec.stream is None:
            self._load_speed.note(loaded.bytes, load.seconds)
        return True

    def _count_loaded(self, req: ReqMeta, loaded: Loaded) -> None:
        assert req.load_spec is not None
        if not loaded.tokens:
            return
        chunk_size, skip = self._config.chunk_size, req.load_spec.vllm_cached_tokens
        self._outcome(req.req_id).loaded_tokens += loaded.tokens
        self._counts["loaded_tokens"] += loaded.tokens
        self._counts["loaded_bytes"] += loaded.bytes
        self._counts["loaded_chunks"] += -(-loaded.end // chunk_size) - skip // chunk_size

    def _record_failed_blocks(self, req: ReqMeta, loaded_end: int) -> None:
        """Every block that was promised and does not hold what was promised."""
        assert req.load_spec is not None
        promised_end = req.load_spec.lmcache_cached_tokens
        failed = failed_blocks(req.block_ids, self._block_tokens, loaded_end, promised_end)
        if not req.load_spec.is_async:
            self._failed_block_ids |= failed
        elif not self._fails_whole_loads:
            self._failed_async_block_ids |= failed
        if self._engine is not None and self._engine.local_cpu is not None:
            # What failed leaves the index before it is reported, or it would be promised again.
            # A stream may end at a chunk that was never read, and forgets by itself what was torn.
            at = loaded_end // self._config.chunk_size * HASH_BYTES
            if at < len(req.hashes) and req.load_spec.stream is None:
                failed_hash = req.hashes[at : at + HASH_BYTES]
                self._engine.local_cpu.remove(self._names.of(req.namespace), failed_hash)
            if not self._num_readers:
                # What the others have not read yet ends with the request, or its deadline.
                self._engine.local_cpu.release(req.req_id)
        if self._tiers.take_stopped(req.req_id):
            # Nobody wants it any more.
            return
        self._counts["failed_loads"] += 1
        compat.logger.warning(
            "lmcache_rs: load of request %s ended at token %d of %d; %d blocks reported as failed",
            req.req_id,
            loaded_end,
            promised_end,
            len(failed),
        )

    def wait_for_layer_load(self, layer_name: str, metadata: LMCacheConnectorMetadata) -> None:
        """Returns once the layer is in every block that the step loads; in bulk mode all are."""
        step, layer = self._step, self._layers.get(layer_name)
        if step is not None and layer is not None and step.metadata is metadata:
            step.wait_for_layer(layer)

    def save_kv_layer(self, layer_name: str, metadata: LMCacheConnectorMetadata) -> None:
        """Copies the layer of what the step saves; in bulk mode all are copied after the step."""
        if not self._config.use_layerwise or not metadata.requests:
            return
        layer = self._layers.get(layer_name)
        is_ours = metadata.engine_start == self._engine_start
        if layer is None or not is_ours or self._is_suspect(metadata):
            return
        step = self._step_of(metadata)
        if step is not None:
            step.save_layer(layer)

    def wait_for_save(self, metadata: LMCacheConnectorMetadata) -> None:
        """Saves what the step computed: in bulk mode the copies are handed over, else done."""
        if metadata.engine_start != self._engine_start:
            return
        step = self._step_of(metadata)
        self._finish_loads(step)
        saves = [req for req in metadata.requests if req.save_spec and req.save_spec.can_save]
        try:
            if self._is_suspect(metadata):
                self._counts["dropped_saves"] += len(saves)
            elif step is not None:
                for req, stored in step.commit():
                    self._count_stored(req, stored)
            else:
                self._save_all(saves, metadata.fences.step)
        finally:
            if saves:
                self._saves.note_step(metadata.fences.step)
            if step is not None:
                step.close()

    def abandon_step(self, metadata: LMCacheConnectorMetadata) -> None:
        """The forward pass failed: loads are done all the same, and nothing is saved."""
        step = self._step if self._step and self._step.metadata is metadata else None
        self._finish_loads(step)
        if step is not None:
            step.close()
        self._saves.note_step(metadata.fences.step)
        self._counts["dropped_saves"] += sum(
            req.save_spec is not None and req.save_spec.can_save for req in metadata.requests
        )

    def _is_suspect(self, metadata: LMCacheConnectorMetadata) -> bool:
        """Whether the step ran on blocks that hold something else, or was described before the
        scheduler half knew of a failure: nothing it computed may be kept."""
        return bool(self._failed_block_ids) or (
            metadata.failures_seen.get(self.rank, 0) < self._failures
        )

    def _step_of(self, metadata: LMCacheConnectorMetadata) -> layerwise.LayerwiseStep | None:
        """The step's state; None in bulk mode, and where there is nothing to do."""
        self._end_other_step(metadata)
        if self._step is None and self._config.use_layerwise and metadata.requests:
            native = None
            if self._engine is not None and self._engine.is_healthy():
                native = self._engine.layerwise_step()
            self._step = layerwise.LayerwiseStep(
                metadata,
                native,
                self._config.chunk_size,
                self._faults,
                self._names.of,
                self._part_to_save,
            )
        return self._step

    def _end_other_step(self, metadata: LMCacheConnectorMetadata) -> None:
        """Drops a step that vLLM never ended: its blocks may be another request's by now."""
        if self._step is not None and self._step.metadata is not metadata:
            self._step.close()
            self._step = None

    def _finish_loads(self, step: layerwise.LayerwiseStep | None) -> None:
        if step is None or not step.loads_anything:
            return
        try:
            outcomes = step.finish_loads()
        except Exception as error:
            self._faults.note("finish_loads", error)
            self._failed_block_ids |= step.metadata.promised_block_ids(self._block_tokens)
            step.close()
            return
        for req, planned, loaded in outcomes:
            self._count_loaded(req, loaded)
            if loaded.end < planned.end:
                self._record_failed_blocks(req, loaded.end)

    def _save_all(self, saves: list[ReqMeta], step: int) -> None:
        for req in saves:
            try:
                self._save(req, step)
            except Exception as error:
                self._faults.note("wait_for_save", error)

    def _save(self, req: ReqMeta, step: int) -> None:
        if self._engine is None or not self._engine.is_healthy():
            return
        part = self._part_to_save(req)
        transfer = self._engine.begin_store_chunks(
            self._names.of(req.namespace), part.hashes, part.block_ids
        )
        self._saves.add(step, req, transfer)

    def _part_to_save(self, req: ReqMeta) -> SavedPart:
        """What a save stores, as far as it is not there."""
        assert req.save_spec is not None
        first, chunk_size = 0, self._config.chunk_size
        if self._tiers.lets_go_of_beginnings(req.num_tokens // chunk_size, self.capacity()[0]):
            first = req.save_spec.skip_leading_tokens // chunk_size
        return SavedPart.of(req, first, chunk_size, self._block_tokens)

    def _count_stored(self, req: ReqMeta, stored: Stored) -> None:
        self._outcome(req.req_id).stored_tokens += stored.tokens
        self._counts["stored_chunks"] += stored.chunks
        self._counts["stored_bytes"] += stored.bytes
        self._counts["refused_chunks"] += stored.refused_chunks
        if stored.chunks:
            assert req.save_spec is not None
            first = req.save_spec.skip_leading_tokens // self._config.chunk_size
            hashes = hashes_of(req.hashes, first, req.num_tokens // self._config.chunk_size)
            self._tiers.offer(self._names.of(req.namespace), hashes)

    def record_failed(self, block_ids: set[int]) -> None:
        """Blocks that do not hold what was promised: reported, and nothing of the step is saved."""
        self._failed_block_ids |= block_ids

    def fail_loads(self, metadata: LMCacheConnectorMetadata) -> None:
        """The step's loads have failed, but those that run already beside the steps."""
        self.record_failed(metadata.promised_block_ids(self._block_tokens))
        self._async_loads.fail_others(metadata.async_loads())

    def take_failed_block_ids(self) -> set[int]:
        """Blocks whose loads failed since the last call."""
        # With drafts vLLM asks before it ends the step.
        self._finish_loads(self._step)
        failed, self._failed_block_ids = self._failed_block_ids, set()
        self._failures += bool(failed)
        failed |= self._failed_async_block_ids
        self._failed_async_block_ids = set()
        return failed

    def take_outcomes(self) -> LMCacheWorkerMetadata | None:
        """What was stored and loaded since the last call, by request."""
        saves_ended = self._saves.take_ended_step()
        outcomes, self._outcomes = self._outcomes, {}
        is_ready = self._engine is not None and (
            self._owners is None or self._owners.reader is not None
        )
        lookup_ids = {self.rank: self._lookups.lookup_id} if is_ready and not self._is_known else {}
        tiers = self._tiers.take_news()
        timed_step, self._timed_step = self._timed_step, None
        is_news = outcomes or lookup_ids or self._failures or tiers.prefetched or tiers.reads
        if not is_news and saves_ended is None and timed_step is None:
            return None
        return LMCacheWorkerMetadata(
            outcomes,
            lookup_ids,
            self._failures,
            load_bytes_per_second=self._load_speed.bytes_per_second,
            has_lower_tiers=self._tiers.storage is not None,
            lower_tiers=self._tiers.names,
            prefetched=tiers.prefetched,
            streamable=tiers.streamable,
            tier_reads=tiers.reads,
            timed_step=timed_step,
            saves_ended=saves_ended,
            rank=self.rank,
        )

    def _outcome(self, req_id: str) -> RequestOutcome:
        return self._outcomes.setdefault(req_id, RequestOutcome())

    # --- for operators ------------------------------------------------------------------------

    @property
    def copies_on(self) -> str:
        """What copies KV: `host` or `cuda`."""
        registered = self._engine and self._engine.registered
        return "cuda" if registered and registered.device is not None else "host"

    @property
    def local_cpu(self) -> _native.LocalCpu | None:
        """Host memory, while there is an engine that has it."""
        return None if self._engine is None else self._engine.local_cpu

    def listen(self) -> _native.EventSink | None:
        """From here on all tiers tell what comes and goes; None where nothing is stored."""
        if self._engine is None or self._engine.local_cpu is None:
            return None
        sink = _native.EventSink(self._engine.local_cpu)
        self._engine.storage_manager.tell(sink)
        return sink

    @property
    def counts(self) -> Mapping[str, int]:
        """This half's own counters."""
        return self._counts

    def counters(self) -> dict[str, Any]:
        """What has happened since the start."""
        self._saves.collect()
        registered = self._engine and self._engine.registered
        counters: dict[str, Any] = {**self._counts, "hashed_bytes": _native.hashed_bytes()}
        counters |= self._tiers.counters()
        if self._engine is None or not registered:
            return counters
        counters["copy_path"] = registered.copy_path
        if registered.device is not None:
            counters["page_locked_bytes"] = self._engine.page_locked_bytes
            counters["copies_under_way"] = registered.device.num_under_way
            for path, count in registered.device.copies().items():
                counters[f"copies_by_{path}"] = count
        return counters

    def memory_stats(self) -> Mapping[str, int]:
        """The books of the pool, walked entry by entry."""
        if self._engine is None or self._engine.local_cpu is None:
            return {} if self._owners is None else NO_MEMORY
        return self._tiers.with_share(self._engine.local_cpu.audit())

    def shutdown(self) -> None:
        """Closes the socket and gives the memory back; what was saved goes to the tiers below
        first, as far as there is time. Idempotent."""
        if self._tiers.storage is not None:
            self._saves.wait()
            self._saves.collect()
        if self._step is not None:
            self._step.close()
            self._step = None
        if self._copier is not None:
            self._copier.close()
        self._async_loads.close()
        self._tiers.close()
        self._lookups.close()
        if self._engine is not None:
            if self._engine.local_cpu is not None:
                self._lookups.forget(self._engine.local_cpu)
            self._engine.close(CLOSE_DEADLINE_S)
        self._tiers.close_share()
