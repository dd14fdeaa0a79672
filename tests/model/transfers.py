"""Loads that run beside the steps, when a schedule says so: `Transfers`.

They stand between the connector's worker half and its engine. Each copy is the engine's own; what a
schedule draws is when it is made, when it is said to be over, and whether something goes wrong on
the way. Until it is made its chunks are held, as they are by a copy that waits behind others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from world import LAYERS, PagedMemory

if TYPE_CHECKING:
    from judge import Judge

    from lmcache_rs import _native
    from lmcache_rs.cache_engine import LMCacheEngine, Loaded

MOST_POLLS = 6
"""How often a load is asked for before it is over for sure."""


class LateTransfer:
    """One load; see the module's description."""

    def __init__(self, transfers: Transfers, req_id: str, copy: Callable[[], Any]) -> None:
        self.req_id = req_id
        self.is_copied = False
        self.is_said_to_be_over = False
        self._transfers = transfers
        self._copy = copy
        self._polls = 0
        self._outcome: Loaded | None = None
        self.held: list[_native.MemoryObj] = []

    def is_done(self) -> bool:
        self._polls += 1
        if self._transfers.takes_long() and self._polls < MOST_POLLS:
            return False
        self.copy()
        self.is_said_to_be_over = True
        return True

    def outcome(self) -> Loaded:
        if self._outcome is None:
            self._transfers.judge.raised["finish_load"] += 1
            raise RuntimeError("the copy fails")
        return self._outcome

    def copy(self) -> None:
        """Makes the copy, once."""
        if self.is_copied:
            return
        self.is_copied = True
        transfers = self._transfers
        if not transfers.fails():
            transfers.memory.watch_writes()
            native = self._copy()
            assert native.wait(60_000), "the copy ends"
            self._outcome = native.outcome()
            written = [transfers.memory.written_slots(layer) for layer in range(LAYERS)]
            transfers.judge.check_late_writes(self.req_id, written)
        self.held = []


class Transfers:
    """See the module's description.

    Args:
        engine: What the worker half loads from.
        memory: The engine's KV memory.
        judge: Who is told of every write.
    """

    def __init__(self, engine: LMCacheEngine, memory: PagedMemory, judge: Judge) -> None:
        self.memory = memory
        self.judge = judge
        self.under_way: list[LateTransfer] = []
        self._engine = engine
        self._draw = random.Random(0)
        self._slowness = 0.0
        self._failures = 0.0
        # What the next load to begin does instead.
        self.instead: Callable[[], None] | None = None
        self._begin_load_chunks = engine.begin_load_chunks
        engine.begin_load_chunks = self._begin  # type: ignore[method-assign]

    def draw_from(self, draw: random.Random, slowness: float, failures: float) -> None:
        """From now on loads are late as often as `slowness` says, and fail as `failures` does."""
        self._draw, self._slowness, self._failures = draw, slowness, failures

    def takes_long(self) -> bool:
        return self._draw.random() < self._slowness

    def fails(self) -> bool:
        return self._draw.random() < self._failures

    def not_over(self) -> set[str]:
        """Requests whose loads are under way, as far as the worker half has heard."""
        self.under_way = [each for each in self.under_way if not each.is_said_to_be_over]
        return {each.req_id for each in self.under_way}

    def go_on(self) -> None:
        """Some time passes: copies are made."""
        for transfer in self.under_way:
            if not self.takes_long():
                transfer.copy()

    def _begin(
        self, lookup_id: str, namespace: str, hashes: bytes, block_ids: list[int], *, skip: int
    ) -> LateTransfer:
        if self.instead is not None:
            self.instead()
        transfer = LateTransfer(
            self,
            lookup_id,
            lambda: self._begin_load_chunks(lookup_id, namespace, hashes, block_ids, skip=skip),
        )
        pool = self._engine.local_cpu
        assert pool is not None
        transfer.held = pool.get(namespace, hashes)
        pool.release(lookup_id)
        self.under_way.append(transfer)
        return transfer
