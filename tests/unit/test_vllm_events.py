"""KV events of several ranks put together, tier by tier, as a consumer sees them."""

from __future__ import annotations

import pickle
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from lmcache_rs import _native
from lmcache_rs.config import LMCacheEngineConfig
from lmcache_rs.key import CacheEngineKey
from lmcache_rs.storage import StorageBackend, StorageManager
from lmcache_rs.vllm_v1.connector import LMCacheConnectorV1Dynamic
from lmcache_rs.vllm_v1.events import EventReports, KVEventStream, LMCacheKVEvents, RankReport
from lmcache_rs.vllm_v1.faults import Faults
from lmcache_rs.vllm_v1.metadata import ONLY_RANK, LMCacheWorkerMetadata

CHUNK, BLOCK, HASH = 8, 4, 2
LINKS, STRIDE = CHUNK // HASH, BLOCK // HASH
NAMESPACES = ("model=m@tag.a=i:1", "model=m@tag.a=i:2")


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def new_stream(num_ranks: int = 1, num_blocks: int = 8) -> KVEventStream:
    return KVEventStream(
        num_ranks=num_ranks,
        chunk_size=CHUNK,
        block_tokens=BLOCK,
        hash_tokens=HASH,
        num_blocks=num_blocks,
    )


def prompt(text: str, **more: Any) -> Request:
    """A request of one-letter tokens, whose hashes are the text so far."""
    links = [text[:end].encode() for end in range(HASH, len(text) + 1, HASH)]
    fields = {"lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None}
    tokens = [ord(letter) for letter in text]
    made = SimpleNamespace(all_token_ids=tokens, block_hashes=links, session_id=None)
    return cast(Request, SimpleNamespace(**(vars(made) | fields | more)))


def chunk_hashes(text: str) -> list[bytes]:
    """Our names of its chunks."""
    ends = range(CHUNK, len(text) + 1, CHUNK)
    return [text[:end].encode().ljust(32, b".")[-32:] for end in ends]


def blocks_of(text: str, index: int) -> list[bytes]:
    """vLLM's names of a chunk's blocks."""
    start = index * CHUNK
    return [text[:end].encode() for end in range(start + BLOCK, start + CHUNK + 1, BLOCK)]


class Consumer:
    """Counts nothing and knows no rank: what comes was not there, what goes was."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, str | None], set[bytes]] = {}

    def take_in(self, events: list[Any]) -> None:
        for event in events:
            held = self.blocks.setdefault((event.medium, event.ownership), set())
            for block in event.block_hashes:
                assert (block in held) == isinstance(event, BlockRemoved), event
                (held.add if isinstance(event, BlockStored) else held.remove)(block)

    def of(self, medium: str = "CPU", ownership: str | None = None) -> set[bytes]:
        return self.blocks.get((medium, ownership), set())


class Rank:
    """One worker's store."""

    def __init__(self, rank: int, capacity: int) -> None:
        self.pool = _native.LocalCpu(6 * 4096, 60_000)
        self.reports = EventReports(rank, _native.EventSink(self.pool, capacity))

    def store(self, namespace: str, chunk_hash: bytes) -> None:
        given = self.pool.allocate([64])
        if given is not None:
            self.pool.put(namespace, chunk_hash, given[0], CHUNK)


@pytest.mark.parametrize("is_anew", [False, True])
def test_ranks_that_call_their_parts_by_their_own_names_hold_one_chunk(is_anew: bool) -> None:
    stream = KVEventStream(
        num_ranks=2,
        chunk_size=CHUNK,
        block_tokens=BLOCK,
        hash_tokens=HASH,
        num_blocks=8,
        common_name=lambda name: name.replace("worker=1", "worker=0"),
    )
    (chunk_hash,) = chunk_hashes("abcdefgh")
    stream.note(prompt("abcdefgh"), "worker=0", chunk_hash)
    for rank in (0, 1):
        assert stream.take() == []
        told = (True, "local_cpu", f"worker={rank}", chunk_hash, 64, CHUNK)
        stream.take_in([RankReport(rank, is_anew, [told])])
    (stored,) = stream.take()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == blocks_of("abcdefgh", 0)


TEXTS = ("abcdefghijklmnopqrstuvwx", "abcdefghijklMNOPQRSTUVWX", "abcdEFGHijkl", "zyxwvuts")


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("capacity", [3, 1000])
def test_a_replay_has_what_every_rank_has_whenever_ranks_report(
    num_ranks: int, capacity: int
) -> None:
    draw = random.Random(capacity + num_ranks)
    ranks = [Rank(rank, capacity) for rank in range(num_ranks)]
    stream, consumer = new_stream(num_ranks), Consumer()
    names = {
        (namespace, chunk_hash): blocks_of(text, index)
        for namespace in NAMESPACES
        for text in TEXTS
        for index, chunk_hash in enumerate(chunk_hashes(text))
    }
    stored = 0
    for turn in range(1500):
        text, namespace = draw.choice(TEXTS), draw.choice(NAMESPACES)
        hashes = chunk_hashes(text)
        stream.note(prompt(text), namespace, b"".join(hashes))
        for rank in ranks:
            # Each evicts by itself, and is ahead of or behind the others.
            for chunk_hash in hashes[: draw.randrange(len(hashes) + 1)]:
                rank.store(namespace, chunk_hash)
            if draw.random() < 0.1:
                rank.pool.remove(namespace, draw.choice(hashes))
            if draw.random() < 0.02:
                rank.pool.clear(draw.choice([None, "model=m@tag.a=i:1"]))
        is_quiet = draw.random() < 0.3
        outputs = []
        for rank in ranks:
            told = rank.reports.take() if is_quiet or draw.random() < 0.5 else None
            # As vLLM brings it from another process.
            told = pickle.loads(pickle.dumps(told))
            output = ModelRunnerOutput([], {})
            output.kv_connector_output = KVConnectorOutput(kv_cache_events=told)
            outputs.append(output)
        merged = KVOutputAggregator(num_ranks).aggregate(outputs)
        assert merged is not None
        told = merged.kv_connector_output.kv_cache_events
        assert told is None or isinstance(told, LMCacheKVEvents)
        if told is not None:
            stream.take_in(told.reports)
        consumer.take_in(stream.take())
        if is_quiet:
            common = set.intersection(*(set(rank.pool.chunks()) for rank in ranks))
            assert consumer.of() == {link for name in common for link in names[name]}, turn
            stored += len(common)
    assert stored > 500
    overflows = sum(rank.reports.sink.times_lost for rank in ranks)
    assert (overflows > 50) == (capacity == 3)


def test_a_chunk_is_told_as_vllm_tells_its_own_blocks() -> None:
    stream = new_stream()
    text = "abcdefghijklmnop"
    request = prompt(text, lora_request=LoRARequest("tongue", 7, "/none"), cache_salt="secret")
    hashes = chunk_hashes(text)
    stream.note(request, "ns", b"".join(hashes))
    stream.take_in([RankReport(0, True, [(True, "local_cpu", "ns", hashes[1], 64, CHUNK)])])
    (event,) = stream.take()
    assert event == BlockStored(
        block_hashes=[b"abcdefghijkl", b"abcdefghijklmnop"],
        parent_block_hash=b"abcdefgh",
        token_ids=[ord(letter) for letter in "ijklmnop"],
        block_size=BLOCK,
        lora_id=7,
        medium="CPU",
        lora_name="tongue",
        extra_keys=[("tongue",), ("tongue",)],
        group_idx=0,
        locality="LOCAL",
    )
    stream.take_in([RankReport(0, False, [(False, "local_cpu", "ns", hashes[1], 64, CHUNK)])])
    (event,) = stream.take()
    assert event == BlockRemoved(
        block_hashes=[b"abcdefghijkl", b"abcdefghijklmnop"],
        medium="CPU",
        group_idx=0,
        locality="LOCAL",
    )


def test_the_salt_of_a_first_block_is_not_told() -> None:
    stream = new_stream()
    request = prompt("abcdefgh", lora_request=LoRARequest("x", 1, "/none"), cache_salt="secret")
    stream.note(request, "ns", chunk_hashes("abcdefgh")[0])
    told = (True, "local_cpu", "ns", chunk_hashes("abcdefgh")[0], 64, CHUNK)
    stream.take_in([RankReport(0, True, [told])])
    (event,) = stream.take()
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [("x",), ("x",)]
    assert "secret" not in repr(event)


def test_hashes_are_the_numbers_that_vllm_publishes_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES")
    stream = new_stream()
    stream.note(prompt("abcdefgh"), "ns", chunk_hashes("abcdefgh")[0])
    told = (True, "local_cpu", "ns", chunk_hashes("abcdefgh")[0], 64, CHUNK)
    stream.take_in([RankReport(0, True, [told])])
    (event,) = stream.take()
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [int.from_bytes(b"abcd"), int.from_bytes(b"abcdefgh")]


def test_tiers_are_told_apart_and_a_late_one_has_the_contents_too() -> None:
    stream, consumer = new_stream(), Consumer()
    (chunk_hash,) = chunk_hashes("abcdefgh")
    stream.note(prompt("abcdefgh"), "ns", chunk_hash)

    def tell(is_stored: bool, tier: str) -> list[Any]:
        stream.take_in([RankReport(0, False, [(is_stored, tier, "ns", chunk_hash, 1, CHUNK)])])
        events = stream.take()
        consumer.take_in(events)
        return events

    for tier in ("local_cpu", "local_disk", "redis"):
        (event,) = tell(True, tier)
        assert event.token_ids
    tell(False, "local_cpu")
    blocks = set(blocks_of("abcdefgh", 0))
    assert consumer.of() == set()
    assert consumer.of("STORAGE", "local_disk") == consumer.of("STORAGE", "redis") == blocks
    assert [tell(False, tier)[0].locality for tier in ("local_disk", "redis")] == [
        "LOCAL",
        "REMOTE",
    ]


def test_a_chunk_nobody_described_is_named_by_its_own_hash_and_taken_back_by_it() -> None:
    stream, consumer = new_stream(), Consumer()
    (chunk_hash,) = chunk_hashes("abcdefgh")
    for is_stored, held in ((True, {chunk_hash}), (False, set())):
        stream.take_in(
            [RankReport(0, False, [(is_stored, "local_cpu", "ns", chunk_hash, 1, CHUNK)])]
        )
        consumer.take_in(stream.take())
        assert consumer.of() == held
    # Described by now, it goes by vLLM's names.
    stream.note(prompt("abcdefgh"), "ns", chunk_hash)
    stream.take_in([RankReport(0, False, [(True, "local_cpu", "ns", chunk_hash, 1, CHUNK)])])
    consumer.take_in(stream.take())
    assert consumer.of() == set(blocks_of("abcdefgh", 0))


def test_after_vllm_empties_its_own_cache_all_is_told_again() -> None:
    stream = new_stream()
    pool = SimpleNamespace(kv_event_queue=[])
    stream.bind_kv_cache_manager(cast(Any, SimpleNamespace(block_pool=pool)))
    text = "abcdefghijklmnop"
    hashes = chunk_hashes(text)
    stream.note(prompt(text), "ns", b"".join(hashes))
    told: list[Any] = [(True, "local_cpu", "ns", each, 64, CHUNK) for each in hashes]
    stream.take_in([RankReport(0, True, told)])
    strict, forgetful = Consumer(), Consumer()
    before = stream.take()
    strict.take_in(before)
    stream.watch_for_clears()
    assert stream.take() == []
    pool.kv_event_queue.append(AllBlocksCleared())
    stream.watch_for_clears()
    again = stream.take()
    strict.take_in(again)
    forgetful.take_in([event for event in again if isinstance(event, BlockStored)])
    assert strict.of() == forgetful.of() == set(blocks_of(text, 0) + blocks_of(text, 1))
    assert [event for event in again if isinstance(event, BlockStored)] == before


def test_what_is_stored_nowhere_is_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_rs.vllm_v1.events.MIN_KEPT", 3)
    stream = new_stream(num_blocks=2)
    for letter in "abcdefghijk":
        text = letter * CHUNK
        stream.note(prompt(text), "ns", chunk_hashes(text)[0])
        if letter == "a":
            told = (True, "local_cpu", "ns", chunk_hashes(text)[0], 1, CHUNK)
            stream.take_in([RankReport(0, True, [told])])
    assert len(stream._kept) == 5
    assert len(stream._contents) == 6, "what is stored stays described"


def test_reports_go_with_the_metadata_of_a_step_where_nobody_asks_for_events() -> None:
    rank, stream = Rank(0, 100), new_stream()
    worker, scheduler = (object.__new__(LMCacheConnectorV1Dynamic) for _ in range(2))
    silent = SimpleNamespace(
        take_outcomes=lambda: None, update_connector_output=lambda _: None, rank=ONLY_RANK
    )
    manager: Any = SimpleNamespace(worker=silent, event_reports=rank.reports, faults=Faults())
    worker._manager = manager
    manager = SimpleNamespace(scheduler=silent, event_stream=stream, faults=Faults())
    scheduler._manager = manager
    (chunk_hash,) = chunk_hashes("abcdefgh")
    stream.note(prompt("abcdefgh"), "ns", chunk_hash)

    def step(*, asks: bool) -> tuple[Any, list[Any]]:
        told = worker.get_kv_connector_kv_cache_events() if asks else None
        meta = worker.build_connector_worker_meta()
        output = KVConnectorOutput(kv_cache_events=told, kv_connector_worker_meta=meta)
        scheduler.update_connector_output(output)
        return meta, list(scheduler.take_events())

    rank.store("ns", chunk_hash)
    meta, (stored,) = step(asks=False)
    assert isinstance(meta, LMCacheWorkerMetadata)
    assert stored.block_hashes == blocks_of("abcdefgh", 0)
    assert step(asks=False) == (None, [])
    rank.pool.clear()
    meta, (removed,) = step(asks=True)
    assert meta is None
    assert removed.block_hashes == stored.block_hashes
    metadata = [LMCacheWorkerMetadata(event_reports=[RankReport(r, False, [])]) for r in (0, 1)]
    merged = metadata[0].aggregate(metadata[1])
    reports = [report for each in merged.of_ranks() for report in each.event_reports]
    assert [report.rank for report in reports] == [0, 1]


class Kept(StorageBackend):
    """A tier in a dict, which drops its oldest chunk for a third."""

    def __init__(self) -> None:
        self.chunks: dict[CacheEngineKey, tuple[bytes, bytes]] = {}

    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        self.chunks[key] = bytes(data), metadata
        if len(data) > 64:
            del self.chunks[key]
            self.evicted(key)
        elif len(self.chunks) > 2:
            oldest = next(iter(self.chunks))
            del self.chunks[oldest]
            self.evicted(oldest)

    def get(self, key: CacheEngineKey) -> tuple[bytes, bytes] | None:
        return self.chunks.get(key)

    def contains(self, key: CacheEngineKey) -> bool:
        return key in self.chunks

    def remove(self, key: CacheEngineKey) -> bool:
        return self.chunks.pop(key, None) is not None

    def keys(self) -> list[CacheEngineKey]:
        return list(self.chunks)


def test_a_tier_in_python_tells_the_same_sink() -> None:
    config = LMCacheEngineConfig.from_defaults(max_local_cpu_size=1 / 1024)
    pool = _native.LocalCpu(16 * 4096, 60_000)
    sink = _native.EventSink(pool)
    held: set[bytes] = set()

    def replayed() -> set[bytes]:
        _, events = sink.drain()
        for is_stored, tier, namespace, chunk_hash, nbytes, _ in events:
            if tier == "kept":
                assert (chunk_hash in held) != is_stored
                (held.add if is_stored else held.remove)(chunk_hash)
                assert (namespace, nbytes) == (key(0).namespace, 64)
        return held

    def key(number: int) -> CacheEngineKey:
        return CacheEngineKey("m", 1, 0, bytes([number]) * 32, "float32")

    def put(*numbers: int) -> None:
        given = manager.batched_allocate([64] * len(numbers))
        assert given is not None
        manager.batched_put([key(number) for number in numbers], given)
        assert manager.flush()

    manager = StorageManager(config, local_cpu=pool)
    backend = Kept()
    manager.tell(sink)
    manager.add_backend("kept", backend)
    for number in range(4):
        put(number)
        assert replayed() == {key.chunk_hash for key in backend.chunks}
    put(3)
    assert (
        replayed()
        == {key.chunk_hash for key in backend.chunks}
        == {bytes([number]) * 32 for number in (2, 3)}
    )
    manager.backends["kept"].remove(key(2))
    assert replayed() == {bytes([3]) * 32}
    # Gone by itself, and found out when it is asked for.
    backend.chunks.clear()
    assert not manager.backends["kept"].contains(key(3))
    assert replayed() == set()
    large = manager.batched_allocate([65])
    assert large is not None
    manager.batched_put([key(4)], large)
    assert manager.flush()
    assert replayed() == set(), "it had to go as it came"
    put(5, 6)
    assert replayed() == {bytes([5]) * 32, bytes([6]) * 32}
    manager.clear()
    assert replayed() == set()
    manager.close()
