"""Which vLLM versions are served; known without importing one."""

from __future__ import annotations

from collections.abc import Mapping

TESTED_VERSIONS = ("0.31.0", "0.32.0")
"""vLLM versions that the end-to-end tests run on."""

BROKEN_VERSIONS: Mapping[str, str] = {}
"""vLLM versions known not to work, each with the reason."""
