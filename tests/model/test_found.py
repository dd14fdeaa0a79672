"""What the schedules have found, each told as a short story of its own.

vLLM's sides of these stories are those of its version 0.32: a synchronous load that fails under
recomputation, or under the scheduler that describes the next step before it hears of this one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine import Engine, block_hasher
from settings import Settings
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from world import BLOCK, CHUNK

TEXT = [at % 3 for at in range(4 * CHUNK)]


def request(name: str, tokens: list[int], max_tokens: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, tokens, params, None, block_hasher=block_hasher)


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    opened: list[Engine] = []
    yield opened
    for engine in opened:
        engine.close()


def cooled(engine: Engine, tokens: list[int]) -> None:
    """The connector has stored these tokens, and vLLM itself has forgotten them."""
    engine.add(request("first", tokens), "")
    while engine.scheduler.has_requests():
        engine.step()
    engine.reset(preempt=False)


def lose_all(engine: Engine) -> None:
    """The leases have run out, and the chunks are gone."""
    for name in list(engine.scheduler.requests):
        engine.pool.release(name)
    engine.pool.clear()


def test_no_request_goes_on_with_what_another_was_to_compute_again(engines: list[Engine]) -> None:
    """Three requests share a load that fails; the one that the third's last block came from ends.

    vLLM lets the first compute the failed blocks again, and the second its own; the third keeps
    what it had from the second, which is now nobody's to compute.
    """
    engine = Engine(Settings(), before_loads=lambda _: lose_all(engine))
    engines.append(engine)
    cooled(engine, TEXT[: CHUNK + 1])
    loads, shares, shares_more = CHUNK + 1, CHUNK + BLOCK + 1, CHUNK + BLOCK + 2
    engine.add(request("loads", [*TEXT[: loads - 1], 0], 8), "")
    engine.add(request("shares", TEXT[:shares], 8), "")
    engine.add(request("shares more", TEXT[:shares_more], 8), "")
    engine.step()
    assert engine.judge.seen["failed loads"] == 1
    engine.abort("shares")
    for _ in range(3):
        engine.step()
    engine.finish()


def test_what_was_computed_on_failed_blocks_is_forgotten_with_a_step_under_way(
    engines: list[Engine],
) -> None:
    """The next step is described before the failure is heard of, and it loads nothing.

    A second request shared the failed blocks: what it computed behind them vLLM leaves in its own
    prefix cache. Nobody gets there until the failed ones are computed anew by somebody else.
    """
    settings = Settings(is_async=True, recompute=False, kv_role="kv_both")
    engine = Engine(settings, before_loads=lambda _: lose_all(engine))
    engines.append(engine)
    cooled(engine, TEXT[: CHUNK + 1])
    engine.add(request("loads", TEXT[: CHUNK + 1], 8), "")
    engine.add(request("shares", TEXT[: 2 * CHUNK + 1], 8), "")
    while engine.scheduler.has_requests():
        engine.step()
    assert engine.judge.seen["failed loads"] == 1
    for name, num_tokens in (("short", CHUNK + 1), ("long", 2 * CHUNK + 1)):
        # What the connector has stored since is not to be had either.
        engine.pool.clear()
        engine.add(request(name, TEXT[:num_tokens]), "")
        while engine.scheduler.has_requests():
            engine.step()
    engine.finish()


def test_a_failed_load_does_not_name_the_placeholder_of_what_left_the_window(
    engines: list[Engine],
) -> None:
    """vLLM would end every request that has it in its table, loads or not."""
    settings = Settings(window=CHUNK + 1, recompute=False)
    engine = Engine(settings, before_loads=lambda _: lose_all(engine))
    engines.append(engine)
    cooled(engine, TEXT[: 3 * CHUNK + 1])
    other = [2, *TEXT[: 3 * CHUNK]]
    engine.add(request("other", other, 12), "")
    for _ in range(3):
        engine.step()
    engine.add(request("loads", TEXT[: 3 * CHUNK + 1]), "")
    engine.step()
    assert engine.judge.seen["failed loads"] == 1
    assert set(engine.scheduler.requests) == {"other"}
    engine.finish()
