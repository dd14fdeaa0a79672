"""Loads that fail, on purpose: chunks that vanish under a promise, and copies that raise.

``vanish``: a chunk in the middle of the load, and all behind it, leave the store with their lease.
``raise``: the copy itself fails, however often it is tried, and the chunks stay where they are.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from lmcache_rs.vllm_v1 import layerwise

if TYPE_CHECKING:
    from probe import ProbeConnector

HASH_BYTES = 32


class LoadBreaker:
    """Breaks a share of all loads from now on.

    Args:
        probe: Whose loads.
        how: ``vanish`` or ``raise``.
        one_in: One load in so many, drawn at random; 1 breaks each.
        limit: At most so many.
    """

    def __init__(self, probe: ProbeConnector, how: str, one_in: int, limit: int | None) -> None:
        if how not in ("vanish", "raise"):
            raise ValueError(f"no way to break a load is called {how!r}: vanish, raise")
        self._probe = probe
        self._how = how
        self._one_in = one_in
        self._left = limit
        self._random = random.Random(f"{how} {one_in}")
        # Requests of the current step, each with the first chunk that will not be loaded.
        self._broken: dict[str, int] = {}
        # Requests whose loads were broken, with the chunk, until the connector reports a failure.
        self._unreported: list[tuple[Any, int]] = []
        if how == "raise":
            self._wrap_copies()

    def begin_step(self, requests: list[Any]) -> dict[str, int]:
        """Breaks loads of a step before they start; the first chunk that each of them lacks."""
        self._broken = {}
        for request in requests:
            spec = request.load_spec
            if spec is None or not spec.can_load or self._left == 0:
                continue
            if self._random.randrange(self._one_in):
                continue
            if self._left is not None:
                self._left -= 1
            first = spec.vllm_cached_tokens // self._probe.chunk_size
            last = len(request.hashes) // HASH_BYTES
            chunk = self._random.randrange(first, last) if self._how == "vanish" else first
            self._broken[request.req_id] = chunk
            self._unreported.append((request, chunk))
            self._probe.totals["broken_loads"] += 1
            if self._how == "vanish":
                self._remove(request, chunk, last)
        return self._broken

    def found_again(self) -> list[str]:
        """Requests whose load has failed, as is reported now, and would be promised once more."""
        worker = self._probe._manager.worker
        store, own_name = worker._engine.local_cpu, worker._names.of
        unreported, self._unreported = self._unreported, []
        return [
            request.req_id
            for request, chunk in unreported
            if store.longest_prefix(own_name(request.namespace), request.hashes) > chunk
        ]

    def _remove(self, request: Any, chunk: int, last: int) -> None:
        worker = self._probe._manager.worker
        store, namespace = worker._engine.local_cpu, worker._names.of(request.namespace)
        store.release(request.req_id)
        for at in range(chunk, last):
            store.remove(namespace, request.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES])

    def _wrap_copies(self) -> None:
        engine: Any = self._probe._manager.worker._engine
        for name in ("load_chunks", "begin_load_chunks"):
            if hasattr(engine, name):
                setattr(engine, name, self._broken_copy(getattr(engine, name)))
        add_load = layerwise.LayerwiseStep.add_load

        def by_layer(step: Any, request: Any) -> Any:
            self._raise_if_broken(request.req_id)
            return add_load(step, request)

        layerwise.LayerwiseStep.add_load = by_layer  # type: ignore[method-assign]

    def _broken_copy(self, copy: Any) -> Any:
        def copies(lookup_id: str, *given: Any, **named: Any) -> Any:
            self._raise_if_broken(lookup_id)
            return copy(lookup_id, *given, **named)

        return copies

    def _raise_if_broken(self, req_id: str) -> None:
        if req_id in self._broken:
            raise OSError("planted: the copy fails")
