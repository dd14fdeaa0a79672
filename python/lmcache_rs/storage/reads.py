"""What reading from the tiers below host memory has taken: `TierRead`, and `ReadLog` of them."""

from __future__ import annotations

import collections
import threading
from typing import NamedTuple

MAX_KEPT = 256


class TierRead(NamedTuple):
    """One read of neighbouring chunks from one tier.

    Args:
        lookup_id: For whom it was.
        tier: The tier's name.
        wanted_chunks: Chunks that the tier said it has, and was asked for.
        chunks: Those that came.
        num_bytes: Bytes of those.
        seconds: How long it took.
    """

    lookup_id: str
    tier: str
    wanted_chunks: int
    chunks: int
    num_bytes: int
    seconds: float


class ReadLog:
    """The last reads, until somebody takes them. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: collections.deque[TierRead] = collections.deque(maxlen=MAX_KEPT)

    def note(self, read: TierRead) -> None:
        """Keeps a read; of too many the oldest is dropped."""
        with self._lock:
            self._reads.append(read)

    def take(self) -> list[TierRead]:
        """The reads since the last call, the oldest first."""
        with self._lock:
            reads = list(self._reads)
            self._reads.clear()
        return reads
