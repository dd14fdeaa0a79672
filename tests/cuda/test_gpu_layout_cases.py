"""`test_layout_cases.py` with its tensors on a GPU."""

from __future__ import annotations

from test_layout_cases import *  # noqa: F403
