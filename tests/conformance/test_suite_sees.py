"""The suite sees each broken promise: tiers that keep all but one of them fail it."""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import pytest
import test_tiers
from tiers import DEADLINE_S, PAGE, DictBackend, Subject, assert_at_rest, python_dict

from lmcache_rs import CacheEngineKey, MemoryObj, _native
from lmcache_rs.storage.lane import Put
from lmcache_rs.storage.record import ChunkRecord
from lmcache_rs.storage.tier import Arrival, BackendTier


class OneBitOff(BackendTier):
    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        return [_copy(self._pool, each, flip=True) for each in super().batched_get_blocking(keys)]


class SaysYes(BackendTier):
    def contains(self, key: CacheEngineKey) -> bool:
        return True


class KnowsHashesAlone(DictBackend):
    def _plain(self, key: CacheEngineKey) -> CacheEngineKey:
        return CacheEngineKey("m", 1, 0, key.chunk_hash, "float32")

    def contains(self, key: CacheEngineKey) -> bool:
        return super().contains(self._plain(key))


class CountsBehindGaps(BackendTier):
    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        return sum(self.contains(key) for key in keys)


class GivesBehindGaps(BackendTier):
    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        each = (super(GivesBehindGaps, self).batched_get_blocking([key]) for key in keys)
        return list(itertools.chain.from_iterable(each))


class RemovesNothing(BackendTier):
    def remove(self, key: CacheEngineKey) -> bool:
        return self.contains(key)


class RemovesTwice(BackendTier):
    def remove(self, key: CacheEngineKey) -> bool:
        super().remove(key)
        return True


class Overwrites(BackendTier):
    def _put(self, put: Put) -> None:
        self.backend.remove(put.key)
        super()._put(put)


class GivesWritable(BackendTier):
    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        return [_copy(self._pool, each, seal=False) for each in super().batched_get_blocking(keys)]


class LosesLoudly(DictBackend):
    def get(self, key: CacheEngineKey) -> tuple[bytes, bytes]:
        return self.chunks[key]


class RaisesItsFaults(BackendTier):
    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        found = super().batched_get_blocking(keys)
        if self.faults.counts:
            raise OSError("read")
        return found


class WholePages(BackendTier):
    def batched_submit_put_task(
        self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[_native.MemoryObj]
    ) -> int:
        padded = [_copy(self._pool, each, pad=True) for each in memory_objs]
        return super().batched_submit_put_task(keys, [each for each in padded if each])


class Small(DictBackend):
    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        if len(data) < 16 << 20:
            super().put(key, data, metadata)


class Forgetful(DictBackend):
    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        if len(self.chunks) < 999:
            super().put(key, data, metadata)


class NeverAnswers(BackendTier):
    def batched_async_contains(self, keys: Sequence[CacheEngineKey]) -> Any:
        return Future()


class KeepsWhatWasCalledOff(BackendTier):
    kept: list[object] = []  # noqa: RUF012 - of all of them

    def batched_get_non_blocking(self, keys: Sequence[CacheEngineKey]) -> Any:
        answer = super().batched_get_non_blocking(keys)
        self.kept.append(answer.result())
        return answer


class ShowsHalves(DictBackend):
    """A big chunk is seen before all of it is there."""

    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        whole = bytes(data)
        if len(whole) > 200 * PAGE:
            super().put(key, *_with_data(metadata, whole[: len(whole) // 2]))
            threading.Timer(1.0, super().put, (key, memoryview(whole), metadata)).start()
        else:
            super().put(key, data, metadata)


class BelievesAnything(BackendTier):
    def _checked(self, key: CacheEngineKey, found: object) -> Arrival:
        data, metadata = cast("tuple[bytes, bytes]", found)
        record = replace(ChunkRecord.from_bytes(metadata), key=str(key))
        return super()._checked(key, (data, record.to_bytes()))


class KeepsForeign(DictBackend):
    def remove(self, key: CacheEngineKey) -> bool:
        return key in self.chunks


class MixesPuts(DictBackend):
    """One half is of another put of that key."""

    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        half = len(data) // 2
        super().put(key, *_with_data(metadata, bytes([data[0] ^ 1]) * half + bytes(data[half:])))


class ForgetsAtTheEnd(DictBackend):
    def close(self) -> None:
        self.chunks.clear()


class ClearsAll(BackendTier):
    def clear(self, prefix: str | None = None) -> int:
        return super().clear()


class DropsAtTheEnd(BackendTier):
    def _put(self, put: Put) -> None:
        time.sleep(0.01)
        super()._put(put)

    def close(self, deadline_s: float = 10.0) -> bool:
        self.lane.withdraw(lambda _: True)
        return super().close(deadline_s)


class ClosesOnce(BackendTier):
    is_closed = False

    def close(self, deadline_s: float = 10.0) -> bool:
        if self.is_closed:
            raise RuntimeError("closed")
        self.is_closed = super().close(deadline_s)
        return True


class ServesAfterTheEnd(BackendTier):
    def contains(self, key: CacheEngineKey) -> bool:
        assert isinstance(self.backend, DictBackend)
        return key in self.backend.chunks


class HoldsWhatItGave(BackendTier):
    given: list[object] = []  # noqa: RUF012 - of all of them

    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        found = super().batched_get_blocking(keys)
        self.given.append(found)
        return found


class WaitsForNothing(BackendTier):
    def flush(self, deadline_s: float) -> bool:
        return True

    def _put(self, put: Put) -> None:
        threading.Timer(1.0, super()._put, [put]).start()


def _copy(
    pool: _native.LocalCpu,
    of: _native.MemoryObj | None,
    *,
    flip: bool = False,
    pad: bool = False,
    seal: bool = True,
) -> MemoryObj | None:
    if of is None:
        return None
    data = bytearray(memoryview(of))  # type: ignore[arg-type]
    if pad:
        data += bytes(-len(data) % PAGE)
    if flip and data:
        data[-1] ^= 1
    (raw,) = pool.allocate([len(data)]) or []
    memoryview(raw)[:] = data  # type: ignore[arg-type]
    if seal:
        raw.seal()
    return MemoryObj(raw)


def _with_data(metadata: bytes, data: bytes) -> tuple[memoryview, bytes]:
    """Other bytes that look whole."""
    record = ChunkRecord.from_bytes(metadata)
    changed = replace(record, nbytes=len(data), checksum=zlib.crc32(data))
    return memoryview(data), changed.to_bytes()


Case = tuple[str, type[BackendTier], type[DictBackend]]
BROKEN: list[Case] = [
    ("what_is_put_comes_back_byte_for_byte", OneBitOff, DictBackend),
    ("what_is_put_is_there", SaysYes, DictBackend),
    ("what_nobody_put_is_a_miss", SaysYes, DictBackend),
    ("what_nobody_put_is_a_miss", BackendTier, KnowsHashesAlone),
    ("a_gap_ends_every_answer", CountsBehindGaps, DictBackend),
    ("a_gap_ends_every_answer", GivesBehindGaps, DictBackend),
    ("a_removed_chunk_is_a_miss_and_may_come_again", RemovesNothing, DictBackend),
    ("a_removed_chunk_is_a_miss_and_may_come_again", RemovesTwice, DictBackend),
    ("a_put_of_a_known_key_only_refreshes", Overwrites, DictBackend),
    ("what_is_got_is_sealed_and_outlives_its_chunk", GivesWritable, DictBackend),
    ("what_is_got_is_sealed_and_outlives_its_chunk", HoldsWhatItGave, DictBackend),
    ("a_chunk_that_was_lost_behind_the_tier_is_a_miss", RaisesItsFaults, LosesLoudly),
    ("empty_tiny_and_big_chunks_come_back", WholePages, DictBackend),
    ("a_byte_a_page_but_one_and_32_mib_come_back", BackendTier, Small),
    ("a_thousand_chunks_come_back", BackendTier, Forgetful),
    ("answers_may_be_waited_for_elsewhere", NeverAnswers, DictBackend),
    ("an_answer_that_is_called_off_leaves_nothing_behind", KeepsWhatWasCalledOff, DictBackend),
    ("a_chunk_is_whole_or_not_there_while_it_is_put", BackendTier, ShowsHalves),
    ("a_chunk_is_whole_or_not_there_while_it_is_removed", RemovesNothing, DictBackend),
    ("one_of_many_puts_of_a_key_is_stored_whole", BackendTier, MixesPuts),
    ("an_object_of_another_chunk_is_a_miss_and_leaves", BelievesAnything, DictBackend),
    ("an_object_of_another_chunk_is_a_miss_and_leaves", BackendTier, KeepsForeign),
    ("what_was_stored_is_there_when_it_is_opened_again", BackendTier, ForgetsAtTheEnd),
    ("threads_that_put_get_and_remove_see_whole_chunks", OneBitOff, DictBackend),
    ("a_prefix_is_cleared_and_the_rest_is_kept", ClearsAll, DictBackend),
    ("pending_puts_are_done_before_a_close", DropsAtTheEnd, DictBackend),
    ("a_closed_tier_is_empty_and_stays_so", ClosesOnce, DictBackend),
    ("a_closed_tier_is_empty_and_stays_so", ServesAfterTheEnd, DictBackend),
    ("what_is_put_is_there", WaitsForNothing, DictBackend),
]


def promises() -> Iterable[str]:
    """Every test of the suite."""
    return [name.removeprefix("test_") for name in vars(test_tiers) if name.startswith("test_")]


def keeps(promise: str, subject: Subject) -> None:
    """Runs one test of the suite, as the fixtures do."""
    test: Callable[[Subject], None] = getattr(test_tiers, f"test_{promise}")
    try:
        test(subject)
        assert_at_rest(subject)
    finally:
        BackendTier.close(subject.tier, DEADLINE_S)  # type: ignore[arg-type]


def of_size(promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "32_mib" in promise:
        monkeypatch.setattr("tiers.POOL_BYTES", 80 << 20)


@pytest.mark.parametrize("promise", promises())
def test_a_tier_that_keeps_all_promises_passes(
    promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_size(promise, monkeypatch)
    keeps(promise, python_dict())


@pytest.mark.parametrize(
    ("promise", "kind", "backend"),
    BROKEN,
    ids=[f"{kind.__name__}-{backend.__name__}-{promise}" for promise, kind, backend in BROKEN],
)
def test_a_broken_promise_is_seen(
    promise: str,
    kind: type[BackendTier],
    backend: type[DictBackend],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiers.DEADLINE_S", 1.0)
    monkeypatch.setattr("test_tiers.DEADLINE_S", 1.0)
    of_size(promise, monkeypatch)
    with pytest.raises((AssertionError, OSError, RuntimeError, TimeoutError)):
        keeps(promise, python_dict(kind, backend()))


def test_each_promise_has_a_tier_that_breaks_it() -> None:
    assert set(promises()) == {promise for promise, _, _ in BROKEN}
