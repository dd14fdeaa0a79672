"""`test_cache_engine.py` with its tensors on a GPU."""

from __future__ import annotations

from test_cache_engine import *  # noqa: F403

# Of the package, not of tensors.
del test_importing_is_quick_and_pulls_in_no_engine  # noqa: F821
