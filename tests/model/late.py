"""Saves that read the engine's blocks at the worst moment a schedule can think of.

Instead of handing a copy to a thread, the worker's store keeps it here: some layers of it are
copied between any two hooks, and the rest when somebody waits for it. A copy that nobody waits for
may end long after its request, so a block that is given away under it shows in what is stored.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Iterable, Sequence
from typing import Any

from world import BLOCK, CHUNK, LAYERS

from lmcache_rs import _native
from lmcache_rs.cache_engine import LMCacheEngine, Stored
from lmcache_rs.transfers import Transfer

HASH_BYTES = 32


class CopyError(RuntimeError):
    """A copy that fails on the way."""


class LateCopy:
    """A save under way: memory is reserved, and the bytes are still the engine's."""

    def __init__(self, native: _native.LayerwiseStep, keys: list[tuple[str, bytes]]) -> None:
        self._native = native
        self._layers = list(range(LAYERS))
        self._outcome: list[int] | None = None
        self.keys = keys
        self.blocks: set[int] = set()
        self.fails = False
        self.failed = 0

    def is_done(self) -> bool:
        return self._outcome is not None

    def wait(self, timeout_ms: int | None = None) -> bool:
        while not self.is_done():
            self.go_on()
        return True

    def outcome(self) -> list[int]:
        assert self._outcome is not None, "nobody asks before the end"
        if self.fails:
            self.failed += 1
            raise CopyError("the copy fails")
        return self._outcome

    def go_on(self) -> None:
        """Copies one more layer, or ends."""
        if self._layers:
            self._native.save(self._layers.pop())
            return
        if self.fails:
            self._native.close()
            self._outcome = []
        else:
            self._outcome = list(self._native.commit()[0])


class LateCopies:
    """The saves of one engine.

    Args:
        store: The worker half's store, whose saves end here from now on.
        draw: What decides.
        lateness: How often nothing happens between two hooks, 0 to 1; at 0 a copy is done at once.
        failures: How often a copy fails.
    """

    def __init__(
        self, store: LMCacheEngine, draw: random.Random, lateness: float, failures: float
    ) -> None:
        self._store = store
        self._draw = draw
        self._lateness = lateness
        self._failures = failures
        self._under_way: list[LateCopy] = []
        self._ended: list[tuple[str, bytes]] = []
        self.seen: collections.Counter[str] = collections.Counter()
        self._all: list[LateCopy] = []
        store.begin_store_chunks = self._begin  # type: ignore[method-assign]

    def _begin(
        self, namespace: str, hashes: bytes, block_ids: Sequence[int], *, first: int = 0
    ) -> Transfer[Stored]:
        native = self._store.layerwise_step()
        assert native is not None
        num_chunks = len(hashes) // HASH_BYTES
        planned = native.add_save(
            namespace, hashes, num_tokens=num_chunks * CHUNK, blocks=block_ids, first=first
        )
        each = (hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))
        copy = LateCopy(native, [(namespace, one) for one in each])
        if not self._lateness or not planned[0]:
            copy.wait()
        else:
            # The last of them are new; those before may be stored already, and are not read.
            new = num_chunks - planned[0]
            copy.blocks = set(block_ids[new * CHUNK // BLOCK : num_chunks * CHUNK // BLOCK])
            copy.fails = self._draw.random() < self._failures
            self._under_way.append(copy)
            self._all.append(copy)
            self.seen["late saves"] += 1
        self._ended += copy.keys if copy.is_done() else []
        return Transfer(copy, Stored, Stored(0, 0, 0, 0))

    def go_on(self, *_: object) -> None:
        """What happens between two hooks."""
        for copy in self._under_way:
            while not copy.is_done() and self._draw.random() >= self._lateness:
                copy.go_on()
        self._take_ended()

    def _take_ended(self) -> None:
        for copy in self._under_way:
            if copy.is_done():
                self._ended += copy.keys
        self._under_way = [copy for copy in self._under_way if not copy.is_done()]

    def take_ended_keys(self) -> list[tuple[str, bytes]]:
        """Chunks that may have been stored since the last call."""
        self._take_ended()
        ended, self._ended = self._ended, []
        return ended

    @property
    def blocks(self) -> set[int]:
        """Blocks that are still read."""
        return set().union(*(copy.blocks for copy in self._under_way if not copy.is_done()))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return all(copy.is_done() for copy in self._under_way)

    @property
    def num_failed(self) -> int:
        """Copies whose failure was heard of."""
        return sum(copy.failed for copy in self._all)

    def listen(self, worker: Any, hooks: Iterable[str]) -> None:
        """Copies go on before each of these hooks of the worker."""
        for name in hooks:
            hook = getattr(worker, name)

            def later(*arguments: Any, _hook: Any = hook) -> Any:
                self.go_on()
                return _hook(*arguments)

            setattr(worker, name, later)
