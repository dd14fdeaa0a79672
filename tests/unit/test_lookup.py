"""The scheduler half's lookup client: by itself, and against the real server in another process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmcache_rs import _native
from lmcache_rs.lookup import (
    UNKNOWN,
    InProcessLookupClient,
    IpcLookupClient,
    LookupClient,
    connect,
    lookup_socket_path,
    register_local,
    unregister_local,
)

NAMESPACE = "model=m@world=1@worker=0@dtype=float32"
LEASE_MS = 10_000
MAX_MESSAGE_BYTES = 4 << 20

# Holds the first chunks of the chain; answers each line on stdin with one of JSON.
SERVER = """
import hashlib, json, sys, threading
from lmcache_rs import _native
path, namespace, num_chunks, lease_ms, num_burners = sys.argv[1:]
cpu = _native.LocalCpu(4096 * (int(num_chunks) + 4) * 2, int(lease_ms))
for i in range(int(num_chunks)):
    (obj,) = cpu.allocate([64])
    cpu.put(namespace, hashlib.sha256(b"%d" % i).digest(), obj)
    del obj
server = _native.LookupServer(path, cpu)
def burn():
    while True:
        sum(range(1000))
for _ in range(int(num_burners)):
    threading.Thread(target=burn, daemon=True).start()
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    print(json.dumps({**server.stats(), **cpu.audit()}), flush=True)
server.close()
"""


def chain(num_chunks: int) -> bytes:
    return b"".join(hashlib.sha256(b"%d" % i).digest() for i in range(num_chunks))


class Server:
    """A worker's process with a store and a lookup server."""

    def __init__(
        self, path: pathlib.Path, num_chunks: int = 4, lease_ms: int = LEASE_MS, burners: int = 0
    ) -> None:
        numbers = [str(number) for number in (num_chunks, lease_ms, burners)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(path), NAMESPACE, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def books(self) -> dict[str, int]:
        """Counters of the server and books of the store."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        books: dict[str, int] = self._read()
        return books

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        # A signal to a process is delivered before the sender's next look at its state.
        while "T" not in pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().split()[2]:
            time.sleep(0.001)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """A short one: a socket's path has at most 107 bytes."""
    path = tempfile.mkdtemp(prefix="lmc-")
    yield pathlib.Path(path)
    shutil.rmtree(path)


@pytest.fixture
def serve(folder: pathlib.Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(**options: Any) -> Server:
        servers.append(Server(folder / "0.sock", **options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def client(folder: pathlib.Path) -> Iterator[IpcLookupClient]:
    client = IpcLookupClient(folder / "0.sock", deadline_ms=5_000)
    yield client
    client.close()


@contextlib.contextmanager
def impatient(folder: pathlib.Path) -> Iterator[IpcLookupClient]:
    client = IpcLookupClient(folder / "0.sock", deadline_ms=300)
    try:
        yield client
    finally:
        client.close()


def final(client: LookupClient, hashes: bytes, req_id: str, seconds: float = 10) -> int:
    """Asks as vLLM does, step by step, until there is a number."""
    until = time.monotonic() + seconds
    while (found := client.lookup(hashes, req_id, NAMESPACE)) is None:
        assert time.monotonic() < until, client.stats()
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def run_python(code: str, **environment: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **environment})


# --- over the socket --------------------------------------------------------------------------


def test_the_stored_prefix_is_answered(
    serve: Callable[..., Server], client: IpcLookupClient
) -> None:
    server = serve(num_chunks=4)
    assert final(client, chain(6), "r1") == 4
    assert final(client, chain(2), "r2") == 2
    assert final(client, chain(6)[32:], "r3") == 3
    assert final(client, b"", "r4") == 0
    assert final(client, hashlib.sha256(b"other").digest(), "r5") == 0
    assert server.books()["leases"] == 3


def test_another_namespace_has_no_hit(
    serve: Callable[..., Server], client: IpcLookupClient
) -> None:
    serve()
    assert final(client, chain(4), "r1") == 4
    until = time.monotonic() + 10
    while (found := client.lookup(chain(4), "r1", "model=other")) is None:
        assert time.monotonic() < until
    assert found == 0


def test_asking_again_is_answered_from_the_record(
    serve: Callable[..., Server], client: IpcLookupClient
) -> None:
    server = serve()
    assert client.lookup_cache("r1") is UNKNOWN
    final(client, chain(4), "r1")
    final(client, b"", "r2")
    for _ in range(50):
        assert client.lookup(chain(4), "r1", NAMESPACE) == 4
        assert client.lookup_cache("r1") == 4
        assert client.lookup_cache("r2") == 0
    assert server.books()["lookups"] == 2


def test_changed_hashes_are_asked_for_anew(
    serve: Callable[..., Server], client: IpcLookupClient
) -> None:
    server = serve(num_chunks=4)
    assert final(client, chain(2), "r1") == 2
    assert final(client, chain(3), "r1") == 3
    books = server.books()
    assert (books["lookups"], books["leases"]) == (2, 1)


def test_a_pending_lookup_is_answered_by_a_later_call(
    serve: Callable[..., Server], client: IpcLookupClient
) -> None:
    server = serve()
    final(client, chain(4), "r0")
    server.stop()
    assert client.lookup(chain(4), "r1", NAMESPACE) is None
    assert client.lookup_cache("r1") is None
    server.resume()
    wait_for(lambda: client.lookup_cache("r1") is not None)
    assert client.lookup(chain(4), "r1", NAMESPACE) == 4
    assert client.stats()["asks"] == 2


def test_a_late_answer_is_dropped_and_spoils_nothing(
    serve: Callable[..., Server], folder: pathlib.Path
) -> None:
    server = serve(num_chunks=4)
    with impatient(folder) as client:
        final(client, chain(4), "r0")
        client.end("r0", release=True)
        server.stop()
        assert client.lookup(chain(4), "r1", NAMESPACE) is None
        time.sleep(0.35)
        assert client.lookup(chain(4), "r1", NAMESPACE) == 0
        assert client.stats()["timeouts"] == 1
        server.resume()
        wait_for(lambda: client.lookup_cache("r1") == 0 and client.stats()["late"] == 1)
        assert final(client, chain(3), "r2") == 3
        assert client.lookup(chain(4), "r1", NAMESPACE) == 0
        # What the late lookup leased was given back by the release behind it.
        assert server.books()["leases"] == 1
        client.end("r1", release=True)
        assert final(client, chain(4), "r1") == 4


def test_a_stopped_server_never_holds_up_the_scheduler(
    serve: Callable[..., Server], folder: pathlib.Path
) -> None:
    server = serve(num_chunks=4)
    with impatient(folder) as client:
        final(client, chain(4), "r0")
        server.stop()
        hashes = chain(512)
        began = time.monotonic()
        for i in range(3_000):
            client.lookup(hashes, f"r{i + 1}", NAMESPACE)
            client.end(f"r{i - 100}", release=True)
        assert time.monotonic() - began < 20, "it takes 0.1 s on an idle machine"
        wait_for(lambda: client.lookup(hashes, "r3000", NAMESPACE) == 0)
        assert client.stats()["unreachable"] > 0
        for i in range(3_001):
            client.end(f"r{i}", release=True)
        assert not client._records
        assert not client._leased
        assert not client._rounds
        assert not client._awaited
        server.resume()
        wait_for(lambda: final(client, chain(4), f"r{time.monotonic()}") == 4)


def test_only_one_call_waits_for_a_server_that_is_held_up(
    serve: Callable[..., Server], folder: pathlib.Path
) -> None:
    server = serve()
    client = IpcLookupClient(folder / "0.sock", wait_us=50_000, deadline_ms=60_000)
    final(client, chain(4), "r0")
    server.stop()
    began = time.monotonic()
    for i in range(40):
        assert client.lookup(chain(4), f"r{i + 1}", NAMESPACE) is None
        assert client.lookup_cache("r1") is None
    assert time.monotonic() - began < 1, "80 waits would be 4 s"
    server.resume()
    wait_for(lambda: client.lookup_cache("r40") == 4)
    waited_for = client.stats()["answered_at_first_ask"]
    for i in range(20):
        assert final(client, chain(4), f"again {i}") == 4
    assert client.stats()["answered_at_first_ask"] >= waited_for + 10
    client.close()


def test_a_killed_server_is_no_hit_and_its_successor_is_found(
    serve: Callable[..., Server], folder: pathlib.Path
) -> None:
    server = serve(num_chunks=4)
    with impatient(folder) as client:
        assert final(client, chain(4), "r0") == 4
        time.sleep(0.35)
        server.kill()
        time.sleep(0.05)
        assert (folder / "0.sock").exists(), "a killed server leaves its socket"
        assert client.lookup(chain(4), "r1", NAMESPACE) == 0, "at once: nobody listens"
        server = serve(num_chunks=3)
        wait_for(lambda: final(client, chain(4), f"r{time.monotonic()}") == 3)


def test_a_missing_server_is_no_hit_at_once_and_found_when_it_comes(
    serve: Callable[..., Server], folder: pathlib.Path, client: IpcLookupClient
) -> None:
    assert client.lookup(chain(4), "r0", NAMESPACE) == 0
    assert client.lookup_cache("r0") == 0
    assert client.stats()["unreachable"] == 1
    serve(num_chunks=4)
    wait_for(lambda: final(client, chain(4), f"r{time.monotonic()}") == 4)
    assert client.lookup(chain(4), "r0", NAMESPACE) == 0, "until its record ends"


def test_a_lease_is_renewed_in_time_and_never_stacked(
    serve: Callable[..., Server], client: IpcLookupClient
) -> None:
    server = serve(num_chunks=4, lease_ms=1_000)
    final(client, chain(4), "r1")
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        assert final(client, chain(4), "r1") == 4
        books = server.books()
        assert books["leases"] == 1, "the number is given while its lease holds"
        time.sleep(0.05)
    assert 4 <= books["lookups"] <= 8
    client.end("r1", release=True)
    wait_for(lambda: server.books()["leases"] == 0)


def test_allocation_keeps_the_lease_and_the_end_of_the_request_gives_it_back(
    serve: Callable[..., Server], client: IpcLookupClient
) -> None:
    server = serve()
    final(client, chain(4), "r1")
    client.end("r1", release=False)
    assert client.lookup_cache("r1") is UNKNOWN
    assert server.books()["leases"] == 1
    client.end("r1", release=True)
    wait_for(lambda: server.books()["leases"] == 0)
    client.end("r1", release=True)
    client.end("never asked", release=True)
    final(client, b"", "r2")
    client.end("r2", release=True)
    assert client.stats()["releases"] == 1, "nothing is sent where nothing is leased"


def test_bad_messages_are_refused_and_the_server_lives(
    serve: Callable[..., Server], folder: pathlib.Path, client: IpcLookupClient
) -> None:
    import zmq

    server = serve(num_chunks=4)
    good = _native.encode_lookup_request(9, "r", NAMESPACE, chain(4))
    bad = [b"", b"\xff" * 40, good[:-1], good + b"\0", bytes([good[0], 9]) + good[2:]]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"ipc://{folder / '0.sock'}")
        for message in bad:
            dealer.send(message)
            assert dealer.poll(10_000)
            _, status, hit_chunks, lease_ms = _native.decode_lookup_answer(dealer.recv())
            assert status
            assert (hit_chunks, lease_ms) == (0, 0)
        dealer.send_multipart([b"", good])
        assert dealer.poll(10_000)
        assert _native.decode_lookup_answer(dealer.recv())[:2] == (0, 1)
        dealer.send(good)
        dealer.send(good)
        answers = [_native.decode_lookup_answer(dealer.recv()) for _ in range(2)]
        assert [answer[1] for answer in answers] == [0, 4], "the second one is a replay"
        dealer.send(b"\0" * (MAX_MESSAGE_BYTES + 1))
        wait_for(lambda: server.books()["oversized"] == 1)
    assert final(client, chain(4), "r1") == 4


def test_a_request_too_large_to_send_is_no_hit(
    serve: Callable[..., Server], client: IpcLookupClient
) -> None:
    serve()
    hashes = b"\0" * MAX_MESSAGE_BYTES
    assert client.lookup(hashes, "r1", NAMESPACE) == 0
    assert client.lookup(chain(4), "lone \ud800 surrogate", NAMESPACE) == 0
    assert client.stats()["errors"] == 2
    assert final(client, chain(4), "r2") == 4


def test_answers_of_something_else_are_counted_and_dropped(
    folder: pathlib.Path, client: IpcLookupClient
) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{folder / '0.sock'}")
        wait_for(lambda: client.lookup(chain(2), "r1", NAMESPACE) is None and router.poll(0) != 0)
        peer, message = router.recv_multipart()
        message_id = message[2]
        for answer in (b"noise", bytes([0x95, 1, message_id + 1, 0, 2, 100])):
            router.send_multipart([peer, answer])
        # More chunks than were asked about.
        router.send_multipart([peer, bytes([0x95, 1, message_id, 0, 3, 100])])
        wait_for(lambda: client.lookup(chain(2), "r1", NAMESPACE) == 0)
        assert client.lookup(chain(2), "r2", NAMESPACE) is None
        assert router.poll(10_000)
        while (message := router.recv_multipart()[1])[3] != 1:
            assert message[3] == 2, "a release of what was given up"
        # A refusal.
        router.send_multipart([peer, bytes([0x95, 1, message[2], 5, 2, 100])])
        wait_for(lambda: client.lookup(chain(2), "r2", NAMESPACE) == 0)
        stats = client.stats()
        assert (stats["late"], stats["errors"], stats["timeouts"]) == (1, 3, 0)


@pytest.mark.parametrize("num_burners", [0, 8])
def test_ten_thousand_lookups_of_512_chunks(
    serve: Callable[..., Server], client: IpcLookupClient, num_burners: int
) -> None:
    """Prints how long they take, from the first ask to the number."""
    server = serve(num_chunks=512, burners=num_burners)
    hashes = chain(512)
    wait_for(lambda: client.lookup(hashes, "warm", NAMESPACE) == 512)
    took = []
    for i in range(10_000):
        asked_at = time.perf_counter()
        assert final(client, hashes, f"r{i}") == 512
        took.append((time.perf_counter() - asked_at) * 1e6)
        client.end(f"r{i}", release=True)
    took.sort()
    p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
    print(f"\n{num_burners} threads burn the server's GIL: p50 {p50:.0f} µs, p99 {p99:.0f} µs")
    print(client.stats())
    assert server.books()["lookups"] >= 10_000


# --- the server's native class ----------------------------------------------------------------


def test_a_live_server_keeps_its_path(serve: Callable[..., Server], folder: pathlib.Path) -> None:
    server = serve()
    local_cpu = _native.LocalCpu(1 << 16, LEASE_MS)
    with pytest.raises(Exception, match="another lookup server is live"):
        _native.LookupServer(folder / "0.sock", local_cpu)
    assert server.books()["lookups"] == 0


def test_a_closed_server_removes_its_files_and_a_forked_child_does_not(
    folder: pathlib.Path,
) -> None:
    run_python(
        f"""
import os
from lmcache_rs import _native
path = {str(folder / "n" / "0.sock")!r}
server = _native.LookupServer(path, _native.LocalCpu(1 << 16, 1000))
assert os.stat(path).st_mode & 0o777 == 0o600
assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
if (child := os.fork()) == 0:
    try:
        server.stats()
    except RuntimeError:
        del server
        raise SystemExit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert os.path.exists(path)
server.close()
server.close()
assert not os.listdir(os.path.dirname(path))
"""
    )


def test_messages_are_the_msgpack_of_the_documented_arrays() -> None:
    msgpack = pytest.importorskip("msgspec").msgpack
    for message_id in (1, 127, 128, 65_536, 2**64 - 1):
        asked = _native.encode_lookup_request(message_id, "r-é", "n" * 300, chain(9))
        assert msgpack.decode(asked) == [1, message_id, 1, "r-é", "n" * 300, chain(9)]
        released = _native.encode_release_request(message_id, "r")
        assert msgpack.decode(released) == [1, message_id, 2, "r", "", b""]
        assert msgpack.decode(_native.encode_ping_request(message_id)) == [
            1,
            message_id,
            3,
            "",
            "",
            b"",
        ]
        answer = msgpack.encode([1, message_id, 0, 512, 10_000])
        assert _native.decode_lookup_answer(answer) == (message_id, 0, 512, 10_000)
    for bad in ([2, 1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0, 2**32], [1, 1, 77, 0, 0], 5):
        with pytest.raises(ValueError, match="lookup answer"):
            _native.decode_lookup_answer(msgpack.encode(bad))


# --- in one process ---------------------------------------------------------------------------


class Index:
    """Holds the first `num_chunks` of any chain."""

    def __init__(self, num_chunks: int = 4, lease_ms: int = LEASE_MS) -> None:
        self.num_chunks = num_chunks
        self.lease_ms = lease_ms
        self.asked: list[str] = []
        self.leases: set[str] = set()
        self.is_broken = False

    def lookup(self, lookup_id: str, namespace: str, hashes: bytes) -> tuple[int, int]:
        if self.is_broken:
            raise RuntimeError("broken")
        self.asked.append(lookup_id)
        self.leases.add(lookup_id)
        return min(self.num_chunks, len(hashes) // 32), self.lease_ms

    def release(self, lookup_id: str) -> None:
        if self.is_broken:
            raise RuntimeError("broken")
        self.leases.discard(lookup_id)

    def clear(self) -> None:
        if self.is_broken:
            raise RuntimeError("broken")
        self.num_chunks = 0


def test_in_process_the_native_store_answers_at_once() -> None:
    local_cpu = _native.LocalCpu(1 << 16, LEASE_MS)
    for i in range(3):
        chunks = local_cpu.allocate([64])
        assert chunks is not None
        assert local_cpu.put(NAMESPACE, chain(i + 1)[-32:], chunks[0])
    client = InProcessLookupClient(local_cpu)
    assert client.lookup(chain(5), "r1", NAMESPACE) == 3
    assert client.lookup_cache("r1") == 3
    assert local_cpu.audit()["leases"] == 1
    client.end("r1", release=True)
    assert local_cpu.audit()["leases"] == 0
    assert client.lookup_cache("r1") is UNKNOWN


def test_in_process_a_number_is_asked_for_anew_when_half_its_lease_is_gone() -> None:
    index = Index(lease_ms=200)
    client = InProcessLookupClient(index)
    assert client.lookup(chain(9), "r1", NAMESPACE) == 4
    index.num_chunks = 2
    assert client.lookup(chain(9), "r1", NAMESPACE) == 4
    assert index.asked == ["r1"]
    time.sleep(0.11)
    assert client.lookup_cache("r1") == 2
    assert index.asked == ["r1", "r1"]


def test_what_is_not_leased_is_not_promised() -> None:
    client = InProcessLookupClient(Index(lease_ms=0))
    assert client.lookup(chain(9), "r1", NAMESPACE) == 0


def test_a_broken_store_is_no_hit_and_no_exception() -> None:
    index = Index()
    client = InProcessLookupClient(index)
    client.lookup(chain(2), "r0", NAMESPACE)
    index.is_broken = True
    assert client.lookup(chain(2), "r1", NAMESPACE) == 0
    client.end("r0", release=True)
    assert client.stats()["errors"] == 1


def test_hashes_that_are_not_whole_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of 32"):
        InProcessLookupClient(Index()).lookup(b"\0" * 33, "r1", NAMESPACE)


# --- which way --------------------------------------------------------------------------------


@pytest.fixture
def runtime(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def test_both_halves_find_each_other_whichever_comes_first(runtime: pathlib.Path) -> None:
    early = connect("engine", 0)
    assert early.lookup(chain(4), "r1", NAMESPACE) == 0, "nobody is there yet"
    index = Index(num_chunks=3)
    register_local("engine", 0, index)
    late, other_rank = connect("engine", 0), connect("engine", 1)
    assert early.lookup(chain(4), "r2", NAMESPACE) == 3
    assert late.lookup(chain(4), "r3", NAMESPACE) == 3
    assert other_rank.lookup(chain(4), "r4", NAMESPACE) == 0
    unregister_local("engine", 0, index)
    assert early.lookup(chain(4), "r5", NAMESPACE) == 0
    for client in (early, late, other_rank):
        client.close()
        client.close()


def test_the_newest_registration_stays(runtime: pathlib.Path) -> None:
    old, new = Index(num_chunks=1), Index(num_chunks=2)
    register_local("engine", 0, old)
    register_local("engine", 0, new)
    unregister_local("engine", 0, old)
    client = connect("engine", 0)
    assert client.lookup(chain(4), "r1", NAMESPACE) == 2
    unregister_local("engine", 0, new)
    unregister_local("engine", 0, new)


def test_another_process_is_found_by_engine_and_rank(runtime: pathlib.Path) -> None:
    server = Server(lookup_socket_path("engine", 1), num_chunks=2)
    client = connect("engine", 1, deadline_ms=5_000)
    assert final(client, chain(4), "r1") == 2
    client.close()
    server.kill()


def test_a_forked_child_has_neither_the_parents_store_nor_its_client(runtime: pathlib.Path) -> None:
    run_python(
        """
import os
from lmcache_rs import lookup
class Index:
    def lookup(self, *_): return 1, 10_000
    def release(self, _): pass
register = lambda: lookup.register_local("engine", 0, Index())
register()
client = lookup.connect("engine", 0)
assert client.lookup(bytes(64), "r1", "ns") == 1
remote = lookup.IpcLookupClient("/nowhere/0.sock")
assert remote.lookup(bytes(64), "r1", "ns") == 0
if (child := os.fork()) == 0:
    for inherited in (client, remote):
        try:
            inherited.lookup(bytes(64), "r2", "ns")
        except RuntimeError as error:
            assert "belongs to process" in str(error)
        else:
            os._exit(1)
    remote.close()
    own = lookup.connect("engine", 0)
    assert own.lookup(bytes(64), "r2", "ns") == 0
    register()
    assert own.lookup(bytes(64), "r3", "ns") == 1
    raise SystemExit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert client.lookup(bytes(64), "r3", "ns") == 1
"""
    )


def test_the_socket_folder_is_private(runtime: pathlib.Path) -> None:
    path = lookup_socket_path("engine", 0)
    assert path.parent == runtime / f"lmcache-rs-{os.geteuid()}"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert lookup_socket_path("engine", 0) == path
    assert len({path, lookup_socket_path("engine", 1), lookup_socket_path("other", 0)}) == 3


def test_a_socket_folder_open_to_others_is_refused(runtime: pathlib.Path) -> None:
    parent = lookup_socket_path("engine", 0).parent
    for mode in (0o750, 0o701, 0o777):
        parent.chmod(mode)
        with pytest.raises(PermissionError, match=f"mode 0{mode:o}"):
            lookup_socket_path("engine", 0)
    parent.rmdir()
    parent.symlink_to(runtime)
    with pytest.raises(PermissionError, match="is a link"):
        lookup_socket_path("engine", 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_socket_folder_of_another_user_is_refused(runtime: pathlib.Path) -> None:
    path = lookup_socket_path("engine", 0)
    os.chown(path.parent, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to uid 12345"):
        lookup_socket_path("engine", 0)
    with pytest.raises(Exception, match="belongs to uid 12345"):
        _native.LookupServer(path, _native.LocalCpu(1 << 16, LEASE_MS))
    assert not list(path.parent.iterdir())


def test_long_names_still_give_a_path_that_fits(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    path = lookup_socket_path("e" * 300, 0)
    assert len(os.fsencode(path)) <= 107
    assert path.is_relative_to(folder)
    assert path != lookup_socket_path("e" * 299, 0)
    deep = folder / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    path = lookup_socket_path("e" * 300, 0)
    assert len(os.fsencode(path)) <= 107
    server = _native.LookupServer(path, _native.LocalCpu(1 << 16, LEASE_MS))
    server.close()


def test_a_runtime_folder_that_is_not_there_is_passed_over(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "gone"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert lookup_socket_path("engine", 0).is_relative_to(folder)


def test_importing_the_client_imports_no_zmq() -> None:
    run_python(
        "import lmcache_rs.lookup, sys; assert not {'zmq', 'torch', 'numpy'} & {*sys.modules}"
    )
