"""Events by lookup id, and chunks that come from lower tiers without anybody waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from lmcache_rs import CacheEngineKey, LMCacheEngineConfig, StorageManager
from lmcache_rs.key import keys_of
from lmcache_rs.storage import EventManager, EventStatus, EventType, StorageBackend
from lmcache_rs.storage.prefetch import Room
from lmcache_rs.storage.reads import MAX_KEPT, ReadLog, TierRead

PAGE = 4096
LOADING = EventType.LOADING


def key(number: int) -> CacheEngineKey:
    return CacheEngineKey("m", 1, 0, bytes([number]) * 32, "float32")


class Shelf(StorageBackend):
    """Counts its reads, and makes everybody wait while it is shut."""

    def __init__(self) -> None:
        self.chunks: dict[str, tuple[bytes, bytes]] = {}
        self.reads: list[str] = []
        self.is_open = threading.Event()
        self.is_open.set()

    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        self.chunks[str(key)] = bytes(data), metadata

    def get(self, key: CacheEngineKey) -> tuple[bytes, bytes] | None:
        self.reads.append(str(key))
        return self.chunks.get(str(key))

    def contains(self, key: CacheEngineKey) -> bool:
        assert self.is_open.wait(60)
        return str(key) in self.chunks

    def remove(self, key: CacheEngineKey) -> bool:
        return self.chunks.pop(str(key), None) is not None


class Store:
    """A store over a shelf that has chunks 1 to 3, and host memory that has none of them."""

    def __init__(self, deadline_s: float) -> None:
        config = LMCacheEngineConfig.from_defaults(max_local_cpu_size=32 * PAGE / 2**30)
        self.manager = StorageManager(config)
        self.shelf = Shelf()
        self.manager.add_backend("shelf", self.shelf, deadline_s=deadline_s)
        self.keys = [key(number) for number in (1, 2, 3)]
        self.put(self.keys)
        assert self.manager.flush(60)
        self.l1.clear()

    def put(self, keys: list[CacheEngineKey]) -> None:
        objects = self.manager.batched_allocate([PAGE] * len(keys))
        assert objects is not None
        for at, memory_obj in enumerate(objects):
            memoryview(memory_obj)[:] = bytes([at + 1]) * PAGE
        self.manager.batched_put(keys, objects)

    @property
    def l1(self):  # type: ignore[no-untyped-def]
        return self.manager.backends["LocalCPUBackend"]

    def leased(self) -> int:
        return int(self.l1.local_cpu.audit()["leased_bytes"])


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    store = Store(getattr(request, "param", 60.0))
    yield store
    store.shelf.is_open.set()
    store.manager.close()


def test_an_event_is_one_of_its_id_and_is_taken_once() -> None:
    events: EventManager = EventManager()
    assert events.get_event_status(LOADING, "a") is EventStatus.NOT_FOUND
    assert events.pop_event(LOADING, "a") is None
    future: Future[int] = Future()
    events.add_event(LOADING, "a", future)
    assert events.get_event_status(LOADING, "a") is EventStatus.ONGOING
    with pytest.raises(ValueError, match="pop_event"):
        events.add_event(LOADING, "a", Future())
    future.set_result(7)
    assert events.get_event_status(LOADING, "a") is EventStatus.DONE
    assert events.pop_event(LOADING, "a") is future
    assert events.get_event_status(LOADING, "a") is EventStatus.NOT_FOUND
    assert len(events) == 0


def test_keys_of_a_namespace_are_those_that_made_it() -> None:
    keys = [CacheEngineKey("m", 2, 1, bytes([n]) * 32, "f", {"lmcache.tag.a": "b"}) for n in (1, 2)]
    assert keys_of(keys[0].namespace, bytes([1]) * 32 + bytes([2]) * 32) == keys
    with pytest.raises(ValueError, match="no multiple of 32"):
        keys_of(keys[0].namespace, bytes(31))


def test_what_is_missing_is_read_published_and_held_until_it_is_taken(store: Store) -> None:
    store.put([store.keys[1]])
    future = store.manager.async_lookup_and_prefetch("r", [*store.keys, key(4)])
    assert [memory_obj.to_bytes()[:1] for memory_obj in future.result(60)] == [b"\1", b"\1", b"\3"]
    assert store.shelf.reads == [str(store.keys[0]), str(store.keys[2])]
    assert store.l1.batched_contains(store.keys) == 3
    assert store.manager.event_manager.get_event_status(LOADING, "r") is EventStatus.DONE
    with pytest.raises(ValueError, match="already"):
        store.manager.async_lookup_and_prefetch("r", store.keys)
    del future
    assert store.leased() == 3 * PAGE
    store.manager.event_manager.pop_event(LOADING, "r")
    assert store.leased() == 0
    assert store.l1.batched_contains(store.keys) == 3


def test_what_came_before_a_loss_is_published(store: Store) -> None:
    lost = str(store.keys[1])
    data, metadata = store.shelf.chunks[lost]
    store.shelf.chunks[lost] = data[1:] + data[:1][::-1] + b"x", metadata
    future = store.manager.async_lookup_and_prefetch("r", store.keys)
    assert len(future.result(60)) == 1
    assert store.l1.batched_contains(store.keys) == 1


def test_nobody_waits_and_what_is_called_off_before_its_turn_is_not_done(store: Store) -> None:
    store.shelf.is_open.clear()
    first = store.manager.async_lookup_and_prefetch("first", store.keys)
    second = store.manager.async_lookup_and_prefetch("second", store.keys)
    assert not first.done()
    assert second.cancel()
    third = store.manager.async_lookup_and_prefetch("third", store.keys)
    store.shelf.is_open.set()
    assert len(third.result(60)) == 3
    assert len(first.result(60)) == 3
    assert len(store.shelf.reads) == 3


@pytest.mark.parametrize("store", [0.05], indirect=True)
def test_a_tier_that_does_not_answer_ends_the_prefetch_by_its_deadline(store: Store) -> None:
    store.put([store.keys[0]])
    store.shelf.is_open.clear()
    future = store.manager.async_lookup_and_prefetch("r", store.keys)
    assert len(future.result(60)) == 1


def test_a_closed_store_brings_nothing(store: Store) -> None:
    store.manager.close()
    assert store.manager.async_lookup_and_prefetch("r", store.keys).result(60) == []


def test_write_through_offers_what_host_memory_has(store: Store) -> None:
    others = [key(5), key(6)]
    objects = store.manager.batched_allocate([PAGE, PAGE])
    assert objects is not None
    for other, memory_obj in zip(others, objects, strict=True):
        store.l1.submit_put_task(other, memory_obj)
    assert str(others[0]) not in store.shelf.chunks
    store.manager.write_through([*others, key(7)])
    assert store.manager.flush(60)
    assert {str(other) for other in others} <= store.shelf.chunks.keys()
    assert str(key(7)) not in store.shelf.chunks


def test_a_tier_with_fewer_chunks_than_are_worth_it_is_not_read() -> None:
    store = Store(60.0)
    for least, expected in ((4, 0), (3, 3)):
        store.l1.clear()
        store.shelf.reads.clear()
        future = store.manager.async_lookup_and_prefetch("r", store.keys, {"shelf": least})
        assert len(future.result(60)) == expected
        assert len(store.shelf.reads) == expected
        store.manager.event_manager.pop_event(LOADING, "r")
    store.manager.close()


def test_a_tier_that_is_not_worth_it_is_passed_over_for_the_next() -> None:
    store, far = Store(60.0), Shelf()
    far.chunks = dict(store.shelf.chunks)
    store.manager.add_backend("far", far)
    future = store.manager.async_lookup_and_prefetch("r", store.keys, {"shelf": 4})
    assert len(future.result(60)) == 3
    assert store.shelf.reads == []
    assert len(far.reads) == 3
    assert [read.tier for read in store.manager.reads.take()] == ["far"]
    store.manager.close()


def test_what_host_memory_has_does_not_count_for_the_tier_below_it() -> None:
    store = Store(60.0)
    first = store.manager.batched_get(store.keys[:1])
    assert first[0] is not None
    store.shelf.reads.clear()
    future = store.manager.async_lookup_and_prefetch("r", store.keys, {"shelf": 3})
    assert len(future.result(60)) == 1
    assert store.shelf.reads == []
    store.manager.close()


@pytest.mark.parametrize(
    ("chunk_pages", "is_closed", "expected"), [(1, False, 3), (6, False, 0), (1, True, 0)]
)
def test_of_more_than_there_is_room_for_none_is_read_and_all_are_counted(
    store: Store, chunk_pages: int, is_closed: bool, expected: int
) -> None:
    # Half of 32 pages is what lookups lease.
    room = Room(store.l1.local_cpu, chunk_pages * PAGE, is_closed=is_closed)
    brought = store.manager.async_lookup_and_prefetch("r", store.keys, room=room).result(60)
    assert (len(brought), brought.num_stored) == (expected, 3)
    assert len(store.shelf.reads) == expected
    del brought
    store.manager.event_manager.pop_event(LOADING, "r")


def test_what_no_memory_was_left_for_is_stored_all_the_same(store: Store) -> None:
    held = store.manager.batched_allocate([PAGE] * 31)
    assert held is not None
    room = Room(store.l1.local_cpu, PAGE)
    brought = store.manager.async_lookup_and_prefetch("r", store.keys, room=room).result(60)
    assert (len(brought), brought.num_stored) == (1, 3)


def test_reads_are_kept_with_their_tier_size_and_time_until_they_are_taken() -> None:
    store = Store(60.0)
    store.manager.reads.take()
    store.shelf.chunks.popitem()
    assert len(store.manager.async_lookup_and_prefetch("r", store.keys).result(60)) == 2
    (read,) = store.manager.reads.take()
    assert (read.lookup_id, read.tier, read.wanted_chunks, read.chunks) == ("r", "shelf", 2, 2)
    assert read.num_bytes > 0
    assert read.seconds > 0
    assert store.manager.reads.take() == []
    store.manager.close()


def test_of_too_many_reads_the_last_are_kept() -> None:
    log = ReadLog()
    for number in range(MAX_KEPT + 5):
        log.note(TierRead(str(number), "shelf", 1, 1, 1, 1.0))
    assert [read.lookup_id for read in log.take()] == [
        str(number) for number in range(5, MAX_KEPT + 5)
    ]
