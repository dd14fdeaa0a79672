"""Fixtures of the tests that run a real vLLM."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import checks  # noqa: E402
import harness  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips with a reason where vLLM is not installed; under CI it must be."""
    if importlib.util.find_spec("vllm") is not None or os.environ.get("CI") == "true":
        return
    reason = "vLLM is not installed in this environment: `make setup` installs it"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


class Engines:
    """Engines by their spec, so that tests of one file share them."""

    def __init__(self) -> None:
        self._engines: dict[harness.EngineSpec, harness.Engine] = {}

    def get(self, spec: harness.EngineSpec) -> harness.Engine:
        """The engine of this spec, cooled: vLLM's own cache empty, its memory noise."""
        engine = self._engines.get(spec)
        if engine is None or not engine.is_open:
            engine = self._engines[spec] = harness.Engine(spec)
        engine.cool()
        if spec.has_probe:
            engine.report()
        return engine

    def close(self) -> None:
        """Ends them all."""
        for engine in self._engines.values():
            engine.close()


@pytest.fixture(scope="session")
def baseline() -> Iterator[checks.Baseline]:
    """vLLM without a connector: the right answers."""
    answers = checks.Baseline()
    yield answers
    answers.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """The engines of one file."""
    shared = Engines()
    yield shared
    shared.close()
