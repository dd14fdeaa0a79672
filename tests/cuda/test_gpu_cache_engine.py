"""`test_cache_engine.py` with its tensors on a GPU."""

from __future__ import annotations

from test_cache_engine import *  # noqa: F403
