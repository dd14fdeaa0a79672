"""`test_engine_tiers.py` with its tensors on a GPU."""

from __future__ import annotations

from test_engine_tiers import *  # noqa: F403
