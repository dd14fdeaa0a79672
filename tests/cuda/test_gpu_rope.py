"""`test_rope.py` with its tensors on a GPU."""

from __future__ import annotations

from test_rope import *  # noqa: F403
