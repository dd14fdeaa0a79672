"""Faults of what lies behind a tier: counted by reason, said now and then, never raised."""

from __future__ import annotations

import logging

from lmcache_rs.faults import FaultCounts

logger = logging.getLogger("lmcache_rs")


class TierFaults(FaultCounts):
    """Counts the faults of one tier. A reason is one word, and part of a counter's name.

    Args:
        tier: The tier's name, for the log.
    """

    def __init__(self, tier: str) -> None:
        super().__init__()
        self._tier = tier

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

        def say(count: int) -> None:
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

        self.count(reason, say)
