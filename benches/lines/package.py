"""What installing and importing costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench import ROOT, Bench, Stop
from measure import Result, spread

MAX_IMPORT_MS = 150
MAX_WHEEL_MB = 20
TIMED = """
import sys, time
began = time.perf_counter()
{statement}
print((time.perf_counter() - began) * 1e3, len(sys.modules))
"""
ENGINE = "from lmcache_rs import LMCacheEngine"
PEER_ENGINE = "from lmcache.v1.cache_engine import LMCacheEngine"


def run(bench: Bench) -> list[Result]:
    pairs = bench.pairs(7)
    bench.say("imports, in turn with LMCache's")
    plain, ours, theirs = [], [], []
    for _ in range(pairs):
        plain.append(_import(sys.executable, "import lmcache_rs"))
        ours.append(_import(sys.executable, ENGINE))
        theirs.append(_import(bench.peer_python, PEER_ENGINE))
    found, engine, peer = spread(plain), spread(ours), spread(theirs)
    size = _wheel().stat().st_size / 1e6
    return [
        Result(
            "import lmcache_rs, and its engine",
            f"≤ {MAX_IMPORT_MS} ms",
            f"{found.median:.1f} ms, with the engine {engine.median:.1f} ms; LMCache's engine "
            f"{peer.median / 1e3:.1f} s",
            engine.median <= MAX_IMPORT_MS,
            pairs,
            {"plain_ms": found.median, "engine_ms": engine.median, "lmcache_ms": peer.median},
        ),
        Result(
            "size of the release wheel",
            f"≤ {MAX_WHEEL_MB} MB",
            f"{size:.2f} MB",
            size <= MAX_WHEEL_MB,
            1,
            {"mb": size},
        ),
    ]


def _import(python: str | Path, statement: str) -> float:
    command = [str(python), "-c", TIMED.format(statement=statement)]
    told = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    return float(told.stdout.splitlines()[-1].split()[0])


def _wheel() -> Path:
    """The file that the installed package came from, if it still lies there."""
    from importlib.metadata import distribution

    told = json.loads(distribution("lmcache-rs").read_text("direct_url.json") or "{}")
    path = Path(told.get("url", "").removeprefix("file://"))
    if path.suffix == ".whl" and path.exists():
        return path
    wheels = sorted((ROOT / "dist").glob("lmcache_rs-*.whl"))
    if not wheels:
        raise Stop("no release wheel found; run `make wheel`")
    return wheels[-1]
