"""`LMCacheConnectorV1Dynamic`: vLLM's hooks, each handed to the half that answers it.

Nothing is decided here. A fault of ours never reaches vLLM: each hook has an answer that means
"no cache", which it gives when its half is missing or fails.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from lmcache_rs.config import ConfigError, LMCacheEngineConfig, disabled_by_environment
from lmcache_rs.vllm_v1 import make_known, register
from lmcache_rs.vllm_v1.compat import HOST_HIT_SOURCE
from lmcache_rs.vllm_v1.events import LMCacheKVEvents
from lmcache_rs.vllm_v1.manager import LMCacheManager
from lmcache_rs.vllm_v1.metadata import (
    LMCacheConnectorMetadata,
    LMCacheWorkerMetadata,
    ReqMeta,
)
from lmcache_rs.vllm_v1.metrics import LMCachePromMetrics, LMCacheStats
from lmcache_rs.vllm_v1.owners_memory import UnreadOwnerError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

Answer = TypeVar("Answer")


def _error_being_handled() -> tuple[int, int]:
    """Tells errors apart, and one raised once more from itself: its traceback is another then. By
    identity, as the error itself would keep its frames alive."""
    error = sys.exception()
    return id(error), id(error and error.__traceback__)


class LMCacheConnectorV1Dynamic(KVConnectorBase_V1):
    """KV that outlives the engine's blocks, handed back through vLLM's connector hooks."""

    # vLLM's `get_external_cache_hit_sources` reads it, from 0.32 on.
    _cache_hit_source = HOST_HIT_SOURCE

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # As for this class itself, at the end of the module.
        make_known(cls.__name__, cls.__module__, cls.__name__)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._manager = LMCacheManager(
            vllm_config, kv_cache_config, is_scheduler=role == KVConnectorRole.SCHEDULER
        )
        self._unserved_block_ids: set[int] = set()
        self._unserved_loads: list[ReqMeta] = []
        self._error_before_step = _error_being_handled()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether Python must run between layers, which a whole captured graph does not let it.

        Copies layer by layer wait for a layer inside the forward pass.
        """
        try:
            return (
                not disabled_by_environment()
                and LMCacheEngineConfig.resolve(connector_extra_config=extra_config).use_layerwise
            )
        except ConfigError:
            # Whatever is wrong stops the start where it can be told in full.
            return False

    def _guard(self, where: str, no_cache: Answer, work: Callable[[], Answer]) -> Answer:
        """Runs a hook; a fault is noted and `no_cache` answered."""
        try:
            return work()
        except Exception as error:
            self._manager.faults.note(where, error)
            return no_cache

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is lost is a miss later, not a broken hand-off."""
        return False

    # --- worker half --------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes in the engine's KV tensors. Stops the start where they cannot be served rightly."""
        self._manager.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Returns once no copy of an earlier step reads a block that this step may overwrite."""
        worker = self._manager.worker
        if worker is not None and isinstance(kv_connector_metadata, LMCacheConnectorMetadata):
            self._guard(
                "handle_preemptions",
                None,
                lambda: worker.handle_preemptions(kv_connector_metadata),
            )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Loads the step's promises."""
        worker, metadata = self._manager.worker, self._bound_metadata()
        if metadata is None:
            return
        # vLLM counts on the promised blocks: what nobody loads is said to have failed.
        if worker is None:
            self._unserved_block_ids |= self._manager.promised_block_ids(metadata)
            self._unserved_loads += metadata.async_loads()
            return
        try:
            worker.start_load_kv(metadata)
        except UnreadOwnerError:
            raise
        except Exception as error:
            self._manager.faults.note("start_load_kv", error)
            worker.fail_loads(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Returns once the layer's loads are written; in bulk mode they were before the pass."""
        worker, metadata = self._manager.worker, self._bound_metadata()
        if worker is None or metadata is None or not metadata.requests:
            return
        try:
            worker.wait_for_layer_load(layer_name, metadata)
        except Exception as error:
            self._manager.faults.note("wait_for_layer_load", error)
            worker.fail_loads(metadata)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Copies the layer of what the step saves; in bulk mode all are, after the pass."""
        worker, metadata = self._manager.worker, self._bound_metadata()
        if worker is None or metadata is None or not metadata.requests:
            return
        self._guard("save_kv_layer", None, lambda: worker.save_kv_layer(layer_name, metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        self._error_before_step = _error_being_handled()

    def wait_for_save(self) -> None:
        """Saves what the step computed, unless the forward pass failed."""
        worker, metadata = self._manager.worker, self._bound_metadata()
        if worker is None or metadata is None:
            return
        # vLLM ends a step this way whatever came of it.
        has_failed = (
            sys.exception() is not None and _error_being_handled() != self._error_before_step
        )
        end = worker.abandon_step if has_failed else worker.wait_for_save
        self._guard("wait_for_save", None, lambda: end(metadata))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that requests wait for and that are over, and ended requests whose saves are done.

        Each is said once. Of the ended ones only those that vLLM keeps blocks for.
        """
        unserved, self._unserved_loads = self._unserved_loads, []
        finished = {req.req_id for req in unserved}
        failed = set(finished)
        worker = self._manager.worker
        if worker is not None:
            nothing: tuple[set[str], set[str]] = (set(), set())
            taken = self._guard("get_transfer_results", nothing, worker.take_finished_loads)
            finished |= taken[0]
            failed |= taken[1]
        return KVConnectorTransferResults(
            finished_sending=self._take_sent(), finished_recving=finished, failed_recving=failed
        )

    def _take_sent(self) -> set[str]:
        worker, metadata = self._manager.worker, self._bound_metadata()
        if metadata is None:
            return set()
        # With nobody to save, nothing is under way.
        if worker is None:
            awaited, metadata.fences.awaited = metadata.fences.awaited, set()
            return awaited
        nobody: set[str] = set()
        return self._guard("take_sent", nobody, lambda: worker.take_sent(metadata))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """As `get_transfer_results`, for engines that ask no more than this."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that do not hold what was promised."""
        unserved, self._unserved_block_ids = self._unserved_block_ids, set()
        worker, metadata = self._manager.worker, self._bound_metadata()
        if worker is None:
            return unserved
        try:
            return unserved | worker.take_failed_block_ids()
        except Exception as error:
            self._manager.faults.note("get_block_ids_with_load_errors", error)
            promised = set() if metadata is None else self._manager.promised_block_ids(metadata)
            return unserved | promised

    def build_connector_worker_meta(self) -> LMCacheWorkerMetadata | None:
        """What the step stored and loaded."""
        worker, reports = self._manager.worker, self._manager.event_reports
        if worker is None:
            return None
        outcomes = self._guard("build_connector_worker_meta", None, worker.take_outcomes)
        if reports is not None and not reports.are_asked_for:
            # vLLM's MultiConnector asks its children for no events, but carries this.
            told = self._guard("build_connector_worker_meta", None, reports.take)
            if told is not None:
                outcomes = outcomes or LMCacheWorkerMetadata(rank=worker.rank)
                outcomes.event_reports = told.reports
        return outcomes

    def get_kv_connector_kv_cache_events(self) -> LMCacheKVEvents | None:
        """What the store took in and gave up since the last step, where vLLM publishes it."""
        reports = self._manager.event_reports
        if reports is None:
            return None
        reports.are_asked_for = True
        return self._guard("get_kv_connector_kv_cache_events", None, reports.take)

    def _bound_metadata(self) -> LMCacheConnectorMetadata | None:
        metadata = self._connector_metadata
        return metadata if isinstance(metadata, LMCacheConnectorMetadata) else None

    # --- scheduler half -----------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Takes in vLLM's block manager, which forgets blocks whose loads failed."""
        super().bind_kv_cache_manager(kv_cache_manager)
        half = self._manager.scheduler
        if half is not None:
            self._guard(
                "bind_kv_cache_manager",
                None,
                lambda: half.bind_evict_blocks(kv_cache_manager.evict_blocks),
            )
        stream = self._manager.event_stream
        if stream is not None:
            self._guard(
                "bind_kv_cache_manager",
                None,
                lambda: stream.bind_kv_cache_manager(kv_cache_manager),
            )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those the engine has."""
        half = self._manager.scheduler
        if half is None:
            return 0, False
        no_cache: tuple[int | None, bool] = (0, False)
        return self._guard(
            "get_num_new_matched_tokens",
            no_cache,
            lambda: half.get_num_new_matched_tokens(request, num_computed_tokens),
        )

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Blocks were granted, or the load is off."""
        half = self._manager.scheduler
        if half is not None:
            self._guard(
                "update_state_after_alloc",
                None,
                lambda: half.update_state_after_alloc(request, blocks, num_external_tokens),
            )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the worker half loads and saves in this step."""
        half = self._manager.scheduler
        nothing: KVConnectorMetadata = LMCacheConnectorMetadata(engine_start="")
        if half is None:
            return nothing
        self._watch_for_clears()
        return self._guard(
            "build_connector_meta", nothing, lambda: half.build_connector_meta(scheduler_output)
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes in what the workers did."""
        half = self._manager.scheduler
        if half is not None:
            self._guard(
                "update_connector_output",
                None,
                lambda: half.update_connector_output(connector_output),
            )
        self._watch_for_clears()
        self._guard("take_in_events", None, lambda: self._take_in_events(connector_output))

    def _take_in_events(self, connector_output: KVConnectorOutput) -> None:
        stream = self._manager.event_stream
        if stream is None:
            return
        told, outcomes = connector_output.kv_cache_events, connector_output.kv_connector_worker_meta
        if isinstance(told, LMCacheKVEvents):
            stream.take_in(told.reports)
        if isinstance(outcomes, LMCacheWorkerMetadata):
            for of_rank in outcomes.of_ranks():
                stream.take_in(of_rank.event_reports)

    def _watch_for_clears(self) -> None:
        stream = self._manager.event_stream
        if stream is not None:
            self._guard("watch_for_clears", None, stream.watch_for_clears)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forgets the request; whether vLLM keeps its blocks until its saves are done."""
        half = self._manager.scheduler
        if half is None:
            return False, None
        keeps = self._guard("request_finished", False, lambda: half.request_finished(request))
        return keeps, None

    def has_pending_block_frees(self) -> bool:
        """Whether blocks of ended requests come back by themselves, as soon as they are saved."""
        half = self._manager.scheduler
        return half is not None and half.is_awaiting_saves

    def reset_cache(self) -> bool | None:
        """Forgets all that is stored. vLLM asks its scheduler's half alone."""
        half = self._manager.scheduler
        if half is None:
            return None
        return self._guard("reset_cache", False, half.reset_cache)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What came and went, as vLLM publishes it."""
        stream = self._manager.event_stream
        return () if stream is None else self._guard("take_events", [], stream.take)

    # --- both halves --------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> LMCacheStats | None:
        """What this half counted since the last step."""
        return self._guard("get_kv_connector_stats", None, self._manager.take_stats)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LMCacheStats:
        """Statistics of what came over the wire; empty ones without it."""
        return LMCacheStats(data=copy.deepcopy(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LMCachePromMetrics:
        """The Prometheus metrics, where vLLM's server answers for them."""
        return LMCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Ends this half."""
        self._guard("shutdown", None, self._manager.shutdown)

    def counters(self) -> dict[str, Any]:
        """What has happened since the start, on this half."""
        half = self._manager.scheduler or self._manager.worker
        return {
            **({} if half is None else half.counters()),
            "faults": self._manager.faults.counts.total(),
        }

    def memory_stats(self) -> dict[str, int]:
        """The books of the pool, walked entry by entry; empty on the scheduler half."""
        worker = self._manager.worker
        return {} if worker is None else dict(worker.memory_stats())


# MultiConnector reads its children's statistics by the name of their class, in processes that may
# have loaded no plugins.
register()
