"""The index: lookups among up to a million chunks, chunks that come and go, bytes of each."""

from __future__ import annotations

from typing import Any

from bench import Bench
from measure import Result, spread

PLACEMENTS = {
    "scattered": "each put at another time (worst)",
    "by_prompt": "put a prompt at a time",
}


def lookup(bench: Bench) -> list[Result]:
    rows = []
    for case in bench.rust("lookup"):
        ours, touches = spread(case["ours"]), spread(case["touches"])
        limit = 2 * touches.median + 20_000
        rows.append(
            Result(
                f"lookup and lease of 512 chunks among {int(case['entries']):,}, "
                + PLACEMENTS[case["case"].split("/")[1]],
                "≤ 2 × 512 random touches of slot, entry and count, + 20 µs",
                f"{ours.median / 1e3:.1f} µs ({ours.low / 1e3:.1f}–{ours.high / 1e3:.1f}); "
                f"limit {limit / 1e3:.1f} (touches {touches.median / 1e3:.1f})",
                ours.median <= limit,
                len(case["ours"]),
                {
                    "ours_us": ours.median / 1e3,
                    "touches_us": touches.median / 1e3,
                    "release_us": spread(case["release"]).median / 1e3,
                },
            )
        )
    return rows


def churn(bench: Bench) -> list[Result]:
    rows = []
    batched: dict[int, float] = {}
    for case in bench.rust("churn"):
        entries, leased = _sizes(case)
        each = spread([time / case["chunks"] / 1e3 for time in case["batched"]])
        alone = spread([time / case["chunks"] / 1e3 for time in case["single"]])
        work = f"reserve + commit + evict, pool of {entries:,} full"
        if "/listening=" in case["case"]:
            work += ", each told to a listener"
        elif leased:
            work += f", {leased:,} leased at the old end"
        else:
            batched[entries] = each.median
        rows.append(
            Result(
                work,
                "≤ 1 µs a chunk",
                f"{each} µs in batches of 64; {alone.median:.2f} one by one",
                each.median <= 1,
                len(case["batched"]),
                {**each.as_dict(), "one_by_one_us": alone.median},
            )
        )
    small, large = min(batched), max(batched)
    growth = batched[large] / batched[small]
    rows.append(
        Result(
            f"the same, {large:,} entries against {small:,}",
            "flat: ≤ 4 ×",
            f"{growth:.2f} ×",
            growth <= 4,
            rows[0].pairs,
            {"growth": growth},
        )
    )
    return rows


def _sizes(case: dict[str, Any]) -> tuple[int, int]:
    parts = dict(part.split("=") for part in case["case"].split("/")[1:])
    return int(parts["entries"]), int(parts["leased"])


def index_bytes(bench: Bench) -> list[Result]:
    (case,) = bench.rust("bytes")
    entries, last, worst = int(case["entries"]), case["at_the_end"], case["worst"]
    return [
        Result(
            f"heap bytes of the index a chunk, {entries // 10:,} to {entries:,} chunks",
            "≤ 256 at any fill",
            f"{last:.0f} at {entries:,}; {worst:.0f} at worst (tables just doubled)",
            worst <= 256,
            1,
            {"at_the_end": last, "worst": worst},
        )
    ]
