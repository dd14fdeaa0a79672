"""Check the wheels: what is in them, what they need, what installing one changes.

Run by the vLLM environment's Python. Builds what is not built, and needs PyPI for the small
environments that a wheel is tried in.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import wheel as wheels

ROOT = wheels.ROOT
REQUIREMENTS = ROOT / "requirements"
MAX_BYTES = 20_000_000
MAX_IMPORT_MS = 150
NEEDED = re.compile(r"(libc\.so\.6|libm\.so\.6|libgcc_s\.so\.1|libpthread\.so\.0|ld-linux.*)")
# An import that pulls one of these in would cost each process of an engine seconds.
HEAVY = ("torch", "vllm", "numpy", "yaml", "zmq")
TIMED_IMPORT = """
import json, sys, time
began = time.perf_counter()
import lmcache_rs
took = (time.perf_counter() - began) * 1e3
print(json.dumps([took, sorted({name.partition(".")[0] for name in sys.modules})]))
"""
# The store that every engine has, without torch; /proc/self/maps names what is loaded.
WITHOUT_DRIVER = """
import json
from lmcache_rs import _native
_native.build_info()
cpu = _native.LocalCpu(1 << 20, 1000)
(chunk,) = cpu.allocate([4096])
memoryview(chunk)[:] = content = bytes(range(256)) * 16
cpu.put("here", bytes(32), chunk)
kept = [found.to_bytes() == content for found in cpu.get("here", bytes(32))] == [True]
mapped = [line.split()[-1] for line in open("/proc/self/maps") if "libcuda" in line]
print(json.dumps({"mapped": sorted(set(mapped)), "kept": kept}))
"""


def main() -> int:
    release, checked = wheels.build("release"), wheels.build("checked")
    if release is None or checked is None:
        return 1
    checks: list[tuple[str, Callable[[], str]]] = []
    for profile, path in (("release", release), ("checked", checked)):
        checks += [
            (f"{profile} wheel is small", partial(size, path)),
            (f"{profile} wheel fits any Python ≥ 3.11", partial(tag, path)),
            (f"{profile} wheel has its parts", partial(parts, path)),
            (f"{profile} wheel needs only the C library", partial(needed, path)),
            (f"{profile} wheel has its CUDA kernels", partial(kernels, path)),
            (f"{profile} wheel starts without a CUDA driver", partial(no_driver, path)),
        ]
    checks += [
        ("import is quick and light without torch", partial(plain_import, release)),
        ("installing changes no other package", partial(changes_nothing, release)),
        ("the wheel serves another torch release", partial(other_torch, release)),
    ]
    failed = 0
    for name, check in checks:
        try:
            print(f"ok      {name}: {check()}", flush=True)
        except (AssertionError, subprocess.CalledProcessError) as fault:
            failed += 1
            print(f"FAILED  {name}: {fault}", flush=True)
    print(f"{len(checks) - failed} passed, {failed} failed")
    return int(failed > 0)


# What is in a wheel


def size(path: Path) -> str:
    found = path.stat().st_size
    assert found < MAX_BYTES, f"{found / 1e6:.1f} MB, the limit is {MAX_BYTES / 1e6:.0f}"
    return f"{found / 1e6:.1f} MB"


def tag(path: Path) -> str:
    *_, python, abi, system = path.stem.split("-")
    assert (python, abi) == ("cp311", "abi3"), f"cp311-abi3 asked, {python}-{abi} found"
    assert "linux" in system, f"a Linux wheel asked, {system} found"
    return f"{python}-{abi}-{system}"


def parts(path: Path) -> str:
    """The stub, the typing marker, the licence, the two entry points; no torch asked for."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        for part in ("lmcache_rs/_native.pyi", "lmcache_rs/py.typed"):
            assert part in names, f"{part} is not in the wheel"
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        assert f"{info}/licenses/LICENSE" in names, "LICENSE is not in the wheel"
        entries = archive.read(f"{info}/entry_points.txt").decode()
        facts = archive.read(f"{info}/METADATA").decode()
    asked = re.findall(r"^Requires-Dist: (\S+)", facts, re.MULTILINE)
    for group in ("[vllm.general_plugins]", "[console_scripts]"):
        assert group in entries, f"entry_points.txt has no {group}"
    named = sorted(re.split(r"[^\w-]", name)[0].lower() for name in asked)
    assert not {"torch", "vllm"} & set(named), f"the wheel asks for {named}"
    return f"requires {', '.join(named)}"


def needed(path: Path) -> str:
    """The shared libraries that the extension names."""
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        told = output("readelf", "-d", archive.extract(name, folder))
    libraries = re.findall(r"\(NEEDED\).*\[(.+)\]", told)
    assert libraries, f"readelf -d names no library for {name}"
    paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.+)\]", told)
    assert not paths, f"it looks for libraries in {', '.join(paths)}"
    foreign = [library for library in libraries if not NEEDED.fullmatch(library)]
    assert not foreign, f"it also needs {', '.join(foreign)}"
    return ", ".join(libraries)


def kernels(path: Path) -> str:
    """Kernels for every GPU where an nvcc is to be had; else the build says that it has none."""
    code = "import json; from lmcache_rs import _native; print(json.dumps(_native.build_info()))"
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
        # Without a driver too: nothing looks for one at import.
        told = subprocess.run(
            [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, cwd=folder
        ).stdout
    info = json.loads(told)
    if not wheels.nvcc():
        assert not info["cuda_kernels"], f"kernels without an nvcc: {info}"
        return f"none: {info['cuda_absent_because']}"
    assert info["cuda_kernels"], f"none: {info['cuda_absent_because']}"
    kilobytes = info["cuda_kernel_bytes"] / 1e3
    return f"nvcc {info['nvcc']}, {kilobytes:.0f} kB for sm {info['cuda_architectures']}"


def no_driver(path: Path) -> str:
    """Store and load in host memory where no driver opens; nothing of CUDA is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
        told = subprocess.run(
            [sys.executable, "-c", WITHOUT_DRIVER],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | {"LMCACHE_RS_LIBCUDA": "/nowhere/libcuda.so.1"},
        ).stdout
    found = json.loads(told)
    assert not found["mapped"], f"importing it loads {found['mapped']}"
    assert found["kept"], "a chunk that was stored is not there"
    return "nothing of CUDA is loaded"


# What a wheel does where it is installed


def plain_import(path: Path) -> str:
    """Import in an environment that has only what the wheel asks for; best of seven."""
    with tempfile.TemporaryDirectory() as folder:
        output(sys.executable, "-m", "venv", "--without-pip", folder)
        python = os.path.join(folder, "bin", "python")
        pip(python, "install", str(path), "-c", str(REQUIREMENTS / "engine.txt"))
        runs = [json.loads(output(python, "-c", TIMED_IMPORT)) for _ in range(7)]
    heavy = sorted({name for _, modules in runs for name in modules} & set(HEAVY))
    assert not heavy, f"`import lmcache_rs` also imports {', '.join(heavy)}"
    best = min(took for took, _ in runs)
    assert best < MAX_IMPORT_MS, f"{best:.0f} ms, the limit is {MAX_IMPORT_MS}"
    return f"{best:.1f} ms"


def changes_nothing(path: Path) -> str:
    """Install into this vLLM environment as an operator would, dependencies and all."""
    pip(sys.executable, "uninstall", "--yes", "lmcache-rs")
    before = frozen()
    pip(sys.executable, "install", str(path))
    changed = before ^ frozen()
    others = sorted(line for line in changed if not line.startswith("lmcache-rs"))
    assert not others, f"pip also changed {', '.join(others)}"
    assert changed, "pip list shows no lmcache-rs after the installation"
    return f"{len(before)} packages as before"


def other_torch(path: Path) -> str:
    """Store and retrieve where torch is another release and vLLM is not installed."""
    folder = output(sys.executable, str(ROOT / "scripts" / "env.py"), "other").strip()
    python = os.path.join(folder, "bin", "python")
    pip(python, "install", "--no-deps", "--force-reinstall", str(path))
    version = "from importlib.metadata import version; print(version('torch'))"
    here, there = output(sys.executable, "-c", version), output(python, "-c", version)
    assert here != there, f"both environments have torch {here.strip()}"
    told = output(python, str(ROOT / "tests" / "wheel" / "other_torch.py")).strip()
    return f"{told} (vLLM's is {here.strip()})"


def frozen() -> set[str]:
    """Every installed package with its version; for lmcache-rs its address too."""
    return set(pip(sys.executable, "freeze", "--all").splitlines())


def pip(python: str, *args: str) -> str:
    """Run this environment's pip on another interpreter."""
    quiet = ["--quiet"] if args[0] != "freeze" else []
    command = ["-m", "pip", "--disable-pip-version-check", "--python", python, *args, *quiet]
    return output(sys.executable, *command)


def output(*command: str) -> str:
    """What the command prints; its errors go through to the terminal."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
