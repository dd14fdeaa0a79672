"""What every line gets to work with: the size of the run, the tools, and processes to ask."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
HOME = ROOT / "target" / "bench"
PEER_FILE = ROOT / "requirements" / "peer.txt"


class Stop(Exception):
    """A line cannot run; the message says why and what to change."""


@dataclass(frozen=True)
class Bench:
    """One run of some lines; `quick` looks whether they work and says little about speed."""

    quick: bool

    def pairs(self, full: int, quick: int = 3) -> int:
        return quick if self.quick else full

    def say(self, text: str) -> None:
        print(f"   {time.strftime('%T')} {text}", flush=True)

    def rust(self, what: str) -> list[dict[str, Any]]:
        """The cases of one subcommand of the Rust half."""
        command = [str(self._rust_half), what, *(["--quick"] if self.quick else [])]
        self.say(" ".join(["lmcache-bench", *command[1:]]))
        told = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        if told.returncode:
            raise Stop(f"lmcache-bench {what} ended with {told.returncode}; its words are above")
        return [json.loads(line) for line in told.stdout.splitlines()]

    @cached_property
    def _rust_half(self) -> Path:
        target = Path(os.environ.get("CARGO_TARGET_DIR") or HOME).absolute()
        self.say("cargo build of benches/rust")
        manifest = str(HERE / "rust" / "Cargo.toml")
        command = [
            "cargo",
            "build",
            "--release",
            "--locked",
            "--quiet",
            "--manifest-path",
            manifest,
        ]
        environment = {**os.environ, "CARGO_TARGET_DIR": str(target)}
        if subprocess.run(command, check=False, env=environment).returncode:
            raise Stop("benches/rust does not build; the compiler's words are above")
        return target / "release" / "lmcache-bench"

    @cached_property
    def peer_python(self) -> Path:
        """The interpreter of an environment with the peer over this one's torch and vLLM."""
        asked = f"{PEER_FILE.read_text()}\0{sys.prefix}"
        folder = HOME / f"peer-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"
        python = folder / "bin" / "python"
        if (folder / ".complete").exists():
            return python
        self.say(f"making {folder.relative_to(ROOT)}")
        venv = [sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder)]
        subprocess.run(venv, check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        site = folder / "lib" / version / "site-packages"
        lent = Path(sys.prefix) / "lib" / version / "site-packages"
        (site / "lent.pth").write_text("".join(f"{path}\n" for path in _site_folders(lent)))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
        pip += ["install", "--quiet", "--no-deps", "-r", str(PEER_FILE)]
        if subprocess.run(pip, check=False).returncode:
            raise Stop("pip cannot install the peer; its words are above")
        (folder / ".complete").touch()
        return python


def _site_folders(lent: Path) -> list[Path]:
    """The folder and those that its own .pth files lend it."""
    found = [lent]
    for listing in sorted(lent.glob("*.pth")):
        lines = (Path(line.strip()) for line in listing.read_text().splitlines())
        found += [path for path in lines if path.is_absolute() and path.is_dir()]
    return found


class Worker:
    """A process that answers one JSON line with another. `close()` or `with` ends it."""

    def __init__(
        self,
        python: str | Path,
        script: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        HOME.mkdir(parents=True, exist_ok=True)
        self._log = log or HOME / f"{script.stem}.log"
        with self._log.open("w") as log_file:
            self._process = subprocess.Popen(
                [str(python), str(script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self.ready = self._read()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **what: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])
            raise Stop(f"a process ended with {self._process.returncode} ({self._log}):\n{tail}")
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
