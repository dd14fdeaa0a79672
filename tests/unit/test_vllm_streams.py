"""Loads that go past host memory, window by window, against a shelf that does what it is told.

Blocks, copies, pools and threads are the engine's own. What random schedules make of it is held to
the scheduler's contract in tests/model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from test_vllm_halves import (
    BLOCK,
    BLOCK_BYTES,
    CHUNK,
    CHUNK_BYTES,
    LAYER_NAMES,
    META,
    Pair,
    new_request,
)

from lmcache_rs import CacheEngineKey, LMCacheEngineConfig, _native
from lmcache_rs.lookup import Rank
from lmcache_rs.storage import StorageBackend
from lmcache_rs.vllm_v1.faults import Faults
from lmcache_rs.vllm_v1.metadata import ONLY_RANK, LoadSpec, ReqMeta
from lmcache_rs.vllm_v1.prefetches import AskedPrefetches
from lmcache_rs.vllm_v1.streams import MOST_SHARE_CHUNKS, Stream, Streams, StreamSpec, share_of
from lmcache_rs.vllm_v1.worker import LMCacheWorkerHalf

NAMESPACE = "model=m@world=1@worker=0@dtype=float32"
NUM_CHUNKS, WINDOW = 12, 2
POOL_CHUNKS = 32
"""Four chunks of them are for streams: two windows."""
HASHES = b"".join(bytes([number]) * 32 for number in range(1, NUM_CHUNKS + 1))
FROM = list(range(1, 2 * NUM_CHUNKS + 1))
TO = [block + 2 * NUM_CHUNKS for block in FROM]


class Shelf(StorageBackend):
    """Counts its reads, stops at one when it is told to, and is shared by all of a test."""

    chunks: ClassVar[dict[str, tuple[bytes, bytes]]] = {}

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.is_open = threading.Event()
        self.is_open.set()
        self.before_read: Callable[[], None] = lambda: None

    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        self.chunks[str(key)] = bytes(data), metadata

    def get(self, key: CacheEngineKey) -> tuple[bytes, bytes] | None:
        self.reads.append(key.chunk_hash[0])
        self.before_read()
        assert self.is_open.wait(60)
        return self.chunks.get(str(key))

    def contains(self, key: CacheEngineKey) -> bool:
        return str(key) in self.chunks

    def remove(self, key: CacheEngineKey) -> bool:
        return self.chunks.pop(str(key), None) is not None


def settings(pool_chunks: int, **more: object) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK,
        max_local_cpu_size=pool_chunks * CHUNK_BYTES / 2**30,
        **{"storage_backends": {"shelf": f"{__name__}:Shelf"}, **more},
    )


class Loads:
    """A worker half over a shelf that has all chunks, which lie in `FROM` and go to `TO`."""

    def __init__(self, pool_chunks: int = POOL_CHUNKS, **more: object) -> None:
        self.faults = Faults()
        config = settings(pool_chunks, **more)
        self.worker = LMCacheWorkerHalf(
            config, META, "start", in_scheduler_process=True, faults=self.faults, recomputes=True
        )
        self.caches = [torch.randn(64, 2, BLOCK, 6) for _ in LAYER_NAMES]
        self.worker.register_kv_caches(self.caches, BLOCK_BYTES, LAYER_NAMES)
        engine, storage = self.worker._engine, self.worker._tiers.storage
        assert engine is not None
        assert storage is not None
        self.engine, self.storage = engine, storage
        for first in range(0, NUM_CHUNKS, 2):
            engine.begin_store_chunks(
                NAMESPACE, HASHES[: (first + 2) * 32], FROM, first=first
            ).wait()
            self.worker._tiers.offer(NAMESPACE, HASHES[first * 32 : (first + 2) * 32])
            assert storage.flush(60)
            self.pool.clear()
        self.shelf.reads.clear()

    @property
    def pool(self) -> _native.LocalCpu:
        assert self.engine.local_cpu is not None
        return self.engine.local_cpu

    @property
    def streams(self) -> Streams:
        streams = self.worker._tiers._streams
        assert streams is not None
        return streams

    @property
    def shelf(self) -> Shelf:
        shelf: Any = self.storage.backends["shelf"]
        assert isinstance(shelf.backend, Shelf)
        return shelf.backend

    def begin(self, name: str = "r", skip: int = 0, **spec: Any) -> Stream:
        stream = self.try_begin(name, skip, **spec)
        assert stream is not None
        return stream

    def try_begin(self, name: str = "r", skip: int = 0, **spec: Any) -> Stream | None:
        return self.streams.begin(request(name, skip, **spec))

    def assert_loaded(self, end: int, skip: int = 0) -> None:
        """The tokens between these are in their blocks, and nothing else was written."""
        first, last = skip // BLOCK, end // BLOCK
        for cache, before in zip(self.caches, self.before, strict=True):
            assert torch.equal(cache[TO[first:last]], before[FROM[first:last]])
            others = TO[:first] + TO[last:]
            assert torch.equal(cache[others], before[others])

    def remember(self) -> None:
        self.before = [cache.clone() for cache in self.caches]

    def assert_idle(self) -> None:
        """Nothing of what was streamed lies anywhere in host memory."""
        # The thread that reads lets go of what it has in hand.
        until(lambda: self.streams._turns.current is None)
        share = self.streams.staging.pool
        until(lambda: share.audit()["free_bytes"] == share.capacity_bytes)
        books = self.worker.memory_stats()
        assert (books["leased_bytes"], books["leases"], books["reserved_bytes"]) == (0, 0, 0)
        assert books["free_bytes"] + books["cached_bytes"] == books["capacity_bytes"]


def request(name: str, skip: int = 0, end: int = NUM_CHUNKS * CHUNK, **spec: Any) -> ReqMeta:
    load = LoadSpec(skip, end, can_load=True, is_async=True, stream=StreamSpec(**spec))
    return ReqMeta(name, 0, HASHES, TO, NAMESPACE, load_spec=load)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "it happens within a minute"
        time.sleep(0.002)


@pytest.fixture
def loads() -> Iterator[Loads]:
    Shelf.chunks.clear()
    loads = Loads()
    loads.remember()
    yield loads
    loads.shelf.is_open.set()
    loads.worker.shutdown()


# --- what comes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [0, BLOCK, 3 * CHUNK, 5 * CHUNK + BLOCK])
def test_all_of_it_comes_through_a_small_share_and_nothing_stays(loads: Loads, skip: int) -> None:
    stream = loads.begin(skip=skip)
    assert stream.wait(60_000)
    loaded = stream.outcome()
    assert (loaded.end, loaded.tokens) == (NUM_CHUNKS * CHUNK, NUM_CHUNKS * CHUNK - skip)
    loads.assert_loaded(NUM_CHUNKS * CHUNK, skip)
    assert loads.shelf.reads == list(range(skip // CHUNK + 1, NUM_CHUNKS + 1)), "once, in order"
    reads = loads.storage.reads.take()
    assert {read.lookup_id for read in reads} == {"r"}
    assert max(read.wanted_chunks for read in reads) == WINDOW
    assert sum(read.chunks for read in reads) == NUM_CHUNKS - skip // CHUNK
    assert loads.pool.audit()["chunks"] == 0
    loads.assert_idle()


def test_a_window_is_read_while_the_one_before_it_is_copied_and_no_more(loads: Loads) -> None:
    loads.engine._transfers.close()
    # A chunk takes a tenth of a second: reading is long over by then.
    loads.engine._transfers = _native.TransferQueue(10 * BLOCK_BYTES * 4)
    seen: list[int] = []

    begun: list[Stream] = []
    is_begun = threading.Event()

    def look() -> None:
        assert is_begun.wait(60)
        with begun[0]._lock:
            seen.append(len(begun[0]._copies))

    loads.shelf.before_read = look
    begun.append(stream := loads.begin())
    is_begun.set()
    assert stream.wait(60_000)
    assert stream.outcome().end == NUM_CHUNKS * CHUNK
    loads.assert_loaded(NUM_CHUNKS * CHUNK)
    assert max(seen) == 1, "one at most is copied"
    assert seen.count(1) > NUM_CHUNKS // 2, "and as a rule one is"


def test_it_works_where_all_of_the_pool_is_somebodys(loads: Loads) -> None:
    held = []
    while (one := loads.pool.allocate([CHUNK_BYTES])) is not None:
        held += one
    assert loads.pool.audit()["free_bytes"] == 0
    stream = loads.begin()
    assert stream.wait(60_000)
    assert stream.outcome().end == NUM_CHUNKS * CHUNK
    loads.assert_loaded(NUM_CHUNKS * CHUNK)


def test_what_host_memory_has_is_copied_and_not_read(loads: Loads) -> None:
    for first, end in ((0, 2), (6, 8)):
        loads.engine.begin_store_chunks(NAMESPACE, HASHES[: end * 32], FROM, first=first).wait()
    stream = loads.begin()
    assert stream.wait(60_000)
    assert stream.outcome().end == NUM_CHUNKS * CHUNK
    loads.assert_loaded(NUM_CHUNKS * CHUNK)
    assert loads.shelf.reads == [3, 4, 5, 6, 9, 10, 11, 12]
    assert loads.pool.audit()["chunks"] == 4
    loads.assert_idle()


def test_what_was_leased_for_it_is_used_though_nobody_finds_it_any_more(loads: Loads) -> None:
    loads.engine.begin_store_chunks(NAMESPACE, HASHES[: 2 * 32], FROM).wait()
    loads.pool.lookup("r", NAMESPACE, HASHES)
    loads.pool.clear()
    stream = loads.begin()
    assert stream.wait(60_000)
    loads.assert_loaded(NUM_CHUNKS * CHUNK)
    assert loads.shelf.reads == list(range(3, NUM_CHUNKS + 1))
    loads.assert_idle()


def test_a_tier_that_is_not_worth_it_is_not_read(loads: Loads) -> None:
    stream = loads.begin(refused_tiers=("shelf",))
    assert stream.wait(60_000)
    assert stream.outcome().end == 0
    assert loads.shelf.reads == []


# --- what does not come ---------------------------------------------------------------------------


def damage(chunk: int) -> None:
    """The shelf gives other bytes than were put."""
    name = list(Shelf.chunks)[chunk]
    data, metadata = Shelf.chunks[name]
    Shelf.chunks[name] = data[:-1] + bytes([data[-1] ^ 1]), metadata


def until_finished(loads: Loads) -> set[str]:
    """The requests whose loads are over, once there are any."""
    finished: set[str] = set()

    def is_over() -> bool:
        finished.update(loads.worker.take_finished_loads()[0])
        return bool(finished)

    until(is_over)
    return finished


def test_a_request_that_has_gone_has_not_lost_its_load(loads: Loads) -> None:
    shut(loads)
    for is_left in (True, False):
        loads.shelf.reads.clear()
        loads.worker._async_loads.begin(request("r"), loads.worker._begin_load)
        until(lambda: not loads.shelf.is_open.is_set())
        if is_left:
            loads.streams.stop("r")
            assert until_finished(loads) == {"r"}
        loads.shelf.before_read = lambda: None
        loads.shelf.is_open.set()
        loads.assert_idle()
        assert loads.worker.counts["failed_loads"] == 0
        # One of the same name that nobody leaves.
        damage(7)
        shut(loads)
    assert until_finished(loads) == {"r"}
    assert loads.worker.counts["failed_loads"] == 1


def test_it_ends_where_a_chunk_is_missing_and_the_rest_is_reported(loads: Loads) -> None:
    damage(7)
    loads.worker._async_loads.begin(request("r"), loads.worker._begin_load)
    assert until_finished(loads) == {"r"}
    assert loads.worker.take_failed_block_ids() == set(TO[7 * CHUNK // BLOCK :])
    loads.assert_loaded(7 * CHUNK)
    assert loads.worker.counts["failed_loads"] == 1
    loads.assert_idle()


def test_nothing_is_copied_behind_a_copy_that_fails(loads: Loads) -> None:
    begin, copies = loads.engine.begin_load_chunks, []

    class Torn:
        """A copy of which nothing is known."""

        def is_done(self) -> bool:
            return True

        def outcome(self) -> Any:
            raise RuntimeError("torn")

    def fails_once(*arguments: Any, **where: Any) -> Any:
        copies.append(where)
        return Torn() if len(copies) == 3 else begin(*arguments, **where)

    loads.engine.begin_load_chunks = fails_once  # type: ignore[method-assign]
    stream = loads.begin()
    assert stream.wait(60_000)
    assert stream.outcome().end == WINDOW * CHUNK
    assert loads.faults.counts == {"finish_load": 1}
    loads.assert_idle()


def shut(loads: Loads, at: int = 5) -> None:
    """The shelf hangs in this read, and its tier waits for it for ever."""
    tier: Any = loads.storage.backends["shelf"]
    tier.lane._deadline_s = 3600.0

    def stop() -> None:
        if loads.shelf.reads[-1] == at:
            loads.shelf.is_open.clear()

    loads.shelf.before_read = stop


def test_a_request_that_has_gone_waits_for_no_read(loads: Loads) -> None:
    shut(loads)
    stream = loads.begin()
    until(lambda: not loads.shelf.is_open.is_set())
    until(lambda: stream.is_done() or stream.end == 4 * CHUNK)
    assert not stream.is_done()
    loads.streams.stop("another")
    assert not stream.is_done()
    loads.streams.stop("r")
    until(stream.is_done)
    assert stream.outcome().end == 4 * CHUNK
    # Its blocks may be anybody's from here on.
    loads.assert_loaded(4 * CHUNK)
    loads.shelf.before_read = lambda: None
    loads.shelf.is_open.set()
    loads.assert_idle()
    loads.assert_loaded(4 * CHUNK)
    behind = loads.begin("behind", skip=4 * CHUNK)
    assert behind.wait(60_000)
    assert behind.outcome().end == NUM_CHUNKS * CHUNK
    loads.assert_idle()


@pytest.mark.parametrize("reason", ["slower than computing", "no window for too long"])
def test_a_tier_that_hangs_is_given_up_on_with_all_who_wait_for_it(
    loads: Loads, reason: str
) -> None:
    shut(loads)
    loads.streams._stall_s = 0.2 if reason == "no window for too long" else 1.0
    within_s = 1e9 if reason == "no window for too long" else 0.2
    first, second = loads.begin("first", within_s=within_s), loads.begin("second")

    def are_done() -> bool:
        loads.streams.poll()
        return first.is_done() and second.is_done()

    until(are_done)
    assert not loads.shelf.is_open.is_set(), "the read has not come back"
    assert first.outcome().end <= 4 * CHUNK
    assert second.outcome().end == 0
    # Whoever comes now would wait for the same read.
    assert loads.try_begin("third") is None
    assert loads.streams.counts["given_up_streams"] == 2
    loads.shelf.before_read = lambda: None
    loads.shelf.is_open.set()
    loads.assert_loaded(first.outcome().end)
    loads.assert_idle()
    again = loads.begin("again")
    assert again.wait(60_000)
    assert again.outcome().end == NUM_CHUNKS * CHUNK


def test_a_request_that_goes_while_its_read_hangs_leaves_nobody_waiting_behind_it(
    loads: Loads,
) -> None:
    shut(loads)
    loads.streams._stall_s = 0.2
    gone, behind = loads.begin("gone"), loads.begin("behind")
    until(lambda: not loads.shelf.is_open.is_set())
    loads.streams.stop("gone")

    def is_done() -> bool:
        loads.streams.poll()
        return behind.is_done()

    until(is_done)
    assert not loads.shelf.is_open.is_set(), "the read has not come back"
    assert gone.is_done()
    assert behind.outcome().end == 0
    assert loads.streams.counts["given_up_streams"] == 1
    loads.shelf.before_read = lambda: None
    loads.shelf.is_open.set()
    loads.assert_idle()


def test_a_slow_copy_is_no_tier_that_hangs(loads: Loads) -> None:
    for first, end in ((0, 8), (8, 10)):
        loads.engine.begin_store_chunks(NAMESPACE, HASHES[: end * 32], FROM, first=first).wait()
    loads.engine._transfers.close()
    # A chunk takes a twentieth of a second, and all that memory holds half a second.
    loads.engine._transfers = _native.TransferQueue(20 * BLOCK_BYTES * 4)
    loads.streams._stall_s = 0.2
    first, second = loads.begin("first"), loads.begin("second")

    def are_done() -> bool:
        loads.streams.poll()
        return first.is_done() and second.is_done()

    until(are_done)
    assert first.outcome().end == second.outcome().end == NUM_CHUNKS * CHUNK
    assert loads.streams.counts["given_up_streams"] == 0


def finished(loads: Loads, name: str) -> None:
    """The worker half says that a load is over."""

    def is_over() -> bool:
        return name in loads.worker.take_finished_loads()[0]

    until(is_over)


def test_what_a_stream_did_not_come_to_stays_in_host_memory(
    loads: Loads, caplog: pytest.LogCaptureFixture
) -> None:
    loads.engine.begin_store_chunks(NAMESPACE, HASHES[: 6 * 32], FROM).wait()
    shut(loads, at=7)
    held = partial(loads.pool.longest_prefix, NAMESPACE, HASHES)
    for name in ("a", "b"):
        loads.worker._async_loads.begin(request(name), loads.worker._begin_load)
    until(lambda: not loads.shelf.is_open.is_set())
    loads.streams.stop("b")
    finished(loads, "b")
    assert held() == 6
    # And where none can begin, what memory holds is loaded.
    loads.streams._turns.is_stuck = True
    loads.worker._async_loads.begin(request("c"), loads.worker._begin_load)
    finished(loads, "c")
    assert f"request c ended at token {6 * CHUNK}" in caplog.text
    assert held() == 6
    loads.shelf.before_read = lambda: None
    loads.shelf.is_open.set()
    finished(loads, "a")


def test_a_chunk_that_memory_could_not_give_leaves_it(loads: Loads) -> None:
    loads.engine.begin_store_chunks(NAMESPACE, HASHES[: 2 * 32], FROM).wait()
    begin = loads.engine.begin_load_chunks

    def begin_short(lookup_id: str, *rest: Any, **more: Any) -> Any:
        if "source" in more:
            loads.streams.staging.pool.clear()
        return begin(lookup_id, *rest, **more)

    loads.engine.begin_load_chunks = begin_short  # type: ignore[method-assign]
    stream = loads.begin()
    assert stream.wait(60_000)
    assert stream.is_torn
    assert stream.outcome().end == 2 * CHUNK
    loads.assert_idle()


def test_no_more_is_promised_than_was_asked_for() -> None:
    asked = AskedPrefetches(60.0, {ONLY_RANK})
    assert asked.is_pending("r", NAMESPACE, HASHES)
    asked.done(ONLY_RANK, {"r"}, {"r": NUM_CHUNKS + 7})
    assert asked.streamable("r") == NUM_CHUNKS


def test_one_at_a_time_holds_windows_and_the_others_come_in_turn(loads: Loads) -> None:
    shut(loads, at=2)
    names = ["a", "b", "c"]
    streams = [loads.begin(name) for name in names]
    until(lambda: not loads.shelf.is_open.is_set())
    assert [stream.is_done() for stream in streams] == [False] * 3
    share = loads.streams.staging.pool
    assert share.usage()["held_bytes"] <= WINDOW * CHUNK_BYTES
    loads.shelf.before_read = lambda: None
    loads.shelf.is_open.set()
    for stream in streams:
        assert stream.wait(60_000)
        assert stream.outcome().end == NUM_CHUNKS * CHUNK
    read_for = [read.lookup_id for read in loads.storage.reads.take()]
    assert list(dict.fromkeys(read_for)) == names
    assert read_for == sorted(read_for)


def test_a_close_in_the_middle_lets_nothing_be_written_any_more(loads: Loads) -> None:
    shut(loads)
    stream, behind = loads.begin(), loads.begin("behind")
    until(lambda: not loads.shelf.is_open.is_set())
    until(lambda: stream.is_done() or stream.end == 4 * CHUNK)
    loads.streams.close()
    assert stream.is_done()
    assert behind.is_done()
    loads.shelf.is_open.set()
    loads.worker.shutdown()
    loads.assert_loaded(4 * CHUNK)
    assert loads.try_begin("later") is None


# --- who gets a share -----------------------------------------------------------------------------


def test_a_share_has_two_chunks_at_least_and_leaves_one_to_the_pool() -> None:
    assert [share_of(chunks) for chunks in (0, 1, 2, 3, 4, 16, 24, 64)] == [0, 0, 0, 2, 2, 2, 3, 8]
    assert share_of(10**6) == MOST_SHARE_CHUNKS


@pytest.mark.parametrize("why_not", ["vLLM fails the request", "others read it", "no tier"])
def test_there_is_none_where_nothing_may_be_streamed(why_not: str) -> None:
    tiers = {"storage_backends": {}} if why_not == "no tier" else {}
    half = LMCacheWorkerHalf(
        settings(8, **tiers),
        META,
        f"start {why_not}",
        in_scheduler_process=False,
        faults=Faults(),
        recomputes=why_not != "vLLM fails the request",
        num_readers=why_not == "others read it",
    )
    caches = [torch.randn(64, 2, BLOCK, 6) for _ in LAYER_NAMES]
    half.register_kv_caches(caches, BLOCK_BYTES, LAYER_NAMES)
    assert half._tiers._streams is None
    assert half.capacity()[0] == 8 * CHUNK_BYTES
    half.shutdown()


@pytest.mark.parametrize("use_layerwise", [False, True], ids=["bulk", "layerwise"])
def test_memory_that_only_stages_keeps_nothing_that_was_stored(
    use_layerwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pair, "use_layerwise", use_layerwise)
    Shelf.chunks.clear()
    pair = Pair(
        {"storage_backends": {"shelf": f"{__name__}:Shelf"}, "local_cpu": False},
        pool_chunks=12,
        recomputes=True,
    )
    request = new_request(7 * CHUNK + 1)
    while (promised := pair.scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
        pair.step({})
    assert promised == 0
    pair.grant(request, 0)
    for num_tokens in (2 * CHUNK, 3 * CHUNK, 2 * CHUNK + 1):
        pair.step({request: num_tokens})
    pair.finish(request)
    pair.step({})
    storage = pair.worker._tiers.storage
    assert storage is not None
    assert storage.flush(60)
    assert len(Shelf.chunks) == 7, "each once"
    assert pair.worker.counters()["stored_chunks"] == 7
    books = pair.worker.memory_stats()
    assert books["free_bytes"] == books["capacity_bytes"] == 12 * CHUNK_BYTES
    pair.close()


@pytest.mark.parametrize("use_layerwise", [False, True], ids=["bulk", "layerwise"])
def test_a_prompt_that_outgrows_host_memory_is_stored_below_it(
    use_layerwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pair, "use_layerwise", use_layerwise)
    Shelf.chunks.clear()
    tiers = {"storage_backends": {"shelf": f"{__name__}:Shelf"}, "lookup_timeout_ms": 60_000}
    pair = Pair(tiers, pool_chunks=8, recomputes=True)
    storage = pair.worker._tiers.storage
    assert storage is not None
    request = new_request(12 * CHUNK + 1)
    assert answer(pair, request) == (0, False)
    pair.grant(request, 0)
    for _ in range(12):
        pair.step({request: CHUNK})
        # What is saved is offered with the next step; a quarter of the pool may wait to be put.
        pair.step({})
        assert storage.flush(60)
    pair.finish(request)
    pair.step({})
    assert len(Shelf.chunks) == 12
    again = new_request(12 * CHUNK + 1)
    assert answer(pair, again) == (12 * CHUNK, True)
    pair.finish(again)
    pair.step({})
    pair.assert_idle()
    pair.close()


@pytest.mark.parametrize("recomputes", [False, True])
def test_memory_that_only_stages_keeps_nothing_that_was_loaded(recomputes: bool) -> None:
    pair = filled(recomputes=recomputes, pool_chunks=24, settings={"local_cpu": False})
    for local in (0, 2 * CHUNK):
        request = new_request(6 * CHUNK + 1)
        num_new, is_async = answer(pair, request, local)
        # What cannot fail is brought before it is promised; what may is streamed.
        assert (num_new, is_async) == (6 * CHUNK - local, recomputes)
        pair.grant(request, num_new or 0)
        pair.step({})
        if is_async:
            until(lambda: bool(pair.worker.take_finished_loads()[0]))
        request.num_computed_tokens = 6 * CHUNK
        pair.step({request: 1})
        assert pair.failed == set()
        pair.finish(request)
        pair.step({})
    assert pair.worker.counters()["loaded_chunks"] == 6 + 4
    books = pair.worker.memory_stats
    until(lambda: books()["free_bytes"] == books()["capacity_bytes"] == 24 * CHUNK_BYTES)
    pair.close()


# --- what is promised -----------------------------------------------------------------------------


def asked(streamable: dict[Rank, int]) -> AskedPrefetches:
    ranks = {Rank(0, 0, 0), Rank(0, 0, 1)}
    prefetches = AskedPrefetches(60.0, ranks)
    assert prefetches.is_pending("r", "n", HASHES, first=3)
    for rank, chunks in streamable.items():
        prefetches.done(rank, ["r"], {"r": chunks})
    return prefetches


def test_all_ranks_must_have_what_is_streamed() -> None:
    one, two = Rank(0, 0, 0), Rank(0, 0, 1)
    assert asked({one: 5}).streamable("r") == 0, "the other has not answered"
    assert asked({one: 5, two: 4}).streamable("r") == 3 + 4
    assert asked({one: 5, two: 0}).streamable("r") == 0
    silent = asked({one: 5})
    silent.done(two, ["r"])
    assert silent.streamable("r") == 0


def test_what_was_not_waited_for_is_not_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetches = AskedPrefetches(0.0, {ONLY_RANK})
    prefetches.is_pending("r", "n", HASHES)
    until(lambda: not prefetches.is_pending("r", "n", HASHES))
    prefetches.done(ONLY_RANK, ["r"], {"r": 5})
    assert prefetches.streamable("r") == 0


def test_chunks_that_the_engine_has_lost_are_asked_for_and_no_others() -> None:
    prefetches = asked({Rank(0, 0, 0): 5, Rank(0, 0, 1): 5})
    assert not prefetches.is_pending("r", "n", HASHES, first=3)
    assert not prefetches.is_pending("r", "n", HASHES, first=8), "it has more now"
    orders = prefetches.take_orders()
    assert orders.begun["r"].first == 3
    assert prefetches.is_pending("r", "n", HASHES, first=1)
    orders = prefetches.take_orders()
    assert orders.ended == ["r"]
    assert orders.begun["r"].first == 1
    assert prefetches.streamable("r") == 0


def filled(settings: dict[str, object] | None = None, **more: Any) -> Pair:
    """Over a shelf that has six chunks of a prompt, and a pool that has room for one."""
    Shelf.chunks.clear()
    tiers: dict[str, object] = {
        "storage_backends": {"shelf": f"{__name__}:Shelf"},
        "lookup_timeout_ms": 60_000,
    }
    large = Pair(tiers)
    first = new_request(6 * CHUNK + 1)
    while large.scheduler.get_num_new_matched_tokens(first, 0)[0] is None:
        large.step({})
    large.grant(first, 0)
    large.step({first: 6 * CHUNK + 1})
    large.finish(first)
    large.step({})
    assert large.worker._tiers.storage is not None
    assert large.worker._tiers.storage.flush(60)
    large.close()
    assert len(Shelf.chunks) == 6
    return Pair(tiers | (settings or {}), **{"pool_chunks": 4, **more})


def answer(pair: Pair, request: Any, local: int = 0) -> tuple[int | None, bool]:
    found = pair.scheduler.get_num_new_matched_tokens(request, local)
    while found[0] is None:
        pair.step({})
        found = pair.scheduler.get_num_new_matched_tokens(request, local)
    return found


def test_a_promise_is_all_that_the_tiers_hold() -> None:
    pair = filled(recomputes=True)
    request = new_request(6 * CHUNK + 1)
    assert answer(pair, request) == (6 * CHUNK, True)
    # Asked again before it has blocks, it is the same.
    assert answer(pair, request) == (6 * CHUNK, True)
    pair.grant(request, 6 * CHUNK)
    (req,) = pair.describe({}).requests
    assert req.load_spec is not None
    assert req.load_spec.stream == StreamSpec()
    assert pair.scheduler.counts["streamed_loads"] == 1
    pair.finish(request)
    orders = pair.describe({}).prefetches
    assert orders is not None
    assert orders.stopped == [request.request_id], "it may be streaming still"
    pair.close()


def test_a_promise_is_what_fits_where_vllm_would_fail_the_request() -> None:
    pair = filled(recomputes=False)
    request = new_request(6 * CHUNK + 1)
    assert answer(pair, request) == (2 * CHUNK, False)
    pair.finish(request)
    pair.close()


def test_chunks_that_the_engine_has_are_not_brought() -> None:
    pair = filled(recomputes=True, pool_chunks=64)
    request = new_request(6 * CHUNK + 1)
    assert answer(pair, request, local=4 * CHUNK) == (2 * CHUNK, False)
    shelf: Any = pair.worker._tiers.storage.backends["shelf"]
    assert len(shelf.backend.reads) == 2
    # Nor is the lookup's lease of anything else.
    assert pair.pool.audit()["chunks"] == 2
    pair.grant(request, 2 * CHUNK)
    request.num_computed_tokens = 6 * CHUNK
    pair.step({request: 1})
    assert pair.worker.counters()["loaded_chunks"] == 2
    pair.finish(request)
    pair.step({})
    pair.assert_idle()
    pair.close()
