"""Loads that would be slower than computing: a real vLLM over a tier behind a token bucket."""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack
from typing import Any

from bench import Bench, Worker
from measure import Result, ratios, spread

from lines.vllm import BYTES_PER_TOKEN, engine

PROMPT = 1025
CHUNK = 256
NUM_PROMPTS = 4
WARM_UP_LOADS = 8
SLOWER = (2, 10, 100)
"""How many times as long as computing a load from the tier takes."""

LONGEST_RECOVERY_S = 120.0


def run(bench: Bench) -> list[Result]:
    pairs = max(20, bench.pairs(30))
    with ExitStack() as stack:
        bench.say("engines start, 2 on one core")
        computing, ours = (stack.enter_context(engine(arm)) for arm in ("none", "bucket"))
        for worker in (computing, ours):
            # The first steps of an engine take longer.
            for seed in (1, 2):
                ask(worker, seed)
        # Stored at full speed, and then nowhere but in the tier.
        for seed in seeds():
            ask(ours, seed)
        quick = [load(ours, seed) for seed in seeds() * 2]
        assert all(told["cached"] for told in quick), "the tier has them, and is quick"
        compute_s = spread([ask(computing, seed)["ns"] / 1e9 for seed in seeds() * 2]).median
        rows = []
        for slower in SLOWER:
            rows.append(slowed(bench, computing, ours, slower, compute_s, pairs))
            rows.append(recovered(bench, ours))
    return rows


def seeds() -> list[int]:
    return list(range(100, 100 + NUM_PROMPTS))


def ask(worker: Worker, seed: int) -> Any:
    return worker.ask(do="ask", prompts=1, tokens=PROMPT, max_tokens=1, seed=seed, reset=True)


def load(worker: Worker, seed: int) -> Any:
    """Asks for a prompt that nobody but the tier has."""
    worker.ask(do="forget")
    return ask(worker, seed)


def slowed(
    bench: Bench, computing: Worker, ours: Worker, slower: int, compute_s: float, pairs: int
) -> Result:
    loaded_bytes = (PROMPT - 1) * BYTES_PER_TOKEN
    rate = loaded_bytes / (slower * compute_s)
    bench.say(f"the tier gives {rate / 1e6:.1f} MB/s")
    ours.ask(do="bucket", bytes_per_second=rate, burst_bytes=CHUNK * BYTES_PER_TOKEN)
    cycle = itertools.cycle(seeds())
    times: dict[str, list[float]] = {"ours": [], "computing": []}
    loads = 0
    for turn in range(-WARM_UP_LOADS, pairs):
        if turn == 0:
            early = ratios(times["ours"], times["computing"])
            worst_early = max(a / b for a, b in zip(times["ours"], times["computing"], strict=True))
            times, loads = {"ours": [], "computing": []}, 0
        seed = next(cycle)
        for name in ("ours", "computing")[:: 1 if turn % 2 else -1]:
            told = load(ours, seed) if name == "ours" else ask(computing, seed)
            times[name].append(told["ns"])
            loads += bool(name == "ours" and told["cached"])
    found = ratios(times["ours"], times["computing"])
    return Result(
        f"vLLM, tiny model, {PROMPT:,} tokens in a tier that takes {slower} × as long as computing",
        "TTFT ≤ 1.05 × computing, in the median of 20 pairs or more, after 8 loads",
        f"{found} ×, {loads} loads made; in the first {WARM_UP_LOADS} {early.median:.2f} ×, the "
        f"slowest {worst_early:.1f} ×",
        found.median <= 1.05,
        pairs,
        {**found.as_dict(), "loads": loads, "worst_early": worst_early},
    )


def recovered(bench: Bench, ours: Worker) -> Result:
    """How long until a tier that is quick again is loaded from again."""
    ours.ask(do="bucket", bytes_per_second=1e12, burst_bytes=1e12)
    began, count = time.monotonic(), 0
    for seed in itertools.cycle(seeds()):
        count += 1
        if load(ours, seed)["cached"] or time.monotonic() - began > LONGEST_RECOVERY_S:
            break
    took = time.monotonic() - began
    again = [load(ours, seed)["cached"] for seed in seeds() * 2]
    return Result(
        "the same tier, quick again: until it is loaded from",
        "–",
        f"{took:.1f} s, {count} requests; then {sum(map(bool, again))} of {len(again)} loaded",
        None,
        1,
        {"seconds": took, "requests": count, "loaded_after": sum(map(bool, again))},
    )
