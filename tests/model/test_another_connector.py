"""Another connector beside ours, as under MultiConnector: its loads fail, and ours hears late.

Ours hears of blocks and of 0 tokens; that the blocks hold nothing it hears when the step is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine import Engine, block_hasher
from settings import Settings
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from world import BLOCK, CHUNK

TEXT = [at % 3 for at in range(4 * CHUNK)]


class Other:
    """Promises a chunk to one request, in the step that computes on it, and loads nothing."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.failed: set[int] = set()
        self.has_failed = False
        connector: Any = engine.connector
        look_up, allocated = (
            connector.get_num_new_matched_tokens,
            connector.update_state_after_alloc,
        )
        report = engine.worker.get_block_ids_with_load_errors

        def chosen(request: Request, local: int) -> tuple[int | None, bool]:
            answer = look_up(request, local)
            is_theirs = request.request_id == name and not self.has_failed
            return (CHUNK, False) if is_theirs else answer

        def granted(request: Request, blocks: Any, num_external: int) -> None:
            if request.request_id == name and num_external and not self.has_failed:
                self.has_failed = True
                self.failed = set(blocks.get_block_ids()[0][: CHUNK // BLOCK])
                num_external = 0
            allocated(request, blocks, num_external)

        def reported() -> set[int]:
            failed, self.failed = self.failed, set()
            return report() | failed

        connector.get_num_new_matched_tokens = chosen
        connector.update_state_after_alloc = granted
        engine.worker.get_block_ids_with_load_errors = reported  # type: ignore[method-assign]
        # Of loads the judge knows our own.
        engine.judge.check_loads = lambda *_: None  # type: ignore[method-assign]


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    opened: list[Engine] = []
    yield opened
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize(("is_async", "recompute"), [(False, True), (False, False), (True, False)])
def test_nothing_that_was_computed_on_its_failed_load_is_stored(
    engines: list[Engine], is_async: bool, recompute: bool, layerwise: bool
) -> None:
    settings = Settings(is_async=is_async, recompute=recompute, layerwise=layerwise)
    engines.append(engine := Engine(settings))
    other = Other(engine, "theirs")
    for name, length in (("theirs", 2 * CHUNK + 1), ("shares", 3 * CHUNK + 1)):
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        engine.add(Request(name, TEXT[:length], params, None, block_hasher=block_hasher), "")
    for _ in range(100):
        if not engine.scheduler.has_requests():
            break
        engine.step()
    assert other.has_failed
    engine.finish()
    # What was computed anew is.
    assert engine.judge.seen["chunks stored at the end"] >= 2 * recompute
