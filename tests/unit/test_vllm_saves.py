"""Saves that go on behind their step: who waits for them, who hears of them, and how often."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_vllm_halves import BLOCK, BLOCK_BYTES, CHUNK, LAYERS, Pair, new_request
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from lmcache_rs import _native
from lmcache_rs.vllm_v1.connector import LMCacheConnectorV1Dynamic
from lmcache_rs.vllm_v1.manager import LMCacheManager
from lmcache_rs.vllm_v1.metadata import LMCacheConnectorMetadata
from lmcache_rs.vllm_v1.saves import SaveFences

SAVE_BYTES = BLOCK_BYTES * LAYERS * 2 * CHUNK // BLOCK


@pytest.fixture(params=[SAVE_BYTES * 10])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Whose copies take a tenth of a second each."""
    pair = Pair(saves_lag=True)
    assert pair.worker._engine is not None
    pair.worker._engine._transfers = _native.TransferQueue(request.param)
    yield pair
    pair.close()


def prefilled(pair: Pair, tokens: int = 2 * CHUNK + 1, first: int = 3) -> Request:
    """A request whose prompt was computed, and whose copy is under way."""
    request = new_request(tokens, first)
    pair.prefill(request)
    assert pair.worker._saves._under_way
    return request


def under_way(pair: Pair) -> bool:
    return any(not transfer.is_done() for _, _, transfer in pair.worker._saves._under_way)


def preempt(pair: Pair, request: Request) -> LMCacheConnectorMetadata:
    """What the next step's description says when vLLM has preempted the request."""
    output = SchedulerOutput.make_empty()
    output.preempted_req_ids = {request.request_id}
    # Somebody else computes something.
    output.num_scheduled_tokens = {"other": 1}
    request.num_computed_tokens = 0
    return pair.scheduler.build_connector_meta(output)


def test_a_step_ends_before_its_saves(pair: Pair) -> None:
    request = prefilled(pair)
    assert under_way(pair)
    assert pair.worker.counters()["stored_chunks"] == 0
    assert pair.outcome is None or not pair.outcome.outcomes
    pair.worker._saves.wait()
    assert pair.worker.counters()["stored_chunks"] == 2
    pair.step({request: 1})
    assert pair.outcome is not None
    assert pair.outcome.outcomes[request.request_id].stored_tokens == 2 * CHUNK
    pair.scheduler.request_finished(request)
    pair.step({})
    pair.assert_idle()


def test_an_ended_request_keeps_its_blocks_until_it_is_named_once(pair: Pair) -> None:
    request, other = prefilled(pair), prefilled(pair, first=4)
    assert pair.scheduler.request_finished(request)
    assert pair.scheduler.is_awaiting_saves
    metadata = pair.describe({other: 1})
    assert metadata.fences.awaited == {request.request_id}
    assert not metadata.fences.copied_first, "a step with work to do is not held up"
    # The queue is in order, so its copy is done when the other's is not.
    pair.worker._saves.wait({request.request_id})
    pair.execute(metadata)
    assert pair.sent == {request.request_id}
    pair.report()
    assert not pair.scheduler.is_awaiting_saves
    for _ in range(3):
        pair.step({other: 1})
        assert not pair.sent
    pair.worker._saves.wait()
    pair.step({other: 1})
    assert not pair.scheduler.request_finished(other), "its copy is done, and that was told"
    pair.step({})
    assert not pair.sent
    pair.assert_idle()


def test_a_busy_request_is_not_named(pair: Pair) -> None:
    request, other = prefilled(pair), prefilled(pair, first=4)
    assert pair.scheduler.request_finished(other)
    pair.execute(metadata := pair.describe({request: 1}))
    assert under_way(pair)
    assert not pair.sent
    pair.report()
    assert metadata.fences.awaited == set(), "a hook called again names nobody again"
    pair.worker._saves.wait()
    pair.step({request: 1})
    assert pair.sent == {other.request_id}
    pair.finish(request)


def test_a_step_without_tokens_waits_for_ended_requests_only(pair: Pair) -> None:
    request, other = prefilled(pair), prefilled(pair, first=4)
    pair.scheduler.request_finished(request)
    metadata = pair.step({})
    assert metadata.fences.copied_first == {request.request_id}
    assert pair.sent == {request.request_id}
    assert under_way(pair)
    pair.scheduler.request_finished(other)
    pair.step({})
    assert pair.sent == {other.request_id}
    pair.assert_idle()


def test_a_request_of_which_nothing_was_saved_is_named_all_the_same(pair: Pair) -> None:
    request = new_request(2 * CHUNK + 1)
    pair.ask(request)
    pair.grant(request, 0)
    metadata = pair.describe({request: 2 * CHUNK})
    assert metadata.requests[0].save_spec is not None
    pair.worker.record_failed({BLOCK})
    pair.execute(metadata)
    assert pair.worker.counters()["dropped_saves"] == 1
    # vLLM says that it ends before it hands on what the workers say of the step.
    assert pair.scheduler.request_finished(request)
    pair.report()
    pair.step({})
    assert pair.sent == {request.request_id}
    pair.assert_idle()


def test_a_request_that_saved_nothing_is_never_waited_for(pair: Pair) -> None:
    short = new_request(CHUNK - 1)
    pair.prefill(short)
    assert not pair.scheduler.request_finished(short)
    unseen = new_request(CHUNK)
    assert not pair.scheduler.request_finished(unseen)
    pair.step({})
    assert not pair.sent


def test_a_preempted_request_is_copied_before_the_step_and_not_waited_for(pair: Pair) -> None:
    request, other = prefilled(pair), prefilled(pair, first=4)
    metadata = preempt(pair, request)
    pair.worker.handle_preemptions(metadata)
    busy = {req.req_id for _, req, _ in pair.worker._saves._under_way}
    assert busy == {other.request_id}
    assert pair.pool.longest_prefix(*stored_as(pair, request)) == 2
    # It may wait for a load by now: it must not be named as sent, too.
    assert not pair.scheduler.request_finished(request)
    pair.finish(other)


def stored_as(pair: Pair, request: Request) -> tuple[str, bytes]:
    tracker = pair.scheduler._trackers[request.request_id]
    assert tracker.namespace is not None
    return tracker.namespace, tracker.chain.hashes(2)


def test_tokens_that_are_computed_anew_wait_for_every_copy(pair: Pair) -> None:
    request, other = prefilled(pair), prefilled(pair, first=4)
    request.num_computed_tokens = CHUNK
    metadata = pair.describe({request: CHUNK + 1})
    assert metadata.fences.copies_all_first
    pair.worker.handle_preemptions(metadata)
    assert not under_way(pair)
    pair.execute(metadata)
    pair.finish(request)
    pair.finish(other)


def test_where_requests_lose_blocks_every_step_waits(pair: Pair) -> None:
    pair.worker._saves.has_windows = True
    request = prefilled(pair)
    assert under_way(pair)
    pair.worker.handle_preemptions(pair.describe({request: 1}))
    assert not under_way(pair)
    pair.finish(request)


def test_what_is_reset_under_its_copy_does_not_come_back(pair: Pair) -> None:
    request = prefilled(pair)
    assert pair.scheduler.reset_cache()
    pair.worker._saves.wait()
    assert pair.worker.counters()["stored_chunks"] == 0
    assert pair.worker.memory_stats()["chunks"] == 0
    pair.finish(request)
    pair.step({})
    pair.assert_idle()


def test_a_failed_copy_is_a_fault_and_its_request_is_named(pair: Pair) -> None:
    request = prefilled(pair)
    (_, _, transfer), *_ = pair.worker._saves._under_way

    def fails() -> None:
        raise RuntimeError("planted")

    transfer.outcome = fails  # type: ignore[assignment]
    assert pair.scheduler.request_finished(request)
    pair.step({})
    assert pair.sent == {request.request_id}
    assert pair.faults.counts == {"wait_for_save": 1}


def test_the_last_line_of_a_request_counts_what_was_stored_late(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.scheduler._config = pair.scheduler._config.with_values("test", log_requests=True)
    request, other = prefilled(pair), prefilled(pair, first=4)
    pair.scheduler.request_finished(request)
    caplog.set_level("INFO", "vllm.lmcache_rs")
    pair.execute(pair.describe({other: 1}))
    pair.report()
    assert "lmcache_rs: request" not in caplog.text
    pair.step({})
    assert f"request {request.request_id} prompt 17 tokens" in caplog.text
    assert f"{2 * CHUNK} stored" in caplog.text
    pair.finish(other)


def test_who_is_waited_for_is_told_with_the_next_description_if_one_fails(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = prefilled(pair)
    pair.scheduler.request_finished(request)
    with monkeypatch.context() as plant:
        plant.setattr(pair.scheduler._steps, "_fences", None)
        assert not pair.describe({}).fences.awaited
    pair.step({})
    assert pair.sent == {request.request_id}


def test_another_engines_requests_are_named_to_it_alone(pair: Pair) -> None:
    request = prefilled(pair)
    pair.scheduler.request_finished(request)
    foreign = LMCacheConnectorMetadata("another", fences=SaveFences(1, awaited={"theirs"}))
    assert pair.worker.take_sent(foreign) == {"theirs"}
    pair.step({})
    assert pair.sent == {request.request_id}


def test_a_step_that_says_nothing_waits_for_every_copy(pair: Pair) -> None:
    request = prefilled(pair)
    pair.worker.handle_preemptions(LMCacheConnectorMetadata(engine_start=""))
    assert not under_way(pair)
    pair.finish(request)


def test_a_shutdown_waits_for_no_copy_that_has_not_begun(pair: Pair) -> None:
    prefilled(pair)
    prefilled(pair, first=4)
    pair.worker.shutdown()
    assert not under_way(pair)
    pair.worker.shutdown()


@pytest.mark.parametrize("has_worker", [True, False])
def test_the_connector_names_who_is_waited_for_with_and_without_a_cache(
    pair: Pair, has_worker: bool
) -> None:
    shell = object.__new__(LMCacheConnectorV1Dynamic)
    manager = object.__new__(LMCacheManager)
    manager.worker = pair.worker if has_worker else None
    manager.scheduler, manager.faults = None, pair.faults
    shell._manager, shell._role = manager, KVConnectorRole.WORKER
    shell._connector_metadata, shell._unserved_loads = None, []
    assert shell.get_finished(set()) == (None, None)
    request = prefilled(pair)
    assert pair.scheduler.request_finished(request)
    metadata = pair.describe({})
    shell.handle_preemptions(metadata)
    shell._connector_metadata = metadata
    assert shell.get_finished({request.request_id}) == ({request.request_id}, None)
    assert shell.request_finished(request, []) == (False, None)
    assert not shell.has_pending_block_frees()
    manager.scheduler = pair.scheduler
    assert shell.has_pending_block_frees()


def test_layer_by_layer_saves_are_done_in_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "use_layerwise", True)
    pair = Pair(saves_lag=True)
    request = new_request(2 * CHUNK + 1)
    pair.prefill(request)
    assert pair.worker.counters()["stored_chunks"] == 2
    assert not pair.scheduler.request_finished(request)
    pair.step({})
    assert not pair.sent
    pair.assert_idle()
    pair.close()
