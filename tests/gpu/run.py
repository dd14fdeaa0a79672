"""Run what needs a GPU; where there is none, say so in one line and do nothing."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    absent = no_gpu()
    if absent:
        print(f"gpu: nothing was run: {absent}")
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


if __name__ == "__main__":
    sys.exit(main())
