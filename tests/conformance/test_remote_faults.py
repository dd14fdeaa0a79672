"""A remote tier whose server dies, hangs, forgets, fills up or is none: misses, and never more."""

from __future__ import annotations

import http.server
import itertools
import logging
import random
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tiers import PATIENCE_S, chain, key, serve_beside_a_dead_tier

import redis_servers
from lmcache_rs import CacheEngineKey, LMCacheEngineConfig, MemoryObj, StorageManager, _native
from lmcache_rs.storage import RemoteBackend
from redis_servers import Server, wait_until

MIB = 1 << 20
DEADLINE_S = 2.0
# How long a test waits for what must come, on a busy machine.
# After so long a server that is back is used again.
RECOVERY_S = 30.0


@pytest.fixture
def server() -> Iterator[Server]:
    """A server of the test's own."""
    redis_servers.require()
    made = Server()
    yield made
    made.close()


class Remote:
    """A tier on a server, and the pool that its chunks come from."""

    def __init__(self, url: str, *, pool_bytes: int = 128 * MIB, **settings: object) -> None:
        self.pool = _native.LocalCpu(pool_bytes, 1000)
        settings = {"deadline_s": DEADLINE_S, **settings}
        self.tier = RemoteBackend(url, self.pool, **settings)  # type: ignore[arg-type]

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.close(PATIENCE_S)
        # Whatever has happened, no byte is held and no put waits.
        books = self.pool.audit()
        assert books["capacity_bytes"] == books["free_bytes"]
        assert self.stat("queued_bytes") == self.stat("queued_chunks") == 0

    def stat(self, name: str) -> int:
        return self.tier.stats().get(name, 0)

    def faults(self) -> dict[str, int]:
        return {
            name.removeprefix("faults_"): count
            for name, count in self.tier.stats().items()
            if name.startswith("faults_")
        }

    def offer(self, keys: list[CacheEngineKey], payloads: list[bytes]) -> int:
        """Puts without waiting; none if there is no memory."""
        allocated = self.pool.allocate([len(payload) for payload in payloads])
        if allocated is None:
            return 0
        objects = [MemoryObj(raw) for raw in allocated]
        for memory_obj, payload in zip(objects, payloads, strict=True):
            memoryview(memory_obj)[:] = payload  # type: ignore[arg-type]
            memory_obj.seal()
        return self.tier.batched_submit_put_task(keys, objects)

    def put(self, keys: list[CacheEngineKey], payloads: list[bytes]) -> int:
        taken = self.offer(keys, payloads)
        assert self.tier.flush(PATIENCE_S)
        return taken

    def got(self, keys: list[CacheEngineKey]) -> list[bytes | None]:
        found = self.tier.batched_get_blocking(keys)
        return [None if each is None else each.to_bytes() for each in found]

    def name(self, of: CacheEngineKey) -> str:
        return self.tier.remote.name_of(of.namespace, of.chunk_hash)


def payload(number: int, size: int = MIB) -> bytes:
    return random.Random(number).randbytes(size)


def assert_prefix(found: list[bytes | None], wanted: list[bytes]) -> int:
    """What was found is right up to a gap, and nothing behind it; how much that is."""
    hits = list(itertools.takewhile(lambda each: each is not None, found))
    assert hits == wanted[: len(hits)]
    assert not any(found[len(hits) :])
    return len(hits)


def test_a_server_that_dies_amid_puts_and_gets_and_comes_back(server: Server) -> None:
    keys, payloads = chain(*range(24)), [payload(number) for number in range(24)]
    with Remote(server.url) as remote:
        assert remote.put(keys, payloads) == 24
        assert remote.got(keys) == payloads
        hits: list[int] = []
        ending = threading.Event()

        def read() -> None:
            while not ending.is_set():
                hits.append(assert_prefix(remote.got(keys), payloads))

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            wait_until("reads are under way", lambda: len(hits) > 2)
            others = chain(*range(100, 116))
            taken = remote.offer(others, [payload(100 + n) for n in range(16)])
            server.kill()
            assert remote.tier.flush(PATIENCE_S)
            wait_until("reads are misses", lambda: hits[-1] == 0)
        finally:
            ending.set()
            for reader in readers:
                reader.join(PATIENCE_S)
        done = remote.stat("put_chunks") - 24 + remote.stat("dropped_chunks")
        assert done >= taken
        assert remote.faults().keys() <= {"unreachable", "timeout", "deadline"}
        assert remote.stat("out_of_reach") == 1
        # A new server at the same place is empty, and used without being told.
        server.start()
        took = wait_until("it is used again", lambda: remote.put(chain(1), [b"new"]) == 1)
        assert took <= RECOVERY_S
        wait_until("hits are back", lambda: remote.got(chain(1)) == [b"new"])
        assert remote.got(chain(2)) == [None]


def test_a_server_that_hangs_costs_no_call_more_than_its_deadline(server: Server) -> None:
    keys, payloads = chain(*range(8)), [payload(number) for number in range(8)]
    with Remote(server.url) as remote:
        assert remote.put(keys, payloads) == 8
        slowest = [0.0]
        ending = threading.Event()

        def timed(call: Callable[[], object]) -> None:
            while not ending.is_set():
                began = time.monotonic()
                call()
                slowest[0] = max(slowest[0], time.monotonic() - began)

        numbers = itertools.count(1000)
        calls = [
            lambda: assert_prefix(remote.got(keys), payloads),
            lambda: remote.tier.batched_contains(keys),
            lambda: remote.offer(chain(next(numbers)), [b"x" * 1000]),
        ]
        threads = [threading.Thread(target=timed, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        try:
            server.freeze()
            wait_until("it counts as out of reach", lambda: remote.stat("out_of_reach") == 1)
            skipped = remote.stat("skipped_operations")
            wait_until(
                "nobody waits for it", lambda: remote.stat("skipped_operations") > skipped + 1000
            )
            server.thaw()
            took = wait_until("it is used again", lambda: remote.stat("out_of_reach") == 0)
            assert took <= RECOVERY_S
        finally:
            server.thaw()
            ending.set()
            for thread in threads:
                thread.join(PATIENCE_S)
        # Far from the sum of what was asked meanwhile; a busy machine may double it.
        assert slowest[0] < DEADLINE_S * 5
        wait_until("hits are back", lambda: remote.got(keys) == payloads)
        assert remote.faults().keys() <= {"timeout", "deadline", "unreachable"}


def test_puts_to_a_server_that_hangs_hold_no_more_than_they_may(server: Server) -> None:
    with Remote(server.url, max_queued_bytes=4 * MIB, deadline_s=5.0) as remote:
        remote.put(chain(0), [b"x"])
        server.freeze()
        try:
            taken = remote.offer(chain(*range(1, 17)), [payload(n) for n in range(16)])
            assert taken == 4
            assert remote.stat("queued_bytes") == 4 * MIB
            assert remote.stat("dropped_chunks") == 12
            assert remote.offer(chain(99), [payload(99)]) == 0
        finally:
            server.thaw()
        assert remote.tier.flush(PATIENCE_S)


def test_a_server_that_was_wiped_is_filled_again(server: Server) -> None:
    keys, payloads = chain(1, 2, 3), [b"1", b"2", b"3"]
    with Remote(server.url) as remote:
        for _ in range(3):
            remote.put(keys, payloads)
            assert remote.got(keys) == payloads
            server.ask("FLUSHALL")
            assert remote.tier.batched_contains(keys) == 0
            assert remote.got(keys) == [None] * 3
        assert remote.faults() == {}


def test_a_server_that_evicts_by_itself_gives_what_it_still_has(server: Server) -> None:
    server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    server.ask("CONFIG", "SET", "maxmemory", "24mb")
    payloads = [payload(number) for number in range(40)]
    with Remote(server.url) as remote:
        for number, each in enumerate(payloads):
            remote.put(chain(number), [each])
        found = [remote.got(chain(number))[0] for number in range(40)]
        assert all(here in (None, wanted) for here, wanted in zip(found, payloads, strict=True))
        assert 0 < sum(each is not None for each in found) < 40
        assert int(server.info("stats")["evicted_keys"]) > 0
        assert remote.faults() == {}


def test_a_full_server_is_read_from_and_takes_puts_when_it_has_room(server: Server) -> None:
    server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    server.ask("CONFIG", "SET", "maxmemory", "8mb")
    with Remote(server.url) as remote:
        for number in range(16):
            remote.put(chain(number), [payload(number)])
        faults = remote.faults()
        assert faults.keys() == {"full"}
        # Left alone for a while, and not told its own trouble sixteen times.
        assert faults["full"] < 8
        assert remote.stat("dropped_chunks") > 0
        assert remote.got(chain(0)) == [payload(0)]
        server.ask("CONFIG", "SET", "maxmemory", "64mb")
        took = wait_until("it takes puts again", lambda: bool(remote.put(chain(99), [b"x"])))
        assert took <= RECOVERY_S
        assert remote.got(chain(99)) == [b"x"]


class Http:
    """A real HTTP server, where somebody thought that there was Redis."""

    def __init__(self) -> None:
        self._server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), http.server.BaseHTTPRequestHandler
        )
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_a_port_where_something_else_listens_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    web = Http()
    try:
        with Remote(f"redis://127.0.0.1:{web.port}/") as remote:
            for _ in range(5):
                assert remote.tier.batched_contains(chain(1)) == 0
                assert remote.got(chain(1)) == [None]
                remote.put(chain(1), [b"x"])
            assert remote.faults().keys() <= {"protocol", "unreachable", "timeout"}
            assert remote.faults()["protocol"] >= 1
            assert remote.stat("put_chunks") == 0
            assert remote.stat("dropped_chunks") == 5
            assert "of kind 'protocol'" in caplog.text
    finally:
        web.close()


def test_a_wrong_password_is_a_miss_and_is_never_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis_servers.require()
    caplog.set_level(logging.DEBUG)
    server = Server(password=redis_servers.PASSWORD)
    try:
        for who in ("hunter2", None):
            url = f"redis://{'' if who is None else f':{who}@'}127.0.0.1:{server.port}/"
            with Remote(url) as remote:
                remote.put(chain(1), [b"x"])
                assert remote.got(chain(1)) == [None]
                assert remote.tier.batched_contains(chain(1)) == 0
                assert remote.faults().keys() == {"denied"}
                assert remote.stat("dropped_chunks") == 1
                shown = [repr(remote.tier), str(remote.tier.health()), remote.tier.url]
                assert "hunter2" not in "".join(shown)
        assert "of kind 'denied'" in caplog.text
        assert "hunter2" not in caplog.text
        # The right one, from where it is best kept; and one who may only read.
        monkeypatch.setenv("REDIS_PASSWORD", redis_servers.PASSWORD)
        with Remote(f"redis://127.0.0.1:{server.port}/") as remote:
            assert remote.put(chain(1), [b"x"]) == 1
            assert remote.got(chain(1)) == [b"x"]
        server.ask("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+@read", "+client")
        with Remote(f"redis://reader:pw@127.0.0.1:{server.port}/") as remote:
            remote.put(chain(2), [b"y"])
            assert remote.faults().keys() == {"denied"}
            assert remote.got(chain(1)) == [b"x"]
            rights = [found for found in remote.tier.health() if found[0] == "rights"]
            assert not rights[0][1]
            assert "SET is refused" in rights[0][2]
    finally:
        server.close()


def test_a_certificate_that_nobody_vouches_for_is_refused_unless_one_says_so() -> None:
    redis_servers.require()
    server = redis_servers.encrypted()
    bare = server.url.split("?")[0]
    with Remote(bare) as remote:
        remote.put(chain(1), [b"x"])
        assert remote.stat("put_chunks") == 0
        assert remote.faults()["unreachable"] >= 1
    for query in ("?insecure=true&prefix=in:", f"?ca={redis_servers.certificates()}/ca.crt"):
        with Remote(bare + query) as remote:
            assert remote.put(chain(1), [b"x"]) == 1
            assert remote.got(chain(1)) == [b"x"]


def test_one_tier_out_of_reach_leaves_the_others_as_they_are(server: Server) -> None:
    dead = redis_servers.free_port()
    config = LMCacheEngineConfig.from_defaults(
        max_local_cpu_size=0.01,
        remote_url=f"redis://127.0.0.1:{dead}/, {server.url}",
        blocking_timeout_secs=DEADLINE_S,
    )
    serve_beside_a_dead_tier(config)


def test_strict_makes_a_server_out_of_reach_and_a_wrong_url_a_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    where = f"redis://me:hunter2@127.0.0.1:{redis_servers.free_port()}/"
    for url, error in ((where, ConnectionError), ("gopher://me:hunter2@h", ValueError)):
        settings = {"max_local_cpu_size": 0.01, "remote_url": url}
        with pytest.raises(error) as raised:
            StorageManager(LMCacheEngineConfig.from_defaults(strict=True, **settings))
        assert "hunter2" not in str(raised.value)
        store = StorageManager(LMCacheEngineConfig.from_defaults(**settings))
        assert store.contains(key(1)) is None
        assert store.close(PATIENCE_S)
    assert "SERVING WITHOUT A REMOTE TIER" in caplog.text
    assert "hunter2" not in caplog.text


def test_of_a_thousand_values_that_were_changed_none_is_used(server: Server) -> None:
    changes = random.Random(7)
    with Remote(server.url) as remote:
        remote.put(chain(1, 2), [payload(1, 5000), payload(2, 5000)])
        name = remote.name(key(1))
        whole, other = server.ask("GET", name), server.ask("GET", remote.name(key(2)))
        for turn in range(1000):
            value = bytearray(whole)
            at = changes.randrange(len(value))
            match turn % 5:
                case 0 | 1:
                    value[at] ^= 1 << changes.randrange(8)
                case 2:
                    del value[at:]
                case 3:
                    value[at:at] = changes.randbytes(changes.randrange(1, 9))
                case 4:
                    value = bytearray(other)
            if not value:
                continue
            server.ask("SET", name, bytes(value))
            assert remote.got(chain(1)) == [None], f"turn {turn} at {at}"
            wait_until("it is removed", lambda: server.ask("EXISTS", name) == 0)
        assert sum(remote.faults().values()) >= 995
        assert remote.faults().keys() <= {
            *("truncated", "magic", "version", "foreign", "checksum", "length", "malformed")
        }
        # A value of another type under our name.
        server.ask("RPUSH", name, "x")
        assert remote.got(chain(1)) == [None]
        assert remote.faults()["server"] == 1
        # It is not ours: no list of chunks names it, and none is refused for it.
        remote.put(chain(3), [payload(3, 5000)])
        remote.tier.clear()
        assert server.ask("EXISTS", remote.name(key(3))) == 0
        assert server.ask("EXISTS", name) == 1


class HoldingProxy:
    """Passes a client's bytes on, and once armed no answer before so many commands were sent."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Condition()
        self._wanted = 0
        self._seen = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def hold_until(self, commands: int) -> None:
        with self._lock:
            self._wanted, self._seen = commands, 0

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._to))
            for work in (self._forward, self._back):
                threading.Thread(target=work, args=(client, server), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        tail = b""
        while data := client.recv(65536):
            seen = (tail + data).count(b"EXISTS\r\n") - tail.count(b"EXISTS\r\n")
            tail = (tail + data)[-7:]
            with self._lock:
                self._seen += seen
                self._lock.notify_all()
            server.sendall(data)
        server.shutdown(socket.SHUT_WR)

    def _back(self, client: socket.socket, server: socket.socket) -> None:
        while data := server.recv(65536):
            with self._lock:
                self._lock.wait_for(lambda: self._seen >= self._wanted)
            client.sendall(data)

    def close(self) -> None:
        self._listener.close()


def test_whether_512_chunks_are_there_is_one_round_trip(server: Server) -> None:
    proxy = HoldingProxy(server.port)
    keys = chain(*range(512))
    try:
        with Remote(f"redis://127.0.0.1:{proxy.port}/") as remote:
            remote.put(keys, [b"x"] * 512)
            assert remote.tier.batched_contains(keys) == 512
            server.ask("CONFIG", "RESETSTAT")
            # Whoever waits for an answer before all is asked waits in vain.
            proxy.hold_until(512)
            assert remote.tier.batched_contains(keys) == 512
            assert server.calls("exists") == 512
            server.ask("DEL", remote.name(keys[300]))
            assert remote.tier.batched_contains(keys) == 300
            assert remote.faults() == {}
    finally:
        proxy.close()


def test_a_values_end_comes_with_it(server: Server) -> None:
    with Remote(server.url, ttl_s=100.0) as remote:
        server.ask("CONFIG", "RESETSTAT")
        remote.put(chain(1), [b"x"])
        assert 0 < server.ask("PTTL", remote.name(key(1))) <= 100_000
        assert [server.calls(name) for name in ("set", "expire", "pexpire")] == [1, 0, 0]
    with Remote(server.url) as remote:
        remote.put(chain(2), [b"x"])
        assert server.ask("PTTL", remote.name(key(2))) == -1
    with Remote(server.url, ttl_s=0.2) as remote:
        remote.put(chain(3), [b"x"])
        wait_until("it has ended", lambda: remote.got(chain(3)) == [None])
        assert remote.faults() == {}


def test_a_slot_that_moved_is_followed() -> None:
    redis_servers.require()
    cluster = redis_servers.cluster()
    prefix = f"{secrets.token_hex(8)}:"
    with Remote(redis_servers.with_prefix(cluster.url, prefix)) as remote:
        keys = chain(*range(64))
        assert remote.put(keys, [b"%d" % number for number in range(64)]) == 64
        assert remote.tier.batched_contains(keys) == 64
        held = [int(node.ask("DBSIZE")) for node in cluster.nodes]
        assert all(count > 0 for count in held), held
        name = remote.name(keys[10])
        assert cluster.ask("DEL", name) == 1
        slot = cluster.nodes[0].ask("CLUSTER", "KEYSLOT", name)
        ids = [node.ask("CLUSTER", "MYID").decode() for node in cluster.nodes]
        owner = next(
            number
            for number, (begin, end) in enumerate([(0, 5460), (5461, 10922), (10923, 16383)])
            if begin <= slot <= end
        )
        target = (owner + 1) % 3
        order = [target, *(number for number in range(3) if number != target)]
        try:
            for number in order:
                cluster.nodes[number].ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
            assert remote.put([keys[10]], [b"10"]) == 1
            assert remote.got(keys) == [b"%d" % number for number in range(64)]
            assert cluster.nodes[target].ask("EXISTS", name) == 1
            assert remote.faults() == {}
        finally:
            remote.tier.clear()
            for number in (owner, *(number for number in range(3) if number != owner)):
                cluster.nodes[number].ask("CLUSTER", "SETSLOT", slot, "NODE", ids[owner])


def test_sentinels_name_the_server(server: Server) -> None:
    sentinel = redis_servers.free_port()
    settings = server.folder / "sentinel.conf"
    settings.write_text(
        f"port {sentinel}\nbind 127.0.0.1\nsentinel monitor mine 127.0.0.1 {server.port} 1\n"
    )
    log = (server.folder / "sentinel.log").open("wb")
    process = subprocess.Popen(
        ["redis-server", str(settings), "--sentinel"], stdout=log, stderr=log
    )
    try:
        with Remote(f"redis-sentinel://127.0.0.1:{sentinel}/mine") as remote:
            wait_until("it is found", lambda: bool(remote.put(chain(1), [b"x"])))
            wait_until("it is stored", lambda: remote.got(chain(1)) == [b"x"])
            assert server.ask("EXISTS", remote.name(key(1))) == 1
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        log.close()
