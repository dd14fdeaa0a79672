"""Whatever a backend in Python does: a miss, a counter and a log line, and never more."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_manager import L1, Spy, assert_all_free, forget_in_l1, got, manager, put
from tiers import DEADLINE_S, PAGE, DictBackend, chain, key

from lmcache_rs import CacheEngineKey, StorageManager
from lmcache_rs._native import LocalCpu
from lmcache_rs.layouts import MemoryFormat, StoredForm
from lmcache_rs.storage.record import ChunkRecord
from lmcache_rs.storage.tier import Arrival, BackendTier


def faults(store: StorageManager) -> dict[str, int]:
    stats = store.stats()["t0"]
    return {
        name.removeprefix("faults_"): count
        for name, count in stats.items()
        if name.startswith("faults_")
    }


class Raising(DictBackend):
    """Raises in one verb."""

    def __init__(self, verb: str, error: BaseException) -> None:
        super().__init__()
        self.verb, self.error = verb, error
        self.armed = False

    def __getattribute__(self, name: str) -> Any:
        own = ("verb", "error", "armed")
        if name not in own and getattr(self, "armed", False) and name == self.verb:

            def fail(*_: object, **__: object) -> Any:
                raise self.error

            return fail
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    "error", [OSError(5, "disk"), ValueError("x"), KeyboardInterrupt(), SystemExit(3)], ids=repr
)
@pytest.mark.parametrize(
    "verb", ["put", "get", "contains", "remove", "keys", "touch", "batched_contains", "batched_get"]
)
def test_an_exception_in_a_verb_is_a_miss_there_and_nowhere_else(
    verb: str, error: BaseException
) -> None:
    backend = Raising(verb, error)
    store = manager(backend)
    put(store, chain(1, 2), b"1", b"2")
    backend.armed = True
    put(store, chain(3), b"3")
    put(store, chain(3), b"3")
    put(store, chain(1), b"1")
    forget_in_l1(store, *chain(1, 2, 3))
    broken = {"contains": {"contains", "batched_contains"}}.get(verb, {verb})
    assert store.backends["t0"].contains(key(1)) == ("contains" not in broken)
    assert store.batched_contains(chain(1, 2)) == (0 if "batched_contains" in broken else 2)
    reads = not {"get", "batched_get"} & broken
    assert got(store, *chain(1, 2)) == ([b"1", b"2"] if reads else [None, None])
    assert store.backends["t0"].remove(key(1)) == ("remove" not in broken)
    store.clear()
    assert faults(store)["error"] >= 1
    backend.armed = False
    put(store, chain(9), b"9")
    forget_in_l1(store, key(9))
    assert got(store, key(9)) == [b"9"], "and it goes on working"
    assert_all_free(store)


def test_an_exception_in_close_is_counted_and_ends_the_tier() -> None:
    class Closing(DictBackend):
        def close(self) -> None:
            raise OSError("x")

    store = manager(Closing())
    put(store, chain(1), b"1")
    assert store.close(DEADLINE_S)
    assert faults(store) == {"error": 1}


class Lying(DictBackend):
    """Gives something else than it was given."""

    def __init__(self, lie: Callable[[Any, Any], object]) -> None:
        super().__init__()
        self.lie = lie

    def get(self, key: CacheEngineKey) -> Any:
        data, metadata = self.chunks[key]
        return self.lie(data, metadata)


def _changed(**changes: Any) -> Callable[[Any, Any], object]:
    def lie(data: bytes, metadata: bytes) -> object:
        record = ChunkRecord.from_bytes(metadata)
        return data, replace(record, **changes).to_bytes()

    return lie


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


OTHER = StoredForm(MemoryFormat.KV_MLA_FMT, 1, 8, "float32")
LIES: dict[str, tuple[str, Callable[[Any, Any], object]]] = {
    "a short answer": ("size", lambda data, meta: (data[:-1], meta)),
    "a long answer": ("size", lambda data, meta: (data + b"x", meta)),
    "no bytes": ("size", lambda data, meta: (b"", meta)),
    "one bit": ("checksum", lambda data, meta: (_flipped(data, 100), meta)),
    "another size in the metadata": ("size", _changed(nbytes=PAGE - 1)),
    "another chunk": ("foreign", _changed(key=str(key(2)))),
    "a form that the bytes do not have": ("metadata", _changed(form=OTHER, num_tokens=5)),
    "a type that there is not": (
        "metadata",
        _changed(form=replace(OTHER, dtype="load"), num_tokens=PAGE // 32),
    ),
    "positions of other tokens": ("size", _changed(positions=bytes(16))),
    "a number for a size": ("size", _changed(nbytes="4096")),
    "more than there is": (
        "no_memory",
        lambda data, meta: (
            bytes(1 << 20),
            replace(ChunkRecord.from_bytes(meta), nbytes=1 << 20).to_bytes(),
        ),
    ),
    "no metadata": ("metadata", lambda data, meta: (data, b"")),
    "short metadata": ("metadata", lambda data, meta: (data, meta[:-1])),
    "metadata of another version": ("metadata", lambda data, meta: (data, b"LMRSC002" + meta[8:])),
    "a bit of the metadata": ("metadata", lambda data, meta: (data, _flipped(meta, 30))),
    "bytes alone": ("type", lambda data, meta: data),
    "three things": ("type", lambda data, meta: (data, meta, None)),
    "a list": ("type", lambda data, meta: [data, meta]),
    "text": ("type", lambda data, meta: (data.decode("latin1"), meta)),
    "None in it": ("type", lambda data, meta: (None, meta)),
    "metadata as text": ("type", lambda data, meta: (data, "x")),
    "gaps between the bytes": ("type", lambda data, meta: (memoryview(data + data)[::2], meta)),
    "an exception for an answer": ("type", lambda data, meta: ValueError("x")),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_a_miss_and_the_chunk_is_removed(lie: str) -> None:
    reason, told = LIES[lie]
    backend = Lying(told)
    store = manager(backend)
    put(store, chain(1), bytes(range(256)) * (PAGE // 256))
    forget_in_l1(store, key(1))
    assert got(store, key(1)) == [None]
    assert faults(store) == {reason: 1}
    assert (key(1) in backend.chunks) == (reason == "no_memory")
    assert_all_free(store)


@pytest.mark.parametrize("told", [True, 99, -1, "2", 2.0, None, np.int64(2)], ids=repr)
def test_a_count_that_is_none_is_a_miss(told: object) -> None:
    class Miscounting(DictBackend):
        def batched_contains(self, keys: Any) -> Any:
            return told

    store = manager(Miscounting())
    put(store, chain(1, 2), b"1", b"2")
    forget_in_l1(store, *chain(1, 2))
    assert store.batched_contains(chain(1, 2)) == 0
    assert sum(faults(store).values()) == 1


@pytest.mark.parametrize("told", [1, "yes", None, np.True_], ids=repr)
def test_a_yes_that_is_none_is_a_miss(told: object) -> None:
    class Vague(DictBackend):
        def contains(self, key: CacheEngineKey) -> Any:
            return told

        def remove(self, key: CacheEngineKey) -> Any:
            super().remove(key)
            return told

    store = manager(Vague())
    put(store, chain(1), b"1")
    tier = store.backends["t0"]
    before = faults(store)["type"]
    assert not tier.contains(key(1))
    assert not tier.remove(key(1))
    assert faults(store) == {"type": before + 2}


@pytest.mark.parametrize("told", [None, 3, [], ["x", "y"], "xy", [None, None, None]], ids=repr)
def test_answers_that_are_none_are_misses(told: object) -> None:
    class Babbling(DictBackend):
        def batched_get(self, keys: Any) -> Any:
            return told

    store = manager(Babbling())
    put(store, chain(1, 2), b"1", b"2")
    forget_in_l1(store, *chain(1, 2))
    assert got(store, *chain(1, 2)) == [None, None]
    assert set(faults(store)) <= {"type"}
    assert_all_free(store)


def test_a_chunk_of_another_form_than_its_namespace_holds_is_a_miss() -> None:
    backend = Lying(lambda data, meta: (data, meta))
    store = manager(backend)
    objects = store.batched_allocate((2, 4, 8), torch.float32, MemoryFormat.KV_MLA_FMT, 2)
    assert objects is not None
    store.batched_put(chain(1, 2), objects)
    assert store.flush(DEADLINE_S)
    forget_in_l1(store, *chain(1, 2))
    other = StoredForm(MemoryFormat.KV_MLA_FMT, 1, 8, "float32")
    backend.lie = _changed(form=other, num_tokens=8)
    assert got(store, *chain(1, 2)) == [None, None]
    assert faults(store) == {"form": 1}
    backend.lie = lambda data, meta: (data, meta)
    assert None not in got(store, *chain(1, 2))


def test_a_hang_is_a_miss_at_the_deadline_and_then_at_once() -> None:
    backend = Spy()
    store = manager(backend, deadline_s=0.2)
    put(store, chain(1), b"1")
    forget_in_l1(store, key(1))
    backend.entered.clear()
    backend.go_on.clear()
    assert got(store, key(1)) == [None]
    assert faults(store) == {"deadline": 1}
    time.sleep(0.25)
    num_asked = len(backend.asked)
    for _ in range(50):
        assert store.contains(key(1)) is None
        assert got(store, key(1)) == [None]
    assert faults(store) == {"deadline": 1, "stalled": 100}
    assert len(backend.asked) == num_asked, "and nobody stands in line"
    # L1 goes on meanwhile.
    objects = store.batched_allocate([1])
    assert objects is not None
    store.batched_put(chain(2), objects)
    assert store.contains(key(2)) == L1
    backend.go_on.set()
    assert store.flush(DEADLINE_S)
    assert got(store, key(1)) == [b"1"], "and the backend when it comes back"
    del objects
    assert_all_free(store)


def test_what_came_before_the_deadline_is_used() -> None:
    class Slowing(DictBackend):
        def __init__(self) -> None:
            super().__init__()
            self.go_on = threading.Event()

        def get(self, key: CacheEngineKey) -> tuple[bytes, bytes] | None:
            if self.chunks[key][0] == b"3":
                assert self.go_on.wait(DEADLINE_S)
            return super().get(key)

    backend = Slowing()
    store = manager(backend, deadline_s=0.3)
    put(store, chain(1, 2, 3), b"1", b"2", b"3")
    forget_in_l1(store, *chain(1, 2, 3))
    tier = store.backends["t0"]
    found = tier.batched_get_blocking(chain(1, 2, 3))
    assert [each and each.to_bytes() for each in found] == [b"1", b"2", None]
    backend.go_on.set()
    assert tier.flush(DEADLINE_S)
    assert [each and each.to_bytes() for each in found] == [b"1", b"2", None]
    del found
    assert_all_free(store)


def test_a_future_of_a_backend_that_hangs_answers_by_its_deadline() -> None:
    backend = Spy()
    store = manager(backend, deadline_s=0.2)
    put(store, chain(1), b"1")
    backend.go_on.clear()
    tier = store.backends["t0"]
    objects = tier.batched_get_non_blocking(chain(1))
    with pytest.raises(TimeoutError):
        objects.result(0.01)
    assert objects.result(DEADLINE_S) == [None]
    assert objects.done()
    backend.go_on.set()
    assert store.close(DEADLINE_S)


def test_a_close_in_mid_flight_waits_for_its_deadline_and_drops_the_rest() -> None:
    backend = Spy()
    store = manager(backend)
    backend.go_on.clear()
    objects = store.batched_allocate([PAGE] * 3)
    assert objects is not None
    store.batched_put(chain(1, 2, 3), objects)
    assert backend.entered.wait(DEADLINE_S)
    del objects
    assert not store.close(0.2)
    assert not store.close(0.01)
    assert faults(store) == {"unfinished": 1}
    assert store.stats()["t0"]["queued_chunks"] == 1, "the one that it does not come back from"
    assert got(store, key(1)) == [None]
    backend.go_on.set()
    assert store.close(DEADLINE_S)
    assert len(backend.chunks) == 1
    gc.collect()
    books = store.stats()[L1]
    assert books["free_bytes"] == books["capacity_bytes"]


def test_who_waits_for_an_answer_is_told_of_a_close() -> None:
    backend = Spy()
    store = manager(backend)
    put(store, chain(1), b"1")
    backend.entered.clear()
    backend.go_on.clear()
    tier = store.backends["t0"]
    in_hand = tier.batched_get_non_blocking(chain(1))
    assert backend.entered.wait(DEADLINE_S)
    in_line = tier.batched_async_contains(chain(1))
    assert not store.close(0.1)
    assert in_hand.done()
    assert in_line.done()
    assert (in_hand.result(), in_line.result()) == ([None], 0)
    backend.go_on.set()
    assert store.close(DEADLINE_S)


KEEPERS: dict[str, Callable[[memoryview], Any]] = {
    "itself": lambda data: data,
    "a part": lambda data: data[:PAGE],
    "numpy": lambda data: np.frombuffer(data, np.uint8),
    # Lets go of the buffer at once, and keeps the view.
    "torch": lambda data: torch.frombuffer(data, dtype=torch.uint8),
}


@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_view_that_a_backend_keeps_is_counted_and_stays_right(keeper: str) -> None:
    class Keeping(DictBackend):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Any] = []

        def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
            assert data.readonly
            self.kept.append(KEEPERS[keeper](data))
            super().put(key, data, metadata)

    backend = Keeping()
    store = manager(backend, pages=4)
    put(store, chain(1), b"1" * PAGE)
    assert faults(store) == {"kept": 1}
    store.clear()
    for number in range(2, 12):
        put(store, chain(number), b"x" * PAGE)
        assert bytes(backend.kept[0].tolist()) == b"1" * PAGE, "its bytes are not given away"
        del backend.kept[1:]
    backend.kept.clear()
    assert_all_free(store)


def test_a_backend_that_asks_its_own_store_gets_a_miss_and_no_knot() -> None:
    class Asking(DictBackend):
        def get(self, key: CacheEngineKey) -> tuple[bytes, bytes] | None:
            assert store.batched_get([key]) == [None]
            assert store.contains(key) is None
            return super().get(key)

    store = manager(Asking())
    put(store, chain(1), b"1")
    forget_in_l1(store, key(1))
    assert got(store, key(1)) == [b"1"]
    assert faults(store) == {"reentry": 2}


def test_a_fault_is_logged_with_kind_tier_key_and_errno_once_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = Raising("put", OSError(28, "no space"))
    store = manager(backend)
    backend.armed = True
    with caplog.at_level(logging.WARNING, "lmcache_rs"):
        for number in range(30):
            put(store, chain(number), b"x")
    assert faults(store) == {"error": 30}
    (record,) = caplog.records
    for part in ("'error'", "tier t0", "put of model=m", "no space", "errno 28"):
        assert part in record.getMessage()


class Mute(Exception):
    """Has no text."""

    def __repr__(self) -> str:
        raise ValueError("no text")

    __str__ = __repr__


def _refuse(_: logging.LogRecord) -> bool:
    raise ValueError("a filter that raises")


@pytest.mark.parametrize("untold", ["exception", "filter"])
@pytest.mark.parametrize("verb", ["put", "get"])
def test_what_cannot_be_logged_is_counted_and_the_tier_goes_on(verb: str, untold: str) -> None:
    backend = Raising(verb, Mute() if untold == "exception" else OSError(5, "disk"))
    store = manager(backend)
    put(store, chain(1), b"1")
    forget_in_l1(store, key(1))
    log = logging.getLogger("lmcache_rs")
    if untold == "filter":
        log.addFilter(_refuse)
    try:
        backend.armed = True
        put(store, chain(2), b"2")
        assert got(store, key(1)) == [b"1" if verb == "put" else None]
    finally:
        log.removeFilter(_refuse)
    assert faults(store) == {"error": 1}
    backend.armed = False
    forget_in_l1(store, key(1)) if verb == "put" else None
    assert got(store, key(1)) == [b"1"]
    assert_all_free(store)


def test_a_thread_that_cannot_be_had_is_a_miss_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = manager(DictBackend())
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refuse)
        put(store, chain(1), b"1")
        forget_in_l1(store, key(1))
        assert got(store, key(1)) == [None]
        assert not manager(DictBackend()).close(DEADLINE_S)
    assert faults(store) == {"no_thread": 2}
    assert store.stats()["t0"]["dropped_chunks"] == 1
    put(store, chain(1), b"1")
    forget_in_l1(store, key(1))
    assert got(store, key(1)) == [b"1"]
    assert_all_free(store)


def test_a_close_between_reading_and_publishing_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    store = manager(DictBackend())
    put(store, chain(1, 2), b"1", b"2")
    forget_in_l1(store, *chain(1, 2))
    tier = store.backends["t0"]
    assert isinstance(tier, BackendTier)
    fetch = tier.fetch

    def fetch_and_close(
        keys: Sequence[CacheEngineKey], into: LocalCpu | None = None
    ) -> list[Arrival]:
        arrived = fetch(keys, into)
        store.close(DEADLINE_S)
        return arrived

    monkeypatch.setattr(tier, "fetch", fetch_and_close)
    assert got(store, *chain(1, 2)) == [None, None]


def test_deadlines_that_never_come_are_waited_for() -> None:
    store = manager(DictBackend(), deadline_s=float("inf"))
    put(store, chain(1), b"1")
    forget_in_l1(store, key(1))
    assert got(store, key(1)) == [b"1"]
    assert store.flush(float("inf"))
    assert store.close(float("inf"))
