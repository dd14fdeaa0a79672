"""Which way to a worker: the store in this process, or its server's socket."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

from lmcache_rs import _native
from lmcache_rs.lookup.in_process import InProcessLookupClient, LocalIndex, registered_local
from lmcache_rs.lookup.paths import Rank, lookup_secret, lookup_socket_path
from lmcache_rs.lookup.ranks import DEADLINE_MS, WAIT_US, RanksLookupClient
from lmcache_rs.lookup.records import LookupClient, Stats, Unknown, check_process


class IpcLookupClient(RanksLookupClient):
    """Asks one worker's process over its Unix socket; `secret` is what its server asks for."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        wait_us: int = WAIT_US,
        deadline_ms: int = DEADLINE_MS,
        *,
        secret: str = "",
    ) -> None:
        connections = _native.LookupConnections([(pathlib.Path(path), secret)])
        super().__init__(connections, 1, wait_us, deadline_ms)


def connect(
    engine_id: str, rank: int | Rank, wait_us: int = WAIT_US, deadline_ms: int = DEADLINE_MS
) -> LookupClient:
    """A client for one worker, in whichever process that is, and whether or not it is there yet.

    Raises what `lookup_socket_path` raises.
    """
    return _RoutedLookupClient(engine_id, rank, wait_us, deadline_ms)


def connect_ranks(
    lookup_ids: Mapping[Rank, str], wait_us: int = WAIT_US, deadline_ms: int = DEADLINE_MS
) -> LookupClient:
    """A client for all workers of an engine, each known by the id under which it can be asked.

    A request has the hits that all of them have. Raises what `lookup_socket_path` raises.
    """
    if len(lookup_ids) == 1:
        ((rank, engine_id),) = lookup_ids.items()
        return connect(engine_id, rank, wait_us, deadline_ms)
    peers = [
        (lookup_socket_path(engine_id, rank), lookup_secret(engine_id))
        for rank, engine_id in sorted(lookup_ids.items())
    ]
    connections = _native.LookupConnections(peers)
    return RanksLookupClient(connections, len(peers), wait_us, deadline_ms)


class _RoutedLookupClient(LookupClient):
    """Goes to the store in this process if there is one, and over the socket if there is none."""

    def __init__(self, engine_id: str, rank: int | Rank, wait_us: int, deadline_ms: int) -> None:
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
        check_process(self._pid)
        local_cpu = registered_local(self._engine_id, self._rank)
        if self._client is None or local_cpu is not self._local_cpu:
            self.close()
            self._local_cpu = local_cpu
            if local_cpu is None:
                self._client = IpcLookupClient(
                    self._path,
                    self._wait_us,
                    self._deadline_ms,
                    secret=lookup_secret(self._engine_id),
                )
            else:
                self._client = InProcessLookupClient(local_cpu)
        return self._client
