"""What every test shares: nothing leaves this machine."""

from __future__ import annotations

import os

# Before any test imports an engine: vLLM and its libraries read these at import.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
