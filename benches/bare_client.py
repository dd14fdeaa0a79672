"""A remote tier against a bare client that moves the same values over as many connections."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from bench import Bench
from measure import Result, ratios, spread

DEPTH = 8
NAMESPACE = "model=bench@world=1@worker=0@dtype=bfloat16"
# What a header takes.
HEADER_BYTES = 4096
# What a protocol wraps an answer in.
MARGIN = 64


class Bare(Protocol):
    """One connection that moves values as they are, and does nothing else."""

    def put(self, name: str, head: bytes, body: memoryview) -> None:
        """Stores a value, which is in two pieces as ours is."""

    def get(self, name: str, into: memoryview, value_bytes: int) -> None:
        """Receives a value of so many bytes; there is room for `MARGIN` more."""

    def remove(self, name: str) -> None:
        """Removes a value."""

    def close(self) -> None:
        """Ends the connection."""


def put_and_get(
    bench: Bench,
    what: str,
    tier: Any,
    pool: Any,
    connect: Callable[[], Bare],
    *,
    chunk_bytes: int,
    round_bytes: int,
    num_pairs: int,
) -> list[Result]:
    """Both arms in turn, and the tier's end.

    Args:
        bench: The run.
        what: The kind of server.
        tier: The native tier, whose pool has room for the chunks of a round twice.
        pool: That pool.
        connect: Makes a bare connection.
        chunk_bytes: Bytes of a chunk.
        round_bytes: Bytes that an arm moves.
        num_pairs: How often.
    """
    count = round_bytes // chunk_bytes
    objects = pool.allocate([chunk_bytes] * count)
    data = os.urandom(chunk_bytes)
    for memory_obj in objects:
        memoryview(memory_obj)[:] = data
        memory_obj.seal()
    # The bare arm moves the same bytes from the same places, and keeps what it gets, too: one value
    # over and over would stay in the processor's cache.
    head = os.urandom(HEADER_BYTES)
    bodies = [memoryview(memory_obj) for memory_obj in objects]
    value_bytes = HEADER_BYTES + chunk_bytes
    room = memoryview(bytearray(count * (value_bytes + MARGIN)))
    kept = [room[at : at + value_bytes + MARGIN] for at in range(0, len(room), len(room) // count)]
    # As many of ours write at a time.
    lanes = {
        "put": [connect() for _ in range(DEPTH // 2)],
        "get": [connect() for _ in range(DEPTH)],
    }
    threads = ThreadPoolExecutor(DEPTH)
    hashes: list[bytes] = []

    def bare(verb: str) -> None:
        def lane(at: int) -> None:
            for number in range(at, count, len(lanes[verb])):
                name = f"bare:{hashes[number].hex()}"
                if verb == "put":
                    lanes[verb][at].put(name, head, bodies[number])
                else:
                    lanes[verb][at].get(name, kept[number], value_bytes)

        list(threads.map(lane, range(len(lanes[verb]))))

    def put() -> None:
        chunks = [(memory_obj, None, 0) for memory_obj in objects]
        assert tier.put(NAMESPACE, b"".join(hashes), chunks) == count
        assert tier.flush(120.0)

    def get() -> None:
        assert len(tier.get(NAMESPACE, b"".join(hashes), 120.0)) == count

    times: dict[str, list[float]] = {"put": [], "bare put": [], "get": [], "bare get": []}
    pairs = bench.pairs(num_pairs)
    for turn in range(-1, pairs):
        hashes = [os.urandom(32) for _ in range(count)]
        arms: tuple[list[tuple[str, Callable[[], None]]], ...] = (
            [("put", put), ("bare put", lambda: bare("put"))],
            [("get", get), ("bare get", lambda: bare("get"))],
        )
        for pair in arms:
            for name, arm in pair if turn % 2 else reversed(pair):
                began = time.perf_counter()
                arm()
                if turn >= 0:
                    times[name].append(time.perf_counter() - began)
        # Both arms give the server its memory back.
        tier.clear()
        for each in hashes:
            lanes["get"][0].remove(f"bare:{each.hex()}")
    stats = tier.stats()
    assert not any(name.startswith("faults_") for name in stats), stats
    tier.close(10.0)
    threads.shutdown()
    for lane in (*lanes["put"], *lanes["get"]):
        lane.close()
    rows = []
    for verb in ("put", "get"):
        found = ratios(times[f"bare {verb}"], times[verb])
        speed = spread([count * chunk_bytes / each / 1e9 for each in times[verb]])
        rows.append(
            Result(
                f"{what} {verb}, {count} chunks of {chunk_bytes >> 20} MiB, checksum included",
                "≥ 0.8 × a bare client with as many connections",
                f"{found} ×, {speed.median:.2f} GB/s",
                found.median >= 0.8,
                pairs,
                {**found.as_dict(), "gb_per_s": speed.median},
            )
        )
    return rows
