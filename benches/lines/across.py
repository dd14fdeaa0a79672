"""Lookups across processes, from the first ask to the final count."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from pathlib import Path

from bench import HERE, HOME, Bench, Worker
from measure import Result

NAMESPACE = "model=m@world=1@worker=0@dtype=float32"
CHUNKS = 512
BURNERS = 8
# LMCache's server answers from a Python thread, which waits its turn among the burners.
PEER_LOOKUPS = 50


def run(bench: Bench) -> list[Result]:
    starts, count = (1, 1_000) if bench.quick else (5, 10_000)
    times: dict[int, list[list[float]]] = {BURNERS: [], 0: []}
    for start in range(starts):
        for burners, series in times.items():
            bench.say(f"{count:,} lookups, {burners} burners ({start + 1} of {starts})")
            series.append(_lookups(count, burners))
    rows = [_row(burners, series) for burners, series in times.items()]
    return rows + [_peer_row(bench, burners) for burners in times]


def _peer_row(bench: Bench, burners: int) -> Result:
    """LMCache's client and server over its own socket, one start."""
    count = 20 if bench.quick else PEER_LOOKUPS
    bench.say(f"{count} lookups by LMCache, {burners} burners")
    script = HERE / "peers" / "lmcache_lookup.py"
    with tempfile.TemporaryDirectory(prefix="lmc-") as folder:
        scene = [str(Path(folder) / "0.sock"), str(CHUNKS)]
        served = ["serve", *scene, str(burners)]
        log = HOME / "lmcache_lookup_server.log"
        with (
            Worker(bench.peer_python, script, *served, log=log),
            Worker(bench.peer_python, script, "ask", *scene) as asking,
        ):
            told = asking.ask(do="ask", count=count)
    times = sorted(told["us"])
    assert told["found"] == CHUNKS * 256, f"{told['found']} tokens found"
    p50, p99 = times[count // 2], times[count * 99 // 100]
    busy = f"with {burners} threads burning its GIL" if burners else "idle"
    return Result(
        f"{count} lookups of 512 chunks by LMCache, hashes given, server's process {busy}",
        "for information",
        f"p50 {p50:.0f} µs, p99 {p99:.0f} µs, worst {times[-1]:.0f} µs",
        None,
        count,
        {"p50_us": p50, "p99_us": p99, "max_us": times[-1]},
    )


def _row(burners: int, series: list[list[float]]) -> Result:
    """All starts together, the bad ones too; each one's p99 beside it."""
    together = sorted(time for times in series for time in times)
    p50, p99 = together[len(together) // 2], together[len(together) * 99 // 100]
    each = [sorted(times)[len(times) * 99 // 100] for times in series]
    work = "lookups of 512 chunks over the socket, server's process "
    work += f"with {burners} threads burning its GIL" if burners else "idle"
    return Result(
        f"{len(together):,} {work}, {len(series)} starts",
        "p99 < 1 ms" if burners else "for information",
        f"p50 {p50:.0f} µs, p99 {p99:.0f} µs, worst {together[-1]:.0f} µs; p99 of each start "
        + ", ".join(f"{of_one:.0f}" for of_one in each),
        p99 < 1000 if burners else None,
        len(together),
        {"p50_us": p50, "p99_us": p99, "max_us": together[-1], "p99_us_of_each_start": each},
    )


def _lookups(count: int, burners: int) -> list[float]:
    """Microseconds from the first ask to the final count, of a server started anew."""
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
    return times
