"""vLLM's scheduler, the connector's two halves, and a runner without a model, in one loop.

The loop is that of vLLM's engine core: schedule, execute, take in aborts, update; with the
AsyncScheduler a step is described while the last one is under way. Between any two of these a
schedule may do what users, timing and failing parts do.
"""

from __future__ import annotations

import collections
import gc
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from judge import HASH_BYTES, Judge, Promise, require
from late import LateCopies
from runner import Outcome, Runner
from settings import Settings, kv_cache_config, vllm_config
from transfers import Transfers
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from world import BLOCK, CHUNK, VOCAB, PagedMemory

from lmcache_rs import _native
from lmcache_rs.cache_engine import LMCacheEngine
from lmcache_rs.vllm_v1.connector import LMCacheConnectorV1Dynamic
from lmcache_rs.vllm_v1.metadata import LMCacheConnectorMetadata

init_none_hash(sha256)
block_hasher = get_request_block_hasher(BLOCK, sha256)


COPIES_GO_ON_BEFORE = (
    "handle_preemptions",
    "bind_connector_metadata",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
"""Hooks of the worker; none while loads are watched, when the memory shows nothing."""
MOST_LAST_STEPS = 200
"""Until every request has ended and was named, without a new one."""


def nothing(*_: object) -> None:
    """What happens between two hooks unless a schedule has other plans."""


@dataclass
class Step:
    """A step that was described, until its outcome is taken in."""

    scheduled: SchedulerOutput
    promises: dict[str, Promise]
    # Steps that were under way when this one was described.
    before: list[Step]
    outcome: Outcome | None = None

    def reported_blocks(self) -> set[int]:
        """Blocks reported as failed, by this step or too late for its description."""
        outcomes = [step.outcome for step in (*self.before, self)]
        return {block for outcome in outcomes if outcome for block in outcome.failed_blocks}


class Engine:
    """See the module's description.

    Args:
        settings: What kind of engine.
        before_loads: Called before the worker half hears of a step that promises loads.
        after_pass: Called between the execution of a step and the scheduler's update.
        declines: Whether vLLM takes up nothing of an answer, as when another connector's is better.
        late: How late saves are done, and how often they fail; see `LateCopies`.
    """

    def __init__(
        self,
        settings: Settings,
        before_loads: Callable[[Step], None] = nothing,
        after_pass: Callable[[], None] = nothing,
        declines: Callable[[], bool] = lambda: False,
        late: tuple[random.Random, float, float] | None = None,
    ) -> None:
        self.settings = settings
        config, cache_config = vllm_config(settings), kv_cache_config(settings)
        self.memory = PagedMemory(settings.num_blocks)
        self._identities: dict[str, str] = {}
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config)
        assert isinstance(worker, LMCacheConnectorV1Dynamic)
        worker.register_kv_caches(self.memory.tensors)
        self.worker = worker
        self.runner = Runner(
            worker,
            self.memory,
            self._identities.__getitem__,
            settings.window,
            drafts=settings.num_drafts > 0,
        )
        scheduler_class = AsyncScheduler if settings.is_async else Scheduler
        self.scheduler: Scheduler = scheduler_class(
            config,
            cache_config,
            StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=False,
        )
        connector = self.scheduler.connector
        assert isinstance(connector, LMCacheConnectorV1Dynamic)
        self.connector = connector
        self.judge = Judge(
            connector,
            self.memory,
            settings.kv_role != "kv_producer",
            settings.recovers_from_sync_load,
            settings.shelf,
            self._block_table,
        )
        assert worker._manager.worker is not None, "the connector serves"
        self.transfers = Transfers(worker._manager.worker, self._store, self.memory, self.judge)
        draw, lateness, failures = late or (random.Random(0), 0.0, 0.0)
        self.late = LateCopies(self._store, draw, lateness, failures)
        self.late.listen(worker, COPIES_GO_ON_BEFORE)
        self._let_decline(declines)
        self._before_loads = before_loads
        self._after_pass = after_pass
        self._in_flight: collections.deque[Step] = collections.deque()
        # vLLM's first step, in which the halves find each other.
        self._execute(step := self._schedule())
        self._update(step)

    def _let_decline(self, declines: Callable[[], bool]) -> None:
        look_up = self.connector.get_num_new_matched_tokens

        def taken_up(request: Request, local: int) -> tuple[int | None, bool]:
            num_new, is_async = look_up(request, local)
            return (0, False) if num_new and declines() else (num_new, is_async)

        self.connector.get_num_new_matched_tokens = taken_up  # type: ignore[method-assign]

    @property
    def _store(self) -> LMCacheEngine:
        assert self.worker._manager.worker is not None, "the connector serves"
        engine = self.worker._manager.worker._engine
        assert engine is not None
        return engine

    @property
    def pool(self) -> _native.LocalCpu:
        """The connector's memory."""
        local_cpu = self._store.local_cpu
        assert local_cpu is not None
        return local_cpu

    def _block_table(self, req_id: str) -> list[int] | None:
        if req_id not in self.scheduler.requests:
            return None
        return list(self.scheduler.kv_cache_manager.get_block_ids(req_id)[0])

    # --- what users do --------------------------------------------------------------------------

    def add(self, request: Request, identity: str) -> None:
        """A request arrives."""
        self._identities[request.request_id] = identity
        self.scheduler.add_request(request)

    def abort(self, req_id: str) -> None:
        """A user goes away."""
        self.judge.seen["aborts during a load"] += req_id in self.judge.waited_for
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def reset(self, *, preempt: bool) -> None:
        """The operator empties vLLM's own prefix cache; with `preempt`, whoever runs loses its KV.

        vLLM does not take that while a step is under way whose blocks it must not free, an ended
        request keeps blocks for its connector, or a streamed prompt waits for its next piece.
        """
        streamed = any(request.resumable for request in self.scheduler.requests.values())
        # Nor while a request holds blocks that wait for a load or, loaded, for their turn.
        loading = self.judge.waited_for or self.scheduler.kv_holding_waiting
        is_busy = bool(self._in_flight or self.judge.kept or streamed or loading)
        preempt = preempt and not is_busy
        self.scheduler.reset_prefix_cache(reset_running_requests=preempt)

    # --- the loop -------------------------------------------------------------------------------

    def step(self, *, ahead: bool = False) -> None:
        """One turn of the loop; with `ahead` a step is executed only when its outcome is needed."""
        if self.settings.is_async:
            self._turn_async(ahead=ahead)
        else:
            self._execute(step := self._schedule())
            self._after_pass()
            self._update(step)
            self._draft(step)
        self._check_books()

    def _turn_async(self, *, ahead: bool) -> None:
        in_flight = self._in_flight
        if self.scheduler.has_requests():
            in_flight.append(self._schedule())
            if not ahead:
                self._execute_all()
            if len(in_flight) < 2:
                return
        if in_flight:
            self._execute_all(1)
            self._after_pass()
            self._update(in_flight.popleft())

    def _execute_all(self, count: int = 2) -> None:
        for step in list(self._in_flight)[:count]:
            if step.outcome is None:
                self._execute(step)

    def _schedule(self) -> Step:
        preempted = sum(request.num_preemptions for request in self.scheduler.requests.values())
        scheduled = self.scheduler.schedule()
        self.judge.seen["preemptions"] += (
            sum(request.num_preemptions for request in self.scheduler.requests.values()) - preempted
        )
        self.judge.seen["steps"] += 1
        return Step(scheduled, self.judge.take_promises(), list(self._in_flight))

    def _execute(self, step: Step) -> None:
        if step.promises:
            self._before_loads(step)
        metadata = step.scheduled.kv_connector_metadata
        assert isinstance(metadata, LMCacheConnectorMetadata)
        self.judge.begin_loads(metadata, step.promises)
        step.outcome = outcome = self.runner.execute(step.scheduled)
        loading = self.transfers.not_over()
        stored = self.late.take_ended_keys()
        just_stored = set(stored) | self._saved_in(metadata)
        self.judge.check_loads(step.promises, outcome, loading, self.pool, just_stored)
        self.judge.check_reads(outcome.passes, step.reported_blocks())
        self.judge.check_saves(metadata, self.runner.sequences, self.pool)
        self.judge.check_stored(stored, self.pool)
        self.judge.check_sent(outcome.output)

    def _saved_in(self, metadata: LMCacheConnectorMetadata) -> set[tuple[str, bytes]]:
        """Chunks that the step stores after all that vLLM asks: layer by layer, with drafts."""
        if not (self.settings.layerwise and self.settings.num_drafts):
            return set()
        return {
            (req.namespace, req.hashes[at : at + HASH_BYTES])
            for req in metadata.requests
            if req.save_spec is not None
            for at in range(0, req.num_tokens // CHUNK * HASH_BYTES, HASH_BYTES)
        }

    def _update(self, step: Step) -> None:
        assert step.outcome is not None
        outputs = self.scheduler.update_from_output(step.scheduled, step.outcome.output)
        self.judge.check_output(outputs)

    def _draft(self, step: Step) -> None:
        """What comes next, says a guesser that is right now and then."""
        if self.settings.num_drafts:
            req_ids = list(step.scheduled.num_scheduled_tokens)
            guesses = [
                [(len(req_id) + at) % VOCAB for at in range(self.settings.num_drafts)]
                for req_id in req_ids
            ]
            self.scheduler.update_draft_token_ids(DraftTokenIds(req_ids, guesses))

    def _check_books(self) -> None:
        requests = self.scheduler.requests
        undelivered = sum(
            # An ended one may keep blocks, but has given its lease back.
            req_id in requests and not requests[req_id].is_finished()
            for step in self._in_flight
            if step.outcome is None
            for req_id in step.promises
        )
        if not self.settings.shelf:
            # Tiers have threads of their own: what those hold is looked at in the end.
            loading = len(self.transfers.not_over())
            books = self.worker.memory_stats()
            self.judge.check_leases(books, undelivered, loading, self.late.is_idle)
        self._check_blocks()
        worker, scheduler = self.worker._manager.faults, self.connector._manager.faults
        raised = collections.Counter({"wait_for_save": self.late.num_failed})
        self.judge.check_faults(worker.counts + scheduler.counts - raised)

    def _check_blocks(self) -> None:
        """A block is somebody's while a copy reads it, or the next step is held back for it."""
        if self.settings.window or any(step.outcome is None for step in self._in_flight):
            return
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        given_away = {block for block in self.late.blocks if not blocks[block].ref_cnt}
        require(not given_away, "no block is free while a copy reads it", given_away)

    # --- the end --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Ends all requests as vLLM does, without a new one, and checks what is left."""
        for req_id in list(self.scheduler.requests):
            self.abort(req_id)
        for _ in range(MOST_LAST_STEPS):
            if not (self.scheduler.has_requests() or self._in_flight):
                break
            self.step()
        self.judge.check_all_sent()
        require(not self.scheduler.has_requests(), "every request ends")
        half = self.connector._manager.scheduler
        assert half is not None
        left = half.counters()["tracked_requests"], len(half._finished)
        require(left == (0, 0), "no request is remembered", left)
        require(not self.judge.take_promises(), "no promise is left")
        if self.settings.shelf:
            self._wait_for_tiers()
        self.judge.check_end(self.worker.memory_stats(), self.pool)

    def _wait_for_tiers(self) -> None:
        storage = self._store.storage_manager
        require(len(storage.event_manager) == 0, "no prefetch is left")
        fetched: Future[None] = Future()
        storage._prefetch.submit(fetched, lambda: None, None)
        fetched.result(60)
        require(storage.flush(60), "puts end")
        assert self.worker._manager.worker is not None
        streams = self.worker._manager.worker._tiers._streams
        deadline = time.monotonic() + 60
        while streams is not None and streams._turns.current is not None:
            require(time.monotonic() < deadline, "the thread that reads comes back")
            time.sleep(0.001)

    def close(self) -> None:
        """Gives everything back, whatever happened before."""
        self.transfers.is_closing = True
        self.scheduler.shutdown()
        self.worker.shutdown()
        gc.collect(0)
