"""`test_layouts.py` with its tensors on a GPU."""

from __future__ import annotations

from test_layouts import *  # noqa: F403
