"""Hashing: the prefix chain against bare SHA-256 and against LMCache."""

from __future__ import annotations

import sys

from bench import HERE, Bench, Worker
from measure import Result, Spread, ratios, spread

MUST_BARE = "≤ 1.3 × SHA-256 alone over the same bytes"
TOKENS = 131_072
CHUNKS = TOKENS // 256
PEERS = HERE / "peers"


def run(bench: Bench) -> list[Result]:
    rows = [*in_rust(bench)]
    with Worker(sys.executable, PEERS / "ours.py") as ours:
        rows.append(from_python(bench, ours))
        bench.say("LMCache starts; it imports for a while")
        with Worker(bench.peer_python, PEERS / "lmcache_peer.py") as peer:
            rows += against_lmcache(bench, ours, peer)
    return rows


def in_rust(bench: Bench) -> list[Result]:
    rows = []
    for case in bench.rust("hash"):
        if case["case"] == "appended_turn":
            found = ratios(case["ours"], case["from_nothing"])
            rows.append(
                Result(
                    "turns of 512 tokens behind 131,072 others",
                    "cost only their new tokens: ≤ 1.1 × the same turns behind nothing",
                    f"{found} ×",
                    found.median <= 1.1,
                    len(case["ours"]),
                    found.as_dict(),
                )
            )
            continue
        vocabulary = int(case["case"].rpartition("=")[2])
        found = ratios(case["ours"], case["sha2"])
        each = spread([time / case["chunks"] / 1e3 for time in case["ours"]])
        rows.append(
            Result(
                f"chain in Rust, 256-token chunks, ids below {vocabulary:,}",
                f"{MUST_BARE} (the sha2 crate)",
                f"{found} ×; {each.median:.2f} µs a chunk",
                found.median <= 1.3,
                len(case["ours"]),
                {**found.as_dict(), "us_per_chunk": each.median},
            )
        )
    return rows


def from_python(bench: Bench, ours: Worker) -> Result:
    repeats = bench.pairs(41, 7)
    vocabulary = 128_256
    asked = {"seed": 1, "tokens": TOKENS, "vocabulary": vocabulary}
    ours.ask(do="hashing", **asked, repeats=4)
    told = ours.ask(do="hashing", **asked, repeats=repeats)
    found = ratios(told["ours"], told["hashlib"])
    each = spread([time / CHUNKS / 1e3 for time in told["ours"]])
    return Result(
        f"chain from Python, int64 array of 131,072 ids below {vocabulary:,}",
        f"{MUST_BARE} (hashlib, OpenSSL)",
        f"{found} ×; {each.median:.2f} µs a chunk",
        found.median <= 1.3,
        repeats,
        {**found.as_dict(), "us_per_chunk": each.median},
    )


def against_lmcache(bench: Bench, ours: Worker, peer: Worker) -> list[Result]:
    pairs = bench.pairs(15)
    times: dict[str, list[float]] = {"keys": [], "hashes": [], "peer": []}
    for pair in range(-1, pairs):
        asked = {"do": "process_tokens", "seed": 100 + pair, "tokens": TOKENS}
        asked["vocabulary"] = 128_256
        order = [ours, peer] if pair % 2 else [peer, ours]
        told = {worker is ours: worker.ask(**asked) for worker in order}
        if pair >= 0:
            times["keys"].append(told[True]["ns"])
            times["hashes"].append(told[True]["hashes_only"])
            times["peer"].append(told[False]["ns"])
    theirs = spread([time / CHUNKS / 1e3 for time in times["peer"]])

    def row(work: str, series: list[float]) -> Result:
        faster: Spread = ratios(times["peer"], series)
        each = spread([time / CHUNKS / 1e3 for time in series])
        return Result(
            work,
            "≥ 15 × LMCache 0.5.6's process_tokens with sha256_cbor",
            f"{faster.median:.1f} × ({faster.low:.1f}–{faster.high:.1f}); "
            f"{each.median:.2f} µs a chunk against {theirs.median:.1f}",
            faster.median >= 15,
            pairs,
            {**faster.as_dict(), "ours_us": each.median, "lmcache_us": theirs.median},
        )

    return [
        row("process_tokens, hashes (make_key=False), 131,072 ids", times["hashes"]),
        row("process_tokens, a whole key object a chunk, 131,072 ids", times["keys"]),
    ]
