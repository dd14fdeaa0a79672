"""A real model over a real text: SmolLM2-135M, in the sizes a server would use."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from checks import Baseline, check
from harness import EngineSpec, Prompt

from conftest import Engines

EXAMPLES = Path(__file__).parents[2] / "examples"
CHUNK = 256


@cache
def model_folder() -> Path:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import smollm2
    finally:
        sys.path.remove(str(EXAMPLES))
    return Path(smollm2.ensure_model())


@cache
def text_tokens() -> tuple[int, ...]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_folder()))
    return tuple(tokenizer.encode((EXAMPLES / "harbour_handbook.txt").read_text("utf-8")))


def spec() -> EngineSpec:
    return EngineSpec(
        model_path=str(model_folder()),
        block_size=128,
        chunk_size=None,
        max_model_len=2048,
        num_blocks=32,
        pool_bytes=256 << 20,
    )


def prompts(start: int) -> list[Prompt]:
    """A prompt of two chunks and a tail, and one of two chunks to the token."""
    tokens = text_tokens()
    longer, full = tokens[start : start + 650], tokens[start + 50 : start + 50 + 2 * CHUNK]
    assert len(longer) == 650
    return [Prompt(longer), Prompt(full)]


@pytest.mark.parametrize("budget", [4096, 200])
def test_cold_hit_and_full_hit(engines: Engines, baseline: Baseline, budget: int) -> None:
    engine = engines.get(replace(spec(), max_num_batched_tokens=budget))
    both = prompts(0)
    check(engine, baseline, both, [(0, 0), (0, 0)], max_tokens=8)
    engine.cool()
    check(engine, baseline, both, [(0, 512), (0, 511)], max_tokens=8)
    # A hit on the head, the rest computed in one step or in several.
    longer = Prompt(text_tokens()[:900])
    engine.cool()
    check(engine, baseline, [longer], [(0, 512)], max_tokens=8)
    engine.cool()
    check(engine, baseline, [longer], [(0, 768)], max_tokens=8)
