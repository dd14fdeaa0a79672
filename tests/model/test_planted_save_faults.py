"""Faults planted in what guards blocks under a save: the search finds each of them, too."""

from __future__ import annotations

from typing import Any

import pytest
from planted import PlantedFaults

from lmcache_rs.vllm_v1 import compat
from lmcache_rs.vllm_v1.connector import LMCacheConnectorV1Dynamic
from lmcache_rs.vllm_v1.saves import BackgroundSaves
from lmcache_rs.vllm_v1.scheduler import LMCacheSchedulerHalf
from lmcache_rs.vllm_v1.steps import StepDescriber

OVERWRITTEN = "a stored chunk holds the KV of its prefix"
GIVEN_AWAY = "no block is free while a copy reads it"
STRAY = "only requests that vLLM waits for are named as sent"
FORGOTTEN = "requests that vLLM waits for are named as sent"
FAULTS = PlantedFaults()
fault = FAULTS.fault


@fault(OVERWRITTEN, GIVEN_AWAY, FORGOTTEN)
def no_step_is_held_back(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(LMCacheConnectorV1Dynamic, "handle_preemptions", lambda *_: None)


@fault(OVERWRITTEN, GIVEN_AWAY)
def preempted_requests_lose_blocks_under_their_copies(plant: pytest.MonkeyPatch) -> None:
    describe = StepDescriber._fences

    def without_preempted(steps: Any, scheduler_output: Any, *ended: Any) -> Any:
        fences = describe(steps, scheduler_output, *ended)
        fences.copied_first -= scheduler_output.preempted_req_ids
        return fences

    plant.setattr(StepDescriber, "_fences", without_preempted)


@fault(OVERWRITTEN)
def a_window_is_taken_for_none(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(compat, "has_windows", lambda _: False)


@fault(OVERWRITTEN, GIVEN_AWAY)
def blocks_of_ended_requests_are_returned_at_once(plant: pytest.MonkeyPatch) -> None:
    finished = LMCacheSchedulerHalf.request_finished

    def keeps_nothing(half: Any, request: Any) -> bool:
        finished(half, request)
        half._to_ask.clear()
        half._awaited.clear()
        return False

    plant.setattr(LMCacheSchedulerHalf, "request_finished", keeps_nothing)


@fault(OVERWRITTEN, GIVEN_AWAY)
def a_save_counts_as_done_when_it_was_handed_over(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(BackgroundSaves, "take_ended_step", lambda saves: saves._last_step)


@fault(OVERWRITTEN, GIVEN_AWAY)
def a_request_is_named_before_its_last_copy_is_done(plant: pytest.MonkeyPatch) -> None:
    take = BackgroundSaves.take_sent

    def names_all(saves: Any, step: Any) -> set[str]:
        sent = take(saves, step) | saves._awaited
        saves._awaited = set()
        return sent

    plant.setattr(BackgroundSaves, "take_sent", names_all)


@fault(STRAY)
def a_request_is_named_twice(plant: pytest.MonkeyPatch) -> None:
    take, before = BackgroundSaves.take_sent, set[str]()

    def names_again(saves: Any, step: Any) -> set[str]:
        sent = take(saves, step)
        again = sent | before
        before.clear()
        before.update(sent)
        return again

    plant.setattr(BackgroundSaves, "take_sent", names_again)


@fault(STRAY)
def every_ended_request_is_named(plant: pytest.MonkeyPatch) -> None:
    results_of = LMCacheConnectorV1Dynamic.get_transfer_results

    def names_all(shell: Any, ended: set[str]) -> Any:
        results = results_of(shell, ended)
        results.finished_sending |= ended
        return results

    plant.setattr(LMCacheConnectorV1Dynamic, "get_transfer_results", names_all)


@fault(FORGOTTEN)
def a_request_whose_save_was_done_already_is_not_named(plant: pytest.MonkeyPatch) -> None:
    take = BackgroundSaves.take_sent

    def names_the_late_ones(saves: Any, step: Any) -> set[str]:
        busy = {req.req_id for _, req, _ in saves._under_way}
        return take(saves, step) & busy

    plant.setattr(BackgroundSaves, "take_sent", names_the_late_ones)


@fault(FORGOTTEN)
def who_is_waited_for_is_told_only_with_other_work(plant: pytest.MonkeyPatch) -> None:
    build = LMCacheSchedulerHalf.build_connector_meta

    def told_with_work(half: Any, scheduler_output: Any) -> Any:
        metadata = build(half, scheduler_output)
        if not metadata.requests:
            metadata.fences.awaited = set()
        return metadata

    plant.setattr(LMCacheSchedulerHalf, "build_connector_meta", told_with_work)


@pytest.mark.parametrize("name", FAULTS)
def test_the_search_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS.require_found(name, monkeypatch)
