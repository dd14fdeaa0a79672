"""Run tests/vllm, one pytest process per file.

An engine that a failed test leaves behind would hold cores and memory of the next file: each file
gets a process group of its own, and what is left of it is ended before the next one starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Seconds: an engine start plus some hundred prompts on two cores, and a whole file of them.
TEST_LIMIT, FILE_LIMIT = 600, 1800


def main() -> int:
    files = sorted((ROOT / "tests" / "vllm").glob("test_*.py"))
    if not files:
        print("e2e: tests/vllm has no test_*.py", file=sys.stderr)
        return 1
    rows = []
    for file in files:
        print(f"\n== {file.relative_to(ROOT)}", flush=True)
        began = time.monotonic()
        code = run(file)
        rows.append((file, code, time.monotonic() - began))
    print("\nend-to-end tests")
    for file, code, seconds in rows:
        print(f"  {seconds:6.0f} s  {'ok' if code == 0 else f'FAILED ({code})':10}  {file.name}")
    return int(any(code for _, code, _ in rows))


def run(file: Path) -> int:
    """The exit code of pytest on one file; -1 when it ran out of time."""
    command = [sys.executable, "-m", "pytest", str(file), "--durations=10"]
    command += [f"--timeout={TEST_LIMIT}"]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(FILE_LIMIT)
    except subprocess.TimeoutExpired:
        print(f"e2e: {file.name} is not done after {FILE_LIMIT} s", file=sys.stderr)
        return -1
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End whatever the process left running."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
