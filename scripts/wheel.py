"""Build the wheel, and install it, where the sources changed.

    wheel.py build release      into dist/
    wheel.py build checked      into target/wheels/: optimised, debug assertions on; what tests use
    wheel.py install PROFILE    build, then install into the environment that runs this

Whether sources changed is told by their contents, not by file times: a checkout renews all times.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").absolute()
WHEELS = {"release": ROOT / "dist", "checked": TARGET / "wheels"}
SOURCES = ("Cargo.toml", "Cargo.lock", "pyproject.toml", "README.md", "LICENSE")
SOURCE_FOLDERS = ("rust", "python", "csrc")
BY_PRODUCTS = {".so", ".pyc"}
# What rustc and the kernels' build script read.
SWITCHES = ("RUSTFLAGS", "CUDA_HOME", "LMCACHE_RS_REQUIRE_CUDA", "LMCACHE_RS_WITHOUT_CUDA")


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[1] not in ("build", "install") or sys.argv[2] not in WHEELS:
        print(__doc__, file=sys.stderr)
        return 2
    verb, profile = sys.argv[1:]
    wheel = build(profile)
    if wheel is None:
        return 1
    return install(wheel) if verb == "install" else 0


def build(profile: str) -> Path | None:
    """The wheel of the sources as they are, built where it is not there yet; None on failure."""
    folder, wanted = WHEELS[profile], source_digest(profile)
    stamp = TARGET / f"wheel-{profile}.json"
    known = built(stamp, wanted)
    if known:
        return known
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "maturin", "build", "--locked", "--profile", profile]
    command += ["--interpreter", sys.executable, "--out", str(folder)]
    # The kernels' build script looks for nvcc among this interpreter's packages.
    environ = os.environ | {"PYO3_PYTHON": sys.executable}
    if subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode:
        return None
    (wheel,) = folder.glob("*.whl")
    facts = {"sources": wanted, "wheel": str(wheel), "sha256": sha256(wheel)}
    stamp.write_text(json.dumps(facts))
    return wheel


def built(stamp: Path, wanted: str) -> Path | None:
    """The wheel that the stamp names, if it is of these sources and still as it was built."""
    if not stamp.exists():
        return None
    facts = json.loads(stamp.read_text())
    wheel = Path(facts["wheel"])
    right = facts["sources"] == wanted and wheel.exists() and sha256(wheel) == facts["sha256"]
    return wheel if right else None


def install(wheel: Path) -> int:
    """Install the wheel and nothing else, unless this very file is what is installed."""
    if installed_sha256() == sha256(wheel):
        return 0
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return subprocess.run(
        [*pip, "--no-deps", "--force-reinstall", str(wheel)], check=False
    ).returncode


def installed_sha256() -> str | None:
    """The digest of the wheel file that pip installed lmcache-rs from."""
    try:
        record = metadata.distribution("lmcache-rs").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    hashes = json.loads(record or "{}").get("archive_info", {}).get("hashes", {})
    return hashes.get("sha256")  # type: ignore[no-any-return]


def source_digest(profile: str) -> str:
    """A digest over all that goes into the wheel, the tools that make it included."""
    rustc = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    facts = [profile, rustc, metadata.version("maturin"), nvcc()]
    facts += [os.environ.get(name, "") for name in SWITCHES]
    sha = hashlib.sha256("\0".join(facts).encode())
    paths = [ROOT / name for name in SOURCES]
    for folder in SOURCE_FOLDERS:
        paths += sorted(path for path in (ROOT / folder).rglob("*") if path.is_file())
    for path in paths:
        if path.suffix not in BY_PRODUCTS and path.exists():
            name = str(path.relative_to(ROOT))
            sha.update(f"{name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return sha.hexdigest()


def nvcc() -> str:
    """Which nvcc would compile the kernels: the one on the PATH, or the package's release."""
    try:
        return shutil.which("nvcc") or metadata.version("nvidia-cuda-nvcc")
    except metadata.PackageNotFoundError:
        return ""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
