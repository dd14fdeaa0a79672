"""The tier on a Redis server, against a bare client with as many connections."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import Bench
from measure import Result, ratios, spread

DEPTH = 8
ROUND_BYTES = 256 << 20
# What a header takes.
HEADER_BYTES = 4096
NAMESPACE = "model=bench@world=1@worker=0@dtype=bfloat16"


def run(bench: Bench) -> list[Result]:
    from lmcache_rs import _native

    if shutil.which("redis-server") is None:
        bench.say("remote: redis-server is not installed, so nothing is measured")
        return []
    with tempfile.TemporaryDirectory(prefix="remote-bench-") as folder:
        path = Path(folder) / "redis.sock"
        port = free_port()
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        server = subprocess.Popen(
            [*command, "--unixsocket", str(path), "--dir", folder], stdout=subprocess.DEVNULL
        )
        try:
            while not path.exists():
                time.sleep(0.02)
            rows = []
            for chunk_bytes in (1 << 20, 8 << 20):
                rows += put_and_get(bench, _native, port, chunk_bytes)
            rows.append(prefix(bench, _native, port))
        finally:
            server.kill()
            server.wait()
    return rows


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Bare:
    """A client that does nothing but send and receive: one connection, values as they are."""

    def __init__(self, port: int, value_bytes: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._into = memoryview(bytearray(value_bytes + 32))

    def set(self, name: bytes, value: memoryview) -> None:
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(value))
        self._socket.sendall(head)
        self._socket.sendall(value)
        self._socket.sendall(b"\r\n")
        assert self._socket.recv(64) == b"+OK\r\n"

    def get(self, name: bytes, value_bytes: int) -> None:
        self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
        due = len(b"$%d\r\n" % value_bytes) + value_bytes + 2
        count = 0
        while count < due:
            count += self._socket.recv_into(self._into[count:due])

    def close(self) -> None:
        self._socket.close()


def put_and_get(bench: Bench, native: Any, port: int, chunk_bytes: int) -> list[Result]:
    count = ROUND_BYTES // chunk_bytes
    pool = native.LocalCpu(3 * ROUND_BYTES, 1000)
    tier = native.Remote(
        f"redis://127.0.0.1:{port}/", pool, operations=DEPTH, max_queued_bytes=2 * ROUND_BYTES
    )
    objects = pool.allocate([chunk_bytes] * count)
    data = os.urandom(chunk_bytes)
    for memory_obj in objects:
        memoryview(memory_obj)[:] = data
        memory_obj.seal()
    value = memoryview(os.urandom(HEADER_BYTES) + data)
    # As many of ours write at a time.
    lanes = {
        "set": [Bare(port, len(value)) for _ in range(DEPTH // 2)],
        "get": [Bare(port, len(value)) for _ in range(DEPTH)],
    }
    threads = ThreadPoolExecutor(DEPTH)
    hashes: list[bytes] = []

    def bare(verb: str) -> None:
        def lane(at: int) -> None:
            for number in range(at, count, len(lanes[verb])):
                name = b"bare:%d" % number
                if verb == "set":
                    lanes[verb][at].set(name, value)
                else:
                    lanes[verb][at].get(name, len(value))

        list(threads.map(lane, range(len(lanes[verb]))))

    def put() -> None:
        chunks = [(memory_obj, None, 0) for memory_obj in objects]
        assert tier.put(NAMESPACE, b"".join(hashes), chunks) == count
        assert tier.flush(120.0)

    def get() -> None:
        assert len(tier.get(NAMESPACE, b"".join(hashes), 120.0)) == count

    times: dict[str, list[float]] = {"put": [], "set": [], "get": [], "bare get": []}
    pairs = bench.pairs(11)
    for turn in range(-1, pairs):
        hashes = [os.urandom(32) for _ in range(count)]
        for pair in (
            [("put", put), ("set", lambda: bare("set"))],
            [("get", get), ("bare get", lambda: bare("get"))],
        ):
            for name, arm in pair if turn % 2 else reversed(pair):
                began = time.perf_counter()
                arm()
                if turn >= 0:
                    times[name].append(time.perf_counter() - began)
        tier.clear()
    stats = tier.stats()
    assert not any(name.startswith("faults_") for name in stats), stats
    tier.close(10.0)
    threads.shutdown()
    for lane in (*lanes["set"], *lanes["get"]):
        lane.close()
    rows = []
    for ours, limit in (("put", "set"), ("get", "bare get")):
        found = ratios(times[limit], times[ours])
        speed = spread([count * chunk_bytes / each / 1e9 for each in times[ours]])
        rows.append(
            Result(
                f"Redis {ours}, {count} chunks of {chunk_bytes >> 20} MiB, checksum included",
                "≥ 0.8 × a bare client with as many connections",
                f"{found} ×, {speed.median:.2f} GB/s",
                found.median >= 0.8,
                pairs,
                {**found.as_dict(), "gb_per_s": speed.median},
            )
        )
    return rows


def prefix(bench: Bench, native: Any, port: int) -> Result:
    pool = native.LocalCpu(1 << 23, 1000)
    tier = native.Remote(f"redis://127.0.0.1:{port}/", pool)
    hashes = b"".join(os.urandom(32) for _ in range(512))
    objects = pool.allocate([64] * 512)
    for memory_obj in objects:
        memory_obj.seal()
    chunks = [(memory_obj, None, 0) for memory_obj in objects]
    assert tier.put(NAMESPACE, hashes, chunks) == 512
    assert tier.flush(60.0)
    times = []
    for _ in range(bench.pairs(200)):
        began = time.perf_counter()
        assert tier.longest_prefix(NAMESPACE, hashes) == 512
        times.append((time.perf_counter() - began) * 1e6)
    tier.close(10.0)
    found = spread(times)
    return Result(
        "Redis, whether 512 chunks are there, one round trip",
        "–",
        f"{found} µs",
        None,
        len(times),
        found.as_dict(),
    )
