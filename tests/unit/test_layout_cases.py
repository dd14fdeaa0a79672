"""Copies of random chunks in random layouts against an oracle in NumPy.

A case stores a prompt's chunks from random slots, compares every stored byte, spoils the engine's
memory, loads from some token on into other slots, and compares every byte of that memory, padding
included: what had to be written was, and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lmcache_rs import _native
from lmcache_rs.gpu_connector import register as register_caches
from lmcache_rs.gpu_connector import registration
from lmcache_rs.layouts import Layout, TokenAxes, token_axes

CASES = 100_000
CASES_PER_CACHE = 100
PAGE = 4096
Bytes = npt.NDArray[np.uint8]
DTYPES = (torch.uint8, torch.bfloat16, torch.float32)
# The logical axes of one layer; L is the layer, and may lie anywhere but innermost in memory.
AXES: list[tuple[Layout, str]] = [
    ("split", "KBNHD"),
    ("split_hnd", "KBHND"),
    ("blocks_first", "BKNHD"),
    ("blocks_first_hnd", "BKHND"),
    ("fused", "BHNC"),
    ("mla", "BND"),
    ("mla", "BHND"),
    ("opaque", "BHNC"),
]


@dataclass
class Cache:
    """An engine's memory, what a registration sees of it, and what NumPy sees of it."""

    layout: Layout
    memory: Bytes
    layers: list[torch.Tensor]
    # [layers, slots, row]: all bytes of a slot, in the order of the stored form. For opaque
    # layouts a row is a block.
    rows: Bytes
    num_rows: int
    block_tokens: int


def make_cache(layout: Layout, axes: str, random: np.random.Generator) -> Cache:
    dtype = DTYPES[random.integers(3)]
    element = dtype.itemsize
    size = dict(zip("LBNHK", random.integers(1, (4, 6, 5, 4, 2)), strict=True))
    size |= {"K": 2, "D": int(random.integers(1, 4)) * element}
    size["C"] = 2 * size["D"]
    if layout == "mla":
        size["H"] = 1
    order = [axis for axis in "L" + axes if axis not in "DC"]
    random.shuffle(order)
    if layout == "opaque":
        # Blocks in one run each: the layer's axis and the blocks outside, the rest as declared.
        order = [axis for axis in order if axis in "LB"] + list("HN")
    order.append(axes[-1])
    # Room between the steps of an axis, but not within a run, nor within an opaque block.
    stays = "HNCD" if layout == "opaque" else "CD"
    room = [size[axis] + (axis not in stays and int(random.integers(2))) for axis in order]
    memory = random.integers(0, 256, room, dtype=np.uint8)
    inside = memory[tuple(slice(size[axis]) for axis in order)]
    logical = inside.transpose([order.index(axis) for axis in "L" + axes])
    layers = [torch.from_numpy(layer).view(dtype) for layer in logical]
    if layout == "opaque":
        shape = (size["L"], size["B"], -1)
        rows = np.lib.stride_tricks.as_strided(
            logical,
            (size["L"], size["B"], size["H"] * size["N"] * size["C"]),
            (logical.strides[0], logical.strides[1], 1),
        )
        assert rows.base is not None
        assert np.array_equal(rows, logical.reshape(shape))
        return Cache(layout, memory, layers, rows, size["B"], size["N"])
    if "C" in axes:
        *outer, content = logical.shape
        logical = np.lib.stride_tricks.as_strided(
            logical,
            (*outer, 2, content // 2),
            (*logical.strides[:-1], content // 2, 1),
        )
        axes = axes.replace("C", "KD")
    order = [0, *(1 + axes.index(axis) for axis in "BNKHD" if axis in axes)]
    rows = logical.transpose(order)
    return Cache(layout, memory, layers, rows, size["B"] * size["N"], size["N"])


def register(cache: Cache, axes: TokenAxes | None = None) -> _native.PagedCache:
    if cache.layout == "opaque":
        registered = register_caches(cache.layers, "opaque", block_tokens=cache.block_tokens)
        return registered.native
    first = cache.layers[0]
    axes = axes or token_axes(cache.layout, first.shape, first.stride())
    # Without the trial: it would find some faults before the cases can.
    return registration._register_tokens(cache.layers, cache.layout, axes, None).native


class Cases:
    """Random cases over one registered cache."""

    def __init__(
        self, cache: Cache, native: _native.PagedCache, random: np.random.Generator
    ) -> None:
        self.cache, self.native, self.random = cache, native, random
        self.pool = _native.LocalCpu(64 * PAGE, 1000)
        self.hashes = b"".join(bytes([number]) * 32 for number in range(64))
        # Tokens of a row: of an opaque block all, of a table's slot one.
        self.unit = cache.block_tokens if cache.layout == "opaque" else 1
        # Rows as [layer, row, bytes] and a scratch for what the memory should be.
        self.wanted_memory = np.empty_like(cache.memory)
        self.wanted_rows = self._same_view(self.wanted_memory)

    def _same_view(self, memory: Bytes) -> Bytes:
        """The rows of the cache, in another memory of the same shape."""
        rows = self.cache.rows
        offset = rows.__array_interface__["data"][0]
        offset -= self.cache.memory.__array_interface__["data"][0]
        return np.lib.stride_tricks.as_strided(
            memory.reshape(-1)[offset:], rows.shape, rows.strides
        )

    def _at(self, rows: Bytes, numbers: npt.NDArray[np.int64]) -> tuple[object, ...]:
        """An index of rows by their number, for reading and for writing."""
        if self.cache.layout == "opaque":
            return (slice(None), numbers)
        return (slice(None), numbers // self.cache.block_tokens, numbers % self.cache.block_tokens)

    def _slots(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The slot mapping of rows; a row of -1 stays -1 in all its tokens."""
        if self.unit == 1:
            return numbers
        slots = numbers[:, None] * self.unit + np.arange(self.unit)
        return np.where(numbers[:, None] < 0, -1, slots).reshape(-1)

    def run_many(self, count: int) -> int:
        for _ in range(count):
            self.run()
        return count

    def run(self) -> None:
        random, cache, unit = self.random, self.cache, self.unit
        # The last chunk may be short, of an opaque cache by whole blocks.
        num_rows = int(random.integers(1, min(cache.num_rows, 12) + 1))
        rows_per_chunk = int(random.integers(1, 6))
        chunk_size, num_tokens = rows_per_chunk * unit, num_rows * unit
        num_chunks = -(-num_rows // rows_per_chunk)
        hashes = self.hashes[: 32 * num_chunks]
        cache.memory[...] = random.integers(0, 256, cache.memory.shape, dtype=np.uint8)

        # Store, perhaps with a hole: the chunk it is in and those behind it are not stored.
        source = random.permutation(cache.num_rows)[:num_rows]
        placed, stored_chunks = source.copy(), num_chunks
        if random.integers(6) == 0:
            hole = int(random.integers(num_rows))
            placed[hole], stored_chunks = -1, hole // rows_per_chunk
        expected = cache.rows[self._at(cache.rows, source)]
        untouched = cache.memory.tobytes()
        stored = _native.store(
            self.pool,
            self.native,
            "ns",
            hashes,
            chunk_size=chunk_size,
            num_tokens=num_tokens,
            slots=self._slots(placed),
        )
        assert stored[0] == stored_chunks
        assert cache.memory.tobytes() == untouched, "a store wrote to the engine"
        objects = self.pool.get("ns", hashes)
        assert len(objects) == stored_chunks
        for number, memory_obj in enumerate(objects):
            part = expected[:, number * rows_per_chunk : (number + 1) * rows_per_chunk]
            assert memory_obj.to_bytes() == part.tobytes(), "stored bytes differ"

        # Load behind what the engine has, into other slots, some of which do not exist.
        noise = random.integers(0, 256, cache.memory.shape, dtype=np.uint8)
        cache.memory[...] = noise
        self.wanted_memory[...] = noise
        target = random.permutation(cache.num_rows)[:num_rows].astype(np.int64)
        if random.integers(3) == 0:
            target[random.random(num_rows) < 0.3] = -1
        skip = int(random.integers(num_rows + 1))
        end = min(stored_chunks * rows_per_chunk, num_rows)
        moved = np.arange(skip, max(end, skip))
        moved = moved[target[moved] >= 0]
        self.wanted_rows[self._at(self.wanted_rows, target[moved])] = expected[:, moved]
        loaded = _native.load(
            self.pool,
            self.native,
            "",
            "ns",
            hashes,
            chunk_size=chunk_size,
            num_tokens=num_tokens,
            slots=self._slots(target),
            skip=skip * unit,
        )
        assert loaded[0] == max(end, skip) * unit
        assert cache.memory.tobytes() == self.wanted_memory.tobytes(), "loaded bytes differ"
        del objects
        self.pool.clear()


def all_cases(random: np.random.Generator) -> Iterator[Cases]:
    for layout, axes in itertools.cycle(AXES):
        cache = make_cache(layout, axes, random)
        yield Cases(cache, register(cache), random)


def test_random_chunks_in_random_layouts_equal_the_oracle() -> None:
    random = np.random.default_rng(20_261)
    rounds, done = CASES // CASES_PER_CACHE, 0
    for cases in itertools.islice(all_cases(random), rounds):
        done += cases.run_many(CASES_PER_CACHE)
    assert done == CASES


@pytest.mark.parametrize(("layout", "order"), AXES[:5])
def test_two_strides_swapped_are_seen(layout: Layout, order: str) -> None:
    random = np.random.default_rng(1)
    while True:
        cache = make_cache(layout, order, random)
        first = cache.layers[0]
        axes = token_axes(layout, first.shape, first.stride())
        if axes.heads == axes.block_tokens > 1 and cache.num_rows > 4:
            break
    swapped = replace(axes, token_stride=axes.head_stride, head_stride=axes.token_stride)
    good, bad = (Cases(cache, register(cache, these), random) for these in (axes, swapped))
    good.run_many(20)
    with pytest.raises(AssertionError, match="bytes differ"):
        bad.run_many(20)
