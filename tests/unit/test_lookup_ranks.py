"""One question to several ranks: real servers, each in a process of its own."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_lookup import LEASE_MS, NAMESPACE, Server, chain, final, folder, wait_for

from lmcache_rs import _native
from lmcache_rs.lookup import (
    Rank,
    RanksLookupClient,
    connect_ranks,
    lookup_secret,
    lookup_socket_path,
)

__all__ = ["folder"]

Serve = Callable[..., Server]


@pytest.fixture
def serve(folder: pathlib.Path) -> Iterator[Serve]:
    servers: list[Server] = []

    def start(rank: int, **options: Any) -> Server:
        # Longer than any wait here: no lease may seem given back because it ran out.
        servers.append(Server(folder / f"{rank}.sock", **{"lease_ms": 60_000, **options}))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@contextlib.contextmanager
def asking(
    folder: pathlib.Path, num_ranks: int, deadline_ms: int = 10_000
) -> Iterator[RanksLookupClient]:
    peers = [(folder / f"{rank}.sock", "") for rank in range(num_ranks)]
    client = RanksLookupClient(_native.LookupConnections(peers), num_ranks, deadline_ms=deadline_ms)
    yield client
    client.close()


def leased(server: Server) -> tuple[int, int]:
    """Lookups that lease, and the chunks of 4096 bytes that they hold."""
    books = server.books()
    return books["leases"], books["leased_bytes"] // 4096


def test_the_answer_is_the_least_and_every_rank_leases_just_that(
    serve: Serve, folder: pathlib.Path
) -> None:
    ranks = [serve(rank, num_chunks=num_chunks) for rank, num_chunks in enumerate((6, 3, 4))]
    with asking(folder, 3) as client:
        assert final(client, chain(8), "r1") == 3
        assert [leased(rank) for rank in ranks] == [(1, 3)] * 3
        assert client.stats()["shortened"] == 1
        assert final(client, chain(2), "r2") == 2
        assert [leased(rank)[0] for rank in ranks] == [2] * 3
        for request in ("r1", "r2"):
            client.end(request, release=True)
        for rank in ranks:
            wait_for(lambda rank=rank: leased(rank) == (0, 0))


def test_ranks_that_share_nothing_lease_nothing(serve: Serve, folder: pathlib.Path) -> None:
    ranks = [serve(rank, num_chunks=num_chunks) for rank, num_chunks in enumerate((4, 0))]
    with asking(folder, 2) as client:
        assert final(client, chain(4), "r1") == 0
        for rank in ranks:
            wait_for(lambda rank=rank: leased(rank) == (0, 0))


def test_a_rank_that_lost_its_cache_shortens_the_answer_for_all(
    serve: Serve, folder: pathlib.Path
) -> None:
    ranks = [serve(rank, num_chunks=4) for rank in range(2)]
    with asking(folder, 2) as client:
        assert final(client, chain(4), "r1") == 4
        client.end("r1", release=True)
        with contextlib.closing(
            RanksLookupClient(_native.LookupConnections([(folder / "1.sock", "")]), 1)
        ) as alone:
            assert alone.clear()
        assert final(client, chain(4), "r2") == 0
        for rank in ranks:
            wait_for(lambda rank=rank: leased(rank) == (0, 0))


def test_a_missing_rank_is_no_hit_at_once_and_nobody_leases(
    serve: Serve, folder: pathlib.Path
) -> None:
    there = serve(0, num_chunks=4)
    with asking(folder, 2) as client:
        assert client.lookup(chain(4), "r1", NAMESPACE) == 0
        assert there.books()["lookups"] == 0
        serve(1, num_chunks=4)
        assert final(client, chain(4), "r2") == 4


def test_a_stopped_rank_is_no_hit_by_the_deadline_and_the_others_let_go(
    serve: Serve, folder: pathlib.Path
) -> None:
    running, stopped = (serve(rank, num_chunks=4) for rank in range(2))
    with asking(folder, 2, deadline_ms=700) as client:
        wait_for(lambda: final(client, chain(1), f"warm {time.monotonic()}") == 1)
        for request in list(client._leased):
            client.end(request, release=True)
        stopped.stop()
        assert client.lookup(chain(4), "r1", NAMESPACE) is None
        wait_for(lambda: leased(running)[0] == 1)
        assert final(client, chain(4), "r1", seconds=5) == 0
        assert client.stats()["timeouts"] == 1
        wait_for(lambda: leased(running) == (0, 0))
        stopped.resume()
        wait_for(lambda: leased(stopped) == (0, 0))
        wait_for(lambda: final(client, chain(4), f"r{time.monotonic()}") == 4)
        assert client.lookup(chain(4), "r1", NAMESPACE) == 0, "until its record ends"


def test_a_killed_rank_is_no_hit_and_the_others_let_go(serve: Serve, folder: pathlib.Path) -> None:
    running, killed = (serve(rank, num_chunks=4) for rank in range(2))
    with asking(folder, 2) as client:
        assert final(client, chain(4), "held") == 4
        killed.stop()
        assert client.lookup(chain(4), "r1", NAMESPACE) is None
        wait_for(lambda: leased(running)[0] == 2)
        killed.kill()
        # Long before the deadline: the connection has ended.
        assert final(client, chain(4), "r1", seconds=5) == 0
        assert client.lookup(chain(4), "r2", NAMESPACE) == 0
        client.end("held", release=True)
        wait_for(lambda: leased(running) == (0, 0))
        serve(1, num_chunks=2)
        assert final(client, chain(4), "r3") == 2
        assert leased(running) == (1, 2)


def test_ranks_stopped_and_killed_at_random_cost_hits_and_nothing_else(
    serve: Serve, folder: pathlib.Path
) -> None:
    ranks = [serve(rank, num_chunks=4) for rank in range(3)]
    with asking(folder, 3, deadline_ms=200) as client:
        found = []
        for step in range(120):
            victim = ranks[step % 3]
            match step % 12:
                case 2 | 7:
                    victim.stop()
                case 4 | 9:
                    for rank in ranks:
                        rank.resume()
                case 11:
                    victim.kill()
                    ranks[step % 3] = serve(step % 3, num_chunks=3)
            found.append(final(client, chain(4), f"r{step}", seconds=5))
            if step >= 4:
                client.end(f"r{step - 4}", release=True)
        for rank in ranks:
            rank.resume()
        assert 3 in found, "where all answer there are hits"
        assert 0 in found, "where one does not there are none"
        for step in range(116, 120):
            client.end(f"r{step}", release=True)
        assert not client._leased
        assert not client._rounds
        assert not client._awaited
        for rank in ranks:
            wait_for(lambda rank=rank: leased(rank) == (0, 0))


def test_clear_empties_all_ranks_and_says_when_it_could_not(
    serve: Serve, folder: pathlib.Path
) -> None:
    ranks = [serve(rank, num_chunks=4) for rank in range(2)]
    with asking(folder, 2) as client:
        assert client.clear()
        assert [rank.books()["cached_bytes"] for rank in ranks] == [0, 0]
        ranks[0].kill()
        assert not client.clear()
        assert ranks[1].books()["clears"] == 2, "the others are cleared all the same"


def test_a_number_over_ranks_is_renewed_on_each_and_never_stacked(
    serve: Serve, folder: pathlib.Path
) -> None:
    ranks = [serve(rank, num_chunks=3 + rank, lease_ms=1_000) for rank in range(2)]
    with asking(folder, 2) as client:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            assert final(client, chain(4), "r1") == 3
            assert [leased(rank) for rank in ranks] == [(1, 3)] * 2
            time.sleep(0.05)
        client.end("r1", release=True)
        for rank in ranks:
            wait_for(lambda rank=rank: leased(rank) == (0, 0))


# Serves under its rank of an engine, with the secret that goes with the id.
WORKER = """
import hashlib, sys
from lmcache_rs import _native
from lmcache_rs.lookup import Rank, lookup_secret, lookup_socket_path
lookup_id, namespace, dp, pp, tp, num_chunks = sys.argv[1:]
cpu = _native.LocalCpu(4096 * 64, 10_000)
for i in range(int(num_chunks)):
    (obj,) = cpu.allocate([64])
    cpu.put(namespace, hashlib.sha256(b"%d" % i).digest(), obj)
path = lookup_socket_path(lookup_id, Rank(int(dp), int(pp), int(tp)))
server = _native.LookupServer(path, cpu, lookup_secret(lookup_id))
print("ready", flush=True)
sys.stdin.read()
"""


def test_ranks_are_found_by_id_and_rank_and_two_engines_never_meet(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    ranks = [Rank(0, pp, tp) for pp in range(2) for tp in range(2)]
    assert len({str(lookup_socket_path("id", rank)) for rank in ranks}) == 4
    assert "dp0-pp1-tp0" in str(lookup_socket_path("id", Rank(0, 1, 0)))
    engines = {
        name: {rank: f"{name}/{rank}" for rank in ranks[:num_ranks]}
        for name, num_ranks in (("a", 4), ("b", 2))
    }
    workers = []
    for name, lookup_ids in engines.items():
        for rank, lookup_id in lookup_ids.items():
            numbers = [str(number) for number in (*rank, 3 if name == "a" else 5)]
            worker = subprocess.Popen(
                [sys.executable, "-c", WORKER, lookup_id, NAMESPACE, *numbers],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            workers.append(worker)
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        for name, num_chunks in (("a", 3), ("b", 5)):
            client = connect_ranks(engines[name], deadline_ms=10_000)
            assert final(client, chain(8), "r1") == num_chunks
            client.close()
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_the_secret_is_not_in_the_name(folder: pathlib.Path) -> None:
    assert lookup_secret("id") != lookup_secret("other")
    assert lookup_secret("id")[:32] not in str(lookup_socket_path("id", 0))


def test_pyzmqs_own_dealer_is_served_by_its_identity(folder: pathlib.Path) -> None:
    import zmq

    path, secret = folder / "0.sock", lookup_secret("id")
    server = _native.LookupServer(path, _native.LocalCpu(1 << 16, LEASE_MS), secret)
    asked = _native.encode_lookup_request(1, "r", NAMESPACE, chain(2))
    with zmq.Context() as context:
        for identity, is_served in ((secret.encode(), True), (b"guess", False), (b"", False)):
            with context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.LINGER, 0)
                if identity:
                    dealer.setsockopt(zmq.IDENTITY, identity)
                dealer.connect(f"ipc://{path}")
                dealer.send(asked)
                assert bool(dealer.poll(10_000 if is_served else 300)) == is_served
                if is_served:
                    assert _native.decode_lookup_answer(dealer.recv()) == (1, 0, 0, 0)
    assert server.stats()["strangers"] >= 2
    assert server.stats()["lookups"] == 1
    server.close()
