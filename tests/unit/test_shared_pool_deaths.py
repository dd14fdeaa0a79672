"""A pool read by another process: either side is stopped or killed at its worst moment."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from lmcache_rs import _native

LAYERS, BLOCK, BLOCKS, DIM = 2, 4, 40, 6
CHUNK, CHUNK_BYTES, POOL_CHUNKS = 8, 4096, 8
HASHES = b"".join(bytes([chunk]) * 32 for chunk in range(4))
READERS = "reader"
PATIENT_S = 60.0

# What either side of a test has: blocks, and a way to copy them.
SIDE = f"""
import sys, time, torch
from lmcache_rs import _native

layers = [torch.zeros({BLOCKS}, {BLOCK}, {DIM}) for _ in range({LAYERS})]
paged = _native.PagedCache.opaque(
    [(layer.data_ptr(), layer.numel() * 4) for layer in layers],
    {BLOCKS}, block_tokens={BLOCK}, block_bytes={BLOCK * DIM * 4},
    block_stride={BLOCK * DIM * 4}, keep_alive=layers,
)
where = dict(chunk_size={CHUNK}, num_tokens={4 * CHUNK}, blocks=list(range({4 * CHUNK // BLOCK})))
hashes = bytes.fromhex("{HASHES.hex()}")
path = sys.argv[1]
"""

OWNER = (
    SIDE
    + f"""
for layer in layers:
    layer.fill_(3.0)
pool = _native.LocalCpu({POOL_CHUNKS * CHUNK_BYTES}, 3_600_000, num_readers=1)
_native.store(pool, paged, "ns", hashes, **where)
server = _native.LookupServer(path, pool, "", dict(), reader_secret="{READERS}")
for line in sys.stdin:
    print(pool.audit()["leased_bytes"], flush=True)
"""
)

# A copy that would take minutes: what it reads is held all the while.
READER = (
    SIDE
    + f"""
reader = _native.RegionReader(path, "{READERS}", 60_000)
queue = _native.TransferQueue(1)
load = _native.begin_shared_load(queue, reader, paged, "r", "ns", hashes, **where)
print("begun", flush=True)
load.wait()
"""
)


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="lmc-"))
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def running(script: str, path: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENT_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def connected(path: pathlib.Path, deadline_ms: int) -> _native.RegionReader:
    """A reader with a short deadline, however busy the machine is while it connects."""
    until = time.monotonic() + PATIENT_S
    while True:
        try:
            return _native.RegionReader(path, READERS, deadline_ms)
        except OSError:
            assert time.monotonic() < until


class Side:
    """A rank in this process."""

    def __init__(self) -> None:
        self.layers = [torch.zeros(BLOCKS, BLOCK, DIM) for _ in range(LAYERS)]
        self.paged = _native.PagedCache.opaque(
            [(layer.data_ptr(), layer.numel() * 4) for layer in self.layers],
            BLOCKS,
            block_tokens=BLOCK,
            block_bytes=BLOCK * DIM * 4,
            block_stride=BLOCK * DIM * 4,
            keep_alive=self.layers,
        )
        self.queue = _native.TransferQueue()

    def load(self, reader: _native.RegionReader) -> int:
        """The token at which a load of all four chunks ended."""
        load = _native.begin_shared_load(
            self.queue,
            reader,
            self.paged,
            "r",
            "ns",
            HASHES,
            chunk_size=CHUNK,
            num_tokens=4 * CHUNK,
            blocks=list(range(4 * CHUNK // BLOCK)),
        )
        assert load.wait(int(PATIENT_S * 1000))
        return load.outcome()[0]


def test_a_stopped_owner_is_a_failed_load_by_the_deadline_and_holds_nothing_once_it_goes_on(
    folder: pathlib.Path,
) -> None:
    path = folder / "s"
    with running(OWNER, path) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None

        def leased() -> int:
            assert owner.stdin is not None
            assert owner.stdout is not None
            owner.stdin.write("\n")
            owner.stdin.flush()
            return int(owner.stdout.readline())

        assert leased() == 0
        side, patient = Side(), _native.RegionReader(path, READERS, int(PATIENT_S * 1000))
        assert side.load(patient) == 4 * CHUNK
        assert all(bool((layer[:8] == 3.0).all()) for layer in side.layers)
        patient.close()
        hasty = connected(path, deadline_ms=500)
        os.kill(owner.pid, signal.SIGSTOP)
        assert side.load(hasty) == 0
        os.kill(owner.pid, signal.SIGCONT)
        # It reads the question late, of a connection that is given up.
        wait_for(lambda: leased() == 0)
        assert side.load(patient) == 4 * CHUNK, "made anew, a connection serves"
        hasty.close()
        owner.kill()
        owner.wait()
        assert side.load(patient) == 0
        with pytest.raises(OSError, match="cannot connect"):
            _native.RegionReader(path, READERS, 1000)


def test_what_a_stopped_reader_reads_stays_and_what_a_dead_one_read_goes(
    folder: pathlib.Path,
) -> None:
    path, side = folder / "s", Side()
    pool = _native.LocalCpu(POOL_CHUNKS * CHUNK_BYTES, 3_600_000, num_readers=1)
    _native.store(
        pool,
        side.paged,
        "ns",
        HASHES,
        chunk_size=CHUNK,
        num_tokens=4 * CHUNK,
        blocks=list(range(8)),
    )
    server = _native.LookupServer(path, pool, "", {}, reader_secret=READERS)
    with running(READER, path) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "begun\n"
        wait_for(lambda: pool.audit()["leased_bytes"] == 4 * CHUNK_BYTES)
        os.kill(reader.pid, signal.SIGSTOP)
        # As many as there are, and not one more: what is read is not made room with.
        assert pool.allocate([CHUNK_BYTES] * (POOL_CHUNKS - 3)) is None
        assert pool.allocate([CHUNK_BYTES] * (POOL_CHUNKS - 4)) is not None
        pool.clear()
        assert pool.allocate([CHUNK_BYTES] * (POOL_CHUNKS - 3)) is None
        reader.kill()
        reader.wait()
    wait_for(lambda: pool.allocate([CHUNK_BYTES] * POOL_CHUNKS) is not None)
    assert server.stats()["locates"] == 1
    server.close()
    pool.close()
