"""Copies layer by layer: the checks of the other files once more, and that it is a pipeline.

A choice of them, for time; ``KV_TEST_LAYERWISE=1`` runs every file this way (``make soak`` does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import test_harness_can_fail
import test_hits
import test_layouts
import test_mla
import test_pools
import test_random_walk
import test_roles
import test_settings
from checks import Baseline, Prompts, check
from harness import Engine, EngineSpec
from probe_names import FAULTS

from conftest import Engines

SPEC = EngineSpec(layerwise=True)
NUM_LAYERS = 4


class LayerwiseEngines(Engines):
    """Engines of the specs asked for, but layer by layer."""

    def get(self, spec: EngineSpec) -> Engine:
        return super().get(replace(spec, layerwise=True))


@pytest.fixture(scope="module")
def engines() -> Any:
    shared = LayerwiseEngines()
    yield shared
    shared.close()


Check = Callable[..., None]
CHECKS: list[tuple[Check, dict[str, Any]]] = [
    (test_hits.test_cold_then_hit_after_reset, {}),
    *(
        (
            test_hits.test_every_local_hit_beside_every_external_hit,
            {"local_blocks": local, "stored_chunks": stored},
        )
        for local, stored in ((0, 3), (1, 3), (2, 1), (3, 2), (5, 3), (6, 3))
    ),
    (test_hits.test_many_forks_in_one_step_and_again_after_reset, {"reverse": False}),
    *(
        (test_hits.test_prompt_lengths_around_each_edge, {"num_tokens": num_tokens})
        for num_tokens in (63, 64, 65, 128, 192)
    ),
    (test_hits.test_full_hits_beside_each_other, {}),
    (test_hits.test_prompt_shorter_than_a_chunk_is_not_stored, {}),
    (test_hits.test_second_identical_request_stores_nothing, {}),
    (test_hits.test_chunked_prefill_of_prompts_that_fork, {}),
    (test_hits.test_engine_prefix_caching_off, {}),
    (test_hits.test_preemption, {"chunked": True}),
    (test_hits.test_default_sizes, {}),
    *(
        (test_harness_can_fail.test_fault_is_seen_in_bytes_and_in_answers, {"fault": f})
        for f in FAULTS
    ),
    (test_pools.test_pool_of_four_chunks, {}),
    (
        test_random_walk.test_answers_stay_right_whatever_is_asked,
        dict(
            zip(
                ("num_blocks", "chunk_size", "pool_chunks", "budget", "prefix_caching"),
                test_random_walk.TIGHT_SPOTS[0],
                strict=True,
            )
        ),
    ),
    (test_mla.test_cold_then_hit, {}),
    (test_mla.test_fault_is_seen_in_bytes_and_in_answers, {"fault": "byte_last_layer"}),
    (test_mla.test_preemption, {}),
    (test_layouts.test_cold_hit_full_hit_and_short, {}),
    (test_roles.test_consumer_never_stores, {}),
]


def name_of(check: Check, options: dict[str, Any]) -> str:
    words = [check.__module__, check.__name__.removeprefix("test_"), *map(str, options.values())]
    return " ".join(words)


@pytest.mark.parametrize(
    ("check", "options"), CHECKS, ids=[name_of(check, options) for check, options in CHECKS]
)
def test_it_holds_layer_by_layer_too(
    engines: LayerwiseEngines, baseline: Baseline, check: Check, options: dict[str, Any]
) -> None:
    check(engines, baseline, **options)


def test_loads_run_ahead_and_no_further_than_they_may(
    engines: LayerwiseEngines, baseline: Baseline
) -> None:
    """The probe looks at each hook which layers are written; see ``LayerWatch``."""
    engine = engines.get(SPEC)
    source = Prompts("layers, loads")
    prompts = [source.fresh(n) for n in (199, 400, 500)]
    check(engine, baseline, prompts, [(0, 0)] * 3)
    for prompt in prompts:
        engine.cool()
        _, report = check(engine, baseline, [prompt], [(0, len(prompt) // 64 * 64)])
        assert report.probe["awaited_layers"] == NUM_LAYERS
        assert "early_layers" not in report.probe


def test_a_layer_is_in_its_chunk_two_layers_later(
    engines: LayerwiseEngines, baseline: Baseline
) -> None:
    """Its blocks are spoiled then, and still what is loaded later is what they held."""
    engine = engines.get(SPEC)
    prompt = Prompts("layers, saves").fresh(400)
    _, report = check(engine, baseline, [prompt], [(0, 0)])
    assert report.probe["spoiled_layers"] == NUM_LAYERS - 2
    engine.cool()
    check(engine, baseline, [prompt], [(0, 384)])


def test_the_banner_says_how_copies_are_made(engines: LayerwiseEngines) -> None:
    said = test_mla.banner(engines.get(SPEC))
    assert "layer by layer" in said


def test_pool_smaller_than_one_chunk_serves_without_it(
    baseline: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_settings, "PLAIN", replace(test_settings.PLAIN, layerwise=True))
    test_settings.test_pool_smaller_than_one_chunk_serves_without_it(baseline)
