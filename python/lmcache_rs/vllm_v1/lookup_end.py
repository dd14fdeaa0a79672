"""Where the scheduler half finds this worker's host memory: `LookupEnd`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from lmcache_rs import _native, lookup


class LookupEnd:
    """Host memory under a name, in this process or behind a socket.

    Args:
        engine_start: The start of the engine whose worker this is.
        rank: Which of its workers.
        in_scheduler_process: Whether the scheduler half is in this process: then it asks the store
            itself, and no socket is opened.
    """

    def __init__(self, engine_start: str, rank: lookup.Rank, *, in_scheduler_process: bool) -> None:
        # The scheduler half learns this name from us, through vLLM. A name that both halves could
        # make by themselves would be that of another engine one day.
        self.lookup_id = f"{engine_start}/{secrets.token_hex(16)}"
        self._rank = rank
        self._in_scheduler_process = in_scheduler_process
        self._server: _native.LookupServer | None = None

    def open(
        self, local_cpu: _native.LocalCpu, fields: Mapping[str, str], *, has_readers: bool
    ) -> None:
        """Lookups find this memory from now on.

        Args:
            local_cpu: The memory.
            fields: What a namespace has here in these fields.
            has_readers: Whether other workers read it, too.

        Raises:
            OSError: The socket cannot be had.
        """
        if self._in_scheduler_process:
            lookup.register_local(self.lookup_id, self._rank, local_cpu)
            return
        path = lookup.lookup_socket_path(self.lookup_id, self._rank)
        secret = lookup.lookup_secret(self.lookup_id)
        readers = lookup.reader_secret(self.lookup_id) if has_readers else ""
        self._server = _native.LookupServer(path, local_cpu, secret, fields, readers)

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def forget(self, local_cpu: _native.LocalCpu) -> None:
        """Nobody in this process finds this memory any more."""
        lookup.unregister_local(self.lookup_id, self._rank, local_cpu)
