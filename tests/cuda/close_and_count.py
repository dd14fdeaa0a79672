"""Stores, loads, closes in the middle of it, and prints how many handles of the device are left."""

from __future__ import annotations

import gc

import torch
from imitated import Imitated

from lmcache_rs import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata


def use(imitated: Imitated) -> None:
    settings = LMCacheEngineConfig.from_defaults(chunk_size=8, max_local_cpu_size=0.002)
    caches = [torch.randn(2, 24, 4, 2, 8) for _ in range(3)]
    where = {"kvcaches": caches, "slot_mapping": torch.arange(16)}
    with LMCacheEngine(settings, LMCacheMetadata("m", 1, 0, "float32")) as engine:
        engine.store(list(range(16)), **where)  # type: ignore[arg-type]
        imitated.be_late(3000)
        engine.retrieve(list(range(16)), **where)  # type: ignore[arg-type]
        storer = engine.store_layer(list(range(100, 116)), **where)  # type: ignore[arg-type]
        next(storer)
        next(storer)
        storer.close()


imitated = Imitated()
with imitated.gpu() as device:
    use(imitated)
    del device
gc.collect()
print(imitated.live(), "handles left")
