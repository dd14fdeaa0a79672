"""The one message that empties the other half's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_lookup import (
    LEASE_MS,
    NAMESPACE,
    Index,
    Server,
    chain,
    client,
    final,
    folder,
    serve,
)

from lmcache_rs import _native
from lmcache_rs.lookup import InProcessLookupClient, IpcLookupClient, ranks

__all__ = ["client", "folder", "serve"]


def test_clear_empties_the_other_process_before_it_returns(
    serve: Callable[..., Server], client: IpcLookupClient
) -> None:
    server = serve()
    assert final(client, chain(4), "r1") == 4
    client.end("r1", release=True)
    assert client.clear()
    books = server.books()
    assert (books["cached_bytes"], books["leased_bytes"], books["clears"]) == (0, 0, 1)
    assert final(client, chain(4), "r2") == 0
    assert client.clear(), "as often as one likes"


def test_what_is_leased_outlives_a_clear_and_is_found_no_more(
    serve: Callable[..., Server], client: IpcLookupClient
) -> None:
    server = serve()
    assert final(client, chain(4), "granted") == 4
    assert client.clear()
    assert server.books()["leases"] == 1
    assert final(client, chain(4), "later") == 0
    client.end("granted", release=True)
    assert final(client, chain(1), "behind") == 0
    assert server.books()["leased_bytes"] == 0


def test_clear_gives_up_on_a_server_that_does_not_answer_and_its_late_answer_spoils_nothing(
    serve: Callable[..., Server], client: IpcLookupClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    assert final(client, chain(4), "r1") == 4
    server.stop()
    monkeypatch.setattr(ranks, "CLEAR_DEADLINE_MS", 50)
    assert not client.clear()
    server.resume()
    # It was cleared all the same.
    assert final(client, chain(4), "r2") == 0
    monkeypatch.undo()
    assert client.clear()


def test_clear_without_a_server_is_false_at_once(client: IpcLookupClient) -> None:
    assert not client.clear()


def test_in_process_the_native_store_is_emptied(folder: Path) -> None:
    local_cpu = _native.LocalCpu(1 << 16, LEASE_MS)
    (obj,) = local_cpu.allocate([64]) or []
    assert local_cpu.put(NAMESPACE, chain(1), obj)
    del obj
    assert InProcessLookupClient(local_cpu).clear()
    assert local_cpu.audit()["cached_bytes"] == 0
    broken = Index()
    broken.is_broken = True
    assert not InProcessLookupClient(broken).clear()
