"""`test_connector_generators.py` with its tensors on a GPU."""

from __future__ import annotations

from test_connector_generators import *  # noqa: F403
