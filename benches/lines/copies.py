"""Host copies as a store and a load make them, against memcpy and non-temporal stores."""

from __future__ import annotations

from typing import Any

from bench import Bench
from measure import Result, ratios, spread

WORDS = {"memcpy": "memcpy", "streamed": "non-temporal", "block": "whole blocks", "run": "runs"}


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
    # Alone, and shared out to as many threads as the limits then get.
    ways = ("", "_shared") if case["threads"] > 1 else ("",)
    names = [name + way for way in ways for name in ("ours", "memcpy", "streamed")]
    speed = {name: spread([case["bytes"] / time for time in case[name]]).median for name in names}
    told, found = [], []
    for way in ways:
        best = max(limits, key=lambda name: speed[name + way])
        # Bytes per time: the limit's time over ours.
        found.append(ratios(case[best + way], case["ours" + way]))
        told.append(
            f"{found[-1]} × {WORDS[best]}, {speed['ours' + way]:.1f} GB/s "
            f"(memcpy {speed['memcpy' + way]:.1f}, non-temporal {speed['streamed' + way]:.1f})"
        )
    measured = told[0]
    if len(told) > 1:
        measured += f"; by {case['threads']:.0f} threads {told[1]}"
    return Result(
        f"{direction} of {WORDS[kind]} of {_bytes(int(size))}",
        f"≥ {must} × {words}, equal threads",
        measured,
        all(ratio.median >= must for ratio in found),
        len(case["ours"]),
        {
            **found[0].as_dict(),
            "shared": found[-1].as_dict(),
            "gb_per_s": speed,
            "threads": case["threads"],
        },
    )


def _bytes(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"
