"""Copies layer by layer in a real vLLM: what they cost, and how much of a load computing hides."""

from __future__ import annotations

from contextlib import ExitStack

from bench import Bench, Worker
from measure import Result, bootstrap_upper, ratios, spread

from lines.vllm import BYTES_PER_TOKEN, HIT_PROMPT, MISS, PROMPT, engine, turned

MISS_ARMS = ("noop", "noop-again", "layerwise")
HIT_ARMS = ("ours", "layerwise")
# Half of the prompt is stored, the other half is computed.
HEAD = 1024


def run(bench: Bench) -> list[Result]:
    starts, rounds = (1, 6) if bench.quick else (3, 16)
    misses: dict[str, list[float]] = {arm: [] for arm in MISS_ARMS}
    hits: dict[str, list[float]] = {arm: [] for arm in HIT_ARMS}
    halves: dict[str, list[float]] = {kind: [] for kind in ("both", "compute", "load")}
    for start in range(starts):
        bench.say(f"engines start ({start + 1} of {starts})")
        with ExitStack() as stack:
            # Started anew, so that no arm keeps the luck of one placement in memory.
            names = turned(tuple(dict.fromkeys((*MISS_ARMS, *HIT_ARMS))), start)
            arms = {arm: stack.enter_context(engine(arm)) for arm in names}
            seed = 1000 * (start + 1)
            for _ in range(2):
                seed += 1
                for worker in arms.values():
                    worker.ask(**MISS, seed=seed)
            for number in range(rounds):
                seed += 1
                for arm in _order(MISS_ARMS, number):
                    told = arms[arm].ask(**MISS, seed=seed)
                    assert told["cached"] == 0, f"{arm}: {told['cached']} tokens cached"
                    misses[arm].append(told["ns"])
            bench.say("hits")
            for number in range(-1, rounds):
                seed += 1
                _hit(arms, seed, number, hits)
        with engine("layerwise-slow") as slow:
            bench.say("half-hits, copies slowed down")
            _halves(slow, 10_000 * (start + 1), rounds, halves)
    return [_miss_row(misses), _hit_row(hits), _half_row(halves)]


def _order(arms: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Every arm after every other equally often, and each order both ways."""
    return turned(arms, number // 2)[:: -1 if number % 2 else 1]


def _hit(arms: dict[str, Worker], seed: int, number: int, hits: dict[str, list[float]]) -> None:
    question = {"do": "ask", "prompts": 1, "tokens": HIT_PROMPT, "max_tokens": 1, "seed": seed}
    for arm in HIT_ARMS:
        arms[arm].ask(**question)
    for arm in _order(HIT_ARMS, number):
        told = arms[arm].ask(**question, reset=True)
        assert told["cached"] == HIT_PROMPT - 1, f"{arm}: {told['cached']} tokens cached"
        if number >= 0:
            hits[arm].append(told["ns"])


def _halves(slow: Worker, seed: int, rounds: int, halves: dict[str, list[float]]) -> None:
    """Prompts of which half is stored, against computing the other half and loading it apart."""
    half = {"do": "ask", "prompts": 1, "tokens": 1025, "max_tokens": 1}

    def ask(number: int, reset: bool) -> int:
        told = slow.ask(**half, seed=number, head_seed=seed, head_tokens=HEAD, reset=reset)
        assert told["cached"] == HEAD, f"{told['cached']} of {HEAD} tokens cached"
        return int(told["ns"])

    # How long computing takes decides how slow the copies are to be: as long, all of them.
    computing = []
    for _ in range(4):
        seed += 10
        slow.ask(do="ask", prompts=1, tokens=HEAD, max_tokens=1, seed=seed)
        computing.append(ask(seed + 1, reset=False))
    load_ns = int(spread(computing[1:]).median)
    slow.ask(do="slow", bytes_per_second=int(HEAD * BYTES_PER_TOKEN / load_ns * 1e9))
    for number in range(-1, rounds):
        seed += 10
        slow.ask(do="ask", prompts=1, tokens=HEAD, max_tokens=1, seed=seed)
        kinds = ("compute", "both") if number % 2 else ("both", "compute")
        for place, kind in enumerate(kinds):
            # What is not reset has the head warm in vLLM's own cache.
            took = ask(seed + 1 + place, reset=kind == "both")
            if number >= 0:
                halves[kind].append(took)
        if number >= 0:
            halves["load"].append(load_ns)


def _miss_row(misses: dict[str, list[float]]) -> Result:
    pairs = [a / b for a, b in zip(misses["layerwise"], misses["noop"], strict=True)]
    equal = [a / b for a, b in zip(misses["noop-again"], misses["noop"], strict=True)]
    bound, equal_bound = bootstrap_upper(pairs), bootstrap_upper(equal)
    ms = {arm: spread(series).median / 1e6 for arm, series in misses.items()}
    return Result(
        f"vLLM, tiny model, layer by layer, 0 % hits: TTFT of {PROMPT:,} tokens",
        "≤ 1.03 × a no-op connector, by the 95 % bound of the median ratio",
        f"bound {bound:.3f}, median {spread(pairs).median:.3f} × no-op ({ms['layerwise']:.1f} ms); "
        f"two equal no-op arms: bound {equal_bound:.3f}, median {spread(equal).median:.3f}",
        bound <= 1.03,
        len(pairs),
        {"bound": bound, "equal_arms_bound": equal_bound, "medians_ms": ms},
    )


def _hit_row(hits: dict[str, list[float]]) -> Result:
    found = ratios(hits["layerwise"], hits["ours"])
    ms = {arm: spread(series).median / 1e6 for arm, series in hits.items()}
    return Result(
        f"vLLM, tiny model, layer by layer, 100 % hits: TTFT of {HIT_PROMPT:,} tokens",
        "≤ 1.10 × all layers at once",
        f"{found} ×; {ms['layerwise']:.2f} ms against {ms['ours']:.2f}",
        found.median <= 1.10,
        len(hits["ours"]),
        {**found.as_dict(), "ms": ms},
    )


def _half_row(halves: dict[str, list[float]]) -> Result:
    apart = [
        load + compute for load, compute in zip(halves["load"], halves["compute"], strict=True)
    ]
    found = ratios(halves["both"], apart)
    ms = {kind: spread(series).median / 1e6 for kind, series in halves.items()}
    return Result(
        f"vLLM, tiny model, layer by layer, {HEAD:,} of {HEAD + PROMPT:,} tokens hit, slowed",
        "≤ 0.80 × (load time + compute time)",
        f"{found} ×; {ms['both']:.1f} ms against {ms['load']:.1f} + {ms['compute']:.1f}",
        found.median <= 0.80,
        len(apart),
        {**found.as_dict(), "ms": ms},
    )
