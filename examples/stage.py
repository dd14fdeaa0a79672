"""What the demo needs around vLLM: progress, time limits, and processes that always end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

import psutil

HEARTBEAT_SECONDS = 10
SHUTDOWN_SECONDS = 30

# The environment is no proxy's business: every request here goes to this machine.
_loopback = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class DemoError(Exception):
    """The demonstration cannot go on; the message says what to change."""


class Stage:
    """The terminal for the story; a log file for everything vLLM's processes print.

    Creating a Stage points this process's stdout and stderr, and so those of every process
    started later, at the log file. ``close()`` undoes that.
    """

    def __init__(self, log_file: Path) -> None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self.log_file = log_file
        self.log: IO[bytes] = log_file.open("wb", buffering=0)
        self._started = time.monotonic()
        self._saved = (os.dup(1), os.dup(2))
        self._redirect(self.log.fileno(), self.log.fileno())
        signal.signal(signal.SIGALRM, _on_alarm)
        signal.signal(signal.SIGINT, _on_stop)
        signal.signal(signal.SIGTERM, _on_stop)

    def close(self) -> None:
        self._redirect(*self._saved)

    def say(self, text: str = "") -> None:
        # A reader that has gone away is no reason to leave processes behind.
        with suppress(BrokenPipeError):
            os.write(self._saved[0], f"{text}\n".encode())

    def detail(self, text: str) -> None:
        self.say(f"      {text}")

    def chapter(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        self.say(f"\n[{minutes}:{seconds:02}] {text}")

    @contextmanager
    def step(self, what: str, limit_seconds: int) -> Iterator[None]:
        """Say that ``what`` has begun, show that it is alive, and how long it took.

        Raises DemoError when it takes longer than ``limit_seconds``. Steps do not nest.
        """
        self.say(f"  … {what}")
        begun = time.monotonic()
        done = threading.Event()
        heart = threading.Thread(target=self._beat, args=(done, begun), daemon=True)
        heart.start()
        signal.alarm(limit_seconds)
        try:
            yield
        except _OutOfTime:
            raise DemoError(
                f"{what}: not done after {limit_seconds} s, so it was stopped. "
                f"The end of the log may say why: {self.log_file}"
            ) from None
        finally:
            signal.alarm(0)
            done.set()
            heart.join()
        self.say(f"  ✓ {what} ({time.monotonic() - begun:.1f} s)")

    def log_tail(self, num_lines: int = 30) -> list[str]:
        return self.log_since(0)[-num_lines:]

    def log_position(self) -> int:
        return self.log_file.stat().st_size

    def log_since(self, position: int) -> list[str]:
        with self.log_file.open("rb") as file:
            file.seek(position)
            return file.read().decode("utf-8", "replace").splitlines()

    def _beat(self, done: threading.Event, begun: float) -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            self.detail(f"still at it, {time.monotonic() - begun:.0f} s")

    @staticmethod
    def _redirect(stdout: int, stderr: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)


class _OutOfTime(BaseException):
    # Not an Exception: no `except Exception` on the way up may swallow it.
    pass


def _on_alarm(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise _OutOfTime


def _on_stop(number: int, _frame: FrameType | None) -> NoReturn:
    # Not KeyboardInterrupt: while an engine starts, vLLM swallows one and then waits for ever.
    raise SystemExit(128 + number)


def children() -> list[psutil.Process]:
    """All processes started, directly or not, by this one, Python's resource tracker aside."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if not any("resource_tracker" in part for part in child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def end_processes(processes: Sequence[psutil.Process], patience_seconds: float = 5) -> None:
    """Wait until all of ``processes`` are gone; terminate, then kill, those that stay."""
    _, alive = psutil.wait_procs(processes, timeout=patience_seconds)
    for ask_to_end in ("terminate", "kill"):
        for process in alive:
            try:
                getattr(process, ask_to_end)()
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(alive, timeout=patience_seconds)


class Server:
    """A running HTTP server process, reached at ``url``."""

    def __init__(self, command: Sequence[str], port: int, stage: Stage) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._stage = stage
        # A session of its own: a Ctrl-C here reaches it through stop(), in order.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stage.log, stderr=stage.log,
            start_new_session=True,
        )  # fmt: skip

    def wait_until_healthy(self) -> None:
        """Return once ``GET /health`` answers 200. Raises DemoError when the process ends."""
        while True:
            status = self._process.poll()
            if status is not None:
                raise DemoError(f"the server ended with status {status} before it was ready")
            try:
                with _loopback.open(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)

    def get(self, path: str) -> str:
        with _loopback.open(f"{self.url}{path}", timeout=30) as reply:
            text: str = reply.read().decode("utf-8")
        return text

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """POST JSON, return the JSON reply. Raises DemoError with the server's words on 4xx/5xx."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=json.dumps(body or {}).encode("utf-8"),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with _loopback.open(request) as reply:
                answer: dict[str, Any] = json.load(reply)
        except urllib.error.HTTPError as error:
            words = error.read().decode("utf-8", "replace")[:500]
            raise DemoError(f"POST {path} answered {error.code}: {words}") from error
        return answer

    def counter(self, name: str) -> int:
        """The sum of a Prometheus counter's samples, 0 when it has none yet."""
        lines = self.get("/metrics").splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{")))

    def stop(self) -> None:
        try:
            family = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        self._process.terminate()
        try:
            self._process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_processes(family)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
