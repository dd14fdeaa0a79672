"""One question to all ranks: the least of their answers, and the same lease on each.

An engine's ranks hold different parts of each chunk, and each evicts on its own. So a prefix counts
only as far as every rank has it. A rank that leases more is asked again for just the common part,
and the number is given when all ranks agree; if they share nothing, all leases go back at once.

A rank that cannot be asked, that answers nothing by the deadline or whose connection ends makes the
request zero hits, and the leases of the others are released.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Sequence
from typing import Final, Protocol

from lmcache_rs.key import HASH_BYTES
from lmcache_rs.lookup.records import Record, RecordingClient, check_process

WAIT_US: Final = 200
DEADLINE_MS: Final = 250
CLEAR_DEADLINE_MS: Final = 5000

# While no answers come, the share of its time that the scheduler may wait for them; below the
# least, the system's timers are coarser than the wait.
HELD_UP_SHARE: Final = 0.2
LEAST_WAIT_S: Final = 20e-6

OK: Final = 0
UNREADABLE: Final = 0  # as the id of a message
LOST: Final = -1

Told = tuple[int, int, int, int]
"""Message id, status, chunks, milliseconds of the lease."""


class Connections(Protocol):
    """What carries messages to the ranks, in order: `_native.LookupConnections`."""

    def connect(self) -> bool:
        """Makes the connections that are missing; whether every rank has one then."""
        ...

    def ask(
        self,
        message_id: int,
        lookup_id: str,
        namespace: str,
        hashes: bytes,
        ranks: Sequence[int] | None = None,
    ) -> bool:
        """Asks these ranks, or all, or none of them: False if one cannot be asked.

        Raises ValueError if no server could read the question.
        """
        ...

    def release(self, message_id: int, lookup_id: str) -> object:
        """Tells every rank that can be told."""
        ...

    def clear(self, message_id: int) -> list[int]:
        """Asks every rank that can be asked; those that cannot."""
        ...

    def receive(self, wait_us: int) -> list[tuple[int, Told | None]]:
        """What has come by rank, None where a connection has ended; waits if that is nothing."""
        ...

    def close(self) -> None:
        """Ends all connections."""
        ...


@dataclasses.dataclass(slots=True)
class Round:
    """One request's question, until all ranks agree.

    Args:
        held: The chunks that each rank leases, by its last answer.
        message_id: The question that is out.
        awaited: The ranks that owe an answer to it.
        lease_ms: The shortest lease that was answered.
    """

    held: list[int]
    message_id: int
    awaited: set[int]
    lease_ms: int = 2**32

    @property
    def common(self) -> int:
        """The chunks that every rank has."""
        return min(self.held)

    def generous(self) -> list[int]:
        """The ranks that lease more than that."""
        common = self.common
        return [rank for rank, held in enumerate(self.held) if held > common]


class RanksLookupClient(RecordingClient):
    """Asks all ranks of an engine.

    `lookup` waits for at most `wait_us` microseconds and is None if no answer came; the next call
    for the request finds it if it came since. `deadline_ms` after the ask the request is given up
    as zero hits. A late answer is dropped by its id. While a rank has no server every request is
    zero hits at once; the first ask after it has come finds it.
    """

    def __init__(
        self,
        connections: Connections,
        num_ranks: int,
        wait_us: int = WAIT_US,
        deadline_ms: int = DEADLINE_MS,
    ) -> None:
        super().__init__()
        self._connections = connections
        self._num_ranks = num_ranks
        self._patience = _Patience(wait_us / 1e6)
        self._deadline_s = deadline_ms / 1e3
        self._message_ids = itertools.count(1)
        # The requests whose ranks do not agree yet, and the questions that are out.
        self._rounds: dict[str, Round] = {}
        self._awaited: dict[int, str] = {}
        # The clear whose answers are awaited, 0 if none is, and each rank's status.
        self._clear_id = 0
        self._cleared: dict[int, int] = {}

    def close(self) -> None:
        super().close()
        self._rounds.clear()
        self._awaited.clear()
        if os.getpid() == self._pid:
            self._connections.close()

    def _resolve(self, req_id: str, record: Record) -> int | None:
        now = time.monotonic()
        if req_id in self._rounds:
            if now - record.asked_at >= self._deadline_s:
                self._fail(req_id, record, "timeouts")
            else:
                self._wait(req_id)
        elif record.hit_chunks is None or now >= record.fresh_until:
            record.hit_chunks = None
            record.asked_at = now
            if self._begin(req_id, record) and self._wait(req_id):
                self._counts["answered_at_first_ask"] += 1
        return record.hit_chunks

    def _begin(self, req_id: str, record: Record) -> bool:
        """Asks all ranks, or gives the request up before any of them holds something for it."""
        if not self._connections.connect():
            self._fail(req_id, record, "unreachable")
            return False
        everyone = range(self._num_ranks)
        self._rounds[req_id] = Round([0] * self._num_ranks, 0, set())
        return self._ask(req_id, record, record.hashes, everyone)

    def _ask(self, req_id: str, record: Record, hashes: bytes, ranks: Sequence[int]) -> bool:
        of_request = self._rounds[req_id]
        message_id = next(self._message_ids)
        try:
            asked = self._connections.ask(message_id, req_id, record.namespace, hashes, list(ranks))
        except ValueError:
            # Too long for any server, or an id or namespace with a lone surrogate.
            self._fail(req_id, record, "errors")
            return False
        if not asked:
            self._fail(req_id, record, "unreachable")
            return False
        self._counts["asks"] += 1
        self._leased.add(req_id)
        self._awaited.pop(of_request.message_id, None)
        self._awaited[message_id] = req_id
        of_request.message_id = message_id
        of_request.awaited = set(ranks)
        return True

    def _wait(self, req_id: str) -> bool:
        """Waits for the answer, as far as there is patience; whether it is there."""
        wait_until = time.monotonic() + self._patience.most_s
        while req_id in self._rounds:
            now = time.monotonic()
            seconds = min(self._patience.left(now), wait_until - now)
            if seconds < LEAST_WAIT_S:
                return False
            events = self._connections.receive(int(seconds * 1e6))
            self._patience.spend(now, time.monotonic())
            self._take(events)
        return True

    def _collect(self) -> None:
        self._take(self._connections.receive(0))

    def _take(self, events: list[tuple[int, Told | None]]) -> None:
        for rank, told in events:
            if told is None:
                self._lose(rank)
                continue
            self._patience.refill()
            message_id, status, hit_chunks, lease_ms = told
            if message_id == UNREADABLE:
                self._counts["errors"] += 1
            elif message_id == self._clear_id:
                self._cleared[rank] = status
            else:
                self._accept(rank, message_id, status, hit_chunks, lease_ms)

    def _accept(
        self, rank: int, message_id: int, status: int, hit_chunks: int, lease_ms: int
    ) -> None:
        req_id = self._awaited.get(message_id)
        of_request = None if req_id is None else self._rounds.get(req_id)
        if req_id is None or of_request is None or rank not in of_request.awaited:
            self._counts["late"] += 1
            return
        record = self._records[req_id]
        if status != OK or hit_chunks * HASH_BYTES > len(record.hashes):
            self._fail(req_id, record, "errors")
            return
        of_request.awaited.remove(rank)
        # What is not leased is not there.
        of_request.held[rank] = hit_chunks if lease_ms else 0
        of_request.lease_ms = min(of_request.lease_ms, lease_ms)
        if not of_request.awaited:
            self._conclude(req_id, record, of_request)

    def _conclude(self, req_id: str, record: Record, of_request: Round) -> None:
        """All ranks have answered: they agree, or share nothing, or some lease too much."""
        generous = of_request.generous()
        if generous and of_request.common:
            self._counts["shortened"] += 1
            # The answer may be shorter still: what is cleared meanwhile is found no more.
            common = record.hashes[: of_request.common * HASH_BYTES]
            self._ask(req_id, record, common, generous)
            return
        if generous:
            self._release(req_id)
        self._abandon(req_id)
        self._settle(req_id, record, of_request.common, of_request.lease_ms)

    def _lose(self, rank: int) -> None:
        """The rank's connection has ended: what it owed will not come."""
        if self._clear_id:
            self._cleared.setdefault(rank, LOST)
        owed = [req_id for req_id, of in self._rounds.items() if rank in of.awaited]
        for req_id in owed:
            self._fail(req_id, self._records[req_id], "unreachable")

    def clear(self) -> bool:
        check_process(self._pid)
        give_up_at = time.monotonic() + CLEAR_DEADLINE_MS / 1e3
        self._collect()
        self._clear_id = next(self._message_ids)
        self._connections.connect()
        self._cleared = dict.fromkeys(self._connections.clear(self._clear_id), LOST)
        while len(self._cleared) < self._num_ranks and time.monotonic() < give_up_at:
            left = max(give_up_at - time.monotonic(), LEAST_WAIT_S)
            self._take(self._connections.receive(int(left * 1e6)))
        self._clear_id = 0
        return [self._cleared.get(rank) for rank in range(self._num_ranks)] == (
            [OK] * self._num_ranks
        )

    def _abandon(self, req_id: str) -> None:
        of_request = self._rounds.pop(req_id, None)
        if of_request is not None:
            self._awaited.pop(of_request.message_id, None)

    def _release(self, req_id: str) -> None:
        self._counts["releases"] += 1
        self._connections.release(next(self._message_ids), req_id)


class _Patience:
    """How long the scheduler may wait: `most_s` while answers come, else a share of its time.

    So neither a server that hangs holds up the scheduler, nor does a scheduler that asks and asks
    keep the processor from the server it waits for.
    """

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self._left_s = most_s
        self._at = 0.0

    def left(self, now: float) -> float:
        """Seconds that may be waited now."""
        earned = (now - self._at) * HELD_UP_SHARE
        self._left_s = min(self._left_s + earned, self.most_s)
        self._at = now
        return self._left_s

    def spend(self, began: float, ended: float) -> None:
        """Takes account of a wait."""
        self._left_s = max(self._left_s - (ended - began), 0.0)
        self._at = ended

    def refill(self) -> None:
        """An answer came."""
        self._left_s = self.most_s
