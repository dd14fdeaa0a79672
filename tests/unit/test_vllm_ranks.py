"""One scheduler half over several workers, each with a pool and a socket of its own."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

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
from vllm.v1.request import Request

from lmcache_rs import LMCacheEngineConfig
from lmcache_rs.lookup import Rank
from lmcache_rs.vllm_v1.faults import Faults
from lmcache_rs.vllm_v1.metadata import LMCacheConnectorMetadata, LMCacheWorkerMetadata
from lmcache_rs.vllm_v1.scheduler import LMCacheSchedulerHalf
from lmcache_rs.vllm_v1.worker import LMCacheWorkerHalf

__all__ = ["mode"]

RANKS = [Rank(0, pp, tp) for pp in range(2) for tp in range(2)]


@dataclass
class Ranks(Pair):
    """Four workers, two stages of two, whose outcomes are merged as vLLM merges them."""

    unheard: set[Rank] = field(default_factory=set)

    def __post_init__(self) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK,
            use_layerwise=self.use_layerwise,
            max_local_cpu_size=self.pool_chunks * CHUNK_BYTES / 2**30,
            log_requests=False,
            lookup_timeout_ms=2_000,
        )
        engine_start = f"test-{next(engine_ids)}"
        self.faults = Faults()
        self.workers = [
            LMCacheWorkerHalf(
                config,
                META,
                engine_start,
                in_scheduler_process=False,
                faults=self.faults,
                rank=rank,
            )
            for rank in RANKS
        ]
        self.scheduler = LMCacheSchedulerHalf(
            config, META, engine_start, self.kv_role, self.faults, ranks=RANKS
        )
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
        for rank, worker in zip(RANKS, self.workers, strict=True):
            self.worker = worker
            super().execute(metadata)
            failed |= self.failed
            if self.outcome is not None and rank in self.unheard:
                self.outcome.lookup_ids.clear()
            if merged is None or self.outcome is None:
                merged = merged or self.outcome
            else:
                merged = merged.aggregate(self.outcome)
        self.failed, self.outcome = failed, merged

    def wait(self, request: Request) -> int:
        """Asks as vLLM does, step by step."""
        until = time.monotonic() + 20
        while (found := self.ask(request)) is None:
            assert time.monotonic() < until
            time.sleep(0.001)
        return found

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
    engine.grant(request, found)
    request.num_computed_tokens = found
    engine.step({request: request.num_tokens - found})
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
    victim = engine.workers[2]
    assert victim._engine is not None
    assert victim._engine.local_cpu is not None
    request = new_request(4 * CHUNK + 1)
    assert engine.wait(request) == 4 * CHUNK
    engine.finish(request)
    engine.wait_until_nothing_is_leased()
    # As if other requests had needed the bytes.
    hashes = engine.scheduler._track(again := new_request(4 * CHUNK + 1))
    hashes.extend_chain(4 * CHUNK, CHUNK)
    packed = hashes.chain.hashes()
    assert hashes.namespace is not None
    assert victim._engine.local_cpu.remove(hashes.namespace, packed[64:96])
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
    server = engine.workers[1]._server
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
