"""Loads that requests wait for: which ones, and what is said of them, hook by hook.

The copies are the engine's own. What random schedules make of them is held to the scheduler's
contract in tests/model.
"""

from __future__ import annotations

from typing import Any

from lmcache_rs.cache_engine import Loaded
from lmcache_rs.vllm_v1.connector import LMCacheConnectorV1Dynamic
from lmcache_rs.vllm_v1.faults import Faults
from lmcache_rs.vllm_v1.load_choice import ASSUMED_BYTES_PER_SECOND, LoadChoice, LoadSpeed
from lmcache_rs.vllm_v1.loads import AsyncLoads
from lmcache_rs.vllm_v1.metadata import LMCacheConnectorMetadata, LoadSpec, ReqMeta

# --- which loads ----------------------------------------------------------------------------------

MS_OF_TOKENS = int(ASSUMED_BYTES_PER_SECOND / 1e3)


def choice(budget_ms: float = 10, **changes: bool) -> LoadChoice:
    """One byte a token: `MS_OF_TOKENS` of them take a millisecond until something is measured."""
    chosen = LoadChoice(budget_ms, 1, **changes)
    chosen.begin_step(others_run=True)
    return chosen


def test_a_budget_of_none_has_every_request_wait() -> None:
    chosen = choice(0)
    assert chosen.is_async(1)
    chosen.begin_step(others_run=False)
    assert chosen.is_async(1)


def test_a_large_budget_has_every_step_wait() -> None:
    assert not choice(1e9).is_async(10**9)


def test_the_loads_of_one_step_share_its_budget() -> None:
    chosen = choice()
    for _ in range(2):
        assert not chosen.is_async(6 * MS_OF_TOKENS)
        chosen.take(6 * MS_OF_TOKENS)
        assert chosen.is_async(6 * MS_OF_TOKENS)
        assert not chosen.is_async(4 * MS_OF_TOKENS)
        chosen.begin_step(others_run=True)


def test_a_load_that_holds_nobody_up_is_waited_for_however_long() -> None:
    chosen = choice()
    assert chosen.is_async(100 * MS_OF_TOKENS)
    chosen.begin_step(others_run=False)
    assert not chosen.is_async(100 * MS_OF_TOKENS)
    chosen.take(100 * MS_OF_TOKENS)
    assert chosen.is_async(1), "somebody is held up now"


def test_nothing_that_has_no_safe_failure_is_waited_for() -> None:
    chosen = choice(1e9, has_safe_failure=False)
    chosen.begin_step(others_run=False)
    assert chosen.is_async(1)


def test_the_measured_speed_decides() -> None:
    chosen = choice()
    assert chosen.is_async(20 * MS_OF_TOKENS)
    chosen.measured(10 * ASSUMED_BYTES_PER_SECOND)
    assert not chosen.is_async(20 * MS_OF_TOKENS)
    chosen.measured(0)
    assert not chosen.is_async(20 * MS_OF_TOKENS), "0 is no measurement"
    chosen.measured(ASSUMED_BYTES_PER_SECOND / 100)
    assert chosen.is_async(MS_OF_TOKENS)


def test_speed_is_that_of_the_best_of_the_last_copies() -> None:
    speed = LoadSpeed()
    assert speed.bytes_per_second == ASSUMED_BYTES_PER_SECOND
    speed.note(1 << 30, 0.1)
    quick = speed.bytes_per_second
    assert quick == (1 << 30) / 0.1
    speed.note(1, 1e-9)
    assert speed.bytes_per_second == quick, "a small copy says nothing"
    for _ in range(8):
        speed.note(1 << 20, 1.0)
    assert speed.bytes_per_second == 1 << 20


# --- loads under way ------------------------------------------------------------------------------


DONE = Loaded(16, 16, 64)


class Slow:
    """A copy that is over when it is told to be."""

    def __init__(self, outcome: Loaded | Exception = DONE) -> None:
        self.is_over = False
        self._outcome = outcome

    def is_done(self) -> bool:
        return self.is_over

    def outcome(self) -> Any:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def load_of(req_id: str, start: int = 0, end: int = 16) -> ReqMeta:
    spec = LoadSpec(start, end, can_load=True, is_async=True)
    return ReqMeta(req_id, 0, bytes(64), [3, 4, 5, 6], "ns", load_spec=spec)


def names(loads: AsyncLoads) -> list[tuple[str, int]]:
    return [(load.req.req_id, load.loaded.end) for load in loads.take_finished()]


def test_each_load_is_said_to_be_over_once_and_not_before() -> None:
    loads, slow, quick = AsyncLoads(Faults()), Slow(), Slow()
    loads.begin(load_of("slow"), lambda _: slow)
    loads.begin(load_of("quick"), lambda _: quick)
    assert names(loads) == []
    quick.is_over = True
    assert names(loads) == [("quick", 16)]
    assert names(loads) == []
    slow.is_over = True
    assert names(loads) == [("slow", 16)]
    assert len(loads) == 0


def test_what_cannot_be_started_or_ends_badly_has_loaded_nothing() -> None:
    faults = Faults()
    loads = AsyncLoads(faults)

    def refuses(_: ReqMeta) -> Slow:
        raise RuntimeError("no")

    broken = Slow(RuntimeError("torn"))
    broken.is_over = True
    loads.begin(load_of("raises", 8), refuses)
    loads.begin(load_of("nowhere", 8), lambda _: None)
    loads.begin(load_of("torn", 8), lambda _: broken)
    assert sorted(names(loads)) == [("nowhere", 8), ("raises", 8), ("torn", 8)]
    assert dict(faults.counts) == {"start_load_kv": 1, "finish_load": 1}


def test_a_copy_that_does_not_say_whether_it_is_over_may_write_still() -> None:
    faults = Faults()
    loads, unsure = AsyncLoads(faults), Slow()
    loads.begin(load_of("unsure"), lambda _: unsure)
    unsure.is_done = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
    assert names(loads) == []
    assert len(loads) == 1
    assert faults.counts["finish_load"] == 1


def test_a_step_that_fails_ends_the_loads_that_it_did_not_start() -> None:
    loads, slow = AsyncLoads(Faults()), Slow()
    started, other = load_of("started"), load_of("other")
    loads.begin(started, lambda _: slow)
    loads.fail_others([started, other])
    loads.fail_others([started, other])
    assert names(loads) == [("other", 0)]
    slow.is_over = True
    assert names(loads) == [("started", 16)]


# --- at vLLM's side -------------------------------------------------------------------------------


class Unserved(LMCacheConnectorV1Dynamic):
    """A connector whose worker half could not be had."""

    def __init__(self) -> None:
        class Manager:
            worker = None
            faults = Faults()

            def promised_block_ids(self, metadata: LMCacheConnectorMetadata) -> set[int]:
                return metadata.promised_block_ids(4)

        self._manager = Manager()  # type: ignore[assignment]
        self._unserved_block_ids = set()
        self._unserved_loads = []
        self._connector_metadata = None
        self._error_before_step = (0, 0)


def test_without_a_worker_half_no_request_waits_for_ever() -> None:
    shell = Unserved()
    in_step = load_of("in step")
    assert in_step.load_spec is not None
    in_step.load_spec.is_async = False
    shell.bind_connector_metadata(LMCacheConnectorMetadata("start", [in_step, load_of("waits")]))
    shell.start_load_kv(None)  # type: ignore[arg-type]
    results = shell.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"waits"}, {"waits"})
    assert shell.get_block_ids_with_load_errors() == {3, 4, 5, 6}
    assert shell.get_transfer_results(set()).finished_recving == set()
    assert shell.get_finished(set()) == (None, None)
