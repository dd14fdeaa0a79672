"""What model facts promise: all of them in every key, none ambiguous."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_rs.config import LMCacheMetadata

FACTS: dict[str, Any] = {
    "model_fingerprint": "abc",
    "stored_form": "opaque",
    "layout_id": "LBHNC",
    "block_size": 128,
    "num_layers": 4,
    "num_kv_heads": 2,
    "head_size": 64,
    "tensor_parallel_rank": 1,
    "tensor_parallel_size": 2,
    "pipeline_parallel_rank": 0,
    "pipeline_parallel_size": 1,
}


def facts_of(**facts: Any) -> LMCacheMetadata:
    given: dict[str, Any] = {
        "model_name": "m",
        "world_size": 2,
        "worker_id": 1,
        "kv_dtype": "bfloat16",
    }
    return LMCacheMetadata(**(given | facts))


def test_fact_left_out_is_unstated_and_part_of_the_facts() -> None:
    facts = facts_of().facts()
    assert facts == {
        "model_name": "m",
        "world_size": "2",
        "worker_id": "1",
        "kv_dtype": "bfloat16",
        **dict.fromkeys(FACTS, "unstated"),
    }


def test_stated_facts_come_in_the_same_order() -> None:
    backwards = dict(reversed(FACTS.items()))
    assert list(facts_of(**backwards).facts()) == list(facts_of().facts())
    assert facts_of(**FACTS).facts() | {} == {
        "model_name": "m",
        "world_size": "2",
        "worker_id": "1",
        "kv_dtype": "bfloat16",
        **{name: str(value) for name, value in FACTS.items()},
    }


@pytest.mark.parametrize("name", FACTS)
def test_each_fact_changes_the_facts(name: str) -> None:
    pair = {other: FACTS[other] for other in FACTS if other[:8] == name[:8]}
    stated = facts_of(**pair) if "parallel" in name else facts_of(**{name: FACTS[name]})
    assert stated.facts()[name] == str(FACTS[name])
    assert stated.facts() != facts_of().facts()
    assert stated != facts_of()


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"kv_dtype": "auto"}, "kv_dtype is 'auto'"),
        ({"kv_dtype": "AUTO"}, "kv_dtype is 'AUTO'|kv_dtype is 'auto'"),
        ({"kv_dtype": "torch.bfloat16"}, "without the prefix: 'bfloat16'"),
        ({"kv_dtype": ""}, "kv_dtype is blank"),
        ({"kv_dtype": None}, "kv_dtype needs text"),
        ({"model_name": " "}, "model_name is blank"),
        ({"model_name": 3}, "model_name needs text, found 3"),
        ({"world_size": 0}, "world_size needs a whole number of at least 1"),
        ({"world_size": True}, "world_size needs a whole number"),
        ({"worker_id": 2}, "worker_id is 2, but world_size 2"),
        ({"worker_id": -1}, "worker_id needs a whole number of at least 0"),
        ({"block_size": 0}, "block_size needs a whole number of at least 1"),
        ({"num_layers": "4"}, "num_layers needs a whole number"),
        ({"layout_id": "unstated"}, "layout_id is 'unstated'"),
        ({"stored_form": ""}, "stored_form is blank"),
        ({"tensor_parallel_rank": 0}, "must be stated together"),
        ({"pipeline_parallel_size": 2}, "must be stated together"),
        (
            {"tensor_parallel_rank": 2, "tensor_parallel_size": 2},
            "tensor_parallel_rank is 2, but tensor_parallel_size 2",
        ),
    ],
)
def test_impossible_fact_is_refused(facts: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        facts_of(**facts)
