"""What a GPU does in a second: page-locked copies, kernels, and the ways of a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from world import World

from lmcache_rs import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata, _native
from lmcache_rs.gpu_connector import register

GIB = 1 << 30
# A layer of 16 tokens' K and V of 8 heads of 128 elements of 2 bytes, as vLLM has them.
BLOCK, HEADS, HEAD, LAYERS = 16, 8, 128, 16


def engine_of(nbytes: int, layout: str) -> LMCacheEngine:
    settings = LMCacheEngineConfig.from_defaults(
        chunk_size=256, max_local_cpu_size=max(0.01, 1.1 * nbytes / GIB)
    )
    metadata = LMCacheMetadata("m", 1, 0, "bfloat16", block_size=BLOCK)
    return LMCacheEngine(settings, metadata, layout=layout)  # type: ignore[arg-type]


def kv(world: World, layout: str, num_blocks: int) -> list[torch.Tensor]:
    shape = (num_blocks, BLOCK, 2 * HEADS * HEAD)
    if layout == "split":
        shape = (2, num_blocks, BLOCK, HEADS, HEAD)  # type: ignore[assignment]
    return [world.new(torch.zeros(shape, dtype=torch.bfloat16)) for _ in range(LAYERS)]


def rates(world: World, paths: list[str], num_tokens: int) -> Iterator[dict[str, Any]]:
    """GB/s of the engine's stores and loads, beside page-locked copies of torch."""
    token_bytes = LAYERS * 2 * HEADS * HEAD * 2
    nbytes = num_tokens * token_bytes
    on_gpu = world.new(torch.zeros(nbytes, dtype=torch.uint8))
    in_host = world.page_locked(nbytes)
    d2h = nbytes / world.seconds(lambda: in_host.copy_(on_gpu, non_blocking=True)) / 1e9
    h2d = nbytes / world.seconds(lambda: on_gpu.copy_(in_host, non_blocking=True)) / 1e9
    yield {"what": "D2H, page-locked copy of torch", "gb_per_second": d2h}
    yield {"what": "H2D, page-locked copy of torch", "gb_per_second": h2d}
    for layout in ("opaque", "split"):
        for path in paths:
            num_blocks = num_tokens // BLOCK
            with engine_of(nbytes, layout) as cached:
                cached.register_kv_caches(kv(world, layout, num_blocks), block_tokens=BLOCK)
                world.native.force_path(path)
                blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
                chain = cached.token_database.new_chain()
                chain.extend(list(range(num_tokens)))
                where = ("ns", chain.hashes(), blocks.tolist())

                def store(cached: LMCacheEngine = cached, where: Any = where) -> None:
                    assert cached.local_cpu is not None
                    cached.local_cpu.clear()
                    stored = cached.begin_store_chunks(*where)
                    stored.wait()
                    assert stored.outcome().tokens == num_tokens, stored.outcome()

                def load(cached: LMCacheEngine = cached, where: Any = where) -> None:
                    loaded = cached.begin_load_chunks("", *where, skip=0)
                    loaded.wait()
                    assert loaded.outcome().tokens == num_tokens, loaded.outcome()

                for what, work, limit in (("store", store, d2h), ("load", load, h2d)):
                    rate = nbytes / world.seconds(work) / 1e9
                    yield {
                        "what": f"{what}, {layout}, by {path}",
                        "gb_per_second": rate,
                        "of_page_locked": rate / limit,
                    }
                world.native.force_path(None)


def kernels(world: World, num_tokens: int) -> Iterator[dict[str, Any]]:
    """GB/s of the kernels within the device, beside a copy on the device; each byte counts once."""
    layer_bytes = num_tokens * 2 * HEADS * HEAD * 2
    one, other = (world.new(torch.zeros(layer_bytes, dtype=torch.uint8)) for _ in range(2))
    copy = layer_bytes / world.seconds(lambda: other.copy_(one)) / 1e9
    yield {"what": "copy on the device, torch", "gb_per_second": copy}
    for layout in ("split", "opaque"):
        caches = kv(world, layout, num_tokens // BLOCK)
        registered = register(caches, layout, block_tokens=BLOCK)  # type: ignore[arg-type]
        order = torch.randperm(num_tokens // BLOCK, generator=torch.Generator().manual_seed(2))
        slots = (order[:, None] * BLOCK + torch.arange(BLOCK)).flatten().numpy()
        world.native.force_path("kernel")
        for storing in (True, False):
            copies: Any = registered.layer_copy([0], [num_tokens], slots, storing=storing)
            buffer: Any = registered.layer_buffer(layer_bytes, storing=storing)
            piece = [(buffer, 0, layer_bytes)]

            def move(copies: Any = copies, piece: Any = piece, storing: bool = storing) -> None:
                (copies.gather if storing else copies.scatter)(0, piece)
                copies.finish()

            rate = layer_bytes / world.seconds(move) / 1e9
            what = "gather" if storing else "scatter"
            yield {
                "what": f"{what} kernel, {layout}",
                "gb_per_second": rate,
                "of_device_copy": rate / copy,
            }
        world.native.force_path(None)


def path_table(world: World, paths: list[str], most_bytes: int) -> Iterator[dict[str, Any]]:
    """Microseconds of one layer's copy by length and number of runs, way and direction."""
    for run_bytes in (256, 4096, 32 << 10, 256 << 10):
        for runs in (1, 16, 256, 4096):
            if run_bytes * runs > most_bytes:
                continue
            cache = world.new(torch.zeros(2 * runs, run_bytes, dtype=torch.uint8))
            registered = register([cache], "opaque", block_tokens=1)
            slots = (2 * torch.arange(runs)).numpy()
            pool = _native.LocalCpu(run_bytes * runs + (1 << 16), 1000)
            (memory_obj,) = pool.allocate([run_bytes * runs]) or []
            for storing in (True, False):
                copies: Any = registered.layer_copy([0], [runs], slots, storing=storing)
                row: dict[str, Any] = {
                    "direction": "store" if storing else "load",
                    "run_bytes": run_bytes,
                    "runs": runs,
                    "chosen": world.native.path(storing, runs, run_bytes * runs),
                }
                for path in paths:
                    world.native.force_path(path)
                    piece = [(memory_obj, 0, run_bytes * runs)]

                    def move(
                        copies: Any = copies, piece: Any = piece, storing: bool = storing
                    ) -> None:
                        (copies.gather if storing else copies.scatter)(0, piece)
                        copies.finish()

                    row[f"{path}_us"] = 1e6 * world.seconds(move)
                world.native.force_path(None)
                yield row
