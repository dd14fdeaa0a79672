"""A server as a tier: chunks that all machines which reach it share, and that outlive them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from lmcache_rs._native import LocalCpu, Remote
from lmcache_rs.config_keys import without_credentials
from lmcache_rs.storage.native_tier import DEADLINE_S, NativeTier

if TYPE_CHECKING:
    from lmcache_rs.config import LMCacheEngineConfig
    from lmcache_rs.key import CacheEngineKey

logger = logging.getLogger("lmcache_rs")

FIRST_ASKED_S = 2.0
"""Seconds that a start waits for a server to say what it is."""


CREDENTIALS = ("REDIS_USERNAME", "REDIS_PASSWORD", "REDISCLI_AUTH")
OBJECT_STORES = ("AWS_", "AZURE_", "GOOGLE_")
"""Variables in which the native side looks for what a URL lacks, and how others of them begin."""


def credentials() -> dict[str, str]:
    """What this process's variables say of credentials."""
    return {
        name: text
        for name, text in os.environ.items()
        if name in CREDENTIALS or name.startswith(OBJECT_STORES)
    }


class RemoteBackend(NativeTier):
    """A server, e.g. Redis or S3. Everything but the marshalling is native: see docs/remote.md.

    Args:
        url: Where the server is. It may hold credentials, and is not logged as it is; what it
            lacks of them comes from variables (`credentials`).
        pool: Where chunks that are read are put.
        name: The tier's name in counters and logs.
        operations: Reads under way at a time; puts have half as many beside them.
        ttl_s: Seconds after which the server drops a chunk, counted from its write; None: never.
        max_queued_bytes: Bytes of the puts that may wait; a quarter of the pool unless given.
        deadline_s: Seconds after which an operation is taken as a miss.
        serde: How chunks lie on the server: `naive`, or `lossless` for packed ones.

    Raises:
        ValueError: The URL is wrong, or a file that it names cannot be read.
        OSError: The system gives no threads.
    """

    def __init__(
        self,
        url: str,
        pool: LocalCpu,
        *,
        name: str = "RemoteBackend",
        operations: int = 8,
        ttl_s: float | None = None,
        max_queued_bytes: int | None = None,
        deadline_s: float = DEADLINE_S,
        serde: str = "naive",
    ) -> None:
        self.url = without_credentials(url)
        self.remote = Remote(
            url,
            pool,
            credentials=credentials(),
            operations=operations,
            deadline_s=deadline_s,
            ttl_s=ttl_s,
            max_queued_bytes=max_queued_bytes or max(1, pool.capacity_bytes // 4),
            serde=serde,
        )
        super().__init__(name, self.remote, deadline_s)

    @classmethod
    def from_config(
        cls, config: LMCacheEngineConfig, url: str, pool: LocalCpu, name: str
    ) -> RemoteBackend:
        """The tier that one of the URLs in `remote_url` asks for.

        What is not as it should be with the server is logged. One that is not reached is used as
        soon as it is.

        Raises:
            ConnectionError: It is not reached, and `strict` makes it a stop.
        """
        made = cls.unasked(config, url, pool, name)
        for what, is_right, words in made.health(min(FIRST_ASKED_S, config.blocking_timeout_secs)):
            if is_right:
                continue
            if what == "reach" and config.strict:
                made.close(0.0)
                raise ConnectionError(f"{made.url} is not reached: {words}")
            logger.warning("lmcache_rs: %s at %s: %s", name, made.url, words)
        # It has been said.
        made.remote.take_lines()
        return made

    @classmethod
    def unasked(
        cls,
        config: LMCacheEngineConfig,
        url: str,
        pool: LocalCpu,
        name: str,
        *,
        max_queued_bytes: int | None = None,
    ) -> RemoteBackend:
        """As `from_config`, without a word to the server yet."""
        return cls(
            url,
            pool,
            name=name,
            operations=config.remote_operations,
            ttl_s=config.remote_ttl,
            max_queued_bytes=max_queued_bytes,
            deadline_s=config.blocking_timeout_secs,
            serde=config.remote_serde,
        )

    def _speak(self) -> None:
        for line in self.remote.take_lines():
            logger.warning("lmcache_rs: tier %s at %s: %s", self.name, self.url, line)

    @property
    def is_reached(self) -> bool:
        """Whether the server is asked; one that failed is left alone until a probe gets through."""
        return not self.remote.stats()["out_of_reach"]

    def batched_async_contains(self, keys: Sequence[CacheEngineKey]) -> Future[int]:
        """As `batched_contains`, without waiting for the server."""
        try:
            return self._waiting.submit(self.batched_contains, list(keys))
        except RuntimeError:
            # Closed: nothing is there.
            future: Future[int] = Future()
            future.set_result(0)
            return future

    def health(self, deadline_s: float = DEADLINE_S) -> list[tuple[str, bool, str]]:
        """What there is to say of the server: of each what was looked at, whether it is as it
        should be, and what to change if it is not."""
        return self.remote.health(deadline_s)
