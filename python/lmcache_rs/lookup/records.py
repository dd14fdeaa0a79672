"""What is known about each request: the records, and what every client does with them."""

from __future__ import annotations

import abc
import collections
import dataclasses
import enum
import math
import os
import time
from typing import TYPE_CHECKING, Final

from lmcache_rs.key import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

ROUND_TRIPS_KEPT: Final = 4096

Stats = dict[str, int | float]

COUNTERS: Final = (
    "lookups",
    "asks",
    "answered",
    "answered_at_first_ask",
    "shortened",
    "late",
    "timeouts",
    "unreachable",
    "errors",
    "releases",
)


class Unknown(enum.Enum):
    """The type of `UNKNOWN`."""

    UNKNOWN = "unknown"


UNKNOWN: Final = Unknown.UNKNOWN
"""`lookup_cache`'s answer for a request that has no record."""


@dataclasses.dataclass(slots=True)
class Record:
    """What is known about one request. Times are `time.monotonic()` seconds."""

    hashes: bytes
    namespace: str
    hit_chunks: int | None = None
    # Until then the number stands; after it, the lease is renewed before the number is given again.
    fresh_until: float = math.inf
    asked_at: float = 0.0


class LookupClient(abc.ABC):
    """The scheduler half's view of what the worker half holds.

    Of every answered number half of the lease is kept in reserve, for the time between the answer
    and the moment the worker takes the chunks; a number older than that is asked for anew, under
    the same id, which renews the lease and never stacks a second one.

    All calls but `close` raise RuntimeError in a forked child.
    """

    @abc.abstractmethod
    def lookup(self, hashes: bytes, req_id: str, namespace: str) -> int | None:
        """Chunks of the longest stored prefix, leased for `req_id`; None if not known yet.

        `hashes` is the request's chain, 32 bytes a chunk, from chunk 0 on. Asking again costs
        nothing while the record stands; other hashes or another namespace are asked for anew.
        Raises ValueError if `hashes` is not a whole number of hashes.
        """

    @abc.abstractmethod
    def lookup_cache(self, req_id: str) -> int | Unknown | None:
        """What `lookup` would say for this request, from its record; UNKNOWN if it has none."""

    @abc.abstractmethod
    def end(self, req_id: str, *, release: bool) -> None:
        """Ends the request's record.

        At allocation `release` is False: the worker takes the lease. When the request finishes or
        is aborted it is True: what is still leased is given back. Unknown ids are ignored.
        """

    @abc.abstractmethod
    def clear(self) -> bool:
        """Empties the worker half's memory; whether that is known to be done.

        Waits, for at most `CLEAR_DEADLINE_MS`. What a worker holds a lease on lives on until that
        ends, and is found no more.
        """

    @abc.abstractmethod
    def stats(self) -> Stats:
        """Counters since the start, and the last round trips in microseconds.

        A round trip runs from the ask to the moment the answer is picked up, which for one that
        came late is the next call of the scheduler.
        """

    def counts(self) -> Mapping[str, int]:
        """The counters of `stats` alone, at no cost: a name that is missing is 0."""
        return {}

    def take_round_trips(self) -> list[float]:
        """Round trips since the last call, in seconds; the last `ROUND_TRIPS_KEPT` of them."""
        return []

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the client and all records. Idempotent. Leases end by their deadlines."""


class RecordingClient(LookupClient):
    """The records; how a number is asked for is left to the subclass."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        # Requests that may hold a lease, from the first ask to the end of the request.
        self._leased: set[str] = set()
        self._pid = os.getpid()
        self._counts: collections.Counter[str] = collections.Counter()
        self._round_trips: collections.deque[float] = collections.deque(maxlen=ROUND_TRIPS_KEPT)
        self._num_round_trips = 0

    def lookup(self, hashes: bytes, req_id: str, namespace: str) -> int | None:
        check_process(self._pid)
        if len(hashes) % HASH_BYTES:
            raise ValueError(
                f"hashes has {len(hashes)} bytes, no multiple of {HASH_BYTES}; "
                "pass the 32-byte chunk hashes end to end"
            )
        self._counts["lookups"] += 1
        self._collect()
        record = self._records.get(req_id)
        if record is None or record.hashes != hashes or record.namespace != namespace:
            if record is not None:
                self._abandon(req_id)
            record = self._records[req_id] = Record(hashes, namespace)
        return self._resolve(req_id, record)

    def lookup_cache(self, req_id: str) -> int | Unknown | None:
        check_process(self._pid)
        self._collect()
        record = self._records.get(req_id)
        return UNKNOWN if record is None else self._resolve(req_id, record)

    def end(self, req_id: str, *, release: bool) -> None:
        check_process(self._pid)
        if self._records.pop(req_id, None) is not None:
            self._abandon(req_id)
        if release and req_id in self._leased:
            self._leased.discard(req_id)
            self._release(req_id)

    def stats(self) -> Stats:
        check_process(self._pid)
        stats: Stats = {name: self._counts[name] for name in COUNTERS}
        trips = sorted(self._round_trips)
        if trips:
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                stats[f"round_trip_us_{name}"] = trips[int(len(trips) * share)] * 1e6
        return stats

    def counts(self) -> Mapping[str, int]:
        return self._counts

    def take_round_trips(self) -> list[float]:
        count, self._num_round_trips = self._num_round_trips, 0
        return list(self._round_trips)[-count:] if count else []

    def close(self) -> None:
        self._records.clear()
        self._leased.clear()

    @abc.abstractmethod
    def _resolve(self, req_id: str, record: Record) -> int | None:
        """The record's number; asks for it first where there is none that stands."""

    @abc.abstractmethod
    def _release(self, req_id: str) -> None:
        """Gives the request's lease back; may silently fail, as the lease has a deadline."""

    def _collect(self) -> None:
        """Takes in the answers that have come."""

    def _abandon(self, req_id: str) -> None:
        """Forgets the ask that the request waits for, if it waits for one."""

    def _settle(self, req_id: str, record: Record, hit_chunks: int, lease_ms: int) -> None:
        """Takes an answer into the record. What is not leased is not promised."""
        self._counts["answered"] += 1
        self._round_trips.append(time.monotonic() - record.asked_at)
        self._num_round_trips += 1
        if hit_chunks * HASH_BYTES > len(record.hashes):
            self._fail(req_id, record, "errors")
        elif hit_chunks == 0 or lease_ms == 0:
            record.hit_chunks, record.fresh_until = 0, math.inf
            self._leased.discard(req_id)
        else:
            # Counted from the ask: the lease began later, so it holds for longer than this.
            record.hit_chunks = hit_chunks
            record.fresh_until = record.asked_at + lease_ms / 2000

    def _fail(self, req_id: str, record: Record, counter: str) -> None:
        """Gives up on this request: it has zero hits until its record ends."""
        self._counts[counter] += 1
        self._abandon(req_id)
        record.hit_chunks, record.fresh_until = 0, math.inf
        if req_id in self._leased:
            # An ask may still lie in a server's queue; this lies behind it.
            self._leased.discard(req_id)
            self._release(req_id)


def check_process(pid: int) -> None:
    """Raises RuntimeError in a process other than `pid`."""
    if os.getpid() != pid:
        raise RuntimeError(
            f"this lookup client belongs to process {pid} and was used in process "
            f"{os.getpid()}; call connect() in the process that asks"
        )
