"""What the engine costs beside the copy: the smallest KV there is, so that bytes do not matter."""

from __future__ import annotations

import sys

from bench import HERE, Bench, Worker
from measure import Result, spread

TOKENS = 131_072
CHUNKS = TOKENS // 256
PEERS = HERE / "peers"
LIMITS_US = {"store": 10, "retrieve": 5}


def run(bench: Bench) -> list[Result]:
    pairs = bench.pairs(15)
    times: dict[str, list[dict[str, float]]] = {"opaque": [], "split": [], "lmcache": []}
    with Worker(sys.executable, PEERS / "ours.py") as ours:
        bench.say("LMCache starts; it imports for a while")
        with Worker(bench.peer_python, PEERS / "lmcache_peer.py") as peer:
            for pair in range(-1, pairs):
                order = ["opaque", "split", "lmcache"]
                for arm in order if pair % 2 else order[::-1]:
                    asked = {"do": "engine_step", "seed": 200 + pair, "tokens": TOKENS}
                    is_peer = arm == "lmcache"
                    told = peer.ask(**asked) if is_peer else ours.ask(**asked, layout=arm)
                    if pair >= 0:
                        times[arm].append(told)
    rows = []
    for verb, limit in LIMITS_US.items():
        each = {arm: spread([told[verb] / CHUNKS / 1e3 for told in times[arm]]) for arm in times}
        theirs = each["lmcache"].median
        for arm, kv in (
            ("opaque", "one layer, blocks of 16 bytes"),
            ("split", "one layer, split K and V, one byte a head: 512 runs a chunk"),
        ):
            found = each[arm]
            rows.append(
                Result(
                    f"{verb} of 512 chunks, hashing included; {kv}",
                    f"≤ {limit} µs a chunk" if arm == "opaque" else "for information",
                    f"{found} µs; LMCache with its mock copy {theirs:.1f} "
                    f"({theirs / found.median:.1f} ×)",
                    found.median <= limit if arm == "opaque" else None,
                    pairs,
                    {**found.as_dict(), "lmcache_us": theirs},
                )
            )
    return rows
