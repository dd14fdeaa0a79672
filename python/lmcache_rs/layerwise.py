"""The engine's walk a layer at a time: the generators behind `store_layer` and `retrieve_layer`.

Each has a fixed number of steps, whatever there is to do, so that a caller counts layers and
nothing else. What a step has begun lives in a native step, which gives everything back when it is
closed: at the end, and wherever the generator is left.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lmcache_rs.cache_engine import LMCacheEngine
    from lmcache_rs.token_database import Mask, Tokens


def store_layer(
    engine: LMCacheEngine,
    tokens: Tokens,
    mask: Mask | None,
    kvcaches: Sequence[torch.Tensor],
    slot_mapping: torch.Tensor | Sequence[int],
    extra_keys: object,
    request_configs: Mapping[str, Any] | None,
) -> Generator[None]:
    """N + 1 steps for N layers: set-up, then a layer each; see `LMCacheEngine.store_layer`."""
    num_layers = len(kvcaches)
    asked = engine._to_store(tokens, mask, kvcaches, slot_mapping, extra_keys, request_configs)
    known = 0 if asked is None else engine._known_chunks(asked)
    step = None if asked is None else engine._layerwise_step(asked.registered)
    try:
        if asked is not None and step is not None:
            step.add_save(asked.namespace, asked.hashes, **asked.where)
        yield
        for layer in range(num_layers):
            if asked is not None and step is not None:
                step.save(layer)
                if layer == num_layers - 1:
                    step.commit()
                    engine._write_through(asked, known)
            yield
    finally:
        if step is not None:
            step.close()


def retrieve_layer(
    engine: LMCacheEngine,
    tokens: Tokens,
    mask: Mask | None,
    kvcaches: Sequence[torch.Tensor],
    slot_mapping: torch.Tensor | Sequence[int],
    extra_keys: object,
    request_configs: Mapping[str, Any] | None,
    req_id: str | None,
    sync: bool,
) -> Generator[int | torch.Tensor | None]:
    """N + 3 steps for N layers: the count, a layer each, the end of the copies, `ret_mask`."""
    num_layers, num_tokens = len(kvcaches), len(tokens)
    asked = engine._to_load(
        tokens, mask, kvcaches, slot_mapping, extra_keys, request_configs, req_id
    )
    step = None if asked is None else engine._layerwise_step(asked.registered)
    end = 0
    try:
        if asked is not None and step is not None:
            # Held until the step holds them itself.
            brought = engine._bring(asked)
            end, _, _ = step.add_load(namespace=asked.namespace, hashes=asked.hashes, **asked.where)
            del brought
            step.start_loads()
        # Made now: the caller may use its slot mapping for something else while we are at work.
        ret_mask = engine._ret_mask(num_tokens, asked, end)
        yield int(ret_mask.sum())
        for layer in range(num_layers):
            if step is not None:
                step.wait(layer)
            yield None
        for loaded_end, _, _ in [] if step is None else step.finish_loads():
            ret_mask[loaded_end:] = False
        if sync and asked is not None:
            asked.registered.settle()
        yield None
        yield ret_mask
    finally:
        if step is not None:
            step.close()
