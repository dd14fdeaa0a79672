"""One engine step, layer by layer: what it loads and saves, and how far that is.

vLLM calls a hook before and after each layer's attention; how often, for which layers and in which
order is its own affair (a layer computed in two pieces calls twice, a replayed graph not at all).
So a `LayerwiseStep` counts nothing: a hook names a layer, and whatever hooks have not done by the
end of the step is done there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lmcache_rs import _native
from lmcache_rs.cache_engine import Loaded, Stored
from lmcache_rs.key import HASH_BYTES

if TYPE_CHECKING:
    from lmcache_rs.vllm_v1.faults import Faults
    from lmcache_rs.vllm_v1.metadata import LMCacheConnectorMetadata, ReqMeta
    from lmcache_rs.vllm_v1.saves import SavedPart


def new_copier() -> _native.Copier:
    """The thread that loads ahead; measurements of the overlap put a slower one in its place."""
    return _native.Copier()


class LayerwiseStep:
    """See the module's description.

    Args:
        metadata: What the scheduler half said of the step; also tells it from the next one.
        native: Where the copies are; None where there is no cache.
        chunk_size: Tokens of a chunk.
        faults: Where faults of ours are noted.
        own_name: The namespace under which this rank keeps what the scheduler half names.
        part_to_save: What of a request a save stores, as far as it is not there.
    """

    def __init__(
        self,
        metadata: LMCacheConnectorMetadata,
        native: _native.LayerwiseStep | _native.CudaLayerwiseStep | None,
        chunk_size: int,
        faults: Faults,
        own_name: Callable[[str], str],
        part_to_save: Callable[[ReqMeta], SavedPart],
    ) -> None:
        self.metadata = metadata
        self._native = native
        self._num_layers = 0 if native is None else native.num_layers
        self._chunk_size = chunk_size
        self._faults = faults
        self._own_name = own_name
        self._part_to_save = part_to_save
        self._loads: list[tuple[ReqMeta, Loaded]] = []
        self._is_loading = False
        self._saves: list[ReqMeta] | None = None
        self._saved_layers: set[int] = set()

    # --- loads --------------------------------------------------------------------------------

    def add_load(self, req: ReqMeta) -> Loaded:
        """Plans a request's load; what it will have loaded once all layers are written."""
        assert req.load_spec is not None
        spec = req.load_spec
        skip, end = spec.vllm_cached_tokens, spec.lmcache_cached_tokens
        if self._native is None:
            return Loaded(skip, 0, 0)
        num_chunks = end // self._chunk_size
        planned = Loaded(
            *self._native.add_load(
                req.req_id,
                self._own_name(req.namespace),
                req.hashes[: num_chunks * HASH_BYTES],
                num_tokens=num_chunks * self._chunk_size,
                blocks=req.block_ids,
                skip=skip,
                computed_from=spec.computed_from,
            )
        )
        self._loads.append((req, planned))
        return planned

    @property
    def loads_anything(self) -> bool:
        """Whether a load is planned or under way."""
        return bool(self._loads)

    def start_loads(self, copier: _native.Copier) -> None:
        """Begins to write."""
        if self._native is not None and self._loads:
            self._is_loading = True
            self._native.start_loads(copier)

    def wait_for_layer(self, layer: int) -> None:
        """Returns once the layer of every load is written."""
        if self._is_loading and self._native is not None:
            self._native.wait(layer)

    def finish_loads(self) -> list[tuple[ReqMeta, Loaded, Loaded]]:
        """Writes what is left; what was planned, and what came of it; empty once it was said."""
        if self._native is None or not self._loads:
            return []
        outcomes = self._native.finish_loads()
        loads, self._loads, self._is_loading = self._loads, [], False
        return [
            (req, planned, Loaded(*outcome))
            for (req, planned), outcome in zip(loads, outcomes, strict=True)
        ]

    # --- saves --------------------------------------------------------------------------------

    def save_layer(self, layer: int) -> None:
        """Copies a layer of everything that the step saves. Again is anew: pieces add up."""
        self._begin_saves()
        if self._saves and self._native is not None:
            # What is saved may have been loaded in this very step.
            self.wait_for_layer(layer)
            self._native.save(layer)
            self._saved_layers.add(layer)

    def commit(self) -> list[tuple[ReqMeta, Stored]]:
        """Copies the layers that no hook named, then publishes; what each request stored."""
        self._begin_saves()
        saves, self._saves = self._saves or [], []
        if self._native is None or not saves:
            return []
        for layer in range(self._num_layers):
            if layer not in self._saved_layers:
                self._native.save(layer)
        return [
            (req, Stored(*outcome))
            for req, outcome in zip(saves, self._native.commit(), strict=True)
        ]

    def _begin_saves(self) -> None:
        """Reserves memory for what the step saves, once."""
        if self._saves is not None:
            return
        self._saves = []
        if self._native is None:
            return
        for req in self.metadata.requests:
            if req.save_spec is None or not req.save_spec.can_save:
                continue
            try:
                part = self._part_to_save(req)
                self._native.add_save(
                    self._own_name(req.namespace),
                    part.hashes,
                    num_tokens=part.num_tokens,
                    blocks=part.block_ids,
                )
            except Exception as error:
                self._faults.note("save_kv_layer", error)
                continue
            self._saves.append(req)

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Writes and publishes nothing more; gives everything back. Idempotent."""
        self._loads, self._saves, self._is_loading = [], [], False
        native, self._native = self._native, None
        if native is not None:
            native.close()
