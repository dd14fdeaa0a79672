"""What it costs to tell a model from others at start."""

from __future__ import annotations

import json
import struct
import tempfile
import time
from pathlib import Path

from bench import Bench
from measure import Result, spread

MAX_S = 1.0
NUM_FILES = 4
FILE_BYTES = 4 << 30
TENSOR_BYTES = 8 << 20


def run(bench: Bench) -> list[Result]:
    from lmcache_rs.fingerprint import weights_of

    runs = bench.pairs(5)
    bench.say("a fingerprint of 16 GiB of safetensors (sparse files)")
    seconds = []
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as folder:
        for number in range(NUM_FILES):
            _write_sparse(Path(folder) / f"model-{number + 1:05}-of-{NUM_FILES:05}.safetensors")
        for _ in range(runs):
            began = time.perf_counter()
            weights_of(Path(folder))
            seconds.append(time.perf_counter() - began)
    found = spread(seconds)
    num_tensors = NUM_FILES * (FILE_BYTES // TENSOR_BYTES)
    return [
        Result(
            f"fingerprint of 16 GiB of safetensors, {num_tensors} tensors",
            f"≤ {MAX_S:.0f} s",
            f"{found.median:.2f} s",
            found.median <= MAX_S,
            runs,
            {"seconds": found.median},
        )
    ]


def _write_sparse(file: Path) -> None:
    header = json.dumps(
        {
            f"layers.{number}.weight": {
                "dtype": "BF16",
                "shape": [TENSOR_BYTES // 2],
                "data_offsets": [number * TENSOR_BYTES, (number + 1) * TENSOR_BYTES],
            }
            for number in range(FILE_BYTES // TENSOR_BYTES)
        }
    ).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + FILE_BYTES)
