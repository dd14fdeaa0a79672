"""The engine as a library: plain torch tensors, no vLLM."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from lmcache_rs import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata

LAYERS, BLOCKS, BLOCK, HEADS, HEAD = 3, 24, 4, 2, 8
CHUNK = 8
META = LMCacheMetadata("m", 1, 0, "float32")


def settings(**changes: object) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.from_defaults(
        **{"chunk_size": CHUNK, "max_local_cpu_size": 0.002, **changes}
    )


@pytest.fixture
def engine() -> Iterator[LMCacheEngine]:
    with LMCacheEngine(settings(), META) as engine:
        yield engine
        assert_books_balance(engine)


def assert_books_balance(engine: LMCacheEngine) -> None:
    assert engine.local_cpu is not None
    audit = engine.local_cpu.audit()
    assert audit["free_bytes"] + audit["cached_bytes"] == audit["capacity_bytes"], audit
    assert (audit["leased_bytes"], audit["reserved_bytes"], audit["leases"]) == (0, 0, 0)


def random_caches(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(2, BLOCKS, BLOCK, HEADS, HEAD).to(dtype) for _ in range(LAYERS)]


def random_slots(num_tokens: int, seed: int = 0) -> torch.Tensor:
    slots = torch.randperm(BLOCKS * BLOCK, generator=torch.Generator().manual_seed(seed))
    return slots[:num_tokens].to(torch.int64)


def of_slots(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`[2, tokens, heads, head]` at the given slots: the reference for what a token's KV is."""
    return cache[:, slots // BLOCK, slots % BLOCK]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_what_is_stored_comes_back_at_other_slots(
    engine: LMCacheEngine, dtype: torch.dtype
) -> None:
    tokens, caches = list(range(20)), random_caches(dtype)
    before, after = random_slots(20, seed=1), random_slots(20, seed=2)
    assert engine.store(tokens, kvcaches=caches, slot_mapping=before) == 16
    expected = [of_slots(cache, before).clone() for cache in caches]
    noise = [cache.clone() for cache in random_caches(dtype)]
    for cache, fresh in zip(caches, noise, strict=True):
        cache.copy_(fresh)
    ret_mask = engine.retrieve(tokens, kvcaches=caches, slot_mapping=after)
    assert ret_mask.tolist() == [True] * 16 + [False] * 4
    for cache, kv, fresh in zip(caches, expected, noise, strict=True):
        assert torch.equal(of_slots(cache, after)[:, :16], kv[:, :16])
        others = torch.ones(BLOCKS * BLOCK, dtype=torch.bool)
        others[after[:16]] = False
        untouched = others.nonzero().squeeze(1)
        assert torch.equal(of_slots(cache, untouched), of_slots(fresh, untouched))


@pytest.mark.parametrize("num_false", range(2 * CHUNK + 1))
def test_any_count_of_held_tokens_is_right_and_none_of_them_is_written(
    engine: LMCacheEngine, num_false: int
) -> None:
    tokens, caches, slots = list(range(24)), random_caches(), random_slots(24)
    engine.store(tokens, kvcaches=caches, slot_mapping=slots)
    stored = [of_slots(cache, slots).clone() for cache in caches]
    for cache in caches:
        cache.zero_()
    mask = torch.arange(24) >= num_false
    ret_mask = engine.retrieve(tokens, mask, kvcaches=caches, slot_mapping=slots)
    assert torch.equal(ret_mask, mask)
    for cache, kv in zip(caches, stored, strict=True):
        assert torch.equal(of_slots(cache, slots)[:, num_false:], kv[:, num_false:])
        assert not of_slots(cache, slots)[:, :num_false].any()


def test_a_store_mask_skips_whole_chunks_only(engine: LMCacheEngine) -> None:
    tokens, caches, slots = list(range(24)), random_caches(), random_slots(24)
    mask = [False] * 11 + [True] * 13
    assert engine.store(tokens, mask, kvcaches=caches, slot_mapping=slots) == 16
    assert engine.lookup(tokens) == 0, "the first chunk was skipped"
    assert engine.store(tokens, kvcaches=caches, slot_mapping=slots) == 8
    assert engine.lookup(tokens) == 24


def test_a_second_store_stores_nothing_and_a_longer_prompt_only_its_new_chunks(
    engine: LMCacheEngine,
) -> None:
    caches, slots = random_caches(), random_slots(40)

    def store(num_tokens: int) -> int:
        tokens = list(range(num_tokens))
        return engine.store(tokens, kvcaches=caches, slot_mapping=slots[:num_tokens])

    assert [store(16), store(16), store(19), store(40)] == [16, 0, 0, 24]


def test_other_extra_keys_and_tags_never_hit_and_the_same_do(engine: LMCacheEngine) -> None:
    tokens, caches, slots = list(range(16)), random_caches(), random_slots(16)
    identities: list[dict[str, object]] = [
        {},
        {"extra_keys": (("lora", "a", "/p"),)},
        {"extra_keys": (("cache_salt", "a"),)},
        {"request_configs": {"lmcache.tag.tenant": "a"}},
        {"request_configs": {"lmcache.tag.tenant": "b"}},
    ]
    for number, identity in enumerate(identities):
        assert engine.lookup(tokens, **identity) == 0  # type: ignore[arg-type]
        engine.store(tokens, kvcaches=caches, slot_mapping=slots, **identity)  # type: ignore[arg-type]
        for earlier in identities[: number + 1]:
            assert engine.lookup(tokens, **earlier) == 16  # type: ignore[arg-type]


def test_unfull_tails_are_stored_where_asked() -> None:
    tokens, slots = list(range(11)), random_slots(11)
    with LMCacheEngine(settings(save_unfull_chunk=True), META) as engine:
        caches = random_caches()
        assert engine.store(tokens, kvcaches=caches, slot_mapping=slots) == 11
        kv = of_slots(caches[0], slots).clone()
        caches[0].zero_()
        assert engine.retrieve(tokens, kvcaches=caches, slot_mapping=slots).all()
        assert torch.equal(of_slots(caches[0], slots), kv)
        assert engine.lookup(tokens[:10]) == 8, "a tail of another length is another chunk"
        assert_books_balance(engine)


def test_slots_of_minus_one_are_neither_stored_nor_written(engine: LMCacheEngine) -> None:
    tokens, caches, slots = list(range(24)), random_caches(), random_slots(24)
    holed = slots.clone()
    holed[18] = -1
    assert engine.store(tokens, kvcaches=caches, slot_mapping=holed) == 16
    assert engine.store(tokens, kvcaches=caches, slot_mapping=slots) == 8
    ret_mask = engine.retrieve(tokens, kvcaches=caches, slot_mapping=holed)
    assert ret_mask.tolist() == [at != 18 for at in range(24)]


def test_lookup_leases_until_retrieve_or_release(engine: LMCacheEngine) -> None:
    tokens, caches, slots = list(range(16)), random_caches(), random_slots(16)
    engine.store(tokens, kvcaches=caches, slot_mapping=slots)
    assert engine.local_cpu is not None
    for end in (
        lambda: engine.release("r"),
        lambda: engine.retrieve(tokens, kvcaches=caches, slot_mapping=slots, req_id="r"),
    ):
        assert engine.lookup(tokens, lookup_id="r") == 16
        assert engine.lookup(tokens, lookup_id="r") == 16
        assert engine.local_cpu.audit()["leases"] == 1
        end()
        assert engine.local_cpu.audit()["leases"] == 0
    assert not engine.release("never")


def test_memory_that_ends_keeps_the_prefix_that_fits_and_evicts_the_least_recent() -> None:
    # Each chunk takes one page: 3 layers x 8 tokens x 2 planes x 2 heads x 8 x 4 bytes = 3072.
    with LMCacheEngine(settings(max_local_cpu_size=4 * 4096 / 2**30), META) as engine:
        caches, slots = random_caches(), random_slots(64)
        long = list(range(64))
        assert engine.store(long, kvcaches=caches, slot_mapping=slots) == 32
        assert engine.lookup(long) == 32
        other = list(range(100, 116))
        assert engine.store(other, kvcaches=caches, slot_mapping=slots[:16]) == 16
        assert engine.lookup(long) == 16, "the suffix went first"
        assert_books_balance(engine)


def test_a_pool_smaller_than_a_chunk_refuses_and_never_fails() -> None:
    meta = LMCacheMetadata("m", 1, 0, "float32")
    with LMCacheEngine(settings(chunk_size=64, max_local_cpu_size=4096 / 2**30), meta) as engine:
        caches, slots = random_caches(), random_slots(64)
        tokens = list(range(64))
        assert engine.store(tokens, kvcaches=caches, slot_mapping=slots) == 0
        assert not engine.retrieve(tokens, kvcaches=caches, slot_mapping=slots).any()


def test_without_host_memory_nothing_is_kept() -> None:
    with LMCacheEngine(settings(local_cpu=False), META) as engine:
        caches, slots = random_caches(), random_slots(8)
        assert engine.store(list(range(8)), kvcaches=caches, slot_mapping=slots) == 0
        assert engine.lookup(list(range(8))) == 0


def test_opaque_blocks_are_moved_whole() -> None:
    meta = LMCacheMetadata("m", 1, 0, "float32", block_size=BLOCK)
    with LMCacheEngine(settings(), meta, layout="opaque") as engine:
        caches = [torch.randn(BLOCKS, HEADS, BLOCK, 2 * HEAD) for _ in range(LAYERS)]
        table = random.Random(3).sample(range(BLOCKS), 4)
        slots = torch.tensor([b * BLOCK + at for b in table for at in range(BLOCK)])
        tokens = list(range(16))
        assert engine.store(tokens, kvcaches=caches, slot_mapping=slots) == 16
        expected = [cache[table].clone() for cache in caches]
        for cache in caches:
            cache.zero_()
        mask = [False] * 6 + [True] * 10
        ret_mask = engine.retrieve(tokens, mask, kvcaches=caches, slot_mapping=slots)
        # Tokens 6 and 7 share a block with tokens that the engine holds: they are left alone.
        assert ret_mask.tolist() == [False] * 8 + [True] * 8
        for cache, kv in zip(caches, expected, strict=True):
            assert not cache[table[:2]].any()
            assert torch.equal(cache[table[2:]], kv[2:])
        shifted = slots + 1
        with pytest.raises(ValueError, match="whole blocks of 4 tokens"):
            engine.store(list(range(50, 66)), kvcaches=caches, slot_mapping=shifted)
        assert_books_balance(engine)


def test_two_engines_in_one_process_share_nothing() -> None:
    tokens, caches, slots = list(range(16)), random_caches(), random_slots(16)
    with LMCacheEngine(settings(), META) as one, LMCacheEngine(settings(), META) as other:
        one.store(tokens, kvcaches=caches, slot_mapping=slots)
        assert (one.lookup(tokens), other.lookup(tokens)) == (16, 0)
        assert not other.retrieve(tokens, kvcaches=caches, slot_mapping=slots).any()


def arguments(**changes: object) -> dict[str, object]:
    return {
        "tokens": list(range(16)),
        "kvcaches": random_caches(),
        "slot_mapping": random_slots(16),
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"slot_mapping": random_slots(15)}, ValueError, "15 entries for 16 tokens"),
        ({"slot_mapping": random_slots(16).int()}, TypeError, "must be int64"),
        ({"slot_mapping": random_slots(16) + 96}, ValueError, "outside the registered cache"),
        ({"slot_mapping": random_slots(16) - 200}, ValueError, "outside the registered cache"),
        ({"mask": [True] * 15}, ValueError, "one bool per token"),
        ({"mask": [True, False] * 8}, ValueError, "run of False"),
        ({"mask": torch.ones(16)}, TypeError, "must be bool"),
        ({"kvcaches": []}, ValueError, "one a layer"),
        ({"kvcaches": [torch.zeros(4, 4)]}, ValueError, "another layout"),
        (
            {"kvcaches": [torch.zeros(2, 4, 4, 2, 8), torch.zeros(2, 4, 4, 2, 4)]},
            ValueError,
            "alike",
        ),
        ({"tokens": [-1] * 16}, (ValueError, OverflowError), "4294967295"),
    ],
)
def test_arguments_that_contradict_each_other_are_named(
    engine: LMCacheEngine, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    for verb in (engine.store, engine.retrieve):
        if verb == engine.retrieve:
            engine.store(**arguments())  # type: ignore[arg-type]
        with pytest.raises(error, match=message):
            verb(**arguments(**changes))  # type: ignore[operator]


def test_a_closed_engine_says_so() -> None:
    engine = LMCacheEngine(settings(), META)
    engine.close()
    engine.close()
    for verb in (engine.store, engine.retrieve):
        with pytest.raises(RuntimeError, match="closed"):
            verb(**arguments())  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="closed"):
        engine.lookup([1])


def test_a_forked_child_is_told_and_harms_nobody() -> None:
    engine = LMCacheEngine(settings(), META)
    engine.store(**arguments())  # type: ignore[arg-type]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"no error"
        try:
            engine.lookup(list(range(16)))
        except RuntimeError as error:
            said = str(error).encode()
        finally:
            os.write(write, said)
            os._exit(0)
    os.close(write)
    assert "made in process" in os.read(read, 1000).decode()
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    assert engine.lookup(list(range(16))) == 16
    engine.close()


def test_importing_is_quick_and_pulls_in_no_engine() -> None:
    program = (
        "import sys, time; t = time.perf_counter(); import lmcache_rs; "
        "print(time.perf_counter() - t); "
        "print([m for m in ('torch', 'vllm', 'numpy', 'yaml', 'zmq') if m in sys.modules])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, check=True, text=True
        ).stdout.split("\n")
        for _ in range(3)
    ]
    assert min(float(seconds) for seconds, *_ in outputs) < 0.150
    assert {modules for _, modules, *_ in outputs} == {"[]"}
