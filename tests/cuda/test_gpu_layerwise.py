"""`test_layerwise.py` with its tensors on a GPU."""

from __future__ import annotations

import test_layerwise as host
import torch
from test_layerwise import *  # noqa: F403

from lmcache_rs import LMCacheEngine


def test_a_layer_is_copied_by_the_step_after_it_and_all_appear_with_the_last(
    engine: LMCacheEngine,
) -> None:
    """On a GPU the blocks are the store's until its last step, and the engine's again behind it."""
    source, where = host.caches(1), host.slots(1)
    wanted = [host.kv(cache, where).clone() for cache in source]
    storer = engine.store_layer(host.TOKENS, kvcaches=source, slot_mapping=where)
    for _ in range(host.LAYERS):
        assert next(storer) is None
        assert engine.lookup(host.TOKENS) == 0
    assert next(storer) is None
    for cache in source:
        cache.zero_()
    assert engine.lookup(host.TOKENS) == 16, "visible with the last layer"
    assert list(storer) == []
    target = host.caches(2)
    loaded = engine.retrieve(host.TOKENS, kvcaches=target, slot_mapping=host.slots(3))
    assert loaded.sum() == 16
    for cache, rows in zip(target, wanted, strict=True):
        assert torch.equal(host.kv(cache, host.slots(3))[:, :16], rows[:, :16])
