"""The harness sees each fault it is there to see, twice: in bytes and in answers."""

from __future__ import annotations

import pytest
from checks import Baseline, Prompts, check, differences
from harness import EngineSpec
from probe_names import FAULTS

from conftest import Engines

SPEC = EngineSpec()


def test_all_is_right_without_a_fault(engines: Engines, baseline: Baseline) -> None:
    engine = engines.get(SPEC)
    prompt = Prompts("no fault").fresh(3 * 64 + 7)
    check(engine, baseline, [prompt], [(0, 0)])
    engine.cool()
    _, report = check(engine, baseline, [prompt], [(0, 192)])
    assert report.probe["loaded_bytes"] == 192 * 8192


# Blocks of 32 in chunks of 64; two prompts load three chunks each.
WRONG_BLOCKS = {
    "nothing_loaded": 12,
    "chunk_zeroed": 2,
    "chunks_swapped": 4,
    "kv_swapped": 12,
    "byte_first_layer": 1,
    "byte_last_layer": 1,
    "chunks_reordered": 4,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_seen_in_bytes_and_in_answers(
    engines: Engines, baseline: Baseline, fault: str
) -> None:
    engine = engines.get(SPEC)
    source = Prompts(fault)
    prompts = [source.fresh(3 * 64 + 7), source.fresh(3 * 64 + 7)]
    check(engine, baseline, prompts, [(0, 0), (0, 0)])
    engine.cool()
    engine.plant(fault)
    reply = engine.ask(prompts)
    report = engine.settled_report()
    assert report.probe["planted"] == 1
    # vLLM's own counters see nothing: the hit is promised all the same.
    assert reply.external_tokens == 2 * 192
    assert report.byte_faults()["wrong_blocks"] == WRONG_BLOCKS[fault], report
    assert "stray_blocks" not in report.byte_faults(), report
    seen = differences(reply.answers, baseline.ask(prompts, 4))
    if fault == "chunks_reordered":
        # Attention sums over its past in any order and K carries its position: chunks
        # of one prompt may trade places unheard. Only the bytes can tell.
        assert not seen, seen
    else:
        assert seen, "the answers hide the fault"
    # What was stored before is untouched: the next hit is right again.
    engine.cool()
    check(engine, baseline, prompts, [(0, 192), (0, 192)])
