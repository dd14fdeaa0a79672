"""LMCache's library paths, in LMCache's own environment, as its own adapter calls them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("PYTHONHASHSEED", "0")

import numpy
import torch
from answering import Answers
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase

CHUNK = 256
LAYERS, HEADS, HEAD = 1, 1, 8
POOL_GB = 1.0


def nanoseconds(work: Callable[[], Any]) -> int:
    began = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - began


class Scene:
    """A token database with SHA-256, and an engine with its default hash and a mock copy."""

    def __init__(self) -> None:
        self.metadata = LMCacheMetadata(
            model_name="m",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(LAYERS, 2, CHUNK, HEADS, HEAD),
        )
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK, pre_caching_hash_algorithm="sha256_cbor"
        )
        self.database = ChunkedTokenDatabase(config, self.metadata)
        assert "cbor" in self.database.hash_func.__name__, self.database.hash_func
        self._engine: Any = None

    def process_tokens(self, seed: int, tokens: int, vocabulary: int) -> dict[str, int]:
        """The better of what it takes: a list, which vLLM has, and a tensor."""
        asked = draw(seed, tokens, vocabulary)
        forms = {"list": asked.tolist(), "tensor": torch.from_numpy(asked)}
        times = {
            name: nanoseconds(lambda form=form: list(self.database.process_tokens(form)))
            for name, form in forms.items()
        }
        return {"ns": min(times.values()), **times}

    def engine_step(self, seed: int, tokens: int) -> dict[str, int]:
        """A new prompt stored, stored again, and retrieved."""
        if self._engine is None:
            config = LMCacheEngineConfig.from_defaults(
                chunk_size=CHUNK, local_cpu=True, max_local_cpu_size=POOL_GB
            )
            self._engine = LMCacheEngineBuilder.get_or_create(
                "bench",
                config,
                self.metadata,
                MockGPUConnector(self.metadata.kv_shape),
                lambda tensor, rank: None,
                lambda value, rank: value,
            )
            self._engine.post_init()
        engine = self._engine
        asked = draw(seed, tokens, 32_000).tolist()
        where: dict[str, Any] = {"kvcaches": [], "slot_mapping": torch.arange(tokens)}
        where["req_id"] = f"request-{seed}"
        told: dict[str, Any] = {}

        def retrieve() -> None:
            told["retrieved"] = engine.retrieve(asked, **where)

        store_ns = nanoseconds(lambda: engine.store(asked, **where))
        again_ns = nanoseconds(lambda: engine.store(asked, **where))
        retrieve_ns = nanoseconds(retrieve)
        assert int(told["retrieved"].sum()) == tokens, told
        return {"store": store_ns, "store_again": again_ns, "retrieve": retrieve_ns}


def draw(seed: int, tokens: int, vocabulary: int) -> numpy.ndarray[Any, Any]:
    return numpy.random.default_rng(seed).integers(0, vocabulary, tokens, dtype=numpy.int64)


if __name__ == "__main__":
    # Two cores are shared with whatever else runs; helpers of torch's would only wait for them.
    torch.set_num_threads(1)
    answers, scene = Answers(), Scene()
    answers.serve({"process_tokens": scene.process_tokens, "engine_step": scene.engine_step})
