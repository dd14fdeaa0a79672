"""Host copies as a store and a load make them, against memcpy and non-temporal stores."""

from __future__ import annotations

from typing import Any

from bench import Bench
from measure import Result, ratios, spread


def blocks(bench: Bench) -> list[Result]:
    return [
        _row(case, 0.9, ("memcpy", "streamed"), "the better of memcpy and non-temporal stores")
        for case in bench.rust("blocks")
    ]


def runs(bench: Bench) -> list[Result]:
    return [_row(case, 0.6, ("memcpy",), "memcpy of as many bytes") for case in bench.rust("runs")]


def _row(case: dict[str, Any], must: float, limits: tuple[str, ...], words: str) -> Result:
    direction, _, what = case["case"].partition("/")
    kind, _, size = what.partition("=")
    speed = {
        name: spread([case["bytes"] / time for time in case[name]]).median
        for name in ("ours", "memcpy", "streamed", "streamed_by_two")
    }
    best = max(limits, key=lambda name: speed[name])
    # Bytes per time: the limit's time over ours.
    found = ratios(case[best], case["ours"])
    threads = max(1, round(case["threads"]))
    name = {"memcpy": "memcpy", "streamed": "non-temporal"}[best]
    told = {"block": "whole blocks", "run": "runs"}[kind]
    return Result(
        f"{direction} of {told} of {_bytes(int(size))}, {threads} thread",
        f"≥ {must} × {words}, equal threads",
        f"{found} × {name}; {speed['ours']:.1f} GB/s (memcpy {speed['memcpy']:.1f}, "
        f"non-temporal {speed['streamed']:.1f}, by two threads {speed['streamed_by_two']:.1f})",
        found.median >= must,
        len(case["ours"]),
        {**found.as_dict(), "gb_per_s": speed, "threads": case["threads"]},
    )


def _bytes(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"
