"""What must be right on a GPU: every connector against torch indexing, and against late streams."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from world import World

from lmcache_rs import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata, StorageManager
from lmcache_rs.gpu_connector import (
    Rope,
    VLLMBufferLayerwiseGPUConnector,
    VLLMPagedMemGPUConnectorV2,
    VLLMPagedMemLayerwiseGPUConnector,
    by_layer,
)
from lmcache_rs.layouts import MemoryFormat

LAYERS, BLOCKS, BLOCK, HEADS, HEAD, CHUNK = 4, 24, 16, 4, 32, 64
TOKENS = 3 * CHUNK + 17
# The axes of each layout: K planes, B blocks, N tokens of a block, H heads, D a head's elements.
AXES = {
    "split": "KBNHD",
    "split_hnd": "KBHND",
    "blocks_first": "BKNHD",
    "blocks_first_hnd": "BKHND",
    "fused": "BHND",
    "mla": "BND",
}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
# The first float of a row is at an odd place, so that kernels take narrow vectors.
NARROW_HEAD = 9
Check = tuple[str, Callable[[World], None]]


def sizes(layout: str, head: int) -> list[int]:
    of = {"K": 2, "B": BLOCKS, "N": BLOCK, "H": HEADS, "D": head}
    axes = [of[axis] for axis in AXES[layout]]
    if layout == "fused":
        axes[-1] *= 2
    return axes


def caches(world: World, layout: str, dtype: torch.dtype, head: int = HEAD, seed: int = 1) -> Any:
    random = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(LAYERS):
        nbytes = [*sizes(layout, head)[:-1], sizes(layout, head)[-1] * dtype.itemsize]
        noise = torch.randint(0, 120, nbytes, generator=random, dtype=torch.uint8)
        made.append(world.new(noise.view(dtype)))
    return made


def rows(cache: torch.Tensor, layout: str, slots: torch.Tensor) -> torch.Tensor:
    """`[tokens, bytes]` of the tokens in the stored order, by torch's indexing alone."""
    axes = AXES[layout]
    raw = cache.view(torch.uint8)
    if layout == "fused":
        raw = torch.stack(raw.chunk(2, dim=-1), dim=0)
        axes = "KBHND"
    raw = raw.permute([axes.index(axis) for axis in "BNKHD" if axis in axes])
    slots = slots.to(raw.device)
    return raw[slots // BLOCK, slots % BLOCK].reshape(len(slots), -1)


def some_slots(seed: int, count: int = TOKENS) -> torch.Tensor:
    return torch.randperm(BLOCKS * BLOCK, generator=torch.Generator().manual_seed(seed))[:count]


def spans() -> tuple[list[int], list[int]]:
    starts = list(range(0, TOKENS, CHUNK))
    return starts, [min(start + CHUNK, TOKENS) for start in starts]


def same(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if not torch.equal(found.cpu(), wanted.cpu()):
        count = int((found.cpu() != wanted.cpu()).sum())
        raise AssertionError(f"{what}: {count} of {wanted.numel()} bytes differ from torch's")


def storage() -> StorageManager:
    settings = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, max_local_cpu_size=0.03)
    return StorageManager(settings)


def allocate(manager: StorageManager, connector: Any, layout: str, dtype: torch.dtype) -> Any:
    fmt = MemoryFormat.KV_MLA_FMT if layout == "mla" else MemoryFormat.KV_T2D
    objects: list[Any] = []
    for start, end in zip(*spans(), strict=True):
        objects += manager.batched_allocate(connector.get_shape(end - start), dtype, fmt) or []
    return objects


def stored_rows(objects: list[Any], layer: int) -> torch.Tensor:
    parts = []
    for memory_obj in objects:
        tokens = memory_obj.tensor.shape[1]
        parts.append(memory_obj.tensor[layer].view(torch.uint8).reshape(tokens, -1))
    return torch.cat(parts)


CONNECTORS: dict[str, Callable[..., Any]] = {
    "bulk": VLLMPagedMemGPUConnectorV2,
    "direct": VLLMPagedMemLayerwiseGPUConnector,
    "staged": lambda **given: VLLMPagedMemLayerwiseGPUConnector(use_gpu=True, **given),
    "buffered": lambda **given: VLLMBufferLayerwiseGPUConnector(rope=None, **given),
}


def gather(connector: Any, objects: list[Any], slots: torch.Tensor, kvcaches: Any) -> None:
    where = {"slot_mapping": slots, "kvcaches": kvcaches}
    if isinstance(connector, VLLMPagedMemGPUConnectorV2):
        connector.batched_from_gpu(objects, *spans(), **where)
    else:
        list(connector.batched_from_gpu(list(by_layer(objects)), *spans(), **where))


def scatter(connector: Any, objects: list[Any], slots: torch.Tensor, kvcaches: Any) -> None:
    where = {"slot_mapping": slots, "kvcaches": kvcaches}
    if isinstance(connector, VLLMPagedMemGPUConnectorV2):
        connector.batched_to_gpu(objects, *spans(), **where)
        return
    steps = connector.batched_to_gpu(*spans(), **where)
    next(steps)
    for views in by_layer(objects):
        steps.send(views)
    list(steps)


def round_trip(world: World, name: str, layout: str, dtype: torch.dtype, head: int) -> None:
    """Gathers, compares with torch, scatters elsewhere, compares again, and looks at the rest."""
    source, target = caches(world, layout, dtype, head), caches(world, layout, dtype, head, 2)
    before, after = some_slots(3), some_slots(4)
    after[5] = after[100] = -1
    connector = CONNECTORS[name](layout=layout)
    connector.initialize_kvcaches_ptr(source)
    manager = storage()
    try:
        objects = allocate(manager, connector, layout, dtype)
        gather(connector, objects, before, source)
        world.sync()
        for layer, cache in enumerate(source):
            same(stored_rows(objects, layer), rows(cache, layout, before), f"gathered {layer}")
        untouched = torch.tensor(sorted(set(range(BLOCKS * BLOCK)) - set(after.tolist())))
        kept = [rows(cache, layout, untouched).clone() for cache in target]
        connector.initialize_kvcaches_ptr(target)
        scatter(connector, objects, after, target)
        world.sync()
        has_place = after >= 0
        for layer, cache in enumerate(target):
            wanted = rows(source[layer], layout, before)[has_place]
            same(rows(cache, layout, after[has_place]), wanted, f"scattered {layer}")
            same(rows(cache, layout, untouched), kept[layer], f"beside layer {layer}")
    finally:
        manager.close()


def shift(world: World, dtype: torch.dtype, interleaved: bool) -> None:
    """Chunks restored elsewhere have turned keys, torch's own values as they are, zeroed gaps."""
    rope = Rope.of_base(10_000.0, HEAD, interleaved=interleaved)
    random = torch.Generator().manual_seed(5)
    shape = (2, BLOCKS, BLOCK, HEADS, HEAD)
    made = [torch.randn(shape, generator=random).to(dtype) for _ in range(LAYERS)]
    source, target = [world.new(cache) for cache in made], caches(world, "split", dtype, HEAD, 6)
    store, connector = VLLMPagedMemGPUConnectorV2(), VLLMBufferLayerwiseGPUConnector(rope=rope)
    store.initialize_kvcaches_ptr(source)
    manager = storage()
    try:
        shape = store.get_shape(CHUNK)
        objects = manager.batched_allocate(shape, dtype, MemoryFormat.KV_T2D, 2) or []
        was = [torch.arange(CHUNK) + 7, torch.arange(CHUNK) + 5000]
        before, after = some_slots(7, 2 * CHUNK), some_slots(8, 2 * CHUNK + 10)
        store.batched_from_gpu(
            objects, [0, CHUNK], [CHUNK, 2 * CHUNK], slot_mapping=before, kvcaches=source
        )
        starts, ends = [0, CHUNK + 10], [CHUNK, 2 * CHUNK + 10]
        positions = torch.arange(len(after)) + 1000
        steps = connector.batched_to_gpu(
            starts,
            ends,
            slot_mapping=after,
            kvcaches=target,
            positions=positions,
            cached_positions=was,
        )
        next(steps)
        for views in by_layer(objects):
            steps.send(views)
        list(steps)
        world.sync()
        half_unit = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
        for layer, cache in enumerate(target):
            found = cache.cpu()[:, after // BLOCK, after % BLOCK].double()
            if found[:, CHUNK : CHUNK + 10].any():
                raise AssertionError(f"layer {layer}: the gap is not zero")
            for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
                chunk = before[number * CHUNK : (number + 1) * CHUNK]
                keys, values = made[layer][:, chunk // BLOCK, chunk % BLOCK].double()
                wanted = turned(keys, positions[start:end] - was[number], rope)
                if not torch.equal(found[1, start:end], values):
                    raise AssertionError(f"layer {layer}: values are not as they were")
                bound = half_unit[dtype] * wanted.abs() + 2.0**-20 * keys.abs().amax()
                if not ((found[0, start:end] - wanted).abs() <= bound).all():
                    worst = (found[0, start:end] - wanted).abs().max()
                    raise AssertionError(f"layer {layer}: keys are off by {worst:.3g}")
    finally:
        manager.close()


def turned(keys: torch.Tensor, distance: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Keys `[tokens, heads, head]` turned by so many positions, in 64 bits."""
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float64)
    angles = (distance.double()[:, None] * inv_freq)[:, None, :].remainder(2 * math.pi)
    if rope.interleaved:
        a, b = keys[..., 0::2], keys[..., 1::2]
    else:
        a, b = keys.chunk(2, dim=-1)
    one = a * angles.cos() - b * angles.sin()
    two = b * angles.cos() + a * angles.sin()
    if rope.interleaved:
        return torch.stack([one, two], dim=-1).flatten(-2)
    return torch.cat([one, two], dim=-1)


def engine() -> LMCacheEngine:
    settings = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, max_local_cpu_size=0.03)
    return LMCacheEngine(settings, LMCacheMetadata("m", 1, 0, "float32"))


def late_store(world: World, way: str) -> None:
    """KV that the engine's stream has yet to write when the store is asked for."""
    cache, values = (caches(world, "split", torch.float32, seed=seed) for seed in (1, 9))
    target = caches(world, "split", torch.float32, seed=10)
    tokens, slots = list(range(2 * CHUNK)), some_slots(11, 2 * CHUNK)
    with engine() as cached:
        cached.register_kv_caches(cache)
        world.sync()
        world.forward(cache, values)
        where = {"kvcaches": cache, "slot_mapping": slots}
        if way == "bulk":
            cached.store(tokens, **where)
        else:
            list(cached.store_layer(tokens, **where))
        world.sync()
        cached.retrieve(tokens, kvcaches=target, slot_mapping=slots)
        world.sync()
        for layer, (found, wanted) in enumerate(zip(target, values, strict=True)):
            same(rows(found, "split", slots), rows(wanted, "split", slots), f"layer {layer}")


def late_load(world: World, way: str) -> None:
    """A block that an earlier step still reads, a load into it, and a step that reads the load."""
    source, target = (caches(world, "split", torch.float32, seed=seed) for seed in (1, 12))
    tokens, slots = list(range(2 * CHUNK)), some_slots(13, 2 * CHUNK)
    with engine() as cached:
        cached.store(tokens, kvcaches=source, slot_mapping=slots)
        cached.register_kv_caches(target)
        before = [layer.clone() for layer in target]
        early = [torch.empty_like(layer) for layer in target]
        late = [torch.empty_like(layer) for layer in target]
        world.sync()
        world.read(early, target)
        where = {"kvcaches": target, "slot_mapping": slots}
        if way == "bulk":
            cached.retrieve(tokens, **where)
        else:
            list(cached.retrieve_layer(tokens, **where))
        for to, layer in zip(late, target, strict=True):
            to.copy_(layer)
        world.sync()
        for layer in range(LAYERS):
            same(early[layer].view(torch.uint8), before[layer].view(torch.uint8), "read early")
            wanted = rows(source[layer], "split", slots)
            same(rows(late[layer], "split", slots), wanted, f"read behind, layer {layer}")


def block_reuse(world: World) -> None:
    """Blocks that the next step overwrites at once, after a store that nobody waited for."""
    cache, target = (caches(world, "split", torch.float32, seed=seed) for seed in (1, 14))
    with engine() as cached:
        cached.register_kv_caches(cache)
        chain = cached.token_database.new_chain()
        chain.extend(list(range(2 * CHUNK)))
        blocks = list(range(3, 3 + 2 * CHUNK // BLOCK))
        wanted = [layer[:, blocks].clone() for layer in cache]
        world.sync()
        cached.store_chunks("ns", chain.hashes(), blocks)
        for layer in cache:
            layer.zero_()
        world.sync()
        cached.register_kv_caches(target)
        cached.load_chunks("", "ns", chain.hashes(), blocks, skip=0)
        world.sync()
        for layer, was in zip(target, wanted, strict=True):
            same(layer[:, blocks].view(torch.uint8), was.view(torch.uint8), "stored blocks")


def opaque_blocks(world: World) -> None:
    """Whole blocks, as vLLM's connector moves them."""
    random = torch.Generator().manual_seed(15)
    shape = (BLOCKS, BLOCK, 2 * HEADS * HEAD)
    source = [world.new(torch.randn(shape, generator=random)) for _ in range(LAYERS)]
    target = [torch.zeros_like(layer) for layer in source]
    settings = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, max_local_cpu_size=0.03)
    metadata = LMCacheMetadata("m", 1, 0, "float32", block_size=BLOCK)
    with LMCacheEngine(settings, metadata, layout="opaque") as cached:
        cached.register_kv_caches(source, block_tokens=BLOCK)
        chain = cached.token_database.new_chain()
        chain.extend(list(range(2 * CHUNK)))
        blocks = [9, 2, 17, 5, 11, 3, 20, 8]
        transfer = cached.begin_store_chunks("ns", chain.hashes(), blocks)
        transfer.wait()
        if transfer.outcome().chunks != 2:
            raise AssertionError(f"stored {transfer.outcome()}")
        cached.register_kv_caches(target, block_tokens=BLOCK)
        load = cached.begin_load_chunks("", "ns", chain.hashes(), blocks[::-1], skip=0)
        load.wait()
        world.sync()
        for here, there in zip(source, target, strict=True):
            same(there[blocks[::-1]].view(torch.uint8), here[blocks].view(torch.uint8), "blocks")


def all_checks(paths: list[str]) -> Iterator[tuple[str, str, Check]]:
    """Every check with its group and the way that copies take."""
    # What a device short of time must not leave out comes first.
    for path in paths:
        for way in ("bulk", "layer"):
            for title, check in (("store", late_store), ("load", late_load)):

                def late(world: World, check: Any = check, way: str = way) -> None:
                    check(world, way)

                yield "late streams", path, (f"{title}, {way}", late)
        yield "late streams", path, ("blocks overwritten behind a store", block_reuse)
        yield "whole blocks in the background", path, ("store and load", opaque_blocks)
    for dtype_name, interleaved in itertools.product(
        ("float32", "bfloat16", "float16"), (False, True)
    ):

        def turn(world: World, name: str = dtype_name, interleaved: bool = interleaved) -> None:
            shift(world, DTYPES[name], interleaved)

        pairs = "GPT-J" if interleaved else "NeoX"
        yield "RoPE shift = torch in 64 bits", paths[0], (f"{dtype_name}, {pairs} pairs", turn)
    for path in paths:
        for name, layout, (dtype_name, dtype) in itertools.product(
            CONNECTORS, AXES, DTYPES.items()
        ):
            for head in (HEAD, NARROW_HEAD):
                if head == NARROW_HEAD and dtype_name not in ("bfloat16", "fp8"):
                    continue
                title = f"{layout} {dtype_name}, heads of {head}"

                def trip(
                    world: World,
                    name: str = name,
                    layout: str = layout,
                    dtype: torch.dtype = dtype,
                    head: int = head,
                ) -> None:
                    round_trip(world, name, layout, dtype, head)

                yield f"{name} connector = torch indexing", path, (title, trip)
