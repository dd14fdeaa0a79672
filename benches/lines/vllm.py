"""A real vLLM with a tiny model: what the connector costs without hits, and what a hit costs."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack

from bench import HERE, HOME, ROOT, Bench, Worker
from measure import Result, bootstrap_upper, ratios, spread

ARMS = ("none", "noop", "noop-again", "ours")
PROMPT = 1025
HIT_PROMPT = 2049
# tiny-llama in float32: 4 layers of 4 heads of 64, K and V.
BYTES_PER_TOKEN = 4 * 2 * 4 * 64 * 4
MISS = {"do": "ask", "prompts": 1, "tokens": PROMPT, "max_tokens": 1}
LOAD = {"do": "ask", "prompts": 8, "tokens": 513, "max_tokens": 24}


def run(bench: Bench) -> list[Result]:
    # Three starts leave the bound to the luck of each.
    starts, rounds = (1, 6) if bench.quick else (6, 16)
    times: dict[str, dict[str, list[float]]] = {
        kind: {arm: [] for arm in ARMS} for kind in ("ttft", "load")
    }
    hits: dict[str, list[float]] = {"hit": [], "warm": [], "copy": []}
    for start in range(starts):
        bench.say(f"engines start ({start + 1} of {starts}), {len(ARMS)} on one core")
        with ExitStack() as stack:
            # Started anew, so that no arm keeps the luck of one placement in memory.
            arms = {arm: stack.enter_context(engine(arm)) for arm in turned(ARMS, start)}
            seed = 1000 * (start + 1)
            for warming in (MISS, MISS, LOAD):
                seed += 1
                for worker in arms.values():
                    worker.ask(**warming, seed=seed)
            for number in range(rounds):
                # Every arm comes after every other equally often, and each order both ways.
                order = turned(ARMS, number // 2)[:: -1 if number % 2 else 1]
                for kind, question in (("ttft", MISS), ("load", LOAD)):
                    seed += 1
                    for arm in order:
                        told = arms[arm].ask(**question, seed=seed)
                        assert told["cached"] == 0, f"{arm}: {told['cached']} tokens cached"
                        times[kind][arm].append(told["ns"])
            bench.say("hits")
            _hits(arms["ours"], seed, rounds, hits)
    return [
        *(_misses(kind, times[kind]) for kind in ("ttft", "load")),
        _hit_row(hits),
    ]


def engine(arm: str) -> Worker:
    # The last core; whoever asks runs on the others.
    core = str(max(os.sched_getaffinity(0)))
    folders = [HERE, HERE / "peers", ROOT / "tests" / "vllm"]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": core,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    log = HOME / f"vllm-{arm}.log"
    script = HERE / "vllm_arm.py"
    return Worker(sys.executable, script, arm, core, environment=environment, log=log)


def turned(arms: tuple[str, ...], by: int) -> tuple[str, ...]:
    return arms[by % len(arms) :] + arms[: by % len(arms)]


def _hits(engine: Worker, seed: int, rounds: int, hits: dict[str, list[float]]) -> None:
    """Each prompt: computed, then found warm in vLLM's own cache and loaded from ours, in turn."""
    question = {"do": "ask", "prompts": 1, "tokens": HIT_PROMPT, "max_tokens": 1}
    cached = HIT_PROMPT - 1
    for number in range(-1, rounds):
        seed += 1
        engine.ask(**question, seed=seed)
        kinds = ("warm", "hit") if number % 2 else ("hit", "warm")
        for kind in kinds:
            told = engine.ask(**question, seed=seed, reset=kind == "hit")
            assert told["cached"] == cached, f"{kind}: {told['cached']} of {cached} tokens cached"
            if number >= 0:
                hits[kind].append(told["ns"])
        copied = engine.ask(do="copy", nbytes=cached * BYTES_PER_TOKEN)
        if number >= 0:
            hits["copy"].append(copied["ns"])


def _misses(kind: str, times: dict[str, list[float]]) -> Result:
    work, unit = {
        "ttft": (f"vLLM, tiny model, 0 % hits: TTFT of {PROMPT:,} tokens", "TTFT"),
        "load": ("vLLM, tiny model, 0 % hits: 8 × 513 tokens in, 8 × 24 out", "time"),
    }[kind]
    against_noop = [a / b for a, b in zip(times["ours"], times["noop"], strict=True)]
    bound = bootstrap_upper(against_noop)
    median = spread(against_noop).median
    equal = ratios(times["noop-again"], times["noop"])
    equal_bound = bootstrap_upper(
        [a / b for a, b in zip(times["noop-again"], times["noop"], strict=True)]
    )
    none = ratios(times["ours"], times["none"]).median
    ours = spread(times["ours"]).median / 1e6
    return Result(
        work,
        f"{unit} ≤ 1.02 × a no-op connector, by the 95 % bound of the median ratio",
        f"bound {bound:.3f}, median {median:.3f} × no-op ({none:.3f} × none; {ours:.1f} ms); "
        f"two equal no-op arms: bound {equal_bound:.3f}, median {equal.median:.3f}",
        bound <= 1.02,
        len(against_noop),
        {
            "bound": bound,
            "median": median,
            "equal_arms_bound": equal_bound,
            "medians_ms": {arm: spread(series).median / 1e6 for arm, series in times.items()},
        },
    )


def _hit_row(hits: dict[str, list[float]]) -> Result:
    floor = [warm + copy for warm, copy in zip(hits["warm"], hits["copy"], strict=True)]
    found = ratios(hits["hit"], floor)
    ms = {kind: spread(series).median / 1e6 for kind, series in hits.items()}
    return Result(
        f"vLLM, tiny model, 100 % hits: TTFT of {HIT_PROMPT:,} tokens",
        "≤ 1.15 × (vLLM's own prefix cache warm + one plain copy of the bytes)",
        f"{found} ×; {ms['hit']:.2f} ms against {ms['warm']:.2f} + {ms['copy']:.2f}",
        found.median <= 1.15,
        len(floor),
        {**found.as_dict(), "ms": ms},
    )
