"""The library's examples run as they are, and their own checks can fail."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmcache_rs import LMCacheEngine

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_own_engine_answers_from_the_cache() -> None:
    lines = run("own_engine.py").splitlines()
    assert "0 from the cache" in lines[0]
    assert all("256 from the cache" in line for line in lines[1:])
    assert len(lines) == 4


def test_own_engine_sees_a_load_that_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    own_engine = importlib.import_module("own_engine")

    def promise(self: LMCacheEngine, tokens: torch.Tensor, **_: object) -> torch.Tensor:
        return torch.arange(len(tokens)) < 256

    monkeypatch.setattr(LMCacheEngine, "retrieve", promise)
    with pytest.raises(AssertionError):
        own_engine.main()
