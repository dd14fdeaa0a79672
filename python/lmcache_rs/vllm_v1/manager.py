"""What a connector is made of, from the first setting to the last socket: `LMCacheManager`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_rs import _native
from lmcache_rs.config import (
    WITHOUT_LOWER_TIERS,
    LMCacheEngineConfig,
    disabled_by_environment,
)
from lmcache_rs.layouts import LayoutError
from lmcache_rs.vllm_v1 import compat, events, metrics, model_identity
from lmcache_rs.vllm_v1.events import EventReports, KVEventStream
from lmcache_rs.vllm_v1.faults import Faults
from lmcache_rs.vllm_v1.identity import chain_notice, identities_of, stays_in_memory
from lmcache_rs.vllm_v1.load_choice import LoadChoice
from lmcache_rs.vllm_v1.metadata import LMCacheConnectorMetadata
from lmcache_rs.vllm_v1.ranks import RankNames
from lmcache_rs.vllm_v1.scheduler import LMCacheSchedulerHalf
from lmcache_rs.vllm_v1.worker import LMCacheWorkerHalf

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lmcache_rs.lookup import Rank


def machine_bytes() -> int:
    """Memory of this machine, or of this process's control group; 0 if neither says."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError):
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8").partition("::")[2].strip()
        root = Path("/sys/fs/cgroup")
        inside = root / own.lstrip("/")
        for group in {root, inside, *(above for above in inside.parents if root in above.parents)}:
            with contextlib.suppress(OSError, ValueError):
                found.append(int((group / "memory.max").read_text(encoding="utf-8")))
    return min((size for size in found if size > 0), default=0)


def require_memory(pool_bytes: int, num_ranks: int, machine_bytes: int) -> None:
    """Stops where the pools of all ranks cannot be there: each of them alone might find room.

    Raises:
        MemoryError: Says what is asked for, and what there is.
    """
    if num_ranks == 1 or not machine_bytes or num_ranks * pool_bytes <= machine_bytes:
        return
    raise MemoryError(
        f"max_local_cpu_size is {pool_bytes / 2**30:.2f} (GB) for each of {num_ranks} ranks on "
        f"this host, {num_ranks * pool_bytes / 2**30:.2f} GB in all, and it has "
        f"{machine_bytes / 2**30:.2f}; set it to less than {machine_bytes / num_ranks / 2**30:.2f}"
    )


class LMCacheManager:
    """Builds one half of the connector and owns its start-up and shutdown.

    Settings that are wrong, and engines that cannot be served rightly, stop the start. Everything
    else that fails leaves an engine that serves without a cache, loudly; `strict` makes it a stop.

    Args:
        vllm_config: The engine's configuration.
        kv_cache_config: The engine's KV cache.
        is_scheduler: Which half.

    Raises:
        ConfigError: A setting is wrong.
        UnsupportedEngineError: This engine or model is not served.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, is_scheduler: bool
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None, "vLLM makes connectors only from a kv_transfer_config"
        self.faults = Faults()
        self.scheduler: LMCacheSchedulerHalf | None = None
        self.worker: LMCacheWorkerHalf | None = None
        self.event_stream: KVEventStream | None = None
        self.event_reports: EventReports | None = None
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._is_scheduler = is_scheduler
        # A scheduler half has no rank: what it tells, it tells for all.
        ranks = compat.ranks_of(vllm_config)
        rank = ranks[0] if is_scheduler else compat.rank_of(vllm_config)
        self._rank = ranks.index(rank)
        self._meter: metrics.Meter | None = None
        if disabled_by_environment():
            self._say("switched off by LMCACHE_RS_DISABLE; the engine serves without it")
            return
        config = LMCacheEngineConfig.resolve(
            connector_extra_config=transfer.kv_connector_extra_config
        )
        self.verdict = compat.engine_verdict()
        compat.require_supported(vllm_config, kv_cache_config)
        chunk_size = config.chunk_size_for(compat.block_size_of(kv_cache_config))
        if chunk_size != config.chunk_size:
            config = config.with_values("rounded up to the engine's block", chunk_size=chunk_size)
        if config.wants_lower_tiers and stays_in_memory(config, vllm_config):
            reason = "left out: this chain's keys are used in host memory alone"
            config = config.with_values(reason, **WITHOUT_LOWER_TIERS)
        self.config = config
        engine_start = compat.engine_start_of(vllm_config)
        metadata = compat.metadata_of(vllm_config, kv_cache_config, rank)
        self._metadata = model_identity.stated(metadata, vllm_config, engine_start, rank)
        identities = identities_of(config, self._metadata, vllm_config, kv_cache_config)
        self._load_failure_policy = str(transfer.kv_load_failure_policy)
        try:
            if config.local_cpu:
                num_pools = compat.num_local_pools(vllm_config, kv_cache_config)
                require_memory(config.max_local_cpu_bytes, num_pools, machine_bytes())
            if is_scheduler:
                self.scheduler = LMCacheSchedulerHalf(
                    config,
                    self._metadata,
                    engine_start,
                    str(transfer.kv_role),
                    self.faults,
                    identities,
                    self._load_choice(),
                    ranks,
                    compat.storing_ranks_of(vllm_config, kv_cache_config),
                )
            else:
                self.worker = LMCacheWorkerHalf(
                    config,
                    self._metadata,
                    engine_start,
                    in_scheduler_process=compat.is_in_scheduler_process(vllm_config),
                    faults=self.faults,
                    rank=rank,
                    owner=compat.owner_of(kv_cache_config, rank),
                    num_readers=self._num_readers(rank),
                    fails_whole_loads=not compat.keeps_all_blocks(kv_cache_config),
                )
            self._meter = self._new_meter()
            if self.scheduler is not None and events.are_wanted(vllm_config):
                self.event_stream = self.scheduler.event_stream = KVEventStream.of_engine(
                    vllm_config,
                    kv_cache_config,
                    config.chunk_size,
                    RankNames.of_no_rank(self._metadata).of,
                )
        except Exception as error:
            self._degrade("start", error)

    def _num_readers(self, rank: Rank) -> int:
        """Other ranks that read what this one keeps."""
        ranks = compat.ranks_of(self._vllm_config)
        owners = [compat.owner_of(self._kv_cache_config, other) for other in ranks if other != rank]
        return owners.count(rank)

    def _load_choice(self) -> LoadChoice:
        of = self._kv_cache_config
        block_bytes = compat.block_bytes_of(of) * len(compat.layer_names_of(of))
        return LoadChoice(
            self.config.max_sync_load_ms,
            -(-block_bytes // compat.block_size_of(of)),
            has_safe_failure=compat.recovers_from_sync_load(self._vllm_config, of),
            keeps_all_blocks=compat.keeps_all_blocks(of),
        )

    def _new_meter(self) -> metrics.Meter:
        if self._is_scheduler:
            return metrics.Meter(self._rank, self._scheduler_totals, self._take_observations)
        return metrics.Meter(self._rank, self._worker_totals)

    def _scheduler_totals(self) -> metrics.Totals:
        half = self.scheduler
        if half is None:
            return {("faults", place): count for place, count in self.faults.counts.items()}
        return metrics.scheduler_totals(
            half.counts, half.lookup_counts(), self.faults.counts, half.chunk_seconds()
        )

    def _take_observations(self) -> Mapping[str, list[float]]:
        half = self.scheduler
        return {} if half is None else {"lookup_round_trip_seconds": half.take_round_trips()}

    def _worker_totals(self) -> metrics.Totals:
        half, reports = self.worker, self.event_reports
        pool = None if half is None else half.local_cpu
        return metrics.worker_totals(
            {} if half is None else half.counts,
            None if pool is None else pool.usage(),
            self.faults.counts,
            0 if reports is None else reports.sink.times_lost,
            copy_path=metrics.HOST if half is None else half.copies_on,
        )

    def take_stats(self) -> metrics.LMCacheStats | None:
        """What this half counted since the last call; None if nothing."""
        return None if self._meter is None else self._meter.take()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Gives the worker half the engine's tensors and prints the banner.

        Raises:
            UnsupportedEngineError: The tensors are not certain to be what the engine declares.
        """
        if self.worker is None:
            return
        if self.worker.is_registered:
            # vLLM keeps one worker connector a process, whatever the number of engines in it.
            compat.logger.error(
                "lmcache_rs: vLLM gives all engines of one process the first one's connector; this "
                "one SERVES WITHOUT A CACHE. Leave VLLM_ENABLE_V1_MULTIPROCESSING on, or use one "
                "engine a process"
            )
            return
        compat.require_backends(self._vllm_config, self._kv_cache_config)
        tensors = compat.kv_tensors(kv_caches, self._kv_cache_config)
        try:
            self.worker.register_kv_caches(
                tensors,
                compat.block_bytes_of(self._kv_cache_config),
                compat.layer_names_of(self._kv_cache_config),
                has_windows=compat.has_windows(self._kv_cache_config),
            )
        except LayoutError as error:
            raise compat.UnsupportedEngineError(
                f"lmcache_rs cannot copy this engine's KV: {error}; or start vLLM without this "
                "connector"
            ) from error
        except _native.CudaError as error:
            raise compat.UnsupportedEngineError(
                f"lmcache_rs cannot copy KV on this engine's GPU: {error}; or start vLLM without "
                "this connector"
            ) from error
        except Exception as error:
            self._degrade("register_kv_caches", error)
            return
        if events.are_wanted(self._vllm_config) and (sink := self.worker.listen()) is not None:
            storing = compat.storing_ranks_of(self._vllm_config, self._kv_cache_config)
            self.event_reports = EventReports(storing.index(self.worker.rank), sink)
        self._print_banner(tensors)

    def _print_banner(self, tensors: list[torch.Tensor]) -> None:
        assert self.worker is not None
        from importlib.metadata import version

        if self._rank:
            # One rank speaks for all of what they have in common.
            return
        num_pools = compat.num_local_pools(self._vllm_config, self._kv_cache_config)
        num_readers = self._num_readers(self.worker.rank)
        capacity_bytes, capacity_tokens = self.worker.capacity()
        self._say(
            "%s on %s; %d layers of %s %s, %s, %s; chunk %d tokens; chain %s (%s)",
            version("lmcache-rs"),
            self.verdict,
            len(tensors),
            self._metadata.kv_dtype,
            self._metadata.layout_id,
            self.worker.plan,
            "layer by layer" if self.config.use_layerwise else "all layers at once",
            self.config.chunk_size,
            self.config.chain,
            self.config.pre_caching_hash_algorithm if self.config.chain == "own" else "vLLM's",
        )
        self._say(
            "capacity %.2f GB = %d tokens of this model a rank, %.2f GB in total on %d rank%s%s; "
            "tiers: %s",
            capacity_bytes / 2**30,
            capacity_tokens,
            num_pools * capacity_bytes / 2**30,
            num_pools,
            "s" if num_pools > 1 else "",
            f", each read by {num_readers} more" if num_readers else "",
            ", ".join(self.worker.tiers()),
        )
        self._say("model fingerprint %s", self._metadata.model_fingerprint)
        self._say("%s", chain_notice(self.config, self._vllm_config))
        for key, value, source in self.config.describe():
            if source != "default":
                self._say("setting %s = %s (%s)", key, value, source)
        for notice in self.config.notices:
            self._say("%s", notice)
        if self.config.save_unfull_chunk:
            self._say("save_unfull_chunk has no effect under vLLM: full chunks alone are kept")
        if self.config.local_disk_paths and not self.config.is_set("max_local_disk_size"):
            compat.logger.warning(
                "lmcache_rs: NO TIER ON DISK: local_disk is set, and max_local_disk_size, the GB "
                "that it may take, is not"
            )
        if self._load_failure_policy == "fail":
            compat.logger.warning(
                "lmcache_rs: kv_load_failure_policy is 'fail' (vLLM's default): a failed load "
                "fails the user's request; add %s to --kv-transfer-config",
                '"kv_load_failure_policy":"recompute"',
            )

    def _degrade(self, where: str, error: Exception) -> None:
        if self.config.strict:
            raise error
        self.faults.note(where, error)
        compat.logger.error(
            "lmcache_rs: THE ENGINE SERVES WITHOUT A CACHE: %s. `strict: true` makes this a stop.",
            error,
        )
        if self.worker is not None:
            self.worker.shutdown()
        self.scheduler = self.worker = None

    def promised_block_ids(self, metadata: LMCacheConnectorMetadata) -> set[int]:
        """Blocks that vLLM counts on after the step's loads."""
        return metadata.promised_block_ids(compat.block_size_of(self._kv_cache_config))

    def shutdown(self) -> None:
        """Ends both halves. Idempotent."""
        if self.scheduler is not None:
            self.scheduler.shutdown()
        if self.worker is not None:
            self.worker.shutdown()

    def _say(self, message: str, *values: object) -> None:
        # One half of the first rank speaks for all, or every line would stand twice.
        if not self._is_scheduler and not self._rank:
            compat.logger.info("lmcache_rs: " + message, *values)
