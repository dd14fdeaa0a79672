"""The tier on local disks, against sequential direct I/O of the same sizes and depth."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import HERE, Bench, Worker
from measure import Result, ratios, spread

DEPTH = 8
ROUND_BYTES = 256 << 20
NAMESPACE = "model=bench@world=1@worker=0@dtype=bfloat16"


def run(bench: Bench) -> list[Result]:
    from lmcache_rs import _native

    rows = [checksum(bench, _native)]
    folder = Path(tempfile.mkdtemp(prefix="disk-bench-", dir=Path.cwd()))
    try:
        for chunk_bytes in (1 << 20, 8 << 20, 32 << 20):
            rows += put_and_get(bench, _native, folder / str(chunk_bytes), chunk_bytes)
        for chunk_bytes in (8 << 20, 32 << 20):
            rows += beside_the_peer(bench, _native, folder / f"peer-{chunk_bytes}", chunk_bytes)
        rows.append(restart(bench, _native, folder / "many"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def checksum(bench: Bench, native: object) -> Result:
    data = os.urandom(1 << 20) * 64
    speeds = []
    for _ in range(bench.pairs(15)):
        began = time.perf_counter()
        native.checksum(data)  # type: ignore[attr-defined]
        speeds.append(len(data) / (time.perf_counter() - began) / 1e9)
    found = spread(speeds)
    return Result(
        "checksum of 64 MiB, one core",
        "≥ 10 GB/s",
        f"{found} GB/s",
        found.median >= 10,
        len(speeds),
        found.as_dict(),
    )


class Ours:
    """The tier over a folder, with a round of chunks to put."""

    def __init__(self, native: object, folder: Path, chunk_bytes: int, data: memoryview) -> None:
        self.count = ROUND_BYTES // chunk_bytes
        self._pool = native.LocalCpu(2 * ROUND_BYTES, 1000)  # type: ignore[attr-defined]
        self._disk = native.LocalDisk(  # type: ignore[attr-defined]
            [folder], 4 * ROUND_BYTES, self._pool, threads=DEPTH, max_queued_bytes=2 * ROUND_BYTES
        )
        self._allocated = self._pool.allocate([chunk_bytes] * self.count)
        for memory_obj in self._allocated:
            memoryview(memory_obj)[:] = data
            memory_obj.seal()
        self._hashes: list[bytes] = []

    @property
    def is_direct(self) -> bool:
        return bool(self._disk.stats()["direct"])

    def new_round(self) -> None:
        self._hashes = [os.urandom(32) for _ in range(self.count)]

    def put(self) -> None:
        chunks = [(memory_obj, None, 0) for memory_obj in self._allocated]
        assert self._disk.put(NAMESPACE, b"".join(self._hashes), chunks) == self.count
        assert self._disk.flush(120.0)

    def get(self) -> None:
        assert len(self._disk.get(NAMESPACE, b"".join(self._hashes), 120.0)) == self.count

    def remove(self) -> None:
        for chunk_hash in self._hashes:
            self._disk.remove(NAMESPACE, chunk_hash)

    def close(self) -> None:
        self._disk.close(10.0)


def put_and_get(bench: Bench, native: object, folder: Path, chunk_bytes: int) -> list[Result]:
    count = ROUND_BYTES // chunk_bytes
    # Into the folder that the tier makes.
    folder.mkdir(parents=True)
    raw = Raw(native, folder / "raw", chunk_bytes, count)
    ours_tier = Ours(native, folder, chunk_bytes, memoryview(os.urandom(chunk_bytes)))
    # As many of ours write at a time.
    write_depth = DEPTH // 2
    times: dict[str, list[float]] = {"put": [], "write": [], "get": [], "read": []}
    pairs = bench.pairs(11)
    for turn in range(pairs):
        ours_tier.new_round()
        arms = [("put", ours_tier.put), ("write", lambda: raw.write(write_depth))]
        arms_back = [("get", ours_tier.get), ("read", lambda: raw.read(DEPTH))]
        for pair in (arms, arms_back):
            for name, arm in pair if turn % 2 else reversed(pair):
                times[name].append(timed(arm))
        ours_tier.remove()
    direct = ours_tier.is_direct
    raw.close()
    ours_tier.close()
    rows = []
    for ours, limit, verb in (("put", "write", "written"), ("get", "read", "read")):
        found = ratios(times[limit], times[ours])
        speed = spread([count * chunk_bytes / each / 1e9 for each in times[ours]])
        rows.append(
            Result(
                f"disk {ours}, {count} chunks of {chunk_bytes >> 20} MiB, checksum included",
                f"≥ 0.85 × as many bytes {verb} end to end in one file, direct, equal threads",
                f"{found} ×, {speed.median:.2f} GB/s" + ("" if direct else " (no direct I/O here)"),
                found.median >= 0.85,
                pairs,
                {**found.as_dict(), "gb_per_s": speed.median},
            )
        )
    return rows


def beside_the_peer(bench: Bench, native: object, folder: Path, chunk_bytes: int) -> list[Result]:
    """LMCache's tier with direct I/O, its setting for the same: neither side's reads come from
    memory. It keeps no checksum."""
    theirs = folder / "theirs"
    theirs.mkdir(parents=True)
    count, pairs = ROUND_BYTES // chunk_bytes, bench.pairs(11)
    tier = Ours(native, folder / "ours", chunk_bytes, memoryview(os.urandom(chunk_bytes)))
    times: dict[str, list[float]] = {"put": [], "get": [], "their put": [], "their get": []}
    script, arguments = HERE / "peers" / "lmcache_disk.py", (str(theirs), str(chunk_bytes))
    environment = {"PYTHONPATH": str(HERE / "peers")}
    with Worker(bench.peer_python, script, *arguments, str(count), environment=environment) as peer:
        for turn in range(-1, pairs):
            tier.new_round()
            for verb, work in (("put", tier.put), ("get", tier.get)):
                arms = [
                    (verb, lambda work=work: timed(work)),
                    (f"their {verb}", lambda verb=verb: peer.ask(do=verb)["ns"] / 1e9),
                ]
                for name, arm in arms if turn % 2 else reversed(arms):
                    took = arm()
                    if turn >= 0:
                        times[name].append(took)
            tier.remove()
    tier.close()
    rows = []
    for verb in ("put", "get"):
        found = ratios(times[f"their {verb}"], times[verb])
        speed = spread([count * chunk_bytes / each / 1e9 for each in times[verb]])
        rows.append(
            Result(
                f"disk {verb}, {count} chunks of {chunk_bytes >> 20} MiB, beside LMCache 0.5.6",
                "–",
                f"{found} × as fast, {speed.median:.2f} GB/s",
                None,
                pairs,
                {**found.as_dict(), "gb_per_s": speed.median},
            )
        )
    return rows


class Raw:
    """Direct I/O of one file, from its beginning to its end, in memory of the kind that the tier's
    is: how pages lie in it tells how large the requests are that reach the disk."""

    def __init__(self, native: object, path: Path, piece: int, count: int) -> None:
        self._pool = native.LocalCpu(piece * count, 1000)  # type: ignore[attr-defined]
        self._views = [memoryview(each) for each in self._pool.allocate([piece] * count)]
        for view in self._views:
            view[:] = os.urandom(1 << 20) * (piece >> 20)
        self._piece = piece
        self._path = path
        self._threads = ThreadPoolExecutor(DEPTH)

    def write(self, depth: int) -> None:
        self._path.unlink(missing_ok=True)
        self._at_depth(os.O_CREAT | os.O_WRONLY, depth, os.pwrite)

    def read(self, depth: int) -> None:
        self._at_depth(os.O_RDONLY, depth, lambda fd, view, at: os.preadv(fd, [view], at))

    def _at_depth(
        self, flags: int, depth: int, move: Callable[[int, memoryview, int], int]
    ) -> None:
        fd = os.open(self._path, flags | os.O_DIRECT, 0o600)

        def lane(first: int) -> None:
            for at in range(first, len(self._views), depth):
                assert move(fd, self._views[at], at * self._piece) == self._piece

        list(self._threads.map(lane, range(depth)))
        os.close(fd)

    def close(self) -> None:
        self._threads.shutdown()


def restart(bench: Bench, native: object, folder: Path) -> Result:
    count = 20_000 if bench.quick else 1_000_000
    pool = native.LocalCpu(1 << 20, 1000)  # type: ignore[attr-defined]

    def opened() -> object:
        return native.LocalDisk([folder], 1 << 40, pool, threads=2)  # type: ignore[attr-defined]

    opened().close(10.0)  # type: ignore[attr-defined]
    root = folder / "lmcache_rs.v1"
    bench.say(f"{count:,} files are made")
    for number in range(count):
        chunk_hash = (number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "little") * 4
        path = root / f"{chunk_hash[0] % 64:02x}" / f"{chunk_hash.hex()}.{'00' * 16}"
        fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        os.ftruncate(fd, 4096)
        os.close(fd)
    (root / "account").write_bytes(b"")
    disk = None

    def open_it() -> None:
        nonlocal disk
        disk = opened()

    walked = timed(open_it)
    times = []
    for _ in range(bench.pairs(5)):
        assert disk is not None
        assert disk.stats()["chunks"] == count  # type: ignore[unreachable]
        disk.close(10.0)
        times.append(timed(open_it))
    disk.close(10.0)  # type: ignore[attr-defined]
    found = spread(times)
    return Result(
        f"restart to warm, {count:,} chunks",
        "< 2 s",
        f"{found} s; {walked:.1f} s where the folder is walked, as after a start of the machine",
        found.median < 2,
        len(times),
        {**found.as_dict(), "walk_s": walked},
    )


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
