"""Both halves of the connector, step by step, with vLLM's own requests and scheduler outputs.

What a real engine rarely does on its own is done here on purpose: allocation that fails, loads that
are called off, chunks that vanish under a promise, requests that end at any moment.
"""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from lmcache_rs import LMCacheEngineConfig, LMCacheMetadata, _native, lookup
from lmcache_rs.vllm_v1 import compat
from lmcache_rs.vllm_v1.faults import Faults
from lmcache_rs.vllm_v1.metadata import LMCacheConnectorMetadata
from lmcache_rs.vllm_v1.scheduler import LMCacheSchedulerHalf
from lmcache_rs.vllm_v1.worker import LMCacheWorkerHalf, failed_blocks

BLOCK, CHUNK, LAYERS, BLOCKS = 4, 8, 2, 64
BLOCK_BYTES = 2 * BLOCK * 6 * 4
CHUNK_BYTES = 4096
META = LMCacheMetadata("m", 1, 0, "float32", block_size=BLOCK)
LAYER_NAMES = [f"model.layers.{layer}.self_attn" for layer in range(LAYERS)]
engine_ids = itertools.count()


@dataclass
class Pair:
    """A scheduler half and a worker half in one process, and the engine's blocks."""

    settings: dict[str, object] = field(default_factory=dict)
    kv_role: str = "kv_both"
    pool_chunks: int = 64
    # Whether a step's saves may go on behind it; if not, they are done when `step` returns.
    saves_lag: bool = False
    # Whether vLLM computes what a load has failed to bring.
    recomputes: bool = False
    # Set by `mode`: everything here holds in bulk and layer by layer.
    use_layerwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK,
            use_layerwise=self.use_layerwise,
            max_local_cpu_size=self.pool_chunks * CHUNK_BYTES / 2**30,
            # What is worth its wait must not hang on how busy this machine is.
            **{"log_requests": False, "refuse_slow_loads": False, **self.settings},
        )
        engine_start = f"test-{next(engine_ids)}"
        self.faults = Faults()
        self.worker = LMCacheWorkerHalf(
            config,
            META,
            engine_start,
            in_scheduler_process=True,
            faults=self.faults,
            recomputes=self.recomputes,
        )
        self.scheduler = LMCacheSchedulerHalf(
            config, META, engine_start, self.kv_role, self.faults, recomputes=self.recomputes
        )
        self.evicted: set[int] = set()
        self.scheduler.bind_evict_blocks(self.evicted.update)
        self.caches = [torch.randn(BLOCKS, 2, BLOCK, 6) for _ in range(LAYERS)]
        self.worker.register_kv_caches(self.caches, BLOCK_BYTES, LAYER_NAMES)
        self.tables: dict[str, list[int]] = {}
        self.next_block = 1
        # An engine's first step, in which the halves find each other.
        self.step({})

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    def give_blocks(self, request: Request, num_tokens: int) -> list[int]:
        table = self.tables.setdefault(request.request_id, [])
        while len(table) * BLOCK < num_tokens:
            table.append(self.next_block)
            self.next_block = self.next_block % (BLOCKS - 1) + 1
        return table

    def ask(self, request: Request, local: int = 0) -> int | None:
        num_new, is_async = self.scheduler.get_num_new_matched_tokens(request, local)
        assert is_async is False
        return num_new

    @property
    def pool(self) -> _native.LocalCpu:
        engine = self.worker._engine
        assert engine is not None
        assert engine.local_cpu is not None
        return engine.local_cpu

    def describe(
        self, scheduled: dict[Request, int], drafts: dict[str, list[int]] | None = None
    ) -> LMCacheConnectorMetadata:
        """What the scheduler half says about a step."""
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {r.request_id: n for r, n in scheduled.items()}
        output.scheduled_spec_decode_tokens = drafts or {}
        for request, num_tokens in scheduled.items():
            self.give_blocks(request, request.num_computed_tokens + num_tokens)
        output.kv_connector_block_state = KVConnectorBlockState(
            req_ids=set(output.num_scheduled_tokens),
            resolve_block_ids=lambda req_id: (self.tables[req_id],),
            boundary_state_offloads={},
        )
        return self.scheduler.build_connector_meta(output)

    def execute(self, metadata: LMCacheConnectorMetadata) -> None:
        """What the worker half makes of it."""
        self.worker.handle_preemptions(metadata)
        loads = any(req.load_spec for req in metadata.requests)
        # As vLLM does: behind the forward pass, where nothing must come before it.
        if loads or metadata.unloadable_block_ids:
            self.worker.start_load_kv(metadata)
        for name in LAYER_NAMES:
            self.worker.wait_for_layer_load(name, metadata)
            self.worker.save_kv_layer(name, metadata)
        if not loads and not metadata.unloadable_block_ids:
            self.worker.start_load_kv(metadata)
        self.worker.wait_for_save(metadata)
        if not self.saves_lag:
            self.worker._saves.wait()
        self.sent = self.worker.take_sent(metadata)
        self.failed = self.worker.take_failed_block_ids()
        self.outcome = self.worker.take_outcomes()

    def report(self) -> None:
        """What the scheduler half hears of it."""
        self.scheduler.update_connector_output(
            KVConnectorOutput(
                finished_sending=self.sent,
                kv_connector_worker_meta=self.outcome,
                invalid_block_ids=self.failed,
            )
        )

    def step(
        self, scheduled: dict[Request, int], drafts: dict[str, list[int]] | None = None
    ) -> LMCacheConnectorMetadata:
        """One engine step from end to end."""
        metadata = self.describe(scheduled, drafts)
        self.execute(metadata)
        self.report()
        for request, num_tokens in scheduled.items():
            num_drafts = len((drafts or {}).get(request.request_id, ()))
            request.num_computed_tokens += num_tokens - num_drafts
        return metadata

    def grant(self, request: Request, num_external_tokens: int) -> None:
        """vLLM's allocation, after a lookup."""
        table = self.give_blocks(request, request.num_tokens)
        blocks = KVCacheBlocks(([KVCacheBlock(block_id) for block_id in table],))
        self.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def prefill(self, request: Request, local: int = 0) -> int:
        """Admits and computes a whole prompt; tokens that came from the store."""
        external = self.ask(request, local) or 0
        self.grant(request, external)
        request.num_computed_tokens = local + external
        self.step({request: request.num_tokens - local - external})
        return external

    def finish(self, request: Request) -> None:
        self.scheduler.request_finished(request)
        self.tables.pop(request.request_id, None)

    def assert_idle(self) -> None:
        books = self.worker.memory_stats()
        assert (books["leased_bytes"], books["leases"], books["reserved_bytes"]) == (0, 0, 0)
        assert books["free_bytes"] + books["cached_bytes"] == books["capacity_bytes"]
        assert self.faults.counts.total() == 0
        assert self.scheduler.counters()["tracked_requests"] == 0


@pytest.fixture(autouse=True, params=[False, True], ids=["bulk", "layerwise"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "use_layerwise", request.param)


@pytest.fixture
def pair(mode: None, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(**getattr(request, "param", {}))
    yield pair
    pair.close()


numbers = itertools.count()


def new_request(num_tokens: int, seed: int = 0, **changes: object) -> Request:
    params = {
        "prompt_token_ids": [seed * 1000 + at for at in range(num_tokens)],
        "sampling_params": SamplingParams(max_tokens=50),
        "pooling_params": None,
    }
    return Request(f"r{next(numbers)}", **{**params, **changes})


@pytest.mark.parametrize("num_tokens", range(1, 3 * CHUNK + 2))
def test_a_promise_leaves_one_token_and_is_never_negative(pair: Pair, num_tokens: int) -> None:
    first = new_request(3 * CHUNK)
    pair.prefill(first)
    pair.finish(first)
    asked = new_request(num_tokens)
    stored = num_tokens // CHUNK * CHUNK
    for local in range(0, num_tokens, BLOCK):
        assert pair.ask(asked, local) == max(0, min(stored, num_tokens - 1) - local)
    pair.finish(asked)
    pair.assert_idle()


def test_what_is_saved_in_pieces_is_hashed_once_and_found_whole(pair: Pair) -> None:
    request = new_request(5 * CHUNK + 3)
    assert pair.ask(request) == 0
    pair.grant(request, 0)
    for num_tokens in (3, 7, 1, 20, 12):
        pair.step({request: num_tokens})
    assert pair.worker.counters()["stored_chunks"] == 5
    again = new_request(5 * CHUNK + 3)
    assert pair.ask(again) == 5 * CHUNK
    for done in (request, again):
        pair.finish(done)
    pair.assert_idle()


def test_a_second_identical_request_stores_nothing(pair: Pair) -> None:
    for expected in (0, 2 * CHUNK):
        request = new_request(2 * CHUNK + 1)
        assert pair.prefill(request) == expected
        pair.finish(request)
    assert pair.worker.counters()["stored_chunks"] == 2
    pair.assert_idle()


def test_blocks_hold_what_was_stored_and_held_ones_are_left_alone(pair: Pair) -> None:
    first = new_request(3 * CHUNK)
    pair.prefill(first)
    stored = [cache[pair.tables[first.request_id]].clone() for cache in pair.caches]
    pair.finish(first)
    for cache in pair.caches:
        cache.zero_()
    second = new_request(3 * CHUNK)
    local = 3 * BLOCK
    assert pair.prefill(second, local=local) == 3 * CHUNK - 1 - local
    for cache, kv in zip(pair.caches, stored, strict=True):
        restored = cache[pair.tables[second.request_id]]
        assert not restored[:3].any()
        assert torch.equal(restored[3:], kv[3:])
    pair.finish(second)
    pair.assert_idle()


def test_a_lookup_repeated_while_allocation_fails_holds_one_lease(pair: Pair) -> None:
    pair.prefill(first := new_request(2 * CHUNK))
    pair.finish(first)
    waiting = new_request(2 * CHUNK)
    for _ in range(100):
        assert pair.ask(waiting) == 2 * CHUNK - 1
        assert pair.worker.memory_stats()["leases"] == 1
    pair.finish(waiting)
    pair.assert_idle()


def test_a_load_that_is_called_off_gives_the_lease_back(pair: Pair) -> None:
    pair.prefill(first := new_request(2 * CHUNK))
    pair.finish(first)
    request = new_request(2 * CHUNK)
    assert pair.ask(request)
    pair.grant(request, 0)
    assert pair.worker.memory_stats()["leases"] == 0
    metadata = pair.step({request: 2 * CHUNK})
    assert all(req.load_spec is None for req in metadata.requests)
    pair.finish(request)
    pair.assert_idle()


def test_a_hit_that_the_engine_will_throw_away_leases_nothing(pair: Pair) -> None:
    pair.prefill(first := new_request(2 * CHUNK))
    pair.finish(first)
    logprobs = new_request(2 * CHUNK, sampling_params=SamplingParams(prompt_logprobs=1))
    assert logprobs.skip_reading_prefix_cache
    assert pair.ask(logprobs) == 0
    assert pair.worker.memory_stats()["leases"] == 0
    pair.finish(logprobs)


@pytest.mark.parametrize("end_at", ["asked", "granted", "loaded"])
def test_a_request_may_end_at_any_moment(pair: Pair, end_at: str) -> None:
    pair.prefill(first := new_request(2 * CHUNK))
    pair.finish(first)
    request = new_request(2 * CHUNK + 1)
    external = pair.ask(request)
    assert external == 2 * CHUNK
    if end_at != "asked":
        pair.grant(request, external)
    if end_at == "loaded":
        request.num_computed_tokens = external
        pair.step({request: 1})
    pair.finish(request)
    pair.finish(request)
    pair.step({})
    pair.assert_idle()


def promised(pair: Pair, num_tokens: int = 3 * CHUNK + 2) -> tuple[Request, int]:
    """A request with granted blocks whose load is due in the next step."""
    pair.prefill(first := new_request(num_tokens))
    pair.finish(first)
    request = new_request(num_tokens)
    external = pair.ask(request)
    assert external
    pair.grant(request, external)
    request.num_computed_tokens = external
    return request, external


def test_a_promise_outlives_every_attempt_to_evict_it(pair: Pair) -> None:
    request, external = promised(pair)
    for seed in range(1, 40):
        other = new_request(2 * CHUNK, seed)
        pair.prefill(other)
        pair.finish(other)
    pair.step({request: request.num_tokens - external})
    assert pair.failed == set()
    assert pair.worker.counters()["loaded_tokens"] == external
    pair.finish(request)
    pair.assert_idle()


def test_a_short_load_reports_its_blocks_drops_the_saves_and_winds_back(pair: Pair) -> None:
    request, external = promised(pair)
    # Nothing but a fault of ours can take leased bytes away; so the fault is made here.
    pair.pool.release(request.request_id)
    hashes = pair.scheduler._trackers[request.request_id].chain.hashes()
    namespace = pair.scheduler._identities.namespace()
    pair.pool.remove(namespace, hashes[32:64])
    table = list(pair.tables[request.request_id])
    stored_before = pair.worker.counters()["stored_chunks"]
    pair.step({request: request.num_tokens - external})
    assert pair.failed == set(table[2:6]), "the blocks of the second and third chunk"
    counters = pair.worker.counters()
    assert (counters["failed_loads"], counters["stored_chunks"]) == (1, stored_before)

    assert pair.evicted == set(table[2:]), "the failed blocks and all that was computed on them"
    assert pair.pool.longest_prefix(namespace, hashes[32:64]) == 0

    # vLLM takes the request back to the first failed block and computes it again.
    request.num_computed_tokens = 2 * BLOCK
    pair.step({request: request.num_tokens - 2 * BLOCK})
    assert pair.failed == set()
    assert pair.worker.counters()["stored_chunks"] == stored_before + 1
    pair.finish(request)
    pair.assert_idle()


def test_a_step_described_before_a_failure_was_known_saves_nothing(pair: Pair) -> None:
    request, external = promised(pair)
    other = new_request(CHUNK, seed=5)
    pair.ask(other)
    pair.grant(other, 0)
    pair.pool.release(request.request_id)
    pair.pool.clear()
    # With asynchronous scheduling the next step is described before this one's failure is reported.
    early = pair.describe({request: request.num_tokens - external})
    late = pair.describe({other: CHUNK})
    pair.execute(early)
    assert pair.failed
    pair.execute(late)
    assert pair.worker.counters()["dropped_saves"] == 1
    pair.report()
    other.num_computed_tokens = 0
    pair.step({other: CHUNK})
    assert pair.worker.counters()["dropped_saves"] == 1
    assert pair.ask(new_request(CHUNK + 1, seed=5)) == CHUNK


def test_what_the_index_could_not_give_is_not_promised_again(pair: Pair) -> None:
    request, external = promised(pair)
    pair.pool.release(request.request_id)
    hashes = pair.scheduler._trackers[request.request_id].chain.hashes()
    namespace = pair.scheduler._identities.namespace()
    # An object of another size than the layout needs, under the second chunk's key.
    pair.pool.remove(namespace, hashes[32:64])
    (foreign,) = pair.pool.allocate([CHUNK_BYTES // 2]) or []
    assert pair.pool.put(namespace, hashes[32:64], foreign)
    del foreign
    pair.step({request: request.num_tokens - external})
    assert pair.failed
    again = new_request(3 * CHUNK + 2)
    assert pair.ask(again) == CHUNK
    for done in (request, again):
        pair.finish(done)
    pair.assert_idle()


def test_a_preempted_request_is_looked_up_again_with_its_output(pair: Pair) -> None:
    request = new_request(2 * CHUNK)
    pair.prefill(request)
    request.append_output_token_ids(list(range(50, 50 + CHUNK)))
    request.num_computed_tokens = 0
    request.num_preemptions += 1
    pair.tables.pop(request.request_id)
    assert pair.ask(request) == 2 * CHUNK
    assert pair.prefill(request) == 2 * CHUNK
    pair.finish(request)
    pair.assert_idle()


@pytest.mark.parametrize("pair", [{}, {"settings": {"save_decode_cache": True}}], indirect=True)
def test_generated_tokens_are_stored_exactly_if_asked(pair: Pair) -> None:
    request = new_request(CHUNK + 3)
    pair.prefill(request)
    for token in range(2 * CHUNK):
        request.append_output_token_ids(token)
        pair.step({request: 1})
    whole = new_request(0, prompt_token_ids=[*request.all_token_ids, 7])
    decode_saved = bool(pair.settings)
    assert pair.ask(whole) == (3 * CHUNK if decode_saved else CHUNK)
    for done in (request, whole):
        pair.finish(done)
    pair.assert_idle()


def test_drafts_that_may_be_rejected_are_not_stored() -> None:
    pair = Pair(settings={"save_decode_cache": True})
    request = new_request(CHUNK - 2)
    pair.prefill(request)
    request.append_output_token_ids(1)
    # One sampled token and three drafts reach into the chunk's last position; none is accepted yet.
    pair.step({request: 4}, drafts={request.request_id: [9, 9, 9]})
    assert pair.worker.counters()["stored_chunks"] == 0
    request.append_output_token_ids(2)
    pair.step({request: 1})
    assert pair.worker.counters()["stored_chunks"] == 1
    pair.close()


def test_what_was_evicted_is_stored_anew_so_that_its_suffix_can_be_reached(pair: Pair) -> None:
    request = new_request(3 * CHUNK)
    pair.ask(request)
    pair.grant(request, 0)
    pair.step({request: 2 * CHUNK})
    pair.pool.clear()
    pair.step({request: CHUNK})
    assert pair.ask(again := new_request(3 * CHUNK + 1)) == 3 * CHUNK
    for done in (request, again):
        pair.finish(done)
    pair.assert_idle()


def test_a_block_that_holds_no_kv_ends_the_save(pair: Pair) -> None:
    request = new_request(2 * CHUNK)
    pair.give_blocks(request, 2 * CHUNK)[3] = 0
    pair.prefill(request)
    assert pair.worker.counters()["stored_chunks"] == 1
    pair.finish(request)


@pytest.mark.parametrize(
    ("pair", "hits"),
    [({"kv_role": "kv_producer"}, 0), ({"kv_role": "kv_consumer"}, 0), ({"kv_role": "kv_both"}, 8)],
    indirect=["pair"],
)
def test_roles_store_and_load_as_they_say(pair: Pair, hits: int) -> None:
    pair.prefill(first := new_request(CHUNK + 1))
    assert pair.worker.counters()["stored_chunks"] == (pair.kv_role != "kv_consumer")
    assert pair.ask(second := new_request(CHUNK + 1)) == hits
    for done in (first, second):
        pair.finish(done)
    pair.assert_idle()


def test_identities_never_mix_and_each_repeats(pair: Pair, tmp_path: pathlib.Path) -> None:
    def lora(name: str, path: str) -> LoRARequest:
        folder = tmp_path / path
        folder.mkdir(exist_ok=True)
        if not (weights := folder / "adapter_model.bin").exists():
            weights.write_bytes(b"the same weights everywhere")
        return LoRARequest(name, abs(hash((name, path))) % 1000 + 1, str(folder))

    def params(**configs: object) -> SamplingParams:
        return SamplingParams(extra_args={"kv_transfer_params": configs})

    identities: list[dict[str, object]] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"lora_request": lora("a", "p")},
        {"lora_request": lora("b", "p")},
        {"lora_request": lora("a", "q")},
        {"sampling_params": params(**{"lmcache.tag.team": "a"})},
        {"sampling_params": params(**{"lmcache.tag.team": "b"})},
    ]
    for number, identity in enumerate(identities):
        assert pair.prefill(first := new_request(2 * CHUNK + 1, **identity)) == 0
        pair.finish(first)
        for earlier in identities[: number + 1]:
            assert pair.ask(again := new_request(2 * CHUNK + 1, **earlier)) == 2 * CHUNK
            pair.finish(again)
    empty = new_request(2 * CHUNK + 1, cache_salt="")
    assert pair.ask(empty) == 2 * CHUNK, "an empty salt is none"
    pair.finish(empty)
    pair.assert_idle()


def test_requests_that_cannot_be_named_bypass_the_cache(pair: Pair) -> None:
    configs = {"lmcache.tag.team": ["a", "list"]}
    unnamed = {"sampling_params": SamplingParams(extra_args={"kv_transfer_params": configs})}
    for changes in (unnamed, {"resumable": True}):
        for _ in range(2):
            assert pair.prefill(request := new_request(CHUNK + 1, **changes)) == 0
            pair.finish(request)
    assert pair.worker.counters()["stored_chunks"] == 0
    assert pair.scheduler.counters()["bypassed_requests"] == 4
    pair.assert_idle()


def test_skip_save_loads_and_does_not_store(pair: Pair) -> None:
    params = SamplingParams(extra_args={"kv_transfer_params": {"lmcache.skip_save": True}})
    assert pair.prefill(first := new_request(CHUNK + 1, sampling_params=params)) == 0
    assert pair.worker.counters()["stored_chunks"] == 0
    pair.prefill(second := new_request(CHUNK + 1))
    assert pair.ask(third := new_request(CHUNK + 1, sampling_params=params)) == CHUNK
    for done in (first, second, third):
        pair.finish(done)
    pair.assert_idle()


def test_short_hits_are_not_worth_a_load_where_so_set() -> None:
    pair = Pair(settings={"min_retrieve_tokens": CHUNK + 1})
    pair.prefill(first := new_request(4 * CHUNK))
    pair.finish(first)
    assert pair.ask(short := new_request(CHUNK + 1)) == 0
    assert pair.ask(long := new_request(2 * CHUNK + 1)) == 2 * CHUNK
    for done in (short, long):
        pair.finish(done)
    pair.assert_idle()
    pair.close()


def test_an_unhealthy_worker_reports_every_promised_block_and_saves_nothing(pair: Pair) -> None:
    request, external = promised(pair, 2 * CHUNK + 1)
    engine = pair.worker._engine
    assert engine is not None
    engine.close()
    table = list(pair.tables[request.request_id])
    pair.step({request: request.num_tokens - external})
    assert pair.failed == set(table[:4])
    pair.finish(request)


def test_a_fault_while_describing_a_step_fails_that_load_and_no_other(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, _ = promised(pair, CHUNK + 2)
    fine, _ = promised(pair, 2 * CHUNK + 2)
    describe = pair.scheduler._steps._describe

    def fails_for_one(tracker, *arguments):  # type: ignore[no-untyped-def]
        if tracker.request is broken:
            raise RuntimeError("planted")
        return describe(tracker, *arguments)

    monkeypatch.setattr(pair.scheduler._steps, "_describe", fails_for_one)
    loaded_before = pair.worker.counters()["loaded_chunks"]
    pair.step({broken: 2, fine: 2})
    assert pair.failed == set(pair.tables[broken.request_id][: CHUNK // BLOCK])
    assert pair.worker.counters()["loaded_chunks"] == loaded_before + 2
    assert pair.faults.counts == {"build_connector_meta": 1}


def test_a_block_table_that_cannot_be_had_does_not_lose_a_promise(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, external = promised(pair)
    table = list(pair.tables[request.request_id])

    def broken_table(*_: object) -> list[int]:
        raise RuntimeError("planted")

    monkeypatch.setattr(compat, "block_table", broken_table)
    pair.step({request: request.num_tokens - external})
    assert pair.failed == set(table[: 3 * CHUNK // BLOCK])
    pair.finish(request)


def test_a_step_of_another_engine_touches_nothing(pair: Pair) -> None:
    other = Pair()
    request = new_request(2 * CHUNK + 1)
    pair.ask(request)
    pair.grant(request, 0)
    request.num_computed_tokens = 0
    metadata = pair.step({request: 2 * CHUNK})
    assert metadata.requests
    other.worker.start_load_kv(metadata)
    other.worker.wait_for_save(metadata)
    assert other.worker.counters()["stored_chunks"] == 0
    assert other.worker.take_failed_block_ids() == set()
    pair.finish(request)

    # Were it promised a load, its engine would count on blocks that nobody fills.
    loading, external = promised(pair)
    metadata = pair.step({loading: loading.num_tokens - external})
    other.worker.start_load_kv(metadata)
    assert other.worker.take_failed_block_ids() == set(pair.tables[loading.request_id][:6])
    pair.finish(loading)
    other.close()


def test_failed_blocks_are_those_that_hold_an_unloaded_token() -> None:
    table = [10, 11, 12, 13]
    for loaded in range(17):
        for end in range(loaded, 17):
            expected = {table[token // 4] for token in range(loaded, end)}
            assert failed_blocks(table, 4, loaded, end) == expected


def test_the_lookup_finds_the_worker_of_its_own_engine_only(pair: Pair) -> None:
    other = Pair()
    pair.prefill(request := new_request(2 * CHUNK))
    assert other.ask(asked := new_request(2 * CHUNK)) == 0
    for half, done in ((pair, request), (other, asked)):
        half.finish(done)
    other.close()
    client = lookup.connect("no such engine", 0)
    assert client.lookup(bytes(32), "r", "ns") in (0, None)
    client.close()


def records(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "lmcache_rs: request" in line]


@pytest.mark.parametrize("pair", [{"settings": {"log_requests": True}}], indirect=True)
def test_each_request_has_one_line_whose_numbers_add_up(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=compat.logger.name)
    first, second = new_request(3 * CHUNK + 1), new_request(3 * CHUNK + 1)
    pair.prefill(first)
    pair.finish(first)
    pair.prefill(second, BLOCK)
    pair.finish(second)
    pair.step({})
    lines = [re.sub(r"request r\d+ |, \d+ ms$", "", line) for line in records(caplog)]
    asked = "lmcache_rs: prompt 25 tokens, "
    assert lines == [
        asked + "0 from the engine, 0 from lmcache_rs, 24 stored",
        asked + "4 from the engine, 20 from lmcache_rs, 0 stored",
    ]
    assert not pair.scheduler._finished


@pytest.mark.parametrize("pair", [{"settings": {"log_requests": True}}], indirect=True)
def test_nothing_is_left_of_a_request_that_ends_when_no_outcome_is_to_come(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=compat.logger.name)
    waiting, running = new_request(2 * CHUNK), new_request(3 * CHUNK, 1)
    assert pair.ask(waiting) == 0
    pair.prefill(running)
    for request in (waiting, running):
        pair.finish(request)
    # vLLM's step after an abort: it has no tokens, and its outcome is nobody's.
    pair.describe({})
    assert len(records(caplog)) == 2
    assert not pair.scheduler._finished
    pair.assert_idle()


@pytest.mark.parametrize("pair", [{"settings": {"log_requests": True}}], indirect=True)
def test_a_request_that_ends_with_its_step_under_way_is_told_with_what_that_stored(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=compat.logger.name)
    request = new_request(2 * CHUNK)
    assert pair.ask(request) == 0
    pair.grant(request, 0)
    under_way = pair.describe({request: 2 * CHUNK})
    pair.scheduler.request_finished(request)
    ended = pair.describe({})
    assert not records(caplog)
    # Copies behind their step are done, and heard of, when the next one begins.
    for step in (under_way, ended):
        pair.execute(step)
        pair.report()
    (line,) = records(caplog)
    assert "16 stored" in line
    assert not pair.scheduler._finished


@pytest.mark.parametrize("pair", [{"settings": {"log_requests": True}}], indirect=True)
def test_lines_of_requests_are_few_when_requests_are_many(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=compat.logger.name)
    for seed in range(200):
        request = new_request(1, seed)
        pair.prefill(request)
        pair.finish(request)
    pair.step({})
    assert 20 <= len(records(caplog)) < 200
    assert not pair.scheduler._finished
