"""Every test here runs with its tensors as if they were on a GPU, over the imitated driver.

The suites of `tests/unit` are run as they are; what differs on a GPU is said here, once. Each test
takes one of the four ways of copying; `CUDA_SUITES=all` takes each, and runs the long suites too.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
for folder in ("unit", "stateful", "fake_cuda"):
    sys.path.insert(0, str(TESTS / folder))
SUITES = ["test_cache_engine", "test_layerwise", "test_layerwise_connectors", "test_layouts"]
SUITES += ["test_layout_cases", "test_rope", "test_connector_generators", "test_engine_tiers"]
pytest.register_assert_rewrite(*SUITES)

from imitated import Imitated  # noqa: E402

from lmcache_rs import _native  # noqa: E402

ALL = os.environ.get("CUDA_SUITES") == "all"
PATHS = ["engine", "single", "kernel", "staged"]
LONG = ["layouts", "layout_cases", "rope", "connector_generators"]
collect_ignore = [] if ALL else [f"test_gpu_{suite}.py" for suite in LONG]

# Sleep before each piece of work on any stream, in microseconds.
LATE_US = 150


@pytest.fixture(scope="session")
def imitated() -> Imitated:
    return Imitated()


@pytest.fixture(autouse=True, params=PATHS if ALL else ["one way"])
def gpu(
    imitated: Imitated, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[_native.CudaDevice]:
    """GPU 0, late on all streams, with one way of copying."""
    with imitated.gpu() as device:
        number = zlib.crc32(request.node.nodeid.encode())
        device.force_path(request.param if ALL else PATHS[number % len(PATHS)])
        imitated.be_late(LATE_US, seed=number)

        def settled(check: Any) -> Any:
            def settle_first(*args: Any, **kwargs: Any) -> Any:
                device.settle()
                return check(*args, **kwargs)

            return settle_first

        # What a copy under way holds is not a leak.
        for suite in SUITES:
            module = sys.modules.get(suite)
            for name in ("assert_idle", "assert_books_balance", "free_bytes"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, settled(getattr(module, name)))
        yield device
