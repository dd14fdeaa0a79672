"""Both halves in one process: straight calls."""

from __future__ import annotations

import logging
import os
import time
from typing import Protocol

from lmcache_rs.lookup.paths import Rank
from lmcache_rs.lookup.records import Record, RecordingClient, check_process

logger = logging.getLogger(__name__)


class LocalIndex(Protocol):
    """What an in-process lookup asks: the native `LocalCpu`, or something like it."""

    def lookup(self, lookup_id: str, namespace: str, hashes: bytes) -> tuple[int, int]:
        """Leases the longest stored prefix: (chunks, milliseconds the lease holds)."""
        ...

    def release(self, lookup_id: str) -> object:
        """Gives back what `lookup_id` leases."""
        ...

    def clear(self) -> object:
        """Forgets every chunk; what is leased lives on unseen."""
        ...


class InProcessLookupClient(RecordingClient):
    """Both halves in one process: straight calls, no socket, every answer at the first ask."""

    def __init__(self, local_cpu: LocalIndex) -> None:
        super().__init__()
        self._index = local_cpu

    def _resolve(self, req_id: str, record: Record) -> int | None:
        now = time.monotonic()
        if record.hit_chunks is None or now >= record.fresh_until:
            record.asked_at = now
            self._counts["asks"] += 1
            self._leased.add(req_id)
            try:
                found = self._index.lookup(req_id, record.namespace, record.hashes)
            except Exception:
                logger.exception("lookup of request %r failed: it counts as no hit", req_id)
                self._fail(req_id, record, "errors")
            else:
                self._counts["answered_at_first_ask"] += 1
                self._settle(req_id, record, *found)
        return record.hit_chunks

    def clear(self) -> bool:
        check_process(self._pid)
        try:
            self._index.clear()
        except Exception:
            logger.exception("the store could not be emptied")
            return False
        return True

    def _release(self, req_id: str) -> None:
        self._counts["releases"] += 1
        try:
            self._index.release(req_id)
        except Exception:
            logger.exception("release of request %r failed: its lease runs out by itself", req_id)


# Stores of workers in this process, by engine and rank, with the process that registered them: a
# fork copies the table, but not the right to use what is in it.
_local: dict[tuple[str, int | Rank], tuple[int, LocalIndex]] = {}


def register_local(engine_id: str, rank: int | Rank, local_cpu: LocalIndex) -> None:
    """Makes a worker's store known to the scheduler half in the same process; the newest stays."""
    _local[engine_id, rank] = (os.getpid(), local_cpu)


def unregister_local(engine_id: str, rank: int | Rank, local_cpu: LocalIndex) -> None:
    """Takes back `register_local`, unless another store has been registered since."""
    if registered_local(engine_id, rank) is local_cpu:
        del _local[engine_id, rank]


def registered_local(engine_id: str, rank: int | Rank) -> LocalIndex | None:
    """The worker's store, if it is in this process."""
    pid, local_cpu = _local.get((engine_id, rank), (0, None))
    return local_cpu if pid == os.getpid() else None
