"""Faults that are counted, said now and then, and never raised."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable

SECONDS_BETWEEN_LINES = 10.0


class FaultCounts:
    """Counts faults by kind; each kind has a line in the log at most once per 10 seconds."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._said_at: dict[str, float] = {}

    def count(self, kind: str, say: Callable[[int], None]) -> None:
        """Counts a fault of this kind; if a line is due, calls `say` with how many there were."""
        now = time.monotonic()
        with self._lock:
            self.counts[kind] += 1
            so_far = self.counts[kind]
            if now - self._said_at.get(kind, -SECONDS_BETWEEN_LINES) < SECONDS_BETWEEN_LINES:
                return
            self._said_at[kind] = now
        # Counted it is; that it cannot be said (an exception that has no text, a filter of the log
        # that raises) is no fault of whoever asked.
        with contextlib.suppress(Exception):
            say(so_far)
