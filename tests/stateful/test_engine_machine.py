"""Any sequence of calls to the engine, against a dict.

The KV of a token is a pure function of everything that may decide it (namespace and the whole
prefix), so whatever comes back can be checked without knowing what was evicted. The machine with
room for everything also knows exactly what must be there.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lmcache_rs import CacheEngineKey, LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata

LAYERS, BLOCKS, BLOCK, HEADS, HEAD, CHUNK = 2, 32, 4, 1, 4, 8
PAGE_BYTES = 4096
"""What a chunk takes: it is smaller than a page."""
NUM_SLOTS = BLOCKS * BLOCK

# Few tokens and few lengths, so that prompts share prefixes and repeat.
prompts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=5 * CHUNK).map(
    # Runs of one chunk each make common prefixes likely.
    lambda ids: [ids[at // CHUNK % len(ids)] for at in range(len(ids))]
)
tenants = st.sampled_from(["", "a", "b"])
lookup_ids = st.sampled_from(["r0", "r1", "r2"])


def true_kv(tenant: str, tokens: list[int], layer: int) -> torch.Tensor:
    """`[2, tokens, heads, head]`: the KV that these tokens have, and no others."""
    rows = []
    for end in range(1, len(tokens) + 1):
        seed = hashlib.sha256(repr((tenant, tokens[:end], layer)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:8]) >> 1)
        rows.append(torch.randn(2, HEADS, HEAD, generator=generator))
    return torch.stack(rows, dim=1)


class EngineMachine(RuleBasedStateMachine):
    """A pool of any size; `exact` if nothing can be evicted from it."""

    pool_chunks = 6
    exact = False

    @initialize()
    def start(self) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK, max_local_cpu_size=self.pool_chunks * PAGE_BYTES / 2**30
        )
        self.engine = LMCacheEngine(config, LMCacheMetadata("m", 1, 0, "float32"))
        self.stored: set[tuple[str, tuple[int, ...]]] = set()
        self.promised: dict[str, tuple[str, list[int], int]] = {}
        self.random = random.Random(0)

    def configs(self, tenant: str) -> dict[str, object] | None:
        return {"lmcache.tag.tenant": tenant} if tenant else None

    def fresh(self, num_tokens: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        caches = [torch.full((2, BLOCKS, BLOCK, HEADS, HEAD), 7.0) for _ in range(LAYERS)]
        slots = torch.tensor(self.random.sample(range(NUM_SLOTS), num_tokens), dtype=torch.int64)
        return caches, slots

    def put(self, tenant: str, tokens: list[int]) -> int:
        caches, slots = self.fresh(len(tokens))
        for layer, cache in enumerate(caches):
            cache[:, slots // BLOCK, slots % BLOCK] = true_kv(tenant, tokens, layer)
        return self.engine.store(
            tokens, kvcaches=caches, slot_mapping=slots, request_configs=self.configs(tenant)
        )

    def get(self, tenant: str, tokens: list[int], num_false: int, req_id: str | None) -> int:
        """Retrieves, checks every written slot and every one left alone; the loaded end."""
        caches, slots = self.fresh(len(tokens))
        mask = torch.arange(len(tokens)) >= num_false
        ret_mask = self.engine.retrieve(
            tokens,
            mask,
            kvcaches=caches,
            slot_mapping=slots,
            request_configs=self.configs(tenant),
            req_id=req_id,
        )
        loaded = int(ret_mask.sum())
        end = num_false + loaded
        assert ret_mask.tolist() == [num_false <= at < end for at in range(len(tokens))]
        for layer, cache in enumerate(caches):
            kv = true_kv(tenant, tokens, layer)
            written = slots[num_false:end]
            assert torch.equal(cache[:, written // BLOCK, written % BLOCK], kv[:, num_false:end])
            cache[:, written // BLOCK, written % BLOCK] = 7.0
            assert bool((cache == 7.0).all()), "a slot outside the request was written"
        return end if loaded else 0

    def chunks_of(self, tenant: str, tokens: list[int]) -> list[tuple[str, tuple[int, ...]]]:
        ends = range(CHUNK, len(tokens) + 1, CHUNK)
        return [(tenant, tuple(tokens[:end])) for end in ends]

    def stored_prefix(self, tenant: str, tokens: list[int]) -> int:
        count = 0
        for chunk in self.chunks_of(tenant, tokens):
            if chunk not in self.stored:
                break
            count += 1
        return count * CHUNK

    @rule(tenant=tenants, tokens=prompts)
    def store(self, tenant: str, tokens: list[int]) -> None:
        num_new = self.put(tenant, tokens)
        chunks = self.chunks_of(tenant, tokens)
        if self.exact:
            assert num_new == sum(chunk not in self.stored for chunk in chunks) * CHUNK
        assert num_new % CHUNK == 0
        self.stored.update(chunks)

    @rule(tenant=tenants, tokens=prompts, share=st.floats(0, 1))
    def retrieve(self, tenant: str, tokens: list[int], share: float) -> None:
        num_false = int(share * len(tokens))
        end = self.get(tenant, tokens, num_false, None)
        expected = self.stored_prefix(tenant, tokens)
        if self.exact:
            assert end == (expected if expected > num_false else 0)
        else:
            assert end <= expected

    @rule(tenant=tenants, tokens=prompts, lookup_id=lookup_ids)
    def lookup(self, tenant: str, tokens: list[int], lookup_id: str) -> None:
        hit_tokens = self.engine.lookup(
            tokens, lookup_id=lookup_id, request_configs=self.configs(tenant)
        )
        expected = self.stored_prefix(tenant, tokens)
        assert hit_tokens == expected if self.exact else hit_tokens <= expected
        self.promised[lookup_id] = (tenant, tokens, hit_tokens)

    @rule(lookup_id=lookup_ids)
    def retrieve_what_was_promised(self, lookup_id: str) -> None:
        tenant, tokens, hit_tokens = self.promised.pop(lookup_id, ("", [1], 0))
        assert self.get(tenant, tokens, 0, lookup_id) >= hit_tokens

    @rule(lookup_id=lookup_ids)
    def abort(self, lookup_id: str) -> None:
        _, _, hit_tokens = self.promised.pop(lookup_id, ("", [], 0))
        assert self.engine.release(lookup_id) == (hit_tokens > 0)

    @rule()
    def clear(self) -> None:
        removed = self.engine.clear()
        assert removed == len(self.stored) if self.exact else removed <= len(self.stored)
        self.stored.clear()
        self.promised.clear()
        for lookup_id in ("r0", "r1", "r2"):
            self.engine.release(lookup_id)

    def prefix_of(self, tenant: str) -> str | None:
        """The namespace of one tenant. That of no tenant is the beginning of every other's."""
        registered = self.engine._registration
        return registered and registered.namespaces.text(self.configs(tenant))

    def forget(self, goes: Callable[[str], bool], removed: int) -> None:
        gone = {chunk for chunk in self.stored if goes(chunk[0])}
        assert removed == len(gone) if self.exact else removed <= len(gone)
        self.stored -= gone

    @rule(tenant=tenants)
    def clear_one(self, tenant: str) -> None:
        if prefix := self.prefix_of(tenant):
            removed = self.engine.clear(prefix)
            self.forget(lambda of: not tenant or of == tenant, removed)

    @rule(tenant=tenants)
    def retain_one(self, tenant: str) -> None:
        if prefix := self.prefix_of(tenant):
            removed = self.engine.storage_manager.retain(prefix)
            self.forget(lambda of: tenant != "" and of != tenant, removed)

    @rule(tenant=tenants, tokens=prompts)
    def get_objects(self, tenant: str, tokens: list[int]) -> None:
        """What the store hands out is what the engine stored, held or not."""
        prefix = self.prefix_of(tenant)
        if prefix is None:
            return
        keys = [
            CacheEngineKey.from_string(f"{prefix}@hash={chunk_hash.hex()}")
            for _, _, chunk_hash in self.engine.token_database.process_tokens(
                tokens[: len(tokens) // CHUNK * CHUNK], make_key=False
            )
        ]
        objects = self.engine.storage_manager.batched_get(keys)
        held = [memory_obj for memory_obj in objects if memory_obj is not None]
        expected = self.stored_prefix(tenant, tokens) // CHUNK
        assert len(held) == expected if self.exact else len(held) <= expected
        for layer, views in enumerate(self.engine.storage_manager.layerwise_batched_get(keys)):
            kv = true_kv(tenant, tokens, layer)
            for at, view in enumerate(views):
                if view is not None:
                    rows = kv[:, at * CHUNK : (at + 1) * CHUNK].flatten(2).transpose(0, 1)
                    assert torch.equal(view.tensor, rows)
        for memory_obj in held:
            memory_obj.ref_count_up()

    @rule(tenant=tenants, tokens=prompts, others=st.lists(prompts, min_size=2, max_size=4))
    def many_at_once(self, tenant: str, tokens: list[int], others: list[list[int]]) -> None:
        if self.exact and len(self.stored) + 5 * len(others) > self.pool_chunks:
            return
        with ThreadPoolExecutor(4) as threads:
            stores = [threads.submit(self.put, tenant, other) for other in others]
            loads = [threads.submit(self.get, tenant, tokens, 0, None) for _ in range(3)]
            for future in [*stores, *loads]:
                future.result(timeout=30)
        for other in others:
            self.stored.update(self.chunks_of(tenant, other))

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert self.engine.local_cpu is not None
        books = self.engine.local_cpu.audit()
        assert books["free_bytes"] + books["cached_bytes"] == books["capacity_bytes"]
        assert books["reserved_bytes"] == 0
        assert books["leases"] == sum(hits > 0 for _, _, hits in self.promised.values())

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert self.engine.local_cpu is not None
        self.clear()
        books = self.engine.local_cpu.audit()
        assert books["free_bytes"] == books["capacity_bytes"], "all bytes are free"
        self.engine.close()


class RoomyEngineMachine(EngineMachine):
    pool_chunks = 2000
    exact = True


for machine in (EngineMachine, RoomyEngineMachine):
    machine.TestCase.settings = settings(
        max_examples=60,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
TestSmallPool = EngineMachine.TestCase
TestRoomyPool = RoomyEngineMachine.TestCase
