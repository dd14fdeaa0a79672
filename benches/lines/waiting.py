"""What a scheduler's question costs while many requests wait: `get_num_new_matched_tokens`.

The scheduler half is the shipped one, its requests are vLLM's own, and the store it asks is another
process behind the lookup's socket: one that answers, and one that was stopped.
"""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from bench import HERE, Bench, Worker
from measure import Result

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from lmcache_rs.vllm_v1.scheduler import LMCacheSchedulerHalf

WAITING = 500
CHUNK = 256
CHUNKS = 16
DEADLINE_MS = 500
STEP_S = 5e-3
"""What an engine does between two rounds of questions takes this long, and mostly longer."""
numbers = itertools.count()


def run(bench: Bench) -> list[Result]:
    rounds = 1 if bench.quick else 5
    asked: list[float] = []
    at_ask: list[int] = []
    stalled: list[float] = []
    ends: list[float] = []
    for number in range(rounds):
        bench.say(f"{WAITING} waiting requests, a store that answers, one that does not ({number})")
        half, worker = _scheduler_half()
        with worker:
            times, needed = _answered(half, worker)
            asked += times
            at_ask += needed
            times, seconds = _unanswered(half, worker)
            stalled += times
            ends.append(seconds)
        half.shutdown()
    return [_healthy(asked, at_ask), _stalled(stalled, ends)]


def _p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


def _healthy(times: list[float], needed: list[int]) -> Result:
    first = sum(asks == 1 for asks in needed) / len(needed)
    return Result(
        f"{len(needed):,} requests asked about, {WAITING} at a time, store healthy",
        "p99 < 1 ms; final count at the first ask in ≥ 90 %, by the third in all",
        f"p99 {_p99(times):.0f} µs, worst {max(times):.0f} µs; {first:.1%} at the first ask, "
        f"all by ask {max(needed)}",
        _p99(times) < 1000 and first >= 0.9 and max(needed) <= 3,
        len(times),
        {"p99_us": _p99(times), "max_us": max(times), "first": first, "most_asks": max(needed)},
    )


def _stalled(times: list[float], ends: list[float]) -> Result:
    return Result(
        f"{len(times):,} questions for {WAITING} waiting requests, store stopped",
        f"p99 < 1 ms; computed after its deadline of {DEADLINE_MS} ms",
        f"p99 {_p99(times):.0f} µs, worst {max(times):.0f} µs; all computed after "
        f"{max(ends) * 1e3:.0f} ms",
        _p99(times) < 1000 and max(ends) < 4 * DEADLINE_MS / 1e3,
        len(times),
        {"p99_us": _p99(times), "max_us": max(times), "seconds": ends},
    )


def _scheduler_half() -> tuple[LMCacheSchedulerHalf, Worker]:
    """The half, and the process of the store that it asks."""
    from vllm.v1.outputs import KVConnectorOutput

    from lmcache_rs import LMCacheEngineConfig, LMCacheMetadata
    from lmcache_rs.lookup import Rank, lookup_socket_path
    from lmcache_rs.vllm_v1.faults import Faults
    from lmcache_rs.vllm_v1.metadata import LMCacheWorkerMetadata
    from lmcache_rs.vllm_v1.scheduler import LMCacheSchedulerHalf

    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, lookup_timeout_ms=DEADLINE_MS, log_requests=False
    )
    metadata = LMCacheMetadata("m", 1, 0, "float32", block_size=16)
    half = LMCacheSchedulerHalf(config, metadata, "bench", "kv_both", Faults())
    name = secrets.token_hex(16)
    rank = Rank(0, 0, 0)
    path = str(lookup_socket_path(name, rank))
    # Leases of waiting requests hold at most half of a pool.
    chunks = str(2 * WAITING * CHUNKS)
    worker = Worker(
        sys.executable, HERE / "peers" / "lookup_server.py", path, "unused", chunks, "0"
    )
    half.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=LMCacheWorkerMetadata({}, {rank: name}))
    )
    return half, worker


def _requests() -> list[Request]:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    made = []
    for _ in range(WAITING):
        number = next(numbers)
        tokens = [(number * 7919 + at) % 50_000 for at in range(CHUNK * CHUNKS + 7)]
        made.append(Request(f"r{number}", tokens, SamplingParams(max_tokens=1), None))
    return made


def _ask(half: LMCacheSchedulerHalf, request: Request) -> tuple[int | None, float]:
    began = time.perf_counter()
    found, _ = half.get_num_new_matched_tokens(request, 0)
    return found, (time.perf_counter() - began) * 1e6


def _answered(half: LMCacheSchedulerHalf, worker: Worker) -> tuple[list[float], list[int]]:
    """Microseconds of each question, and how many of them each request took."""
    requests = _requests()
    _warm_up(half)
    for request in requests:
        # Hashed once, as the first question does: that is another line's.
        tracker = half._track(request)
        tracker.extend_chain(request.num_tokens, CHUNK)
        stored: Any = worker.ask(
            do="put", namespace=tracker.namespace, hashes=tracker.chain.hashes().hex()
        )
        assert stored == CHUNKS, f"the store takes all chunks, not {stored}"
    times: list[float] = []
    needed = dict.fromkeys(range(len(requests)), 0)
    waiting = list(needed)
    while waiting:
        for at in list(waiting):
            found, took = _ask(half, requests[at])
            times.append(took)
            needed[at] += 1
            if found is not None:
                assert found == CHUNK * CHUNKS, f"{found} tokens found"
                waiting.remove(at)
        time.sleep(STEP_S)
    for request in requests:
        half.request_finished(request)
    return times, list(needed.values())


def _warm_up(half: LMCacheSchedulerHalf) -> None:
    """Until there is a connection, no answer is final."""
    (request, *_) = _requests()
    while half._client is None or half._client.stats()["answered"] == 0:
        _ask(half, request)
        half.request_finished(request)
        time.sleep(0.01)


def _unanswered(half: LMCacheSchedulerHalf, worker: Worker) -> tuple[list[float], float]:
    """Microseconds of each question, and seconds until every request computes."""
    requests = _requests()
    for request in requests:
        half._track(request).extend_chain(request.num_tokens, CHUNK)
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        times: list[float] = []
        began = time.perf_counter()
        waiting = list(requests)
        while waiting:
            for request in list(waiting):
                found, took = _ask(half, request)
                times.append(took)
                if found is not None:
                    assert found == 0, "nobody has answered"
                    waiting.remove(request)
            time.sleep(STEP_S)
        seconds = time.perf_counter() - began
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    for request in requests:
        half.request_finished(request)
    return times, seconds
