"""The fixture of the conformance tests: each tier in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiers import DEADLINE_S, TIERS, Subject


@pytest.fixture(params=TIERS)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    """Each tier in turn; at the end no byte is held and no put waits, walked."""
    made = TIERS[request.param](tmp_path)
    yield made
    stats = made.tier.stats()
    assert stats.get("queued_chunks", 0) == stats.get("queued_bytes", 0) == 0
    assert stats.get("leased_bytes", 0) == stats.get("leases", 0) == 0
    assert made.tier.close(DEADLINE_S)
    assert made.in_use() == 0
