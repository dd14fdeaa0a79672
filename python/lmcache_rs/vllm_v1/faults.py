"""Faults of ours inside the engine's process: counted, said now and then, never raised.

A cache must not be worse than no cache: whatever goes wrong here is a miss.
"""

from __future__ import annotations

from lmcache_rs.faults import FaultCounts
from lmcache_rs.vllm_v1.compat import logger


class Faults(FaultCounts):
    """Counts faults by where they happened."""

    def note(self, where: str, error: BaseException) -> None:
        """Counts a fault and logs it with its traceback, at most once per place and 10 seconds."""

        def say(count: int) -> None:
            logger.error(
                "lmcache_rs: fault %d in %s, taken as a miss: %s",
                count,
                where,
                error,
                exc_info=error,
            )

        self.count(where, say)
