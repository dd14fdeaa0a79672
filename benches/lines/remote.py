"""The tier on a Redis server, against a bare client with as many connections."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import bare_client
from bare_client import DEPTH, NAMESPACE
from bench import Bench
from measure import Result, spread

ROUND_BYTES = 256 << 20


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

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, name: str, head: bytes, body: memoryview) -> None:
        num_bytes = len(head) + len(body)
        begin = f"*3\r\n$3\r\nSET\r\n${len(name)}\r\n{name}\r\n${num_bytes}\r\n"
        self._socket.sendall(begin.encode() + head)
        self._socket.sendall(body)
        self._socket.sendall(b"\r\n")
        assert self._socket.recv(64) == b"+OK\r\n"

    def get(self, name: str, into: memoryview, value_bytes: int) -> None:
        self._socket.sendall(f"*2\r\n$3\r\nGET\r\n${len(name)}\r\n{name}\r\n".encode())
        due = len(b"$%d\r\n" % value_bytes) + value_bytes + 2
        count = 0
        while count < due:
            count += self._socket.recv_into(into[count:due])

    def remove(self, name: str) -> None:
        self._socket.sendall(f"*2\r\n$3\r\nDEL\r\n${len(name)}\r\n{name}\r\n".encode())
        assert self._socket.recv(64) == b":1\r\n"

    def close(self) -> None:
        self._socket.close()


def put_and_get(bench: Bench, native: Any, port: int, chunk_bytes: int) -> list[Result]:
    pool = native.LocalCpu(3 * ROUND_BYTES, 1000)
    tier = native.Remote(
        f"redis://127.0.0.1:{port}/", pool, operations=DEPTH, max_queued_bytes=2 * ROUND_BYTES
    )
    return bare_client.put_and_get(
        bench,
        "Redis",
        tier,
        pool,
        lambda: Bare(port),
        chunk_bytes=chunk_bytes,
        round_bytes=ROUND_BYTES,
        num_pairs=11,
    )


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
