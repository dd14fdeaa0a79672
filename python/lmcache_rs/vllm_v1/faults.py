"""Faults of ours inside the engine's process: counted, said now and then, never raised.

A cache must not be worse than no cache: whatever goes wrong here is a miss.
"""

from __future__ import annotations

import collections
import contextlib
import time

from lmcache_rs.vllm_v1.compat import logger

SECONDS_BETWEEN_LINES = 10.0


class Faults:
    """Counts faults by where they happened."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._said_at: dict[str, float] = {}

    def note(self, where: str, error: BaseException) -> None:
        """Counts a fault and logs it with its traceback, at most once per place and 10 seconds."""
        self.counts[where] += 1
        now = time.monotonic()
        if now - self._said_at.get(where, -SECONDS_BETWEEN_LINES) < SECONDS_BETWEEN_LINES:
            return
        self._said_at[where] = now
        # What cannot be said (a filter of the log that raises) is counted, and no fault of vLLM's.
        with contextlib.suppress(Exception):
            logger.error(
                "lmcache_rs: fault %d in %s, taken as a miss: %s",
                self.counts[where],
                where,
                error,
                exc_info=error,
            )
