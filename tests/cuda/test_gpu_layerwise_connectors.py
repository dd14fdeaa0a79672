"""`test_layerwise_connectors.py` with its tensors on a GPU."""

from __future__ import annotations

from test_layerwise_connectors import *  # noqa: F403
