"""Where loads, saves, tiers and other connectors meet: nobody waits for ever, nothing wrong stays.

What fails here is planted in the middle of a hook, so that half of its work is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from test_vllm_halves import BLOCK, CHUNK, Pair, new_request
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.request import Request

from lmcache_rs.vllm_v1.metadata import ONLY_RANK, LMCacheConnectorMetadata
from lmcache_rs.vllm_v1.prefetches import AskedPrefetches

PROMPT = 2 * CHUNK + 1


class Planted(RuntimeError):
    """What fails here."""


def fails(*_: Any, **__: Any) -> Any:
    raise Planted


@pytest.fixture(params=[0.0, 1e6], ids=["waited for", "in step"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair({"max_sync_load_ms": request.param}, saves_lag=True)
    yield pair
    pair.close()


def stored(pair: Pair, num_tokens: int = PROMPT) -> None:
    """The prompt is in the store, and its request has ended."""
    first = new_request(num_tokens)
    pair.scheduler.get_num_new_matched_tokens(first, 0)
    pair.grant(first, 0)
    pair.step({first: num_tokens})
    pair.worker._saves.wait()
    pair.scheduler.request_finished(first)
    pair.step({})


def granted(pair: Pair, num_tokens: int = PROMPT) -> tuple[Request, int, bool]:
    """A request that got its blocks, what it was promised, and whether it waits for that."""
    request = new_request(num_tokens)
    num_new, is_async = pair.scheduler.get_num_new_matched_tokens(request, 0)
    assert num_new
    table = pair.give_blocks(request, num_tokens)
    blocks = KVCacheBlocks(([KVCacheBlock(block_id) for block_id in table],))
    pair.scheduler.update_state_after_alloc(request, blocks, num_new)
    request.num_computed_tokens = num_new
    return request, num_new, is_async


def described(
    pair: Pair, scheduled: dict[Request, int], *, loads: bool = False
) -> LMCacheConnectorMetadata:
    """As `Pair.describe`, of a step of which vLLM says that it computes on what is loaded."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {each.request_id: n for each, n in scheduled.items()}
    output.has_sync_kv_loads = loads
    for request, num_tokens in scheduled.items():
        pair.give_blocks(request, request.num_computed_tokens + num_tokens)
    output.kv_connector_block_state = KVConnectorBlockState(
        req_ids=set(output.num_scheduled_tokens),
        resolve_block_ids=lambda req_id: (pair.tables[req_id],),
        boundary_state_offloads={},
    )
    return pair.scheduler.build_connector_meta(output)


# --- nobody is waited for for ever ----------------------------------------------------------------


def test_a_save_whose_end_cannot_be_counted_has_ended(pair: Pair) -> None:
    request = new_request(PROMPT)
    pair.scheduler.get_num_new_matched_tokens(request, 0)
    pair.grant(request, 0)
    pair.worker._saves._count = fails
    pair.step({request: PROMPT})
    pair.worker._saves.wait()
    if pair.scheduler.request_finished(request):
        pair.step({})
        assert pair.sent == {request.request_id}
    assert pair.faults.counts == {"wait_for_save": 1}
    pair.step({})
    assert not pair.scheduler.is_awaiting_saves


@pytest.mark.parametrize("part", ["_take_back_failed", "_find_workers"])
def test_a_fault_in_what_workers_say_leaves_nobody_awaited(
    pair: Pair, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = new_request(PROMPT)
    pair.scheduler.get_num_new_matched_tokens(request, 0)
    pair.grant(request, 0)
    pair.step({request: PROMPT})
    assert pair.scheduler.request_finished(request) is not pair.use_layerwise
    monkeypatch.setattr(pair.scheduler, part, fails)
    pair.execute(pair.describe({}))
    pair.failed = {1}
    with contextlib.suppress(Planted):
        pair.report()
    assert not pair.scheduler.is_awaiting_saves
    assert pair.scheduler._finished == {}


def test_workers_that_could_not_be_reached_are_told_of_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = pair.scheduler
    half._books.lookup_ids, half._client = {}, None
    with monkeypatch.context() as plant:
        plant.setattr("lmcache_rs.lookup.connect_ranks", fails)
        pair.step({})
        assert pair.faults.counts == {"update_connector_output": 1}
    assert half._client is None
    for _ in range(2):
        pair.step({})
    assert half._client is not None


@pytest.mark.parametrize("part", ["_fences", "_describe_step"])
def test_a_description_that_fails_says_so_of_every_promise(
    pair: Pair, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(pair)
    request, num_new, is_async = granted(pair)
    scheduled = {} if is_async else {request: PROMPT - num_new}
    with monkeypatch.context() as plant:
        plant.setattr(pair.scheduler._steps, part, fails)
        metadata = described(pair, scheduled, loads=not is_async)
    assert metadata.fences.copies_all_first
    pair.execute(metadata)
    finished, _ = pair.worker.take_finished_loads()
    assert finished == ({request.request_id} if is_async else set())
    failed = pair.failed | pair.worker.take_failed_block_ids()
    assert failed == set(pair.tables[request.request_id][: 2 * CHUNK // BLOCK])
    pair.failed = failed
    pair.report()
    pair.finish(request)
    pair.step({})
    assert pair.worker.memory_stats()["leases"] == 0


def test_what_has_failed_as_a_whole_is_not_tried_again() -> None:
    """Where the store stays unwell, it would be for ever."""
    pair = Pair({"max_sync_load_ms": 0.0})
    stored(pair)
    request, _, is_async = granted(pair)
    assert is_async
    pair.step({})
    # vLLM has taken it back as a whole, and asks again.
    request.num_computed_tokens = 0
    assert pair.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    # After a preemption it is another matter.
    request.num_preemptions += 1
    assert pair.scheduler.get_num_new_matched_tokens(request, 0)[0]
    pair.finish(request)
    pair.close()


# --- another connector beside ours ----------------------------------------------------------------


def loaded_by_another(pair: Pair, num_tokens: int) -> Request:
    """vLLM's MultiConnector took up another child's answer; ours hears of blocks and 0 tokens."""
    request = new_request(num_tokens, seed=7)
    assert pair.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    pair.grant(request, 0)
    request.num_computed_tokens = CHUNK
    return request


def saves(metadata: LMCacheConnectorMetadata) -> set[str]:
    return {req.req_id for req in metadata.requests if req.save_spec is not None}


def test_what_is_computed_on_anothers_load_is_saved_when_it_is_known_to_be_right(
    pair: Pair,
) -> None:
    beside = new_request(PROMPT)
    pair.scheduler.get_num_new_matched_tokens(beside, 0)
    pair.grant(beside, 0)
    request = loaded_by_another(pair, PROMPT)
    scheduled = {request: PROMPT - CHUNK, beside: PROMPT}
    metadata = described(pair, scheduled, loads=True)
    assert saves(metadata) == set(), "blocks may be shared"
    pair.execute(metadata)
    # The other child's load has failed: vLLM tells all of them, when the step is over.
    pair.failed = {pair.tables[request.request_id][0]}
    pair.report()
    assert set(pair.tables[request.request_id]) <= pair.evicted
    beside.num_computed_tokens = PROMPT
    request.num_computed_tokens = 0
    for _ in range(2):
        metadata = described(pair, {request: CHUNK, beside: 1})
        pair.execute(metadata)
        pair.report()
        request.num_computed_tokens += CHUNK
        beside.num_computed_tokens += 1
    assert saves(metadata) == {request.request_id, beside.request_id}
    for req in metadata.requests:
        assert req.num_tokens == 2 * CHUNK
    pair.finish(beside)
    pair.finish(request)


def test_who_comes_back_from_a_load_of_ours_puts_nothing_in_doubt() -> None:
    pair = Pair({"max_sync_load_ms": 0.0})
    stored(pair)
    request, num_new, _ = granted(pair, PROMPT + CHUNK)
    pair.step({})
    pair.grant(request, 0)
    metadata = described(pair, {request: PROMPT + CHUNK - num_new}, loads=True)
    assert saves(metadata) == {request.request_id}
    pair.execute(metadata)
    pair.finish(request)
    pair.close()


# --- tiers below and KV events --------------------------------------------------------------------


def test_what_is_asked_from_below_is_described_before_it_comes(pair: Pair) -> None:
    """A tier may have chunks of an earlier engine, which no request of this one has saved."""
    noted: list[tuple[str, int]] = []

    class Stream:
        def note(self, request: Request, namespace: str, hashes: bytes) -> None:
            noted.append((request.request_id, len(hashes) // 32))

    pair.scheduler.event_stream = Stream()  # type: ignore[assignment]
    pair.scheduler._prefetches = AskedPrefetches(60.0, {ONLY_RANK})
    request = new_request(PROMPT, seed=11)
    assert pair.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert noted == [(request.request_id, 2)]
    metadata = pair.describe({})
    assert metadata.prefetches is not None
    assert request.request_id in metadata.prefetches.begun
    assert pair.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert len(noted) == 1, "once"
    pair.finish(request)


def test_a_description_that_fails_takes_no_order_with_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or chunks that a request has asked for would be held for ever."""
    pair.scheduler._prefetches = AskedPrefetches(60.0, {ONLY_RANK})
    request = new_request(PROMPT, seed=11)
    assert pair.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    pair.describe({})
    pair.finish(request)
    with monkeypatch.context() as plant:
        plant.setattr(pair.scheduler, "_log_finished", fails)
        first = pair.describe({})
    orders = [each.prefetches for each in (first, pair.describe({}))]
    ended = [req_id for each in orders if each is not None for req_id in each.ended]
    assert ended == [request.request_id]
