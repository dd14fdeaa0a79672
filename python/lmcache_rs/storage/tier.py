"""A user's `StorageBackend` as a tier: whatever it does, a miss is the worst that comes of it."""

from __future__ import annotations

import collections
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from lmcache_rs import _native
from lmcache_rs._native import LocalCpu
from lmcache_rs.key import CacheEngineKey, LayerCacheEngineKey
from lmcache_rs.storage.backend import StorageBackend, StorageBackendInterface
from lmcache_rs.storage.faults import TierFaults
from lmcache_rs.storage.lane import Answer, Lane, Put
from lmcache_rs.storage.memory_obj import MemoryObj, described, tokens_of
from lmcache_rs.storage.record import ChunkRecord


class Arrival(NamedTuple):
    """A chunk that a tier gave, in writable memory that nobody else knows yet."""

    memory_obj: MemoryObj
    record: ChunkRecord


class _Refused(Exception):
    """An answer that is not used: its reason in one word, and what was found."""

    def __init__(self, reason: str, found: str) -> None:
        super().__init__(reason, found)
        self.reason = reason
        self.found = found


class BackendTier(StorageBackendInterface):
    """A tier over a backend written in Python; see `StorageBackend` for what it may rely on.

    Args:
        name: The tier's name in counters and logs.
        backend: What keeps the chunks.
        pool: Where chunks that are read are put.
        deadline_s: Seconds after which an answer is taken as a miss.
        max_queued_bytes: Bytes of the puts that may wait; more are dropped and counted.
    """

    def __init__(
        self,
        name: str,
        backend: StorageBackend,
        *,
        pool: LocalCpu,
        deadline_s: float,
        max_queued_bytes: int,
    ) -> None:
        self.name = name
        self.backend = backend
        self.faults = TierFaults(name)
        # Who hears of the chunks that come and go, if anybody does.
        self.sink: _native.EventSink | None = None
        self._dropped: set[CacheEngineKey] = set()
        backend._on_evicted = self._note_evicted
        self._pool = pool
        self._counts: collections.Counter[str] = collections.Counter()
        self.lane = Lane(
            f"lmcache_rs-{name}",
            put=self._put,
            end=backend.close,
            deadline_s=deadline_s,
            max_queued_bytes=max_queued_bytes,
            faults=self.faults,
        )

    def __str__(self) -> str:
        return self.name

    @property
    def allocator(self) -> None:
        """Any memory will do: the backend copies what it keeps."""
        return None

    # --- puts ---------------------------------------------------------------------------------

    def submit_put_task(self, key: CacheEngineKey, memory_obj: _native.MemoryObj) -> bool:
        """Queues a put of a sealed object; false if it is queued already or there is no room.

        Raises:
            ValueError: The object is not sealed.
        """
        return self._offer(key, memory_obj) is True

    def batched_submit_put_task(
        self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[_native.MemoryObj]
    ) -> int:
        """Queues puts, first to last, as far as there is room: behind a gap nothing is found."""
        count = 0
        for position, (key, memory_obj) in enumerate(zip(keys, memory_objs, strict=True)):
            offered = self._offer(key, memory_obj)
            if offered is False:
                self._counts["dropped_chunks"] += len(keys) - position - 1
                break
            count += offered is True
        return count

    def _offer(self, key: CacheEngineKey, memory_obj: _native.MemoryObj) -> bool | None:
        if not memory_obj.sealed:
            raise ValueError(
                f"the object for {key} is not sealed; put it with StorageManager.batched_put, or "
                "seal() it first"
            )
        metadata = memory_obj.metadata if isinstance(memory_obj, MemoryObj) else None
        handle = MemoryObj(memory_obj, metadata)
        # Held as long as the put waits, whatever becomes of the caller's handle; and seen to be.
        handle.ref_count_up()
        offered = self.lane.offer(Put(_chunk_key(key), handle, handle.nbytes))
        if offered is False:
            self._counts["dropped_chunks"] += 1
        return offered

    def _put(self, put: Put) -> None:
        if self._contains(put.key):
            self.backend.touch(put.key)
            self._counts["refreshed_chunks"] += 1
            self._tell_stored(put)
            return
        metadata = ChunkRecord.of(str(put.key), put.memory_obj).to_bytes()
        num_references = sys.getrefcount(put.memory_obj)
        view = memoryview(cast(Any, put.memory_obj))
        self._dropped.clear()
        self.backend.put(put.key, view, metadata)
        # It may have had to go again in the same call.
        if put.key not in self._dropped:
            self._tell_stored(put)
        # Not released: arrays made of a view outlive it, and what they see must stay leased.
        del view
        if sys.getrefcount(put.memory_obj) > num_references:
            found = (
                "the backend keeps a view of the data, and so its lease; copy what is to be kept"
            )
            self.faults.note("kept", "put", found, key=put.key)
        self._counts["put_chunks"] += 1
        self._counts["put_bytes"] += put.nbytes

    # --- who is told --------------------------------------------------------------------------

    def _tell_stored(self, put: Put) -> None:
        if self.sink is not None:
            key, num_tokens = put.key, tokens_of(put.memory_obj)
            self.sink.stored(self.name, key.namespace, key.chunk_hash, put.nbytes, num_tokens)

    def _note_evicted(self, key: CacheEngineKey) -> None:
        self._dropped.add(_chunk_key(key))
        self._tell_removed(key)

    def _tell_removed(self, key: CacheEngineKey) -> None:
        if self.sink is not None:
            key = _chunk_key(key)
            self.sink.removed(self.name, key.namespace, key.chunk_hash)

    # --- questions ----------------------------------------------------------------------------

    def contains(self, key: CacheEngineKey) -> bool:
        """Whether the chunk is stored; false if the backend does not say so in time."""
        key = _chunk_key(key)
        return self.lane.ask("contains", lambda _: self._contains(key), lambda: False).result()

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many chunks are stored, from the first to the first gap."""
        return self.batched_async_contains(keys).result()

    def batched_async_contains(self, keys: Sequence[CacheEngineKey]) -> Answer[int]:
        """As `batched_contains`, without waiting."""
        chunk_keys = [_chunk_key(key) for key in keys]

        def call(_: Answer[int]) -> int:
            count: object = self.backend.batched_contains(chunk_keys)
            if type(count) is not int:
                self.faults.note("type", "batched_contains", f"{_kind(count)} where int is due")
                return 0
            if not 0 <= count <= len(chunk_keys):
                found = f"{count} of {len(chunk_keys)} chunks"
                self.faults.note("size", "batched_contains", found)
                return 0
            return count

        return self.lane.ask("batched_contains", call, lambda: 0)

    def _contains(self, key: CacheEngineKey) -> bool:
        stored: object = self.backend.contains(key)
        if type(stored) is not bool:
            self.faults.note("type", "contains", f"{_kind(stored)} where bool is due", key=key)
            return False
        if not stored:
            self._tell_removed(key)
        return stored

    # --- reads --------------------------------------------------------------------------------

    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Reads chunks, from the first to the first gap; None from there on.

        What arrived before the deadline is there.
        """
        return self.batched_get_non_blocking(keys).result()

    def batched_get_non_blocking(
        self, keys: Sequence[CacheEngineKey]
    ) -> Answer[list[MemoryObj | None]]:
        """As `batched_get_blocking`, without waiting."""

        def seal(arrivals: list[Arrival]) -> list[MemoryObj | None]:
            sealed: list[MemoryObj | None] = []
            for memory_obj, _ in arrivals:
                memory_obj.seal()
                sealed.append(memory_obj)
            return sealed + [None] * (len(keys) - len(sealed))

        return self._fetch("batched_get", keys, seal)

    def fetch(self, keys: Sequence[CacheEngineKey], into: LocalCpu | None = None) -> list[Arrival]:
        """Reads chunks up to the first gap, to be published or sealed by the caller; into memory of
        another pool, if one is given."""
        arrivals: list[Arrival] = self._fetch("batched_get", keys, list, into).result()
        return arrivals

    def _fetch(
        self,
        verb: str,
        keys: Sequence[CacheEngineKey],
        give: Callable[[list[Arrival]], Any],
        into: LocalCpu | None = None,
    ) -> Answer[Any]:
        chunk_keys = [_chunk_key(key) for key in keys]
        arrivals: list[Arrival] = []
        given: list[Any] = []
        giving = threading.Lock()

        def give_once() -> Any:
            # At the deadline the caller takes what is there, and from then on it is the caller's.
            with giving:
                if not given:
                    given.append(give(arrivals[:]))
                return given[0]

        def call(answer: Answer[Any]) -> Any:
            try:
                answers = iter(self.backend.batched_get(chunk_keys))
            except TypeError as error:
                self.faults.note("type", verb, "no iterable of answers", error=error)
                return give_once()
            for key in chunk_keys:
                found: object = next(answers, None)
                if answer.done() or found is None:
                    break
                try:
                    arrivals.append(self._checked(key, found, into or self._pool))
                except _Refused as refused:
                    self.faults.note(refused.reason, verb, refused.found, key=key)
                    if refused.reason != "no_memory":
                        self.backend.remove(key)
                        self._tell_removed(key)
                    break
            return give_once()

        return self.lane.ask(verb, call, give_once)

    def _checked(self, key: CacheEngineKey, found: object, pool: LocalCpu) -> Arrival:
        """The chunk in memory of ours, if that is what the backend gave."""
        if not isinstance(found, tuple) or len(found) != 2:
            raise _Refused("type", f"{_kind(found)} where (data, metadata) is due")
        try:
            data, metadata = memoryview(found[0]).cast("B"), bytes(memoryview(found[1]))
        except (TypeError, ValueError, BufferError) as error:
            kinds = f"({_kind(found[0])}, {_kind(found[1])})"
            raise _Refused("type", f"{kinds} where two contiguous buffers are due") from error
        try:
            record = ChunkRecord.from_bytes(metadata)
        except ValueError as error:
            raise _Refused("metadata", str(error)) from error
        if record.key != str(key):
            raise _Refused("foreign", f"the chunk of {record.key}")
        if record.nbytes != data.nbytes:
            raise _Refused("size", f"{data.nbytes} bytes where {record.nbytes} were put")
        if record.positions is not None and len(record.positions) != 8 * record.num_tokens:
            raise _Refused("size", f"{len(record.positions)} bytes of positions")
        allocated = pool.allocate([data.nbytes])
        if allocated is None:
            raise _Refused("no_memory", f"no room for {data.nbytes} bytes")
        (memory_obj,) = allocated
        with memoryview(cast(Any, memory_obj)) as ours:
            ours[:] = data
            # Over our copy: theirs might change under us.
            checksum = zlib.crc32(ours)
        if checksum != record.checksum:
            raise _Refused("checksum", "other bytes than were put")
        if record.positions is not None:
            positions = memoryview(record.positions).cast("q")
            memory_obj.set_positions(positions.tolist())
        try:
            arrival = Arrival(described(memory_obj, record.form, record.num_tokens), record)
        except Exception as error:
            raise _Refused("metadata", f"a form that the bytes do not have: {error!r}") from error
        self._counts["got_chunks"] += 1
        self._counts["got_bytes"] += data.nbytes
        return arrival

    # --- the rest -----------------------------------------------------------------------------

    def remove(self, key: CacheEngineKey) -> bool:
        """Forgets a chunk, a put that waits included; whether it was there."""
        key = _chunk_key(key)
        withdrawn = self.lane.withdraw(lambda queued: queued == key)

        def call(_: Answer[bool]) -> bool:
            removed: object = self.backend.remove(key)
            self._tell_removed(key)
            if type(removed) is not bool:
                self.faults.note("type", "remove", f"{_kind(removed)} where bool is due", key=key)
            return removed is True

        removed = self.lane.ask("remove", call, lambda: False).result()
        return removed or withdrawn > 0

    def clear(self, prefix: str | None = None) -> int:
        """Removes every chunk, or those whose namespace begins with `prefix`, as far as the backend
        lists its keys; how many."""
        return self._remove_where(lambda namespace: _begins_with(namespace, prefix or ""))

    def retain(self, prefix: str) -> int:
        """Removes every chunk that `clear(prefix)` would leave; how many."""
        return self._remove_where(lambda namespace: not _begins_with(namespace, prefix))

    def _remove_where(self, goes: Callable[[str], bool]) -> int:
        self.lane.withdraw(lambda queued: goes(queued.namespace))
        removed: list[CacheEngineKey] = []

        def call(_: Answer[int]) -> int:
            try:
                listed: list[object] = list(self.backend.keys())
            except NotImplementedError:
                found = "the backend does not list its keys and keeps all; write its keys()"
                self.faults.note("not_cleared", "clear", found)
                return 0
            for key in listed:
                # Past the deadline too: what is to be cleared is cleared.
                if not isinstance(key, CacheEngineKey):
                    found = f"{_kind(key)} where CacheEngineKey is due"
                    self.faults.note("type", "keys", found)
                elif goes(key.namespace) and self.backend.remove(key) is True:
                    removed.append(key)
                    self._tell_removed(key)
            return len(removed)

        return self.lane.ask("clear", call, lambda: len(removed)).result()

    def flush(self, deadline_s: float) -> bool:
        """Waits until every put submitted before is done; false if the deadline came first."""
        return self.lane.flush(deadline_s)

    def stats(self) -> dict[str, int]:
        """What was put, got and dropped, what waits, and faults by reason."""
        names = "put_chunks put_bytes refreshed_chunks dropped_chunks got_chunks got_bytes"
        stats = {name: self._counts[name] for name in names.split()}
        stats["queued_chunks"], stats["queued_bytes"] = self.lane.queued()
        faults = sorted(self.faults.counts.items())
        return stats | {f"faults_{reason}": count for reason, count in faults}

    def close(self, deadline_s: float = 10.0) -> bool:
        """Ends the tier, pending puts done first; false if the deadline came first."""
        return self.lane.close(deadline_s)


def _chunk_key(key: CacheEngineKey) -> CacheEngineKey:
    """A layer's key is an address into its chunk."""
    return key.to_chunk_key() if isinstance(key, LayerCacheEngineKey) else key


def _begins_with(namespace: str, prefix: str) -> bool:
    return _native.namespace_begins_with(namespace, prefix)


def _kind(found: object) -> str:
    return type(found).__name__
