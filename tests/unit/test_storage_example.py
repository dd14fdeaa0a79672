"""The backend that the documentation shows, as it is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_backend_does_what_it_says() -> None:
    command = [sys.executable, str(ROOT / "examples" / "python_backend.py")]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    lines = told.stdout.splitlines()
    assert lines[:3] == ["held by: folder", "the same bytes: True", "held by: LocalCPUBackend"]
    assert "faults_" not in lines[3]
    assert told.stderr == ""


def test_the_documented_backend_works_as_it_is_printed() -> None:
    text = (ROOT / "docs" / "storage-backends.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    used = (
        blocks[0].replace("max_local_cpu_size=1.0", "max_local_cpu_size=0.001")
        + """
from lmcache_rs import CacheEngineKey
key = CacheEngineKey("m", 1, 0, bytes(32), "float32")
(chunk,) = storage.batched_allocate([5])
memoryview(chunk)[:] = b"hello"
storage.batched_put([key], [chunk])
assert storage.flush()
assert storage.backends["LocalCPUBackend"].remove(key)
assert storage.contains(key) == "dict"
assert storage.batched_get([key])[0].to_bytes() == b"hello"
assert storage.close()
"""
    )
    subprocess.run([sys.executable, "-c", used], check=True, timeout=120)


def test_every_fault_has_its_line_in_the_documentation() -> None:
    package = ROOT / "python" / "lmcache_rs" / "storage"
    source = "".join((package / f"{name}.py").read_text() for name in ("lane", "tier", "manager"))
    noted = re.findall(r'(?:note|_Refused)\(\s*"(\w+)"', source)
    refused = re.findall(r'(?:refused =|return) "(\w+)"', source)
    documented = re.findall(r"`faults_(\w+)`", (ROOT / "docs" / "storage-backends.md").read_text())
    assert {*noted, *refused} == set(documented)
