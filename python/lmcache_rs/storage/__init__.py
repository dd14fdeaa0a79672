"""The tiers as one store: `StorageManager`, the memory objects that move through it, and
`StorageBackend`, for a tier of one's own. docs/storage-backends.md shows how to write one.
"""

from __future__ import annotations

from lmcache_rs.layouts import MemoryFormat
from lmcache_rs.storage.backend import StorageBackend, StorageBackendInterface
from lmcache_rs.storage.events import EventManager, EventStatus, EventType
from lmcache_rs.storage.local_cpu import LocalCPUBackend
from lmcache_rs.storage.local_disk import LocalDiskBackend
from lmcache_rs.storage.manager import StorageManager, allocate_and_copy_objects
from lmcache_rs.storage.memory_obj import LayerView, MemoryObj, MemoryObjMetadata
from lmcache_rs.storage.record import key_text
from lmcache_rs.storage.remote import RemoteBackend

__all__ = [
    "EventManager",
    "EventStatus",
    "EventType",
    "LayerView",
    "LocalCPUBackend",
    "LocalDiskBackend",
    "MemoryFormat",
    "MemoryObj",
    "MemoryObjMetadata",
    "RemoteBackend",
    "StorageBackend",
    "StorageBackendInterface",
    "StorageManager",
    "allocate_and_copy_objects",
    "key_text",
]
