"""Lookups across processes, from the first ask to the final count."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from pathlib import Path

from bench import HERE, Bench, Worker
from measure import Result

NAMESPACE = "model=m@world=1@worker=0@dtype=float32"
CHUNKS = 512
BURNERS = 8


def run(bench: Bench) -> list[Result]:
    count = 1_000 if bench.quick else 10_000
    rows = []
    for burners in (BURNERS, 0):
        p50, p99, worst = percentiles(bench, count, burners)
        work = f"{count:,} lookups of 512 chunks over the socket, server's process "
        work += f"with {burners} threads burning its GIL" if burners else "idle"
        rows.append(
            Result(
                work,
                "p99 < 1 ms" if burners else "for information",
                f"p50 {p50:.0f} µs, p99 {p99:.0f} µs, worst {worst:.0f} µs",
                p99 < 1000 if burners else None,
                count,
                {"p50_us": p50, "p99_us": p99, "max_us": worst},
            )
        )
    return rows


def percentiles(bench: Bench, count: int, burners: int) -> tuple[float, float, float]:
    from lmcache_rs.lookup import IpcLookupClient

    hashes = b"".join(hashlib.sha256(b"%d" % index).digest() for index in range(CHUNKS))
    times: list[float] = []
    with tempfile.TemporaryDirectory(prefix="lmc-") as folder:
        path = Path(folder) / "0.sock"
        arguments = [str(path), NAMESPACE, str(CHUNKS), str(burners)]
        with Worker(sys.executable, HERE / "peers" / "lookup_server.py", *arguments):
            client = IpcLookupClient(path, deadline_ms=5_000)
            while client.lookup(hashes, "warm", NAMESPACE) != CHUNKS:
                time.sleep(0.01)
            bench.say(f"{count:,} lookups, {burners} burners")
            for number in range(count):
                request = f"request-{number}"
                began = time.perf_counter()
                # None is no answer yet; the scheduler would ask again at its next step.
                while (found := client.lookup(hashes, request, NAMESPACE)) is None:
                    pass
                times.append((time.perf_counter() - began) * 1e6)
                client.end(request, release=True)
                assert found == CHUNKS, f"{found} of {CHUNKS} chunks found"
            client.close()
    times.sort()
    return times[count // 2], times[count * 99 // 100], times[-1]
