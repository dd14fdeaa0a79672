"""Any interleaving of generators over one engine: steps, closes, exceptions, bulk calls, evictions.

At any moment what can be found is whole and right; in the end no lease is left, nothing is half
visible, and every byte is free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_engine_machine import BLOCK, CHUNK, HEAD, HEADS, LAYERS, PAGE_BYTES, prompts, true_kv

from lmcache_rs import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata

LONGEST = 5 * CHUNK
BLOCKS = LONGEST // BLOCK
walk_numbers = st.integers(0, 5)


class Left(Exception):
    """Thrown into a generator."""


class Walk:
    """A generator under way, with its own KV tensors."""

    def __init__(self, engine: LMCacheEngine, tokens: list[int], lookup_id: str | None) -> None:
        self.tokens = tokens
        self.is_load = lookup_id is not None
        self.yielded: list[Any] = []
        self.is_over = False
        self.caches = [torch.full((2, BLOCKS, BLOCK, HEADS, HEAD), 7.0) for _ in range(LAYERS)]
        self.slots = torch.arange(len(tokens))
        where = {"kvcaches": self.caches, "slot_mapping": self.slots}
        self.generator: Generator[Any]
        if self.is_load:
            self.generator = engine.retrieve_layer(tokens, req_id=lookup_id, **where)
        else:
            self.generator = engine.store_layer(tokens, **where)

    def rows(self, layer: int) -> torch.Tensor:
        return self.caches[layer].flatten(1, 2)[:, : len(self.tokens)]

    def step(self) -> None:
        number = len(self.yielded)
        if not self.is_load and 1 <= number <= LAYERS:
            # The engine computes a layer right before the step that copies it, and no sooner.
            self.rows(number - 1).copy_(true_kv("", self.tokens, number - 1))
        try:
            self.yielded.append(next(self.generator))
        except StopIteration:
            assert number == (LAYERS + 3 if self.is_load else LAYERS + 1)
            self.is_over = True
            return
        if not self.is_load:
            assert self.yielded[-1] is None
            if 1 <= number <= LAYERS:
                self.rows(number - 1).fill_(9.0)
            return
        hit = self.yielded[0]
        for layer in range(LAYERS):
            kv = true_kv("", self.tokens, layer)
            is_written = number > layer
            expected = torch.full_like(kv, 7.0)
            if is_written:
                expected[:, :hit] = kv[:, :hit]
            assert torch.equal(self.rows(layer), expected)
        if number == LAYERS + 2:
            assert self.yielded[-1].tolist() == [at < hit for at in range(len(self.tokens))]


class LayerwiseMachine(RuleBasedStateMachine):
    pool_chunks = 6

    @initialize()
    def start(self) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK, max_local_cpu_size=self.pool_chunks * PAGE_BYTES / 2**30
        )
        self.engine = LMCacheEngine(config, LMCacheMetadata("m", 1, 0, "float32"))
        self.walks: list[Walk] = []

    def walk(self, number: int) -> Walk | None:
        return self.walks[number % len(self.walks)] if self.walks else None

    @rule(tokens=prompts)
    def begin_store(self, tokens: list[int]) -> None:
        if len(self.walks) < 6:
            self.walks.append(Walk(self.engine, tokens, None))

    @rule(tokens=prompts, lookup_id=st.sampled_from(["", "r0", "r1"]))
    def begin_load(self, tokens: list[int], lookup_id: str) -> None:
        if len(self.walks) < 6:
            if lookup_id:
                self.engine.lookup(tokens, lookup_id=lookup_id)
            self.walks.append(Walk(self.engine, tokens, lookup_id))

    @rule(number=walk_numbers, count=st.integers(1, LAYERS + 4))
    def step(self, number: int, count: int) -> None:
        walk = self.walk(number)
        for _ in range(count if walk else 0):
            assert walk is not None
            walk.step()

    @rule(number=walk_numbers, how=st.sampled_from(["close", "throw", "forget"]))
    def leave(self, number: int, how: str) -> None:
        walk = self.walk(number)
        if walk is None:
            return
        self.walks.remove(walk)
        if how == "close":
            walk.generator.close()
        elif how == "throw":
            with contextlib.suppress(Left):
                walk.generator.throw(Left())

    @rule(tokens=prompts)
    def bulk(self, tokens: list[int]) -> None:
        walk = Walk(self.engine, tokens, None)
        for layer in range(LAYERS):
            walk.rows(layer).copy_(true_kv("", tokens, layer))
        self.engine.store(tokens, kvcaches=walk.caches, slot_mapping=walk.slots)
        walk.generator.close()

    @rule(tokens=prompts)
    def what_is_found_is_right(self, tokens: list[int]) -> None:
        walk = Walk(self.engine, tokens, "")
        walk.generator.close()
        ret_mask = self.engine.retrieve(tokens, kvcaches=walk.caches, slot_mapping=walk.slots)
        end = int(ret_mask.sum())
        for layer in range(LAYERS):
            kv = true_kv("", tokens, layer)
            assert torch.equal(walk.rows(layer)[:, :end], kv[:, :end])

    @rule()
    def clear(self) -> None:
        assert self.engine.local_cpu is not None
        self.engine.local_cpu.clear()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert self.engine.local_cpu is not None
        books = self.engine.local_cpu.audit()
        used = books["free_bytes"] + books["cached_bytes"] + books["reserved_bytes"]
        # What was evicted while a walk or a lookup holds it is in none of the three.
        assert used <= books["capacity_bytes"]
        is_under_way = any(walk.yielded and not walk.is_over for walk in self.walks)
        if not is_under_way and not books["leases"]:
            assert used == books["capacity_bytes"]
            assert books["reserved_bytes"] == 0

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.walks.clear()
        for lookup_id in ("r0", "r1"):
            self.engine.release(lookup_id)
        assert self.engine.local_cpu is not None
        books = self.engine.local_cpu.audit()
        assert (books["leases"], books["leased_bytes"], books["reserved_bytes"]) == (0, 0, 0)
        assert books["free_bytes"] + books["cached_bytes"] == books["capacity_bytes"]
        self.clear()
        books = self.engine.local_cpu.audit()
        assert books["free_bytes"] == books["capacity_bytes"], "all bytes are free"
        self.engine.close()


LayerwiseMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestLayerwise = LayerwiseMachine.TestCase
