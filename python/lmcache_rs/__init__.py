"""A KV-cache layer for vLLM with a Rust core.

The names below are loaded when they are first used, so that importing the package costs little and
pulls in neither torch nor vllm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_rs.cache_engine import LMCacheEngine
    from lmcache_rs.config import ConfigError, LMCacheEngineConfig, LMCacheMetadata
    from lmcache_rs.key import CacheEngineKey, LayerCacheEngineKey
    from lmcache_rs.storage import MemoryFormat, MemoryObj, StorageManager
    from lmcache_rs.token_database import (
        ChunkedTokenDatabase,
        SegmentTokenDatabase,
        TokenDatabase,
    )

_HOME = {
    "CacheEngineKey": "key",
    "ChunkedTokenDatabase": "token_database",
    "ConfigError": "config",
    "LMCacheEngine": "cache_engine",
    "LMCacheEngineConfig": "config",
    "LMCacheMetadata": "config",
    "LayerCacheEngineKey": "key",
    "MemoryFormat": "storage",
    "MemoryObj": "storage",
    "SegmentTokenDatabase": "token_database",
    "StorageManager": "storage",
    "TokenDatabase": "token_database",
}

__all__ = [
    "CacheEngineKey",
    "ChunkedTokenDatabase",
    "ConfigError",
    "LMCacheEngine",
    "LMCacheEngineConfig",
    "LMCacheMetadata",
    "LayerCacheEngineKey",
    "MemoryFormat",
    "MemoryObj",
    "SegmentTokenDatabase",
    "StorageManager",
    "TokenDatabase",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("lmcache-rs")
    if name not in _HOME:
        raise AttributeError(f"module 'lmcache_rs' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lmcache_rs.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__, "__version__"]
