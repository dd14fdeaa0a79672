"""The tier on an object store, against a bare HTTP client with as many connections; and packing.

The server is moto's on the loopback, in a process of its own. It limits both sides: they are
compared, and not praised.
"""

from __future__ import annotations

import http.client
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import HERE, Bench
from measure import Result, ratios, spread

sys.path.insert(0, str(HERE.parent / "tests"))
import s3_server

DEPTH = 8
ROUND_BYTES = 64 << 20
NAMESPACE = "model=bench@world=1@worker=0@dtype=bfloat16"
TOKENS = 256


def run(bench: Bench) -> list[Result]:
    from lmcache_rs import _native

    rows = packing(bench, _native)
    if not s3_server.is_there():
        bench.say("remote_s3: moto's server is not installed, so the store is not measured")
        return rows
    server = s3_server.S3Server()
    try:
        for chunk_bytes in (1 << 20, 8 << 20):
            rows += put_and_get(bench, _native, server, chunk_bytes)
    finally:
        server.kill()
    return rows


class Bare:
    """One connection that puts and gets, and does nothing else."""

    def __init__(self, server: Any, value_bytes: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port)
        self._headers = {"Authorization": s3_server.SIGNED}
        self._into = memoryview(bytearray(value_bytes))

    def put(self, path: str, value: memoryview) -> None:
        self._connection.request("PUT", path, value, self._headers)
        answer = self._connection.getresponse()
        answer.read()
        assert answer.status == 200

    def get(self, path: str) -> None:
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        count = 0
        while count < len(self._into):
            read = answer.readinto(self._into[count:])
            assert read
            count += read
        answer.read()

    def close(self) -> None:
        self._connection.close()


def put_and_get(bench: Bench, native: Any, server: Any, chunk_bytes: int) -> list[Result]:
    count = ROUND_BYTES // chunk_bytes
    pool = native.LocalCpu(4 * ROUND_BYTES, 1000)
    tier = native.Remote(
        server.url("bench"),
        pool,
        credentials=s3_server.CREDENTIALS,
        operations=DEPTH,
        max_queued_bytes=2 * ROUND_BYTES,
        deadline_s=120.0,
    )
    objects = pool.allocate([chunk_bytes] * count)
    data = os.urandom(chunk_bytes)
    for memory_obj in objects:
        memoryview(memory_obj)[:] = data
        memory_obj.seal()
    value = memoryview(os.urandom(4096) + data)
    # As many of ours write at a time.
    lanes = {
        "put": [Bare(server, len(value)) for _ in range(DEPTH // 2)],
        "get": [Bare(server, len(value)) for _ in range(DEPTH)],
    }
    threads = ThreadPoolExecutor(DEPTH)
    hashes: list[bytes] = []

    def bare(verb: str) -> None:
        def lane(at: int) -> None:
            for number in range(at, count, len(lanes[verb])):
                path = f"/{s3_server.BUCKET}/bare/{number}"
                if verb == "put":
                    lanes[verb][at].put(path, value)
                else:
                    lanes[verb][at].get(path)

        list(threads.map(lane, range(len(lanes[verb]))))

    def put() -> None:
        chunks = [(memory_obj, None, 0) for memory_obj in objects]
        assert tier.put(NAMESPACE, b"".join(hashes), chunks) == count
        assert tier.flush(120.0)

    def get() -> None:
        assert len(tier.get(NAMESPACE, b"".join(hashes), 120.0)) == count

    times: dict[str, list[float]] = {"put": [], "bare put": [], "get": [], "bare get": []}
    pairs = bench.pairs(7)
    for turn in range(-1, pairs):
        hashes = [os.urandom(32) for _ in range(count)]
        arms: tuple[list[tuple[str, Callable[[], None]]], ...] = (
            [("put", put), ("bare put", lambda: bare("put"))],
            [("get", get), ("bare get", lambda: bare("get"))],
        )
        for pair in arms:
            for name, arm in pair if turn % 2 else reversed(pair):
                took = timed(arm)
                if turn >= 0:
                    times[name].append(took)
        tier.clear()
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
                f"S3 {verb}, {count} chunks of {chunk_bytes >> 20} MiB, checksum included",
                "≥ 0.8 × a bare client with as many connections",
                f"{found} ×, {speed.median:.2f} GB/s",
                found.median >= 0.8,
                pairs,
                {**found.as_dict(), "gb_per_s": speed.median},
            )
        )
    return rows


def real_kv(num_chunks: int) -> list[bytes]:
    """Chunks of `TOKENS` tokens of SmolLM2's KV in bfloat16, `[layers, tokens, 2, hidden]`, of an
    English text."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    import smollm2
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder: Path = smollm2.ensure_model(report=lambda _: None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    text = (HERE.parent / "examples" / "harbour_handbook.txt").read_text()
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    tokens = tokens[:, : num_chunks * TOKENS]
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
    num_tokens = tokens.shape[1]

    def flat(heads: torch.Tensor) -> torch.Tensor:
        return heads[0].transpose(0, 1).reshape(num_tokens, -1)

    layers = [torch.stack([flat(each.keys), flat(each.values)], 1) for each in cache.layers]
    kv = torch.stack(layers)
    chunks = kv.split(TOKENS, dim=1)[: num_tokens // TOKENS]
    return [bytes(each.contiguous().view(torch.uint8).numpy().tobytes()) for each in chunks]


def packing(bench: Bench, native: Any) -> list[Result]:
    rows = []
    chunks = real_kv(4)
    speeds: dict[str, list[float]] = {"pack": [], "unpack": []}
    sizes = []
    for _ in range(bench.pairs(9)):
        for chunk in chunks:
            began = time.perf_counter()
            packed = native.pack_object(chunk, "bfloat16")
            speeds["pack"].append(len(chunk) / (time.perf_counter() - began) / 1e9)
            began = time.perf_counter()
            # Held against both its sums, as a read does.
            *_, defect = native.inspect_object(packed)
            speeds["unpack"].append(len(chunk) / (time.perf_counter() - began) / 1e9)
            assert defect is None
            sizes.append(len(packed) / len(chunk))
    size = spread(sizes)
    pack, unpack = spread(speeds["pack"]), spread(speeds["unpack"])
    rows.append(
        Result(
            f"lossless packing of SmolLM2's KV, bfloat16, chunks of {len(chunks[0]) >> 20} MiB, "
            "one core",
            "–",
            f"{size.median:.3f} of the bytes; packed at {pack.median:.2f}, unpacked at "
            f"{unpack.median:.2f} GB/s",
            None,
            len(sizes),
            {**size.as_dict(), "pack_gb_per_s": pack.median, "unpack_gb_per_s": unpack.median},
        )
    )
    return rows


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
