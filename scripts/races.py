"""Run the CUDA side over the imitated driver under ThreadSanitizer, where the toolchain can.

Needs Rust's nightly with the component rust-src: the standard library is compiled with the
sanitizer too, else its own synchronisation would be reported. Where either is missing that is said
in one line, and nothing was proven. The last part leaves waits out on purpose: there the sanitizer
must report.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").absolute()
DRIVER = ("cuda_driver", "cuda_failures", "cuda_executor", "cuda_staged", "cuda_costs")
WHOLE = (*DRIVER, "cuda_device", "cuda_waits")
# Their streams race where a wait is left out, and they leave it out by themselves.
RACING = {
    "cuda_driver": "events_keep_late_streams_in_order_and_each_wait_is_needed",
    "cuda_waits": "every_wait_is_needed",
}
# What the sanitizer ends a process with that raced.
RACED = 66


def main() -> int:
    host = toolchain()
    if not host:
        print("races: nothing was run: no nightly toolchain with the component rust-src")
        return 0
    skipped = [word for racing in RACING.values() for word in ("--skip", racing)]
    clean = run(host, WHOLE, skipped)
    if clean:
        print(f"races: FAILED, the tests ended with {clean}; the sanitizer's words are above")
        return 1
    for test, racing in RACING.items():
        seen = run(host, (test,), (racing,), quiet=True)
        if seen != RACED:
            print(f"races: FAILED, waits that {racing} leaves out are no races ({seen})")
            return 1
    print("races: none, and those planted are seen")
    return 0


def toolchain() -> str:
    """The host's target triple, or nothing where the sanitizer cannot be used."""
    asked = ("rustc", "+nightly", "-vV")
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    root = ("rustc", "+nightly", "--print", "sysroot")
    folder = subprocess.run(root, capture_output=True, text=True, check=False).stdout.strip()
    library = Path(folder) / "lib/rustlib/src/rust/library/Cargo.lock"
    if told.returncode or not library.exists():
        return ""
    (host,) = (line.split()[1] for line in told.stdout.splitlines() if line.startswith("host:"))
    return host


def run(host: str, tests: Sequence[str], words: Sequence[str], quiet: bool = False) -> int:
    """Run tests of lmcache-transfer under the sanitizer; how the worst of them ended."""
    command = ["cargo", "+nightly", "test", "--locked", "-Zbuild-std", "--target", host]
    command += ["--target-dir", str(TARGET / "races"), "--package", "lmcache-transfer"]
    command += ["--features", "planted-removals"]
    named = [word for test in tests for word in ("--test", test)]
    switches = {"RUSTFLAGS": "-Zsanitizer=thread", "LMCACHE_RS_WITHOUT_CUDA": "1"}
    out = subprocess.DEVNULL if quiet else None
    done = subprocess.run(
        [*command, *named, "--", *words],
        cwd=ROOT,
        env=os.environ | switches,
        stdout=out,
        stderr=out,
        check=False,
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
