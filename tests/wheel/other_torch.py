"""Store and retrieve through `LMCacheEngine`, in an environment without vLLM.

Not a pytest file: `scripts/check_wheel.py` runs it with the other environment's own Python.
Prints one line and ends with 0, or ends with a traceback.
"""

from __future__ import annotations

import importlib.util
import sys

import torch

from lmcache_rs import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata

LAYERS, BLOCKS, BLOCK, HEADS, HEAD = 4, 64, 16, 2, 32
CHUNK = 256
NUM_TOKENS = 3 * CHUNK


def main() -> None:
    assert importlib.util.find_spec("vllm") is None, "this environment was to have no vLLM"
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, local_cpu=True, max_local_cpu_size=0.05
    )
    metadata = LMCacheMetadata(model_name="m", world_size=1, worker_id=0, kv_dtype="float32")
    generator = torch.Generator().manual_seed(7)
    kvcaches = [
        torch.randn(2, BLOCKS, BLOCK, HEADS, HEAD, generator=generator) for _ in range(LAYERS)
    ]
    tokens = torch.randint(0, 32_000, (NUM_TOKENS,), generator=generator)
    table = torch.randperm(BLOCKS, generator=generator)[: NUM_TOKENS // BLOCK]
    slots = (table[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    wanted = [layer.clone() for layer in kvcaches]

    with LMCacheEngine(config, metadata) as engine:
        stored = engine.store(tokens, kvcaches=kvcaches, slot_mapping=slots)
        assert stored == NUM_TOKENS, f"{NUM_TOKENS} tokens to store, {stored} stored"
        for layer in kvcaches:
            layer.zero_()
        found = engine.lookup(tokens)
        assert found == NUM_TOKENS, f"{NUM_TOKENS} tokens stored, {found} found"
        loaded = engine.retrieve(tokens, kvcaches=kvcaches, slot_mapping=slots)
        assert int(loaded.sum()) == NUM_TOKENS, f"{int(loaded.sum())} tokens loaded"

    for number, (layer, before) in enumerate(zip(kvcaches, wanted, strict=True)):
        assert torch.equal(layer[:, table], before[:, table]), f"layer {number} came back changed"
        rest = torch.ones(BLOCKS, dtype=torch.bool)
        rest[table] = False
        assert not layer[:, rest].any(), f"layer {number}: a block nobody asked for was written"
    assert "vllm" not in sys.modules
    print(f"{NUM_TOKENS} tokens stored and retrieved under torch {torch.__version__}")


if __name__ == "__main__":
    main()
