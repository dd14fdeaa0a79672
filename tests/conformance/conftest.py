"""The fixture of the conformance tests: each tier in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiers import DEADLINE_S, TIERS, Subject, assert_at_rest


@pytest.fixture(params=TIERS)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    """Each tier in turn; at the end no byte is held and no put waits, walked."""
    made = TIERS[request.param](tmp_path)
    yield made
    assert_at_rest(made)
    assert made.tier.close(DEADLINE_S)


@pytest.fixture(params=TIERS)
def big_subject(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Subject]:
    """As `subject`, with memory for objects of 32 MiB."""
    monkeypatch.setattr("tiers.POOL_BYTES", 80 << 20)
    made = TIERS[request.param](tmp_path)
    yield made
    assert_at_rest(made)
    assert made.tier.close(DEADLINE_S)
