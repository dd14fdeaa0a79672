"""The tier on an object store, against a bare HTTP client with as many connections; and packing.

The server is moto's on the loopback, in a process of its own. It limits both sides: they are
compared, and not praised.
"""

from __future__ import annotations

import http.client
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bare_client
from bare_client import DEPTH, MARGIN
from bench import HERE, Bench
from measure import Result, ratios, spread

sys.path.insert(0, str(HERE.parent / "tests"))
import s3_server

ROUND_BYTES = 64 << 20
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
        rows.append(ranged(bench, server))
    finally:
        server.kill()
    return rows


class Bare:
    """One connection that puts and gets, and does nothing else."""

    def __init__(self, server: Any) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port)

    def _ask(self, verb: str, name: str, body: Any = None, **headers: str) -> Any:
        headers["Authorization"] = s3_server.SIGNED
        self._connection.request(verb, f"/{s3_server.BUCKET}/{name}", body, headers)
        answer = self._connection.getresponse()
        assert answer.status in (200, 204, 206), answer.status
        return answer

    def put(self, name: str, head: bytes, body: memoryview) -> None:
        length = str(len(head) + len(body))
        self._ask("PUT", name, iter((head, body)), **{"Content-Length": length}).read()

    def get(self, name: str, into: memoryview, value_bytes: int, begin: int | None = None) -> None:
        where = {} if begin is None else {"Range": f"bytes={begin}-{begin + value_bytes - 1}"}
        answer = self._ask("GET", name, **where)
        count = 0
        while count < value_bytes:
            read = answer.readinto(into[count:value_bytes])
            assert read
            count += read
        answer.read()

    def remove(self, name: str) -> None:
        self._ask("DELETE", name).read()

    def close(self) -> None:
        self._connection.close()


def put_and_get(bench: Bench, native: Any, server: Any, chunk_bytes: int) -> list[Result]:
    pool = native.LocalCpu(4 * ROUND_BYTES, 1000)
    tier = native.Remote(
        server.url("bench"),
        pool,
        credentials=s3_server.CREDENTIALS,
        operations=DEPTH,
        max_queued_bytes=2 * ROUND_BYTES,
        deadline_s=120.0,
    )
    return bare_client.put_and_get(
        bench,
        "S3",
        tier,
        pool,
        lambda: Bare(server),
        chunk_bytes=chunk_bytes,
        round_bytes=ROUND_BYTES,
        num_pairs=7,
    )


def ranged(bench: Bench, server: Any) -> Result:
    """Whether an object is better read in parts, where nothing else uses the wires."""
    parts, part_bytes = 4, 8 << 20
    lanes = [Bare(server) for _ in range(parts)]
    lanes[0].put("ranged", b"", memoryview(os.urandom(parts * part_bytes)))
    room = memoryview(bytearray(parts * part_bytes + MARGIN))
    times: dict[str, list[float]] = {"whole": [], "ranged": []}
    with ThreadPoolExecutor(parts) as threads:

        def whole() -> None:
            lanes[0].get("ranged", room, parts * part_bytes)

        def in_parts() -> None:
            begins = range(0, parts * part_bytes, part_bytes)
            reads = [
                threads.submit(lane.get, "ranged", room[begin:], part_bytes, begin)
                for lane, begin in zip(lanes, begins, strict=True)
            ]
            for read in reads:
                read.result()

        pairs = bench.pairs(21)
        for turn in range(-1, pairs):
            arms = [("whole", whole), ("ranged", in_parts)]
            for name, arm in arms if turn % 2 else arms[::-1]:
                began = time.perf_counter()
                arm()
                if turn >= 0:
                    times[name].append(time.perf_counter() - began)
    lanes[0].remove("ranged")
    for lane in lanes:
        lane.close()
    found = ratios(times["whole"], times["ranged"])
    return Result(
        "S3, one object of 32 MiB in four ranged reads, bare clients",
        "–",
        f"{found} × one read",
        None,
        pairs,
        found.as_dict(),
    )


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
