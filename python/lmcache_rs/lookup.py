"""How the scheduler half asks the worker half what is stored.

`connect` gives the client. It calls the store directly when both halves share a process, and asks
over a Unix socket (docs/lookup-protocol.md) when they do not. Either way a request has one record:
unknown until it is asked about, pending until the answer is there, then a number of chunks for as
long as the lease behind that number holds. The record ends at `end`.

Nothing here waits for longer than `wait_us`, and a worker that is missing, stopped or dead is zero
hits, never an exception. A client belongs to one thread.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import enum
import hashlib
import itertools
import logging
import math
import os
import pathlib
import select
import stat
import tempfile
import time
from typing import TYPE_CHECKING, Final, Protocol

from lmcache_rs import _native
from lmcache_rs.key import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    import zmq

__all__ = [
    "UNKNOWN",
    "InProcessLookupClient",
    "IpcLookupClient",
    "LocalIndex",
    "LookupClient",
    "Unknown",
    "connect",
    "lookup_socket_path",
    "register_local",
    "unregister_local",
]

logger = logging.getLogger(__name__)

WAIT_US: Final = 200
DEADLINE_MS: Final = 250
CLEAR_DEADLINE_MS: Final = 5000
MAX_MESSAGE_BYTES: Final = 4 << 20
MAX_SOCKET_PATH_BYTES: Final = 107

# Messages that may wait for a server that does not read. Each can be up to MAX_MESSAGE_BYTES.
SEND_HIGH_WATER_MARK: Final = 64
ROUND_TRIPS_KEPT: Final = 4096

Stats = dict[str, int | float]

COUNTERS: Final = (
    "lookups",
    "asks",
    "answered",
    "answered_at_first_ask",
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


@dataclasses.dataclass(slots=True)
class _Record:
    """What is known about one request. Times are `time.monotonic()` seconds."""

    hashes: bytes
    namespace: str
    hit_chunks: int | None = None
    # Until then the number stands; after it, the lease is renewed before the number is given again.
    fresh_until: float = math.inf
    # The ask whose answer is awaited; 0 if none is.
    message_id: int = 0
    asked_at: float = 0.0

    def settle(self, hit_chunks: int, fresh_until: float = math.inf) -> None:
        """Takes the answer."""
        self.hit_chunks = hit_chunks
        self.fresh_until = fresh_until
        self.message_id = 0


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


class _RecordingClient(LookupClient):
    """The records; how a number is asked for is left to the subclass."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        # Requests that may hold a lease, from the first ask to the end of the request.
        self._leased: set[str] = set()
        self._pid = os.getpid()
        self._counts: collections.Counter[str] = collections.Counter()
        self._round_trips: collections.deque[float] = collections.deque(maxlen=ROUND_TRIPS_KEPT)
        self._num_round_trips = 0

    def lookup(self, hashes: bytes, req_id: str, namespace: str) -> int | None:
        _check_process(self._pid)
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
                self._abandon(record)
            record = self._records[req_id] = _Record(hashes, namespace)
        return self._resolve(req_id, record)

    def lookup_cache(self, req_id: str) -> int | Unknown | None:
        _check_process(self._pid)
        self._collect()
        record = self._records.get(req_id)
        return UNKNOWN if record is None else self._resolve(req_id, record)

    def end(self, req_id: str, *, release: bool) -> None:
        _check_process(self._pid)
        record = self._records.pop(req_id, None)
        if record is not None:
            self._abandon(record)
        if release and req_id in self._leased:
            self._leased.discard(req_id)
            self._release(req_id)

    def stats(self) -> Stats:
        _check_process(self._pid)
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
    def _resolve(self, req_id: str, record: _Record) -> int | None:
        """The record's number; asks for it first where there is none that stands."""

    @abc.abstractmethod
    def _release(self, req_id: str) -> None:
        """Gives the request's lease back; may silently fail, as the lease has a deadline."""

    def _collect(self) -> None:
        """Takes in the answers that have come."""

    def _abandon(self, record: _Record) -> None:
        """Forgets the ask that `record` waits for."""

    def _settle(self, req_id: str, record: _Record, hit_chunks: int, lease_ms: int) -> None:
        """Takes an answer into the record. What is not leased is not promised."""
        self._counts["answered"] += 1
        self._round_trips.append(time.monotonic() - record.asked_at)
        self._num_round_trips += 1
        if hit_chunks * HASH_BYTES > len(record.hashes):
            self._fail(req_id, record, "errors")
        elif hit_chunks == 0 or lease_ms == 0:
            record.settle(0)
            self._leased.discard(req_id)
        else:
            # Counted from the ask: the lease began later, so it holds for longer than this.
            record.settle(hit_chunks, record.asked_at + lease_ms / 2000)

    def _fail(self, req_id: str, record: _Record, counter: str) -> None:
        """Gives up on this request: it has zero hits until its record ends."""
        self._counts[counter] += 1
        self._abandon(record)
        record.settle(0)
        if req_id in self._leased:
            # An ask may still lie in the server's queue; this lies behind it.
            self._leased.discard(req_id)
            self._release(req_id)


def _check_process(pid: int) -> None:
    if os.getpid() != pid:
        raise RuntimeError(
            f"this lookup client belongs to process {pid} and was used in process "
            f"{os.getpid()}; call connect() in the process that asks"
        )


class InProcessLookupClient(_RecordingClient):
    """Both halves in one process: straight calls, no socket, every answer at the first ask."""

    def __init__(self, local_cpu: LocalIndex) -> None:
        super().__init__()
        self._index = local_cpu

    def _resolve(self, req_id: str, record: _Record) -> int | None:
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
        _check_process(self._pid)
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


class IpcLookupClient(_RecordingClient):
    """Asks the worker's process over its Unix socket.

    `lookup` waits for at most `wait_us` microseconds and is None if no answer came; the next call
    for the request finds it if it came since. `deadline_ms` after the ask the request is given up
    as zero hits. A late answer is dropped by its id. While nobody listens every request is zero
    hits at once; the connection comes back by itself, within half a second of the server.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        wait_us: int = WAIT_US,
        deadline_ms: int = DEADLINE_MS,
    ) -> None:
        super().__init__()
        self._path = os.fspath(path)
        self._wait_s = wait_us / 1e6
        self._deadline_s = deadline_ms / 1e3
        self._message_ids = itertools.count(1)
        # The asks whose answers are awaited.
        self._awaited: dict[int, str] = {}
        # Whether a wait has been in vain since the last answer.
        self._is_held_up = False
        # The clear whose answer is awaited, 0 if none is, and the answer.
        self._clear_id = 0
        self._clear_status: int | None = None
        # Since when nothing can be sent; None while it can.
        self._cut_off_at: float | None = None
        self._context, self._socket = _open_dealer(self._path)
        self._descriptor: int = self._socket.FD

    def close(self) -> None:
        super().close()
        self._awaited.clear()
        if os.getpid() == self._pid:
            self._socket.close(linger=0)
            self._context.term()

    def _resolve(self, req_id: str, record: _Record) -> int | None:
        now = time.monotonic()
        if record.message_id:
            if now - record.asked_at >= self._deadline_s:
                self._fail(req_id, record, "timeouts")
            else:
                self._wait(record)
        elif record.hit_chunks is None or now >= record.fresh_until:
            record.hit_chunks = None
            record.asked_at = now
            if self._ask(req_id, record) and self._wait(record):
                self._counts["answered_at_first_ask"] += 1
        return record.hit_chunks

    def _ask(self, req_id: str, record: _Record) -> bool:
        """Sends the ask. If there is no connection yet, the record stays unasked."""
        message_id = next(self._message_ids)
        try:
            message = _native.encode_lookup_request(
                message_id, req_id, record.namespace, record.hashes
            )
        except ValueError:
            # An id or namespace with a lone surrogate.
            self._fail(req_id, record, "errors")
            return False
        if len(message) > MAX_MESSAGE_BYTES:
            self._fail(req_id, record, "errors")
            return False
        if not self._send(message):
            if self._is_cut_off():
                self._fail(req_id, record, "unreachable")
            return False
        self._counts["asks"] += 1
        self._leased.add(req_id)
        self._awaited[message_id] = req_id
        record.message_id = message_id
        return True

    def _is_cut_off(self) -> bool:
        """Whether it is no use waiting for a connection. A young one gets as long as an answer."""
        now = time.monotonic()
        if self._cut_off_at is None:
            self._cut_off_at = now
        return now - self._cut_off_at >= self._deadline_s or not os.path.exists(self._path)

    def _send(self, message: bytes) -> bool:
        import zmq

        try:
            self._socket.send(message, zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            self._counts["errors"] += 1
            return False
        self._cut_off_at = None
        return True

    def _wait(self, record: _Record) -> bool:
        """Waits for the record's answer: once for all records while the server is held up."""
        wait_until = time.monotonic() + self._wait_s
        while True:
            self._collect()
            if not record.message_id:
                return True
            seconds = wait_until - time.monotonic()
            if self._is_held_up or seconds <= 0:
                self._is_held_up = True
                return False
            self._wait_for_input(seconds)

    def _wait_for_input(self, seconds: float) -> None:
        # Not zmq's poll nor epoll: both count in milliseconds.
        try:
            select.select([self._descriptor], [], [], seconds)
        except ValueError:
            # select knows descriptors below 1024 only.
            time.sleep(min(seconds, 20e-6))

    def _collect(self) -> None:
        import zmq

        while True:
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            except zmq.ZMQError:
                self._counts["errors"] += 1
                return
            self._accept(parts)

    def _accept(self, parts: list[bytes]) -> None:
        self._is_held_up = False
        try:
            (data,) = parts
            message_id, status, hit_chunks, lease_ms = _native.decode_lookup_answer(data)
        except ValueError:
            self._counts["errors"] += 1
            return
        if message_id == self._clear_id:
            self._clear_status = status
            return
        req_id = self._awaited.pop(message_id, None)
        record = None if req_id is None else self._records.get(req_id)
        if req_id is None or record is None or record.message_id != message_id:
            self._counts["late"] += 1
            return
        if status:
            self._fail(req_id, record, "errors")
        else:
            self._settle(req_id, record, hit_chunks, lease_ms)

    def clear(self) -> bool:
        _check_process(self._pid)
        give_up_at = time.monotonic() + CLEAR_DEADLINE_MS / 1e3
        self._clear_id, self._clear_status = next(self._message_ids), None
        message = _native.encode_clear_request(self._clear_id)
        while not self._send(message):
            # Also while the releases before it fill the queue.
            if self._is_cut_off() or time.monotonic() >= give_up_at:
                return False
            time.sleep(1e-3)
        while self._clear_status is None and (left := give_up_at - time.monotonic()) > 0:
            self._wait_for_input(left)
            self._collect()
        self._clear_id = 0
        return self._clear_status == 0

    def _abandon(self, record: _Record) -> None:
        self._awaited.pop(record.message_id, None)
        record.message_id = 0

    def _release(self, req_id: str) -> None:
        self._counts["releases"] += 1
        self._send(_native.encode_release_request(next(self._message_ids), req_id))


def _open_dealer(path: str) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    # Without a connection nothing is queued: a send fails at once instead.
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RECONNECT_IVL, 20)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    dealer.setsockopt(zmq.HANDSHAKE_IVL, 2000)
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    dealer.connect(f"ipc://{path}")
    return context, dealer


def lookup_socket_path(engine_id: str, rank: int) -> pathlib.Path:
    """The socket of one worker, the same in every process of one user and environment.

    Its folder is made if need be: mode 0700, under XDG_RUNTIME_DIR if that is a writable folder,
    else under the temporary folder. Raises PermissionError if the folder belongs to somebody else
    or is open to others, ValueError if every candidate is too long for a socket.
    """
    digest = hashlib.sha256(engine_id.encode("utf-8", "surrogatepass")).hexdigest()
    name = f"{digest[:32]}-{rank}.sock"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    bases = [runtime] if os.access(runtime, os.W_OK | os.X_OK) else []
    for base in (*bases, tempfile.gettempdir(), "/tmp"):
        path = pathlib.Path(base) / f"lmcache-rs-{os.geteuid()}" / name
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            _make_private(path.parent)
            return path
    raise ValueError(
        f"no folder is short enough for a socket of at most {MAX_SOCKET_PATH_BYTES} bytes; "
        "set TMPDIR to a short path"
    )


def _make_private(folder: pathlib.Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is a link or a file; remove it")
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"{folder} belongs to uid {found.st_uid}, this process runs as {os.geteuid()}; "
            "set XDG_RUNTIME_DIR or TMPDIR to a folder of this user"
        )
    if found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} has mode {stat.S_IMODE(found.st_mode):04o}; others may not enter it: "
            f"chmod 700 {folder}"
        )


# Stores of workers in this process, by engine and rank, with the process that registered them: a
# fork copies the table, but not the right to use what is in it.
_local: dict[tuple[str, int], tuple[int, LocalIndex]] = {}


def register_local(engine_id: str, rank: int, local_cpu: LocalIndex) -> None:
    """Makes a worker's store known to the scheduler half in the same process; the newest stays."""
    _local[engine_id, rank] = (os.getpid(), local_cpu)


def unregister_local(engine_id: str, rank: int, local_cpu: LocalIndex) -> None:
    """Takes back `register_local`, unless another store has been registered since."""
    if _registered(engine_id, rank) is local_cpu:
        del _local[engine_id, rank]


def _registered(engine_id: str, rank: int) -> LocalIndex | None:
    pid, local_cpu = _local.get((engine_id, rank), (0, None))
    return local_cpu if pid == os.getpid() else None


def connect(
    engine_id: str, rank: int, wait_us: int = WAIT_US, deadline_ms: int = DEADLINE_MS
) -> LookupClient:
    """A client for one worker, in whichever process that is, and whether or not it is there yet.

    Raises what `lookup_socket_path` raises.
    """
    return _RoutedLookupClient(engine_id, rank, wait_us, deadline_ms)


class _RoutedLookupClient(LookupClient):
    """Goes to the store in this process if there is one, and over the socket if there is none."""

    def __init__(self, engine_id: str, rank: int, wait_us: int, deadline_ms: int) -> None:
        self._engine_id = engine_id
        self._rank = rank
        self._wait_us = wait_us
        self._deadline_ms = deadline_ms
        self._path = lookup_socket_path(engine_id, rank)
        self._pid = os.getpid()
        # The store `_client` was made for; None if that goes over the socket.
        self._local_cpu: LocalIndex | None = None
        self._client: LookupClient | None = None

    def lookup(self, hashes: bytes, req_id: str, namespace: str) -> int | None:
        return self._route().lookup(hashes, req_id, namespace)

    def lookup_cache(self, req_id: str) -> int | Unknown | None:
        return self._route().lookup_cache(req_id)

    def end(self, req_id: str, *, release: bool) -> None:
        self._route().end(req_id, release=release)

    def clear(self) -> bool:
        return self._route().clear()

    def stats(self) -> Stats:
        return self._route().stats()

    def counts(self) -> Mapping[str, int]:
        return self._route().counts()

    def take_round_trips(self) -> list[float]:
        return self._route().take_round_trips()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _route(self) -> LookupClient:
        _check_process(self._pid)
        local_cpu = _registered(self._engine_id, self._rank)
        if self._client is None or local_cpu is not self._local_cpu:
            self.close()
            self._local_cpu = local_cpu
            if local_cpu is None:
                self._client = IpcLookupClient(self._path, self._wait_us, self._deadline_ms)
            else:
                self._client = InProcessLookupClient(local_cpu)
        return self._client
