"""One scheduler half over several workers, each with a pool and a socket of its own."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from test_vllm_halves import (
    BLOCK,
    BLOCK_BYTES,
    BLOCKS,
    CHUNK,
    CHUNK_BYTES,
    LAYER_NAMES,
    LAYERS,
    META,
    Pair,
    engine_ids,
    mode,
    new_request,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from lmcache_rs import LMCacheEngineConfig, LMCacheMetadata
from lmcache_rs.lookup import Rank
from lmcache_rs.vllm_v1.faults import Faults
from lmcache_rs.vllm_v1.identity import Identities
from lmcache_rs.vllm_v1.metadata import (
    LMCacheConnectorMetadata,
    LMCacheWorkerMetadata,
    RequestOutcome,
)
from lmcache_rs.vllm_v1.prefetches import AskedPrefetches
from lmcache_rs.vllm_v1.ranks import RankBooks, RankNames
from lmcache_rs.vllm_v1.scheduler import LMCacheSchedulerHalf
from lmcache_rs.vllm_v1.worker import LMCacheWorkerHalf

__all__ = ["mode"]

RANKS = [Rank(0, pp, tp) for pp in range(2) for tp in range(2)]


def metadata_of(rank: Rank) -> LMCacheMetadata:
    """A rank's facts; its stage has other layers than the first."""
    return dataclasses.replace(
        META,
        world_size=len(RANKS),
        worker_id=RANKS.index(rank),
        num_layers=LAYERS + rank.pp,
        tensor_parallel_rank=rank.tp,
        tensor_parallel_size=2,
        pipeline_parallel_rank=rank.pp,
        pipeline_parallel_size=2,
    )


@dataclass
class Ranks(Pair):
    """Four workers, two stages of two, whose outcomes are merged as vLLM merges them."""

    unheard: set[Rank] = field(default_factory=set)
    # Ranks whose saves go on behind their step.
    late: set[Rank] = field(default_factory=set)
    # Requests that wait for their load, with the ranks that have it.
    arrived: dict[str, set[Rank]] = field(default_factory=dict)
    sent_by: dict[str, set[Rank]] = field(default_factory=dict)

    # The ranks that keep KV; None for all.
    storing: ClassVar[list[Rank] | None] = None

    def facts_of(self, rank: Rank) -> LMCacheMetadata:
        return metadata_of(rank)

    def place_of(self, rank: Rank) -> dict[str, Any]:
        """What a worker is told of its place among the others."""
        return {"rank": rank}

    def __post_init__(self) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK,
            use_layerwise=self.use_layerwise,
            max_local_cpu_size=self.pool_chunks * CHUNK_BYTES / 2**30,
            log_requests=False,
            lookup_timeout_ms=2_000,
            **self.settings,
            refuse_slow_loads=False,
        )
        engine_start = f"test-{next(engine_ids)}"
        self.faults = Faults()
        self.workers = [
            LMCacheWorkerHalf(
                config,
                self.facts_of(rank),
                engine_start,
                in_scheduler_process=False,
                faults=self.faults,
                **self.place_of(rank),
            )
            for rank in RANKS
        ]
        metadata = self.facts_of(RANKS[0])
        self.scheduler = LMCacheSchedulerHalf(
            config,
            metadata,
            engine_start,
            self.kv_role,
            self.faults,
            Identities(config, metadata),
            ranks=RANKS,
            storing=self.storing,
        )
        self.evicted: set[int] = set()
        self.scheduler.bind_evict_blocks(self.evicted.update)
        self.all_caches = []
        for worker in self.workers:
            caches = [torch.randn(BLOCKS, 2, BLOCK, 6) for _ in range(LAYERS)]
            worker.register_kv_caches(caches, BLOCK_BYTES, LAYER_NAMES)
            self.all_caches.append(caches)
        self.tables: dict[str, list[int]] = {}
        self.next_block = 1

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()

    def execute(self, metadata: LMCacheConnectorMetadata) -> None:
        merged: LMCacheWorkerMetadata | None = None
        failed: set[int] = set()
        sent: set[str] = set()
        for rank, worker in zip(RANKS, self.workers, strict=True):
            self.worker = worker
            self.saves_lag = rank in self.late
            # Each process has a copy of its own.
            super().execute(pickle.loads(pickle.dumps(metadata)))
            failed |= self.failed
            for req_id in self.sent:
                self.sent_by.setdefault(req_id, set()).add(rank)
                if self.sent_by[req_id] == set(RANKS):
                    sent.add(req_id)
            outcome = pickle.loads(pickle.dumps(self.outcome))
            if outcome is not None and rank in self.unheard:
                outcome.lookup_ids.clear()
            if merged is None or outcome is None:
                merged = merged or outcome
            else:
                merged = merged.aggregate(outcome)
        self.failed, self.outcome, self.sent = failed, merged, sent

    def take_loads(self) -> None:
        """What vLLM asks each rank at the end of a step, and the scheduler half then hears."""
        merged: LMCacheWorkerMetadata | None = None
        failed: set[int] = set()
        for rank, worker in zip(RANKS, self.workers, strict=True):
            for req_id in worker.take_finished_loads()[0]:
                self.arrived.setdefault(req_id, set()).add(rank)
            failed |= worker.take_failed_block_ids()
            outcome = worker.take_outcomes()
            merged = outcome if merged is None else merged
            if outcome is not None and merged is not outcome:
                merged = merged.aggregate(outcome)
        self.failed_loads = failed
        self.scheduler.update_connector_output(
            KVConnectorOutput(kv_connector_worker_meta=merged, invalid_block_ids=failed)
        )

    def wait(self, request: Request) -> int:
        """Asks as vLLM does, step by step."""
        until = time.monotonic() + 20
        while (found := self.scheduler.get_num_new_matched_tokens(request, 0))[0] is None:
            assert time.monotonic() < until
            time.sleep(0.001)
        assert found[1] == (found[0] > 0), "every load is waited for, and none holds up a step"
        return found[0]

    def load(self, request: Request, found: int) -> set[int]:
        """Loads what was found; blocks that some rank has not."""
        self.grant(request, found)
        self.step({})
        until = time.monotonic() + 20
        failed: set[int] = set()
        while self.arrived.get(request.request_id) != set(RANKS):
            assert time.monotonic() < until
            self.take_loads()
            failed |= self.failed_loads
        return failed

    def compute(self, request: Request, loaded: int) -> None:
        """The rest of a prompt, in one step."""
        request.num_computed_tokens = min(loaded, request.num_tokens - 1)
        if loaded:
            # vLLM asks for blocks once more.
            self.grant(request, 0)
        self.step({request: request.num_tokens - request.num_computed_tokens})

    def hashes(self, num_chunks: int) -> bytes:
        tracker = self.scheduler._track(asked := new_request(num_chunks * CHUNK))
        tracker.extend_chain(num_chunks * CHUNK, CHUNK)
        self.finish(asked)
        return tracker.chain.hashes()

    def remove(self, rank: int, packed_hash: bytes) -> bool:
        """Whether a rank had the chunk under its own name, and now has it no more."""
        namespace = Identities(self.scheduler._config, self.facts_of(RANKS[rank])).namespace()
        engine = self.workers[rank]._engine
        assert engine is not None
        assert engine.local_cpu is not None
        return engine.local_cpu.remove(namespace, packed_hash)

    def leases(self) -> list[int]:
        return [worker.memory_stats()["leases"] for worker in self.workers]

    def wait_until_nothing_is_leased(self) -> None:
        until = time.monotonic() + 10
        while any(self.leases()):
            assert time.monotonic() < until, self.leases()
            time.sleep(0.005)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    folder = tempfile.mkdtemp(prefix="lmc-")
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    yield pathlib.Path(folder)
    shutil.rmtree(folder)


@pytest.fixture
def engine(mode: None, runtime: pathlib.Path) -> Iterator[Ranks]:
    engine = Ranks()
    yield engine
    engine.close()


def store(engine: Ranks, num_chunks: int) -> None:
    """A prompt that every rank computes and stores."""
    request = new_request(num_chunks * CHUNK)
    assert engine.wait(request) == 0
    engine.grant(request, 0)
    engine.step({request: request.num_tokens})
    engine.finish(request)


def load(engine: Ranks, num_chunks: int) -> int:
    """Asks for as much and a token more, and computes it; tokens that came from the store."""
    request = new_request(num_chunks * CHUNK + 1)
    found = engine.wait(request)
    if found:
        assert engine.load(request, found) == set()
    else:
        engine.grant(request, 0)
    engine.compute(request, found)
    engine.finish(request)
    return found


def test_every_rank_stores_and_loads_its_own_part(engine: Ranks) -> None:
    engine.step({})
    store(engine, 3)
    kept = [[cache.clone() for cache in caches] for caches in engine.all_caches]
    table = list(range(1, 1 + 3 * CHUNK // BLOCK))
    for caches in engine.all_caches:
        for cache in caches:
            cache.fill_(7.0)
    assert load(engine, 3) == 3 * CHUNK
    loaded = [worker.counters()["loaded_bytes"] for worker in engine.workers]
    assert len(set(loaded)) == 1
    assert loaded[0] > 0
    # The second prompt got the blocks behind the first one's.
    for caches, before in zip(engine.all_caches, kept, strict=True):
        for cache, kept_cache in zip(caches, before, strict=True):
            at = len(table)
            assert torch.equal(cache[at + 1 : 2 * at + 1], kept_cache[1 : at + 1])
    engine.wait_until_nothing_is_leased()


def test_a_cache_evicted_on_one_rank_shortens_the_hit_on_all(engine: Ranks) -> None:
    engine.step({})
    store(engine, 4)
    request = new_request(4 * CHUNK + 1)
    assert engine.wait(request) == 4 * CHUNK
    engine.finish(request)
    engine.wait_until_nothing_is_leased()
    # As if other requests had needed the bytes.
    assert engine.remove(2, engine.hashes(4)[64:96])
    again = new_request(4 * CHUNK + 1)
    assert engine.wait(again) == 2 * CHUNK
    engine.finish(again)
    engine.wait_until_nothing_is_leased()
    assert load(engine, 4) == 2 * CHUNK
    assert load(engine, 4) == 4 * CHUNK, "what was computed is stored on the rank that had lost it"


def test_nothing_is_hit_before_every_rank_is_known(engine: Ranks) -> None:
    engine.unheard = {RANKS[3]}
    engine.step({})
    store(engine, 2)
    assert load(engine, 2) == 0
    engine.unheard = set()
    engine.step({})
    assert load(engine, 2) == 2 * CHUNK
    assert engine.describe({}).lookup_ids.keys() == set(RANKS)


def test_a_reset_empties_every_rank(engine: Ranks) -> None:
    engine.step({})
    store(engine, 2)
    assert engine.scheduler.reset_cache()
    for worker in engine.workers:
        assert worker.memory_stats()["cached_bytes"] == 0
    assert load(engine, 2) == 0


def test_a_rank_without_a_server_is_no_hit_and_the_others_lease_nothing(engine: Ranks) -> None:
    engine.step({})
    store(engine, 2)
    server = engine.workers[1]._lookups._server
    assert server is not None
    server.close()
    request = new_request(2 * CHUNK + 1)
    assert engine.wait(request) == 0
    engine.finish(request)
    engine.wait_until_nothing_is_leased()
    assert not engine.scheduler.reset_cache()
    assert engine.faults.counts.total() == 0


def test_each_rank_has_a_socket_of_its_own_name(engine: Ranks, runtime: pathlib.Path) -> None:
    (folder,) = runtime.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    names = sorted(path.name for path in folder.glob("*.sock"))
    ends = sorted(name.partition("-")[2] for name in names)
    assert ends == sorted(f"{rank}.sock" for rank in RANKS)
    engine.close()
    assert not list(folder.iterdir())


def test_each_rank_keeps_its_part_under_a_name_of_its_own(engine: Ranks) -> None:
    engine.step({})
    store(engine, 1)
    config, facts = engine.scheduler._config, [metadata_of(rank) for rank in RANKS]
    names = [Identities(config, of).namespace() for of in facts]
    assert len(set(names)) == len(RANKS)
    (common,) = {RankNames.of_no_rank(of).of(name) for of, name in zip(facts, names, strict=True)}
    assert common not in names, "what nobody has put a rank into names nobody's part"
    assert [RankNames.of_rank(of).of(common) for of in facts] == names
    for number in range(len(RANKS)):
        assert engine.remove(number, engine.hashes(1))


def test_one_rank_has_no_use_for_names_without_a_rank() -> None:
    assert RankNames.of_rank(META).of("ns") == RankNames.of_no_rank(META).of("ns") == "ns"


def test_a_load_that_fails_on_one_rank_has_failed_on_all_and_is_computed_again(
    engine: Ranks,
) -> None:
    engine.step({})
    store(engine, 4)
    request = new_request(4 * CHUNK + 1)
    found = engine.wait(request)
    assert found == 4 * CHUNK
    # Under the promise and the lease: as if the bytes could not be read.
    victim = engine.workers[3]
    pool = victim.local_cpu
    assert pool is not None
    pool.release(request.request_id)
    assert engine.remove(3, engine.hashes(4)[32:64])
    failed = engine.load(request, found)
    table = engine.tables[request.request_id]
    assert failed == set(table[CHUNK // BLOCK : 4 * CHUNK // BLOCK])
    assert [worker.counters()["failed_loads"] for worker in engine.workers] == [0, 0, 0, 1]
    # vLLM goes on from the first block that failed.
    engine.compute(request, CHUNK)
    engine.finish(request)
    assert [worker.counters()["dropped_saves"] for worker in engine.workers] == [0] * 4
    assert load(engine, 4) == 4 * CHUNK, "the rank that had lost it has stored it anew"
    engine.wait_until_nothing_is_leased()


def test_a_step_that_is_to_load_at_once_is_saved_on_no_rank(engine: Ranks) -> None:
    """Which vLLM never asks for; but then the ranks could not know of each other."""
    engine.step({})
    store(engine, 2)
    request = new_request(3 * CHUNK)
    found = engine.wait(request)
    assert found == 2 * CHUNK
    engine.grant(request, found)
    before = [worker.counters()["stored_chunks"] for worker in engine.workers]
    request.num_computed_tokens = found
    metadata = engine.step({request: CHUNK})
    # What was promised, and none of the blocks behind it.
    promised = engine.tables[request.request_id][: 2 * CHUNK // BLOCK]
    assert engine.failed == set(promised)
    assert all(req.load_spec is None for req in metadata.requests)
    assert [worker.counters()["dropped_saves"] for worker in engine.workers] == [1] * 4
    assert [worker.counters()["stored_chunks"] for worker in engine.workers] == before
    engine.finish(request)


def test_blocks_are_kept_until_the_last_rank_has_saved_them(engine: Ranks) -> None:
    if engine.use_layerwise:
        return  # saves are done in their step
    engine.step({})
    slow = engine.workers[1]
    transfers: list[object] = []
    begin = slow._saves.add
    slow._saves.add = lambda *save: transfers.append(save)  # type: ignore[method-assign]
    engine.late = {RANKS[1]}
    take_ended = slow._saves.take_ended_step
    slow._saves.take_ended_step = lambda: None  # type: ignore[method-assign]
    request = new_request(2 * CHUNK)
    assert engine.wait(request) == 0
    engine.grant(request, 0)
    engine.step({request: request.num_tokens})
    assert engine.scheduler.request_finished(request), "one rank may read its blocks still"
    slow._saves.take_ended_step = take_ended  # type: ignore[method-assign]
    slow._saves.add = begin  # type: ignore[method-assign]
    for save in transfers:
        begin(*save)  # type: ignore[misc]
    slow._saves.wait()
    engine.step({})
    assert engine.sent == {request.request_id}
    assert not engine.scheduler.is_awaiting_saves
    assert engine.scheduler.counts["stored_tokens"] == 2 * CHUNK
    # Told once by each rank, in whichever step: it stands.
    last = engine.wait(again := new_request(1))
    assert last == 0
    engine.grant(again, 0)
    engine.step({again: 1})
    assert not engine.scheduler.request_finished(again)


def told(rank: int, **what: object) -> LMCacheWorkerMetadata:
    return LMCacheWorkerMetadata(rank=RANKS[rank], **what)  # type: ignore[arg-type]


def test_what_ranks_say_is_kept_by_rank_and_stands_until_they_say_otherwise() -> None:
    books = RankBooks(RANKS)
    for rank in range(3):
        books.take_in(told(rank, saves_ended=5, failures=rank, load_bytes_per_second=9e9 - rank))
    assert books.saves_ended == 0, "one has said nothing"
    books.take_in(told(3, saves_ended=3))
    assert books.saves_ended == 3
    books.take_in(told(3, saves_ended=7))
    assert books.saves_ended == 5, "those that said it before need not say it again"
    assert books.failures == {RANKS[0]: 0, RANKS[1]: 1, RANKS[2]: 2, RANKS[3]: 0}
    assert books.load_bytes_per_second == 9e9 - 2


def test_tokens_are_counted_once_every_rank_has_them() -> None:
    books = RankBooks(RANKS)
    for rank in range(4):
        assert (books.stored_tokens, books.loaded_tokens) == (0, 0)
        books.take_in(told(rank, outcomes={"r": RequestOutcome(8 + rank, 4)}))
    assert (books.stored_tokens, books.loaded_tokens) == (8, 4)


def test_reports_of_ranks_pass_unmerged() -> None:
    merged = told(0, failures=2).aggregate(told(2, failures=1)).aggregate(told(3))
    assert [each.rank for each in merged.of_ranks()] == [RANKS[0], RANKS[2], RANKS[3]]
    assert [each.failures for each in merged.of_ranks()] == [2, 1, 0]
    assert not any(each.others for each in merged.of_ranks())
    turned = told(3).aggregate(merged)
    assert [each.rank for each in turned.of_ranks()] == [RANKS[3], RANKS[0], RANKS[2], RANKS[3]]


def test_what_is_brought_from_below_is_there_once_every_rank_has_brought_it() -> None:
    asked = AskedPrefetches(60, set(RANKS[:3]))
    assert asked.is_pending("r", "ns", bytes(32))
    for rank in RANKS[:3]:
        assert asked.is_pending("r", "ns", bytes(32))
        asked.done(rank, ["r", "unknown"])
    assert not asked.is_pending("r", "ns", bytes(32)), "the fourth has no lower tier"


def test_what_one_rank_could_not_load_is_found_no_more(engine: Ranks) -> None:
    engine.step({})
    store(engine, 2)
    request = new_request(2 * CHUNK + 1)
    found = engine.wait(request)
    failing = engine.workers[2]._engine
    assert failing is not None
    begin = failing.begin_load_chunks

    def refuses(*_: object, **__: object) -> None:
        raise OSError("planted")

    failing.begin_load_chunks = refuses  # type: ignore[assignment, method-assign]
    assert engine.load(request, found) == set(
        engine.tables[request.request_id][: 2 * CHUNK // BLOCK]
    )
    failing.begin_load_chunks = begin  # type: ignore[method-assign]
    again = new_request(2 * CHUNK + 1)
    assert engine.wait(again) == 0
    engine.finish(again)
    engine.finish(request)
    assert engine.faults.counts.total() == 1
    engine.wait_until_nothing_is_leased()
