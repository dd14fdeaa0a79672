"""Schedules over a small pool and a shelf below it: hits come as streams, and some are lost."""

from __future__ import annotations

import random
import time
from itertools import product

from engine import Engine, block_hasher
from schedules import Schedule, _named
from settings import Settings
from shelf import Shelf
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request


def run(engine: Engine) -> None:
    """Steps until every request has ended."""
    deadline = time.monotonic() + 60
    while engine.scheduler.has_requests():
        assert time.monotonic() < deadline, "every request ends"
        engine.step()


class LossyShelf(Schedule):
    """A schedule over a small pool and a shelf that loses chunks now and then."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(f"shelf {seed}")
        settings = Settings.drawn(draw).but(
            shelf=True, pool_chunks=draw.choice((2, 3, 4, 4, 6, 6, 12)), kv_role="kv_both"
        )
        super().__init__(seed, settings)
        self._shelf_losses = draw.choice((0.0, 0.0, 0.1, 0.3))

    def run(self) -> Engine:
        large = Engine(self.settings.but(pool_chunks=64, recompute=True, lookup_delay=0.0))
        try:
            for at, (text, identity) in enumerate(product(self._texts, self._identities)):
                params = SamplingParams(max_tokens=1, ignore_eos=True)
                request = Request(
                    f"f{at}", text[:40], params, None, block_hasher=block_hasher, **identity
                )
                large.add(request, _named(identity))
            run(large)
            assert large._store.storage_manager.flush(60)
        finally:
            large.close()
        self._filled = Shelf.newest.chunks, large.judge._known_chunks
        return super().run()

    def _delay_lookups(self) -> None:
        super()._delay_lookups()
        chunks, known = self._filled
        Shelf.newest.chunks = chunks
        self._engine.judge._known_chunks |= known

    def _between_steps(self) -> None:
        super()._between_steps()
        chunks = Shelf.newest.chunks
        if chunks and self._draw.random() < self._shelf_losses:
            chunks.pop(self._draw.choice(sorted(chunks)), None)
        # Threads have their turn.
        if self._draw.random() < 0.5:
            time.sleep(0.002)
