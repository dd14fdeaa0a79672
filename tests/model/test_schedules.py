"""Every rule of the scheduler's contract holds under random legal schedules.

`MODEL_SCHEDULES` says how many; each is named by its seed, and a seed that fails becomes a test of
its own in test_found.py.
"""

from __future__ import annotations

import collections
import os

import pytest
from schedules import Schedule

NUM_SCHEDULES = int(os.environ.get("MODEL_SCHEDULES", "10000"))
BATCH = 500
seen: collections.Counter[str] = collections.Counter()


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, BATCH))
def test_every_schedule_keeps_every_rule(first: int) -> None:
    for seed in range(first, min(first + BATCH, NUM_SCHEDULES)):
        try:
            engine = Schedule(seed).run()
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        seen.update(engine.judge.seen, schedules=1)


def test_the_schedules_reach_what_they_are_meant_to() -> None:
    if not seen:
        pytest.skip("no schedule has run")
    print(dict(seen))
    for what, least in {
        "steps": 15,
        "promises": 0.9,
        "full hits": 0.2,
        "failed loads": 0.1,
        "passes on failed blocks": 0.05,
        "promises that are waited for": 0.5,
        "failed loads that were waited for": 0.1,
        "aborts during a load": 0.02,
        "preemptions": 0.1,
        "pending answers": 1,
        "evicted chunks": 1,
        "chunks stored at the end": 2,
    }.items():
        assert seen[what] >= least * seen["schedules"], f"too few {what}: {seen[what]}"
