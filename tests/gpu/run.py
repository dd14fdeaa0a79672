"""Run what needs a GPU; where there is none, say so in one line and do nothing.

    run.py [--imitated] [--quick] [--other PYTHON] [--json FILE]

Needs this package, with kernels, and a torch that has CUDA; nothing else. `--imitated` runs the
same over a library that imitates the driver, on any machine with g++: that proves this script, and
its figures mean nothing. `--quick` leaves out most layouts and element types. `--other` names a
Python with another torch and this very wheel, which runs a choice of the checks, too. Where vLLM is
beside torch, its end-to-end tests of hits run last, in the time that is left.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Leaves figures their time within eight minutes.
CHECK_SECONDS = 240
WHOLE_SECONDS = 480
WAYS = ["kernel", "engine", "single", "staged"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--imitated", action="store_true", help="over the imitated driver")
    parser.add_argument("--quick", action="store_true", help="a choice of the checks")
    parser.add_argument("--other", help="a Python with another torch and the same wheel")
    parser.add_argument("--json", type=Path, help="where the report goes")
    args = parser.parse_args()
    if args.imitated:
        return Report(args).run()
    absent = no_gpu()
    if absent:
        print(f"gpu: nothing was run: {absent}")
        return 0
    failed = rust_tests()
    absent = no_torch()
    if absent:
        print(f"gpu: the connectors were not run: {absent}")
        return failed or 1
    return Report(args).run() or failed


def rust_tests() -> int:
    """The executor's own test on a GPU, where this is a checkout with a toolchain."""
    if shutil.which("cargo") is None:
        print("gpu: no cargo here: the Rust test was not run")
        return 0
    command = ["cargo", "test", "--locked", "--package", "lmcache-transfer", "--test", "gpu"]
    environ = os.environ | {"LMCACHE_RS_REQUIRE_CUDA": "1", "PYO3_PYTHON": sys.executable}
    done = subprocess.run([*command, "--", "--nocapture"], cwd=ROOT, env=environ, check=False)
    return done.returncode


def no_gpu() -> str:
    """Why there is no GPU to use, or nothing."""
    path = os.environ.get("LMCACHE_RS_LIBCUDA") or "libcuda.so.1"
    try:
        driver = ctypes.CDLL(path)
    except OSError:
        return f"no CUDA driver here ({path} does not open)"
    code, count = driver.cuInit(0), ctypes.c_int()
    if code:
        return f"the CUDA driver does not start (cuInit answers {code})"
    driver.cuDeviceGetCount(ctypes.byref(count))
    return "" if count.value else "the CUDA driver shows no GPU"


def no_torch() -> str:
    """Why Python's torch or this package cannot use the GPU, or nothing."""
    try:
        import torch

        from lmcache_rs import _native
    except ImportError as error:
        return f"{error}; install torch with CUDA and this package's wheel in {sys.executable}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} has no CUDA; run this with a Python whose torch has"
    if not _native.build_info()["cuda_kernels"]:
        return f"the package has no kernels ({_native.build_info()['cuda_absent_because']})"
    return ""


def extension_digest() -> str:
    """SHA-256 of the extension module, which tells one wheel from another."""
    from lmcache_rs import _native

    assert _native.__file__ is not None
    return hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()


class Report:
    """One table and one JSON of what was found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._found: dict[str, Any] = {"checks": {}, "failures": [], "figures": [], "paths": []}

    def run(self) -> int:
        """All checks and figures; 0 if every check held."""
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        from world import ImitatedWorld, World

        begun = time.monotonic()
        world = ImitatedWorld() if self._args.imitated else World()
        with world.entered():
            self._found["facts"] = {**world.facts(), "extension": extension_digest()}
            self._check(world)
            self._measure(world)
        if self._args.other:
            self._run_other()
        if not self._args.imitated and importlib.util.find_spec("vllm"):
            self._run_vllm(begun + WHOLE_SECONDS - time.monotonic())
        self._found["seconds"] = round(time.monotonic() - begun, 1)
        self._print()
        if self._args.json:
            self._args.json.write_text(json.dumps(self._found, indent=1) + "\n")
        return 1 if self._found["failures"] else 0

    def _check(self, world: Any) -> None:
        from checks import all_checks

        until = time.monotonic() + CHECK_SECONDS
        for number, (group, path, (title, check)) in enumerate(all_checks(WAYS)):
            if self._args.quick and group.endswith("torch indexing") and number % 13:
                continue
            counts = self._found["checks"].setdefault(
                group, {"held": 0, "failed": 0, "left_out": 0}
            )
            if time.monotonic() > until:
                counts["left_out"] += 1
                continue
            world.native.force_path(path)
            try:
                check(world)
                counts["held"] += 1
            except Exception as error:
                counts["failed"] += 1
                where = traceback.format_exc(limit=-2)
                self._found["failures"].append(f"{group}, by {path}: {title}: {error}\n{where}")
            finally:
                world.native.force_path(None)

    def _measure(self, world: Any) -> None:
        import figures

        small = world.is_imitated
        num_tokens = 1024 if small else 16_384
        most_bytes = (1 << 20) if small else (256 << 20)
        self._found["figures"] += figures.rates(world, WAYS, num_tokens)
        self._found["figures"] += figures.kernels(world, num_tokens)
        self._found["paths"] += figures.path_table(world, WAYS, most_bytes)

    def _run_other(self) -> None:
        """A choice of the checks by another Python and torch, with the same extension module."""
        own = self._found["facts"]
        command = [self._args.other, __file__, "--quick", *["--imitated"] * self._args.imitated]
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "told.json"
            subprocess.run([*command, "--json", told], stdout=subprocess.DEVNULL, check=False)
            found = json.loads(told.read_text()) if told.exists() else {"failures": ["it ended"]}
        facts = found.get("facts", {})
        self._found["other"] = {"facts": facts, "failures": found["failures"]}
        self._found["failures"] += [f"the other Python: {each}" for each in found["failures"]]
        if facts.get("extension") != own["extension"]:
            self._found["failures"].append(f"{self._args.other} has another wheel than this Python")
        if facts.get("torch") == own["torch"]:
            self._found["failures"].append(f"{self._args.other} has the same torch, {own['torch']}")

    def _run_vllm(self, seconds: float) -> None:
        """vLLM's hits equal its own answers, engine memory overwritten in between."""
        command = [sys.executable, "-m", "pytest", "-q", "tests/vllm/test_hits.py"]
        try:
            code = subprocess.run(
                command, cwd=ROOT, timeout=max(seconds, 1), check=False
            ).returncode
        except subprocess.TimeoutExpired:
            self._found["vllm"] = "left out for time"
            return
        self._found["vllm"] = "failed" if code else "passed"
        if code:
            self._found["failures"].append("vLLM's end-to-end tests of hits")

    def _print(self) -> None:
        for line in self._lines():
            print(line)

    def _lines(self) -> Iterator[str]:
        found, facts = self._found, self._found["facts"]
        yield f"{facts['gpu']}, driver of CUDA {facts['driver_cuda']}, torch {facts['torch']}"
        if facts["imitated"]:
            yield "IMITATED: the checks are meant, the figures are those of no GPU"
        yield ""
        for group, counts in found["checks"].items():
            left_out = f", {counts['left_out']} left out for time" if counts["left_out"] else ""
            verdict = f"{counts['failed']} FAILED" if counts["failed"] else "none failed"
            yield f"{group:<44} {counts['held']:>4} held, {verdict}{left_out}"
        yield ""
        for figure in found["figures"]:
            ratios = [
                f"{figure[key]:.2f} x {key[3:].replace('_', ' ')}"
                for key in figure
                if key[:3] == "of_"
            ]
            yield f"{figure['what']:<44} {figure['gb_per_second']:>9.2f} GB/s  {' '.join(ratios)}"
        yield ""
        ways = " ".join(f"{way:>9}" for way in WAYS)
        yield f"a layer's copy, us      run bytes    runs {ways}  chosen"
        for row in found["paths"]:
            times = " ".join(f"{row[f'{way}_us']:>9.1f}" for way in WAYS)
            size = f"{row['run_bytes']:>12} {row['runs']:>7}"
            yield f"{row['direction']:<20} {size} {times}  {row['chosen']}"
        yield ""
        if "other" in found:
            other = found["other"]
            verdict = f"{len(other['failures'])} FAILED" if other["failures"] else "none failed"
            yield f"the same wheel beside torch {other['facts'].get('torch')}: {verdict}"
        if "vllm" in found:
            yield f"vLLM's end-to-end tests of hits: {found['vllm']}"
        yield f"{found['seconds']} s"
        for failure in found["failures"]:
            yield f"\nFAILED {failure}"


if __name__ == "__main__":
    sys.exit(main())
