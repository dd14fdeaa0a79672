"""Segments stored at one position and restored at others: through the whole library, with attention
in double precision as the judge."""

from __future__ import annotations

import importlib
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rope_oracle import FAMILIES, HALF_UNITS, SINGLE, Family, partners, rotated

from lmcache_rs import (
    CacheEngineKey,
    LMCacheEngineConfig,
    LMCacheMetadata,
    MemoryFormat,
    SegmentTokenDatabase,
    StorageManager,
)
from lmcache_rs.gpu_connector import (
    Rope,
    VLLMBufferLayerwiseGPUConnector,
    VLLMPagedMemLayerwiseGPUConnector,
    by_layer,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAYERS, BLOCK, BLOCKS = 2, 8, 40
SEPARATOR = [901, 902]
SIZES = [5, 40, 1, 23, 64]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are not worth threads, which many tests at once would fight for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class World:
    """A model whose keys, before their rotation, and values are functions of the token alone."""

    def __init__(self, family: Family, dtype: torch.dtype) -> None:
        self.family, self.dtype = family, dtype
        generator = torch.Generator().manual_seed(6)
        shape = (LAYERS, 1000, 2, family.heads, family.head_size)
        self.table = torch.randn(shape, generator=generator, dtype=torch.float64)
        config = LMCacheEngineConfig.from_defaults(max_local_cpu_size=0.01)
        metadata = LMCacheMetadata("m", 1, 0, str(dtype).removeprefix("torch."))
        self.segments = SegmentTokenDatabase(config, metadata, separator=SEPARATOR)
        self.storage = StorageManager(config)
        self.connector = VLLMBufferLayerwiseGPUConnector(rope=family.rope)

    def kv(self, tokens: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in double precision, the keys at positions 0, 1, 2, …."""
        rows = self.table[layer, tokens]
        keys = rotated(rows[:, 0], torch.arange(len(tokens)), self.family.rope)
        return keys * self.family.rope.attention_scaling, rows[:, 1]

    def caches(self) -> list[torch.Tensor]:
        shape = (2, BLOCKS, BLOCK, self.family.heads, self.family.head_size)
        return [torch.full(shape, 3.0, dtype=self.dtype) for _ in range(LAYERS)]

    def store(self, prompt: list[int], slots: torch.Tensor) -> None:
        """What an engine does that computed the prompt's KV: each layer in turn, then put."""
        caches = self.caches()
        new = [one for one in self.chunks(prompt) if not self.storage.contains(one[2])]
        objects = []
        for start, end, _ in new:
            objects += self.storage.batched_allocate(
                (LAYERS, end - start, 2, self.family.heads * self.family.head_size),
                self.dtype,
                MemoryFormat.KV_T2D,
                cached_positions=[torch.arange(start, end)],
            ) or [pytest.fail("no memory")]
        steps = self.connector.batched_from_gpu(
            list(by_layer(objects)),
            [start for start, _, _ in new],
            [end for _, end, _ in new],
            slot_mapping=slots,
            kvcaches=caches,
        )
        next(steps)
        for layer, cache in enumerate(caches):
            kv = torch.stack(self.kv(prompt, layer)).to(self.dtype)
            cache[:, slots // BLOCK, slots % BLOCK] = kv
            next(steps)
        self.storage.batched_put([key for _, _, key in new], objects)

    def chunks(self, prompt: list[int]) -> list[tuple[int, int, CacheEngineKey]]:
        return list(self.segments.process_tokens(prompt))  # type: ignore[arg-type]

    def restore(
        self, prompt: list[int], slots: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The engine's memory with the stored segments in it, and which tokens those are."""
        caches = self.caches()
        found = [(start, end, self.storage.batched_get([key])[0]) for start, end, key in
                 self.chunks(prompt)]  # fmt: skip
        held = [(start, end, one) for start, end, one in found if one is not None]
        steps = self.connector.batched_to_gpu(
            [start for start, _, _ in held],
            [end for _, end, _ in held],
            slot_mapping=slots,
            kvcaches=caches,
        )
        next(steps)
        for views in by_layer([one for _, _, one in held]):
            steps.send(views)
        assert list(steps) == [None]
        restored = torch.zeros(len(prompt), dtype=torch.bool)
        for start, end, _ in held:
            restored[start:end] = True
        return caches, restored

    def attention(self, keys: torch.Tensor, values: torch.Tensor, at: int) -> torch.Tensor:
        """What a query at position `at` makes of them, in double precision."""
        generator = torch.Generator().manual_seed(9)
        shape = (1, self.family.heads, self.family.head_size)
        query = torch.randn(shape, generator=generator, dtype=torch.float64)
        query = rotated(query, torch.tensor([at]), self.family.rope)
        scores = torch.einsum("qhd,khd->hqk", query, keys) / self.family.head_size**0.5
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def documents() -> list[list[int]]:
    draw = random.Random(2)
    return [[draw.randrange(900) for _ in range(size)] for size in SIZES]


def prompt_of(order: tuple[int, ...], extra: dict[int, list[int]]) -> list[int]:
    """Documents and, before some of them, tokens that nobody stored."""
    prompt = list(extra.get(-1, []))
    for place, number in enumerate(order):
        prompt += [*extra.get(place, []), *documents()[number], *SEPARATOR]
    return prompt


def random_slots(num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(BLOCKS * BLOCK, generator=generator)[:num_tokens]


ORDERS = [
    *itertools.permutations(range(3)),
    (4, 3, 2, 1, 0),
    (3, 4, 0),
    (1,),
]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_restored_segments_attend_as_if_they_had_been_computed_there(
    name: str, dtype: torch.dtype
) -> None:
    world = World(FAMILIES[name], dtype)
    rope = world.family.rope
    whole = prompt_of((0, 1, 2, 3, 4), {})
    world.store(whole, random_slots(len(whole), 1))
    draw = random.Random(name)
    unit, smallest = HALF_UNITS[dtype]
    single = SINGLE if dtype != torch.float64 else 2.0**-40
    for number, order in enumerate(ORDERS):
        # A document nobody has seen makes a gap between two separators; so does each separator.
        unseen = [draw.randrange(900) for _ in range(draw.randint(1, 60))]
        extra = {draw.randrange(len(order)): [*unseen, *SEPARATOR]}
        prompt = prompt_of(order, extra)
        slots = random_slots(len(prompt), number)
        caches, restored = world.restore(prompt, slots)
        assert int(restored.sum()) == sum(SIZES[number] for number in order)
        first, last = restored.nonzero().flatten()[[0, -1]].tolist()
        for layer, cache in enumerate(caches):
            keys, values = cache[:, slots // BLOCK, slots % BLOCK].double()
            wanted_keys, wanted_values = world.kv(prompt, layer)
            size = wanted_keys.abs() + partners(wanted_keys, rope, 0).abs()
            # Rounded when stored, turned, rounded again. |a| + |b| of a pair is at most the square
            # root of 2 times as large at another position.
            roundings = unit * (1 + 2**0.5) * (1 + 2 * unit) + 2 * single
            allowed = roundings * size + 2 * smallest
            off = (keys - wanted_keys).abs()
            assert bool((off <= allowed)[restored].all())
            assert torch.equal(values[restored], wanted_values.to(dtype).double()[restored])
            between = ~restored
            between[:first], between[last:] = False, False
            assert not keys[between].any()
            assert not values[between].any()
            outside = torch.cat([torch.arange(first), torch.arange(last + 1, len(prompt))])
            assert bool((keys[outside] == 3.0).all())
            # And what attention makes of it is what it makes of keys computed here.
            got = world.attention(keys[restored], values[restored], len(prompt))
            right = world.attention(wanted_keys[restored], wanted_values[restored], len(prompt))
            assert torch.allclose(got, right, rtol=0, atol=40 * unit)
    world.storage.close()


def test_layers_come_from_the_store_as_views_of_whole_chunks() -> None:
    world = World(FAMILIES["Qwen2"], torch.float32)
    whole = prompt_of((0, 1), {})
    world.store(whole, random_slots(len(whole), 1))
    prompt = prompt_of((1, 0), {})
    slots, chunks, caches = random_slots(len(prompt), 2), world.chunks(prompt), world.caches()
    steps = world.connector.batched_to_gpu(
        [start for start, _, _ in chunks],
        [end for _, end, _ in chunks],
        slot_mapping=slots,
        kvcaches=caches,
    )
    next(steps)
    for views in world.storage.layerwise_batched_get([key for _, _, key in chunks]):
        steps.send(views)
    assert list(steps) == [None]
    again, _ = world.restore(prompt, slots)
    assert all(map(torch.equal, caches, again))
    # A chunk that is not there is an error with its reason, not a layer of something else.
    world.storage.clear()
    gone = world.connector.batched_to_gpu([0], [5], slot_mapping=slots)
    next(gone)
    with pytest.raises(ValueError, match="a chunk of layer 0 is not there"):
        gone.send([None])
    world.storage.close()


def test_the_plain_layerwise_connector_restores_at_the_same_positions_bit_for_bit() -> None:
    world = World(FAMILIES["GPT-J"], torch.bfloat16)
    prompt = prompt_of((3, 1, 4), {})
    world.store(prompt, random_slots(len(prompt), 1))
    slots, chunks = random_slots(len(prompt), 2), world.chunks(prompt)
    turned, _ = world.restore(prompt, slots)
    for staged in (False, True):
        caches = world.caches()
        steps = VLLMPagedMemLayerwiseGPUConnector(use_gpu=staged).batched_to_gpu(
            [start for start, _, _ in chunks],
            [end for _, end, _ in chunks],
            slot_mapping=slots,
            kvcaches=caches,
        )
        next(steps)
        for views in world.storage.layerwise_batched_get([key for _, _, key in chunks]):
            steps.send(views)
        assert list(steps) == [None]
        for start, end, _ in chunks:
            of_chunk = slots[start:end]
            for one, other in zip(caches, turned, strict=True):
                at = (slice(None), of_chunk // BLOCK, of_chunk % BLOCK)
                assert torch.equal(one[at].view(torch.int16), other[at].view(torch.int16))
    world.storage.close()


# --- the example --------------------------------------------------------------------------------


def test_the_example_reuses_documents_anywhere() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "segments.py"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(": ")[1][:6] for line in lines] == ["0 of 3", "3 of 4", "4 of 5"]


@pytest.mark.parametrize("fault", ["unturned", "wrong frequencies"])
def test_the_example_sees_keys_that_were_not_turned(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("segments")
    rope = None if fault == "unturned" else Rope.of_base(500.0, example.HEAD)

    def connector(hidden: int, layers: int, **_: object) -> VLLMBufferLayerwiseGPUConnector:
        return VLLMBufferLayerwiseGPUConnector(hidden, layers, rope=rope)

    monkeypatch.setattr(example, "VLLMBufferLayerwiseGPUConnector", connector)
    with pytest.raises(AssertionError, match="the KV differs"):
        example.main()
