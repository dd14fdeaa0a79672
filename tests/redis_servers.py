"""Redis servers of the tests' own, on loopback: plain, encrypted, behind a password, a cluster.

They need Debian's `redis-server` (Redis 7 or later), and `openssl` for certificates.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

START_S = 60.0
PASSWORD = "p@ss/word"
ESCAPED = "p%40ss%2Fword"


def require() -> None:
    """Skips the test where no server is installed; under CI it must be."""
    if shutil.which("redis-server") is None:
        reason = "redis-server is not installed: apt-get install redis-server"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def wait_until(what: str, is_so: Callable[[], bool], within_s: float = START_S) -> float:
    """Seconds until it was so."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < within_s, f"not within {within_s} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - began


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisError(Exception):
    """An error that a server reports."""


class Control:
    """The least of a client, over a server's Unix socket."""

    def __init__(self, path: Path, password: str | None) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(START_S)
        self._socket.connect(str(path))
        self._file = self._socket.makefile("rb")
        if password is not None:
            self.ask("AUTH", password)

    def ask(self, *words: str | int | bytes) -> Any:
        """One command and its answer."""
        parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        sent = b"*%d\r\n" % len(parts)
        sent += b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
        self._socket.sendall(sent)
        return self._answer()

    def _answer(self) -> Any:
        line = self._file.readline()
        if not line:
            raise ConnectionError("the server has gone")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise RedisError(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"$":
            if rest == b"-1":
                return None
            return self._file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self._answer() for _ in range(int(rest))]
        return rest.decode()

    def close(self) -> None:
        """Ends the connection."""
        self._file.close()
        self._socket.close()


class Server:
    """One `redis-server` on a port that it keeps over restarts. Nothing is written to disk.

    Args:
        settings: Further settings, as `--name value`.
        password: What it asks for.
        tls: Whether it is encrypted.
    """

    def __init__(self, *settings: str, password: str | None = None, tls: bool = False) -> None:
        require()
        self.folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self.port = free_port()
        self.password = password
        self._tls = tls
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Control | None = None
        atexit.register(self.close)
        self.start()

    @property
    def socket_path(self) -> Path:
        """Where it listens besides."""
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        """Its URL, with all that it asks for."""
        who = "" if self.password is None else f":{ESCAPED}@"
        if self._tls:
            return f"rediss://{who}127.0.0.1:{self.port}/?ca={certificates() / 'ca.crt'}"
        return f"redis://{who}127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Starts it, empty, and waits until it answers."""
        command = ["redis-server", "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no", "--unixsocket", str(self.socket_path)]
        if self._tls:
            keys = certificates()
            command += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            command += ["--tls-cert-file", str(keys / "redis.crt")]
            command += ["--tls-key-file", str(keys / "redis.key")]
            command += ["--tls-ca-cert-file", str(keys / "ca.crt")]
        else:
            command += ["--port", str(self.port)]
        if self.password is not None:
            command += ["--requirepass", self.password]
        # It does not outlive these tests, however they end.
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*guard, *command, *self._settings], stdout=log, stderr=log
            )

        def answers() -> bool:
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError((self.folder / "log").read_text()[-2000:])
            try:
                return bool(self.ask("PING") == "PONG")
            except (OSError, RedisError):
                self._forget()
                return False

        wait_until("redis-server answers", answers)

    def ask(self, *words: str | int | bytes) -> Any:
        """One command, past whatever is under test."""
        if self._control is None:
            self._control = Control(self.socket_path, self.password)
        return self._control.ask(*words)

    def info(self, section: str) -> dict[str, str]:
        """A section of INFO."""
        lines = self.ask("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def calls(self, command: str) -> int:
        """How often a command was called since the last CONFIG RESETSTAT."""
        stats = self.info("commandstats").get(f"cmdstat_{command}", "calls=0,")
        return int(stats.removeprefix("calls=").split(",")[0])

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def freeze(self) -> None:
        """Lets it hang, connections open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets it go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it at once; what it kept is lost."""
        self._forget()
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)
            self._process = None
        self.socket_path.unlink(missing_ok=True)

    def _forget(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def close(self) -> None:
        """Ends it for good. Idempotent."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Cluster:
    """Three nodes that have a third of the keys each."""

    def __init__(self) -> None:
        self.nodes = [
            Server("--cluster-enabled", "yes", "--cluster-port", str(free_port())) for _ in range(3)
        ]
        first = self.nodes[0]
        bounds = [0, 5461, 10923, 16384]
        for node, begin, end in zip(self.nodes, bounds, bounds[1:], strict=False):
            node.ask("CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
        for node in self.nodes[1:]:
            bus = node.ask("CONFIG", "GET", "cluster-port")[1]
            first.ask("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        wait_until("the cluster is whole", self._is_whole)

    def _is_whole(self) -> bool:
        infos = [node.ask("CLUSTER", "INFO").decode() for node in self.nodes]
        known = [len(node.ask("CLUSTER", "SLOTS")) for node in self.nodes]
        return all("cluster_state:ok" in info for info in infos) and known == [3, 3, 3]

    @property
    def url(self) -> str:
        """Its URL, by two of the nodes: the third is found."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])
        return f"redis-cluster://{hosts}/"

    def ask(self, *words: str | int | bytes) -> Any:
        """A command about one key, on the node that has it."""
        for node in self.nodes:
            try:
                return node.ask(*words)
            except RedisError as error:
                if not str(error).startswith("MOVED"):
                    raise
        raise AssertionError(f"no node has the key of {words}")


@functools.cache
def certificates() -> Path:
    """A folder with an authority of our own, and a certificate for loopback."""
    folder = Path(tempfile.mkdtemp(prefix="redis-keys-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        *("req", "-x509", *new, "-days", "2", "-subj", "/CN=authority of the tests"),
        *("-keyout", "ca.key", "-out", "ca.crt"),
    )
    openssl("req", *new, "-subj", "/CN=redis", "-keyout", "redis.key", "-out", "redis.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    openssl(
        *("x509", "-req", "-in", "redis.csr", "-days", "2", "-extfile", "names"),
        *("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-out", "redis.crt"),
    )
    return folder


@functools.cache
def plain() -> Server:
    """The one of this session."""
    return Server()


@functools.cache
def encrypted() -> Server:
    """The one of this session, with TLS and a password."""
    return Server(password=PASSWORD, tls=True)


@functools.cache
def cluster() -> Cluster:
    """The one of this session."""
    require()
    return Cluster()


def with_prefix(url: str, prefix: str) -> str:
    """The URL with a prefix for all names."""
    return f"{url}{'&' if '?' in url else '?'}prefix={prefix}"
