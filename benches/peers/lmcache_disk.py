"""LMCache's tier on local disks, by its own backend, in LMCache's own environment.

    lmcache_disk.py FOLDER CHUNK_BYTES COUNT

With direct I/O, its setting for what is to be read back cold: so neither side reads memory.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("PYTHONHASHSEED", "0")

import torch
from answering import Answers
from lmcache.utils import CacheEngineKey
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata

CHUNK, HIDDEN = 256, 512
LAYER_BYTES = 2 * CHUNK * HIDDEN * 2
GIB = 1 << 30
PATIENCE_NS = 60 * 10**9


class Scene:
    """An engine with a pool that holds a round twice, and its disk backend."""

    def __init__(self, folder: str, chunk_bytes: int, count: int) -> None:
        layers = chunk_bytes // LAYER_BYTES
        self._shape = torch.Size([2, layers, CHUNK, HIDDEN])
        metadata = LMCacheMetadata(
            model_name="m",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(layers, 2, CHUNK, 8, HIDDEN // 8),
        )
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK,
            local_cpu=True,
            max_local_cpu_size=3.0 * chunk_bytes * count / GIB,
            local_disk=folder,
            # What it is told to remove goes on counting.
            max_local_disk_size=64.0 * chunk_bytes * count / GIB,
            extra_config={"use_odirect": True},
        )
        engine = LMCacheEngineBuilder.get_or_create(
            "bench",
            config,
            metadata,
            MockGPUConnector(metadata.kv_shape),
            lambda tensor, rank: None,
            lambda value, rank: value,
        )
        engine.post_init()
        backends = engine.storage_manager.storage_backends
        self._memory, self._disk = backends["LocalCPUBackend"], backends["LocalDiskBackend"]
        self._folder = folder
        self._keys: list[Any] = []
        self._count = count
        self._round = 0
        self._chunks = [self._allocated() for _ in range(count)]
        for chunk in self._chunks:
            chunk.tensor.view(torch.int16).random_(0, 1 << 14)
        self._wanted = self._chunks[0].tensor.view(torch.int16).sum().item()

    def _allocated(self) -> Any:
        chunk = self._memory.allocate(self._shape, torch.bfloat16, MemoryFormat.KV_2LTD)
        assert chunk is not None, "the pool holds a round"
        return chunk

    def put(self) -> dict[str, int]:
        """Nanoseconds until a round of chunks is written and known."""
        self._round += 1
        first = self._round * self._count
        self._keys = [
            CacheEngineKey("m", 1, 0, first + number, torch.bfloat16)
            for number in range(self._count)
        ]
        began = time.perf_counter_ns()
        self._disk.batched_submit_put_task(self._keys, self._chunks)
        while not all(self._disk.contains(key) for key in self._keys):
            assert time.perf_counter_ns() - began < PATIENCE_NS, "it stores what it took"
            time.sleep(2e-4)
        return {"ns": time.perf_counter_ns() - began}

    def get(self) -> dict[str, int]:
        """Nanoseconds of reading the round back, none of it in the page cache."""
        for name in os.listdir(self._folder):
            fd = os.open(os.path.join(self._folder, name), os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        began = time.perf_counter_ns()
        chunks = self._disk.batched_get_blocking(self._keys)
        took = time.perf_counter_ns() - began
        assert chunks[0].tensor.view(torch.int16).sum().item() == self._wanted
        for chunk in chunks:
            chunk.ref_count_down()
        for key in self._keys:
            self._disk.remove(key)
        return {"ns": took}


if __name__ == "__main__":
    torch.set_num_threads(1)
    path, size, number = sys.argv[1:]
    answers, scene = Answers(), Scene(path, int(size), int(number))
    answers.serve({"put": scene.put, "get": scene.get})
