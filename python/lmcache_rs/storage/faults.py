"""Faults of what lies behind a tier: counted by reason, said now and then, never raised."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time

logger = logging.getLogger("lmcache_rs")
SECONDS_BETWEEN_LINES = 10.0


class TierFaults:
    """Counts the faults of one tier. A reason is one word, and part of a counter's name.

    Args:
        tier: The tier's name, for the log.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._said_at: dict[str, float] = {}
        self.counts: collections.Counter[str] = collections.Counter()

    def note(
        self,
        reason: str,
        verb: str,
        found: object,
        *,
        key: object = None,
        error: BaseException | None = None,
    ) -> None:
        """Counts a fault and logs it, at most once per reason and 10 seconds.

        Args:
            reason: What kind of fault it is.
            verb: What was asked of the tier.
            found: What was found instead of an answer; None: the exception.
            key: The chunk's key, if it is about one.
            error: The exception behind it, if there is one.
        """
        now = time.monotonic()
        with self._lock:
            self.counts[reason] += 1
            count = self.counts[reason]
            if now - self._said_at.get(reason, -SECONDS_BETWEEN_LINES) < SECONDS_BETWEEN_LINES:
                return
            self._said_at[reason] = now
        # Counted it is; that it cannot be said (an exception that has no text, a filter of the log
        # that raises) is no fault of whoever asked the tier.
        with contextlib.suppress(Exception):
            logger.warning(
                "lmcache_rs: fault %d of kind %r in tier %s, %s%s, taken as a miss: %s%s",
                count,
                reason,
                self._tier,
                verb,
                "" if key is None else f" of {key}",
                repr(error) if found is None else found,
                f" (errno {error.errno})" if isinstance(error, OSError) and error.errno else "",
                exc_info=error,
            )
