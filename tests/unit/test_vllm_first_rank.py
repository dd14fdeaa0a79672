"""Ranks that hold the same KV: the first of each stage keeps it, the others read it there."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from test_vllm_halves import BLOCK, BLOCK_BYTES, CHUNK, CHUNK_BYTES, LAYER_NAMES, mode, new_request
from test_vllm_ranks import RANKS, Ranks, load, metadata_of, runtime, store

from lmcache_rs import LMCacheMetadata, lookup
from lmcache_rs.lookup import Rank
from lmcache_rs.vllm_v1 import compat
from lmcache_rs.vllm_v1.faults import Faults
from lmcache_rs.vllm_v1.metadata import LMCacheConnectorMetadata
from lmcache_rs.vllm_v1.owners_memory import UnreadOwnerError
from lmcache_rs.vllm_v1.worker import LMCacheWorkerHalf

__all__ = ["mode", "runtime"]

FIRSTS = [rank for rank in RANKS if rank.tp == 0]


@dataclass
class FirstRanks(Ranks):
    """Two stages of two ranks; of each stage the first keeps what both hold."""

    storing: ClassVar[list[Rank] | None] = FIRSTS
    # What happens when the first rank of a stage has done its step, and the other not.
    between: Callable[[], None] = field(default=lambda: None)

    def facts_of(self, rank: Rank) -> LMCacheMetadata:
        return dataclasses.replace(
            metadata_of(rank),
            world_size=1,
            worker_id=0,
            tensor_parallel_rank=0,
            tensor_parallel_size=1,
        )

    def place_of(self, rank: Rank) -> dict[str, Any]:
        return {"rank": rank, "owner": rank._replace(tp=0), "num_readers": int(rank.tp == 0)}

    def __post_init__(self) -> None:
        super().__post_init__()
        for worker in self.workers:
            take_step = worker.start_load_kv

            def start_load_kv(
                metadata: LMCacheConnectorMetadata,
                rank: Rank = worker.rank,
                take_step: Callable[[LMCacheConnectorMetadata], None] = take_step,
            ) -> None:
                if rank.tp:
                    self.between()
                take_step(metadata)

            worker.start_load_kv = start_load_kv  # type: ignore[method-assign]


@pytest.fixture
def engine(mode: None, runtime: pathlib.Path) -> Iterator[FirstRanks]:
    engine = FirstRanks()
    # Where the stores are; that they can be read.
    engine.step({})
    engine.step({})
    yield engine
    engine.close()


def counts(engine: FirstRanks, name: str) -> list[int]:
    return [worker.counters()[name] for worker in engine.workers]


def test_the_first_rank_stores_and_all_load_the_same_bytes(engine: FirstRanks) -> None:
    store(engine, 3)
    assert counts(engine, "stored_chunks") == [3, 0, 3, 0]
    assert engine.scheduler.counts["stored_tokens"] == 3 * CHUNK
    assert [worker.capacity()[0] > 0 for worker in engine.workers] == [True, False, True, False]
    kept = [[cache.clone() for cache in caches] for caches in engine.all_caches]
    for caches in engine.all_caches:
        for cache in caches:
            cache.fill_(7.0)
    assert load(engine, 3) == 3 * CHUNK
    (loaded,) = set(counts(engine, "loaded_bytes"))
    assert loaded > 0
    at = 3 * CHUNK // BLOCK
    for rank, caches in zip(RANKS, engine.all_caches, strict=True):
        owner = RANKS.index(rank._replace(tp=0))
        for cache, kept_cache in zip(caches, kept[owner], strict=True):
            assert torch.equal(cache[at + 2 : 2 * at + 2], kept_cache[1 : at + 1]) or torch.equal(
                cache[at + 1 : 2 * at + 1], kept_cache[1 : at + 1]
            )
    engine.wait_until_nothing_is_leased()
    assert engine.faults.counts.total() == 0


def test_nothing_is_hit_before_every_rank_can_read(mode: None, runtime: pathlib.Path) -> None:
    engine = FirstRanks()
    engine.step({})
    store(engine, 2)
    assert engine.scheduler._client is not None, "by now all have mapped"
    engine.close()
    engine = FirstRanks()
    engine.unheard = {RANKS[3]}
    engine.step({})
    store(engine, 2)
    assert load(engine, 2) == 0
    engine.unheard = set()
    engine.step({})
    assert load(engine, 2) == 2 * CHUNK
    engine.close()


def test_what_a_rank_has_yet_to_read_is_not_evicted(engine: FirstRanks) -> None:
    """The first rank has loaded, and its pool fills up before the other one asks."""
    store(engine, 4)
    pool = engine.workers[0].local_cpu
    assert pool is not None

    def fill() -> None:
        engine.between = lambda: None
        # More than there is room for, twice: what nobody holds goes.
        for part in range(2):
            lens = [CHUNK_BYTES] * (engine.pool_chunks - 4)
            taken = pool.allocate(lens)
            assert taken is not None, part
            del taken
        assert pool.allocate([CHUNK_BYTES] * (engine.pool_chunks - 3)) is None

    engine.between = fill
    request = new_request(4 * CHUNK + 1)
    found = engine.wait(request)
    assert found == 4 * CHUNK
    engine.grant(request, found)
    engine.step({})
    while engine.arrived.get(request.request_id) != set(RANKS):
        engine.take_loads()
        assert engine.failed_loads == set()
    engine.compute(request, found)
    engine.finish(request)
    assert counts(engine, "failed_loads") == [0] * 4
    engine.wait_until_nothing_is_leased()


def test_a_clear_under_a_promise_takes_nothing_from_who_reads_later(engine: FirstRanks) -> None:
    store(engine, 2)
    engine.between = lambda: [  # type: ignore[assignment, return-value]
        worker.local_cpu.clear() for worker in engine.workers if worker.local_cpu
    ]
    request = new_request(2 * CHUNK + 1)
    found = engine.wait(request)
    assert engine.load(request, found) == set()
    engine.finish(request)
    engine.wait_until_nothing_is_leased()
    assert [worker.memory_stats()["cached_bytes"] for worker in engine.workers] == [0] * 4


def test_a_rank_that_cannot_reach_the_first_reports_its_blocks_and_no_other_does(
    engine: FirstRanks,
) -> None:
    store(engine, 2)
    request = new_request(2 * CHUNK + 1)
    found = engine.wait(request)
    server = engine.workers[2]._lookups._server
    assert server is not None
    engine.between = server.close
    failed = engine.load(request, found)
    assert failed == set(engine.tables[request.request_id][: 2 * CHUNK // BLOCK])
    assert counts(engine, "failed_loads") == [0, 0, 0, 1]
    engine.finish(request)
    # Nobody is left to give back what that rank has not taken: it ends by its deadline.
    first = engine.workers[2].local_cpu
    assert first is not None
    assert first.release(request.request_id)
    engine.wait_until_nothing_is_leased()


def test_a_chunk_that_is_gone_under_the_promise_ends_the_load_at_the_same_token_on_both(
    engine: FirstRanks,
) -> None:
    store(engine, 4)
    request = new_request(4 * CHUNK + 1)
    found = engine.wait(request)
    first = engine.workers[0].local_cpu
    assert first is not None
    first.release(request.request_id)
    assert engine.remove(0, engine.hashes(4)[32:64])
    failed = engine.load(request, found)
    table = engine.tables[request.request_id]
    assert failed == set(table[CHUNK // BLOCK : 4 * CHUNK // BLOCK])
    assert counts(engine, "failed_loads") == [1, 1, 0, 0]
    engine.compute(request, CHUNK)
    engine.finish(request)
    assert load(engine, 4) == 4 * CHUNK, "the first rank has stored it anew, for both"
    engine.wait_until_nothing_is_leased()


@pytest.mark.parametrize("strict", [False, True])
def test_a_pool_that_cannot_be_mapped_is_no_cache_loudly_and_a_stop_if_strict(
    mode: None,
    runtime: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    strict: bool,
) -> None:
    monkeypatch.setattr(compat.logger, "propagate", True)
    engine = FirstRanks({"strict": strict})
    engine.step({})
    monkeypatch.setattr(lookup, "reader_secret", lambda engine_id: f"not {engine_id}")
    if strict:
        with pytest.raises(UnreadOwnerError, match="rank dp0-pp0-tp1 cannot read"):
            engine.step({})
    else:
        engine.step({})
        store(engine, 2)
        assert load(engine, 2) == 0
        assert engine.scheduler._client is None
        assert engine.faults.counts == {"map_owner": 2}, "once a rank, not once a step"
        assert "SERVES WITHOUT A CACHE: rank dp0-pp1-tp1" in caplog.text
    engine.close()


def test_a_rank_that_reads_has_no_pool_no_socket_and_no_tier_of_its_own(
    engine: FirstRanks, runtime: pathlib.Path
) -> None:
    (folder,) = runtime.iterdir()
    ends = sorted(path.name.partition("-")[2] for path in folder.glob("*.sock"))
    assert ends == sorted(f"{rank}.sock" for rank in FIRSTS)
    reading = LMCacheWorkerHalf(
        engine.scheduler._config.with_values(
            "test", local_disk="/nowhere", max_local_disk_size=1.0
        ),
        engine.facts_of(RANKS[1]),
        "test",
        in_scheduler_process=False,
        faults=Faults(),
        rank=RANKS[1],
        owner=RANKS[0],
    )
    caches = [torch.zeros_like(cache) for cache in engine.all_caches[0]]
    reading.register_kv_caches(caches, BLOCK_BYTES, LAYER_NAMES)
    assert reading.tiers() == ["local_cpu off"]
    assert set(reading.memory_stats().values()) == {0}
    assert reading.listen() is None
    reading.shutdown()
