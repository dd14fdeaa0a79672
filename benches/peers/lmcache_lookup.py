"""LMCache's lookup across processes: a worker that serves, or a scheduler that asks.

    lmcache_lookup.py serve SOCKET CHUNKS BURNERS
    lmcache_lookup.py ask SOCKET CHUNKS

The asking side is given its hashes, as ours is: hashing has a line of its own.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("PYTHONHASHSEED", "0")

import torch
from answering import Answers
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.lookup_client.lmcache_lookup_client import LMCacheLookupClient, LMCacheLookupServer
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.rpc.zmq_transport import (
    SocketParams,
    ZmqReqRepClientTransport,
    ZmqRouterServerTransport,
)

CHUNK = 256
METADATA = LMCacheMetadata(
    model_name="m",
    world_size=1,
    local_world_size=1,
    worker_id=0,
    local_worker_id=0,
    kv_dtype=torch.bfloat16,
    kv_shape=(1, 2, CHUNK, 1, 8),
)
CONFIG = LMCacheEngineConfig.from_defaults(
    chunk_size=CHUNK,
    local_cpu=True,
    max_local_cpu_size=1.0,
    pre_caching_hash_algorithm="sha256_cbor",
)


def tokens(num_chunks: int) -> list[int]:
    return list(range(num_chunks * CHUNK))


def burn() -> None:
    while True:
        sum(range(1000))


def serve(path: str, num_chunks: int, num_burners: int) -> None:
    answers = Answers()
    engine = LMCacheEngineBuilder.get_or_create(
        "bench",
        CONFIG,
        METADATA,
        MockGPUConnector(METADATA.kv_shape),
        lambda tensor, rank: None,
        lambda value, rank: value,
    )
    engine.post_init()
    asked = tokens(num_chunks)
    engine.store(asked, kvcaches=[], slot_mapping=torch.arange(len(asked)), req_id="stored")
    server = LMCacheLookupServer(engine, METADATA, ZmqRouterServerTransport(path))
    for _ in range(num_burners):
        threading.Thread(target=burn, daemon=True).start()
    answers.serve({"unpin": lambda req_id: engine.lookup_unpin([req_id])}, ready=server.running)


class Asking:
    """A client whose tokens are hashed once."""

    def __init__(self, path: str, num_chunks: int) -> None:
        transport = ZmqReqRepClientTransport([SocketParams(path, 0)], timeout_ms=60_000)
        self._client = LMCacheLookupClient(CONFIG, METADATA, transport)
        self._tokens = tokens(num_chunks)
        database = self._client.token_database
        spans = list(database.process_tokens(self._tokens, make_key=False))
        database.process_tokens = lambda *_, **__: iter(spans)

    def ask(self, count: int) -> dict[str, Any]:
        """Microseconds of each lookup; the tokens that the last one found."""
        times = []
        for number in range(count):
            began = time.perf_counter()
            found = self._client.lookup(self._tokens, f"request-{number}")
            times.append((time.perf_counter() - began) * 1e6)
        return {"us": times, "found": found}


if __name__ == "__main__":
    verb, socket_path, chunks, *rest = sys.argv[1:]
    if verb == "serve":
        serve(socket_path, int(chunks), int(rest[0]))
    else:
        told = Answers()
        told.serve({"ask": Asking(socket_path, int(chunks)).ask})
