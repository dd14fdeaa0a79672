"""How the scheduler half asks the worker half what is stored.

`connect` gives a client of one worker, `connect_ranks` one of all workers of an engine. A client
calls the store directly when both halves share a process, and asks over Unix sockets
(docs/lookup-protocol.md) when they do not. Either way a request has one record: unknown until it is
asked about, pending until the answer is there, then a number of chunks for as long as the leases
behind that number hold. The record ends at `end`.

Nothing here waits for longer than `wait_us`, and a worker that is missing, stopped or dead is zero
hits, never an exception. A client belongs to one thread.
"""

from __future__ import annotations

from lmcache_rs.lookup.in_process import (
    InProcessLookupClient,
    LocalIndex,
    register_local,
    unregister_local,
)
from lmcache_rs.lookup.paths import Rank, lookup_secret, lookup_socket_path, reader_secret
from lmcache_rs.lookup.ranks import DEADLINE_MS, WAIT_US, RanksLookupClient
from lmcache_rs.lookup.records import UNKNOWN, LookupClient, Stats, Unknown
from lmcache_rs.lookup.routes import IpcLookupClient, connect, connect_ranks

__all__ = [
    "DEADLINE_MS",
    "UNKNOWN",
    "WAIT_US",
    "InProcessLookupClient",
    "IpcLookupClient",
    "LocalIndex",
    "LookupClient",
    "Rank",
    "RanksLookupClient",
    "Stats",
    "Unknown",
    "connect",
    "connect_ranks",
    "lookup_secret",
    "lookup_socket_path",
    "reader_secret",
    "register_local",
    "unregister_local",
]
