"""A real S3 server on the loopback, and a proxy before it that does what networks do.

The server is moto's, in a process of its own: it keeps everything in memory, so one that was killed
comes back empty. A server that comes back with what it had is `Proxy.stop` and `Proxy.start`.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib.util
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote

import pytest

BUCKET = "kv-cache"
START_WITHIN_S = 60.0
# Ends with the process that started it, however that ends: its standard input is a pipe of ours.
_SERVE = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", int(sys.argv[1]), verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
# Of the form of a signature; the server checks no more.
SIGNED = (
    "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=00"
)
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing-secret",
    "AWS_REGION": "us-east-1",
}


def is_there() -> bool:
    """Whether moto's server is installed."""
    return all(importlib.util.find_spec(name) for name in ("moto", "flask", "flask_cors"))


def require() -> None:
    """Skips a test where there is no server; under CI there must be one."""
    if not is_there():
        assert os.environ.get("CI") != "true", "moto's server is missing: see requirements/dev.txt"
        pytest.skip("moto's server is not installed: pip install 'moto[s3]' flask flask-cors")


class S3Server:
    """moto's server in a process of its own, with the bucket `BUCKET`.

    Args:
        port: Where it listens on the loopback; 0 for any that is free.
    """

    def __init__(self, port: int = 0) -> None:
        # No credentials, settings or proxies of whoever runs the tests.
        environ = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        assert self._process.stdout is not None
        told = self._process.stdout.readline()
        assert told.strip().isdigit(), "moto's server did not start"
        self.port = int(told)
        due = time.monotonic() + START_WITHIN_S
        while True:
            with contextlib.suppress(OSError):
                if self.request("PUT", "")[0] == 200:
                    return
            assert time.monotonic() < due, "moto's server does not answer"
            time.sleep(0.05)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str = "", **options: str) -> str:
        """What `remote_url` is for this server."""
        return s3_url(self.endpoint, prefix, **options)

    def request(self, method: str, name: str, body: bytes = b"") -> tuple[int, bytes]:
        """Asks for an object, or for the bucket if `name` is empty: status and answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            path = f"/{BUCKET}/{quote(name, safe='/?=&')}"
            connection.request(method, path, body, {"Authorization": SIGNED})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects that begin so."""
        listed = self.request("GET", f"?list-type=2&max-keys=1000&prefix={prefix}")[1].decode()
        return re.findall(r"<Key>(.*?)</Key>", listed)

    def wipe(self) -> None:
        for name in self.names():
            self.request("DELETE", name)

    def kill(self) -> None:
        """At once, whatever it is doing. What it had is lost."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def s3_url(endpoint: str, prefix: str = "", **options: str) -> str:
    told = "".join(f"&{name}={text}" for name, text in options.items())
    return f"s3://{BUCKET}/{prefix}?endpoint={endpoint}{told}"


@functools.cache
def shared_server() -> S3Server:
    """One for all tests of a process; it ends with it."""
    return S3Server()


@contextlib.contextmanager
def credentials() -> Iterator[None]:
    """The environment that the server's clients need."""
    before = {name: os.environ.get(name) for name in CREDENTIALS}
    os.environ.update(CREDENTIALS)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


@dataclass
class Fault:
    """What the proxy does to requests.

    Args:
        kind: `status`: answers itself. `slow`: waits first. `hang`: never answers. `cut_request`:
            closes when half of the request's body has come. `cut_answer`: closes in the middle of
            the answer's body. `truncate`: an answer that is shorter, and says so. `change`: an
            answer with other bytes. `no_http`: an answer that is none.
        methods: Of these requests.
        status: For `status`.
        code: The word in its body.
        seconds: For `slow`.
        change: For `change`: the body, and what becomes of it.
    """

    kind: str
    methods: tuple[str, ...] = ("GET", "PUT", "HEAD", "DELETE", "POST")
    status: int = 500
    code: str = "InternalError"
    seconds: float = 0.0
    change: Callable[[bytes], bytes] = field(default=lambda body: body)


class Proxy:
    """Stands before a server, on a port that stays the same.

    Args:
        upstream: The server's port on the loopback.
    """

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.fault: Fault | None = None
        self.port = 0
        self.counts: dict[str, int] = {}
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._resume = threading.Event()
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str = "", **options: str) -> str:
        return s3_url(self.endpoint, prefix, **options)

    def start(self) -> None:
        """Listens, again on the port that it had."""
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._resume.clear()
        self._server = _Listener(("127.0.0.1", self.port), handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Nobody listens, and all connections are broken: as a server that is gone."""
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        server.server_close()
        self._resume.set()
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def count(self, method: str) -> int:
        with self._lock:
            return self.counts.get(method, 0)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Broken connections are what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: Proxy

    def setup(self) -> None:
        super().setup()
        self._upstream = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream, timeout=60)
        with self.proxy._lock:
            self.proxy._open.add(self.connection)

    def finish(self) -> None:
        with self.proxy._lock:
            self.proxy._open.discard(self.connection)
        self._upstream.close()
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *_: object) -> None:
        pass

    def _any(self) -> None:
        fault = self.proxy.fault
        if fault is not None and self.command not in fault.methods:
            fault = None
        kind = fault.kind if fault is not None else ""
        with self.proxy._lock:
            self.proxy.counts[self.command] = self.proxy.counts.get(self.command, 0) + 1
        length = int(self.headers.get("Content-Length") or 0)
        if kind == "cut_request" and length:
            self.rfile.read(length // 2)
            return self._break()
        body = self.rfile.read(length)
        if fault is not None:
            if kind == "hang":
                self.proxy._resume.wait()
                return self._break()
            if kind == "no_http":
                self.wfile.write(b"220 mail.example ESMTP\r\n" * 3)
                return self._break()
            if kind == "slow":
                self.proxy._resume.wait(fault.seconds)
            if kind == "status":
                told = f"<Error><Code>{fault.code}</Code><Message>of the test</Message></Error>"
                return self._answer(
                    fault.status, {"Content-Type": "application/xml"}, told.encode()
                )
        headers = {
            name: text
            for name, text in self.headers.items()
            if name.lower() not in ("connection", "content-length", "expect")
        }
        self._upstream.request(self.command, self.path, body, headers)
        answer = self._upstream.getresponse()
        data = answer.read()
        told_headers = {
            name: text
            for name, text in answer.getheaders()
            if name.lower() not in ("connection", "transfer-encoding", "server", "date")
        }
        if kind == "truncate" and data:
            data = data[: len(data) // 2]
        if kind == "change" and fault is not None and answer.status in (200, 206):
            data = fault.change(data)
        self._answer(answer.status, told_headers, data, cut=kind == "cut_answer")

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _any

    def _answer(
        self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        is_head = self.command == "HEAD"
        length = headers.get("Content-Length", "0") if is_head else str(len(data))
        for name, text in headers.items():
            if name.lower() != "content-length":
                self.send_header(name, text)
        self.send_header("Content-Length", length)
        self.end_headers()
        if is_head:
            return
        if cut:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self._break()
        else:
            self.wfile.write(data)

    def _break(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
