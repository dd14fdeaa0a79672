"""This library's own paths, as an engine developer calls them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import cbor2
import numpy
import torch
from answering import Answers

from lmcache_rs import ChunkedTokenDatabase, LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata

BLOCK = 16
CHUNK = 256
POOL_GB = 0.25


def nanoseconds(work: Callable[[], Any]) -> int:
    began = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - began


class Scene:
    """A token database, and engines over the smallest KV there is."""

    def __init__(self) -> None:
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK, local_cpu=True, max_local_cpu_size=POOL_GB
        )
        self.database = ChunkedTokenDatabase(self.config, metadata())
        self._engines: dict[str, tuple[LMCacheEngine, list[torch.Tensor]]] = {}

    def process_tokens(self, seed: int, tokens: int, vocabulary: int) -> dict[str, int]:
        """With whole keys, as LMCache makes them, and with the hashes alone."""
        asked = draw(seed, tokens, vocabulary)
        process = self.database.process_tokens
        return {
            "ns": nanoseconds(lambda: list(process(asked))),
            "hashes_only": nanoseconds(lambda: list(process(asked, make_key=False))),
        }

    def hashing(
        self, seed: int, tokens: int, vocabulary: int, repeats: int
    ) -> dict[str, list[int]]:
        """Ours and hashlib over the same bytes, in turn."""
        asked = draw(seed, tokens, vocabulary)
        chain = self.chain(asked)
        inputs = []
        parent = self.database.none_hash
        for index, start in enumerate(range(0, tokens, CHUNK)):
            ids = asked[start : start + CHUNK].tolist()
            inputs.append(cbor2.dumps((parent, ids, None), canonical=True))
            parent = hashlib.sha256(inputs[-1]).digest()
            assert chain[32 * index : 32 * index + 32] == parent, "other bytes than the chain's"

        def bare() -> None:
            for data in inputs:
                hashlib.sha256(data).digest()

        times: dict[str, list[int]] = {"ours": [], "hashlib": []}
        for turn in range(repeats):
            arms = [("ours", lambda: self.chain(asked)), ("hashlib", bare)]
            for name, work in arms if turn % 2 else arms[::-1]:
                times[name].append(nanoseconds(work))
        return times

    def chain(self, tokens: Any) -> bytes:
        chain = self.database.new_chain()
        chain.extend(tokens)
        return chain.hashes()

    def engine(self, layout: str, tokens: int) -> tuple[LMCacheEngine, list[torch.Tensor]]:
        """One layer; with `opaque` a byte a token, with `split` a head of one byte."""
        if layout not in self._engines:
            blocks = tokens // BLOCK
            shape = (blocks, BLOCK) if layout == "opaque" else (2, blocks, BLOCK, 1, 1)
            kind: Any = layout
            engine = LMCacheEngine(self.config, metadata(), layout=kind)
            self._engines[layout] = engine, [torch.zeros(shape, dtype=torch.int8)]
        return self._engines[layout]

    def engine_step(self, layout: str, seed: int, tokens: int) -> dict[str, int]:
        """A new prompt stored, stored again, and retrieved."""
        engine, kv = self.engine(layout, tokens)
        asked = draw(seed, tokens, 32_000)
        where: dict[str, Any] = {"kvcaches": kv, "slot_mapping": torch.arange(tokens)}
        told: dict[str, Any] = {}

        def store() -> None:
            told["stored"] = engine.store(asked, **where)

        def retrieve() -> None:
            told["retrieved"] = engine.retrieve(asked, **where)

        store_ns = nanoseconds(store)
        assert told["stored"] == tokens, told
        again_ns = nanoseconds(store)
        retrieve_ns = nanoseconds(retrieve)
        assert int(told["retrieved"].sum()) == tokens, told
        return {"store": store_ns, "store_again": again_ns, "retrieve": retrieve_ns}


def metadata() -> LMCacheMetadata:
    return LMCacheMetadata(
        model_name="m", world_size=1, worker_id=0, kv_dtype="int8", block_size=BLOCK
    )


def draw(seed: int, tokens: int, vocabulary: int) -> numpy.ndarray[Any, Any]:
    return numpy.random.default_rng(seed).integers(0, vocabulary, tokens, dtype=numpy.int64)


if __name__ == "__main__":
    # Two cores are shared with whatever else runs; helpers of torch's would only wait for them.
    torch.set_num_threads(1)
    answers, scene = Answers(), Scene()
    answers.serve(
        {
            "process_tokens": scene.process_tokens,
            "hashing": scene.hashing,
            "engine_step": scene.engine_step,
        }
    )
