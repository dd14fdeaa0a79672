"""`test_layerwise.py` with its tensors on a GPU."""

from __future__ import annotations

from test_layerwise import *  # noqa: F403
