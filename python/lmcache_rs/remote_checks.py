"""What the doctor finds out about remote tiers: reach and latency, rights, memory, and whether a
chunk that is stored comes back."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lmcache_rs import doctor
from lmcache_rs.config_keys import without_credentials

if TYPE_CHECKING:
    from lmcache_rs._native import LocalCpu
    from lmcache_rs.config import LMCacheEngineConfig
    from lmcache_rs.doctor import Finding

REACH_S = 10.0
"""Seconds in which a server is to say what it is."""
_CHANGES = {
    "reach": "see that the server runs and that remote_url names it",
    "rights": "see what this user may do there",
}


def remote(config: LMCacheEngineConfig) -> Iterator[Finding]:
    """One server after the other, each asked what it is and used as the engine would use it."""
    from lmcache_rs.storage import RemoteBackend

    urls = config.remote_urls
    for number, url in enumerate(urls):
        name = f"remote {number}" if len(urls) > 1 else "remote"
        native = importlib.import_module("lmcache_rs._native")
        pool: LocalCpu = native.LocalCpu(doctor.TEST_POOL_BYTES, 60_000)
        try:
            tier = RemoteBackend.unasked(
                config, url, pool, name, max_queued_bytes=doctor.TEST_POOL_BYTES
            )
        except (OSError, ValueError) as error:
            pool.close()
            found = f"{without_credentials(url)}: {error}"
            yield doctor.Finding(name, "problem", found, "correct remote_url or remote_ttl")
            continue
        try:
            yield from _looked_at(name, tier, pool)
        finally:
            tier.close(doctor.TEST_DEADLINE_S)
            pool.close()


def _looked_at(name: str, tier: object, pool: LocalCpu) -> Iterator[Finding]:
    from lmcache_rs.storage import RemoteBackend

    assert isinstance(tier, RemoteBackend)
    is_usable = True
    for what, is_right, words in tier.health(REACH_S):
        # The server's memory is its operator's: the engine misses nothing by it.
        verdict: doctor.Verdict = "note" if what == "memory" else "problem"
        if is_right:
            verdict = "ok"
        is_usable = is_usable and verdict != "problem"
        change = "" if is_right else _CHANGES.get(what, "")
        yield doctor.Finding(name, verdict, f"{what}: {words}", change)
    if is_usable:
        yield doctor.self_test(name, tier, pool)
