"""Saves whose copies take longer than many steps: the blocks they read are kept, or waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checks import Baseline, Prompts, check, chunk_bytes
from harness import Engine, EngineSpec

CHUNK = 64
SPEC = EngineSpec(layerwise=False, max_model_len=512, num_blocks=34, max_num_seqs=16)
COPY_SECONDS = 0.02
"""Of one chunk; a decode step of a tiny model takes a tenth of that."""


@pytest.mark.parametrize(("caching", "layout"), [(True, "inproc"), (False, "mp")])
def test_blocks_are_kept_while_their_copies_run(
    baseline: Baseline, caching: bool, layout: str
) -> None:
    spec = replace(SPEC, prefix_caching=caching, layout=layout)
    source = Prompts(f"late {caching} {layout}")
    with Engine(spec) as engine:
        engine.slow_copies(round(chunk_bytes(spec) / COPY_SECONDS))
        preemptions = loads = 0
        for _ in range(3):
            prompts = [source.fresh(CHUNK * (1 + at % 4) + 3) for at in range(16)]
            # Some end in the very step that saves them, some in the middle of a copy.
            for max_tokens in (1, 40):
                reply, report = check(engine, baseline, prompts, max_tokens=max_tokens)
                preemptions += reply.preemptions
                loads += report.probe.get("loads", 0)
                engine.cool()
        assert preemptions > 0
        assert loads > 0
