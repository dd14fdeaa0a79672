"""What the native tiers have in common: keys and objects in, chunks out, and no verb raises."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from lmcache_rs import _native
from lmcache_rs._native import LocalDisk, Remote
from lmcache_rs.key import HASH_BYTES, CacheEngineKey, LayerCacheEngineKey
from lmcache_rs.layouts import MemoryFormat, StoredForm
from lmcache_rs.storage.backend import StorageBackendInterface
from lmcache_rs.storage.faults import TierFaults
from lmcache_rs.storage.local_cpu import runs
from lmcache_rs.storage.memory_obj import MemoryObj, described
from lmcache_rs.storage.record import ChunkRecord
from lmcache_rs.storage.tier import Arrival

DEADLINE_S = 5.0
"""Seconds after which a read is taken as a miss."""


class NativeTier(StorageBackendInterface):
    """A tier whose work is done in Rust; this is the marshalling.

    Args:
        name: The tier's name in counters and logs.
        native: What does the work.
        deadline_s: Seconds after which a read is taken as a miss.
    """

    def __init__(self, name: str, native: LocalDisk | Remote, deadline_s: float) -> None:
        self.name = name
        self.faults = TierFaults(name)
        self._native = native
        self._deadline_s = deadline_s
        # For those that do not wait: reads are made by threads of the tier's own.
        self._waiting = ThreadPoolExecutor(4, thread_name_prefix=f"lmcache_rs-{name}")

    def __str__(self) -> str:
        return self.name

    def _speak(self) -> None:
        """Logs what the native side has to say, if it says anything."""

    @property
    def allocator(self) -> None:
        """Any memory will do: it is written from where it lies."""
        return None

    def submit_put_task(self, key: CacheEngineKey, memory_obj: _native.MemoryObj) -> bool:
        """Queues a put of a sealed object; false if it is known, queued, or there is no room.

        Raises:
            ValueError: The object is not sealed.
        """
        return self.batched_submit_put_task([key], [memory_obj]) == 1

    def batched_submit_put_task(
        self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[_native.MemoryObj]
    ) -> int:
        """Queues puts, first to last, as far as there is room; how many are new."""
        if len(keys) != len(memory_objs):
            raise ValueError(f"{len(keys)} keys for {len(memory_objs)} objects; give one a key")
        taken = start = 0
        for namespace, hashes in runs(_chunk_keys(keys)):
            end = start + len(hashes) // HASH_BYTES
            chunks = [_given(memory_obj) for memory_obj in memory_objs[start:end]]
            taken += self._native.put(namespace, hashes, chunks)
            start = end
        self._speak()
        return taken

    def contains(self, key: CacheEngineKey) -> bool:
        """Whether the chunk is stored."""
        return self.batched_contains([key]) == 1

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many chunks are stored, from the first to the first gap."""
        count = 0
        for namespace, hashes in runs(_chunk_keys(keys)):
            found = self._native.longest_prefix(namespace, hashes)
            count += found
            if found < len(hashes) // HASH_BYTES:
                break
        self._speak()
        return count

    def batched_async_contains(self, keys: Sequence[CacheEngineKey]) -> Future[int]:
        """As `batched_contains`; the future is done."""
        future: Future[int] = Future()
        future.set_result(self.batched_contains(keys))
        return future

    def fetch(self, keys: Sequence[CacheEngineKey]) -> list[Arrival]:
        """Reads chunks up to the first gap, to be published or sealed by the caller."""
        arrivals: list[Arrival] = []
        chunk_keys = _chunk_keys(keys)
        for namespace, hashes in runs(chunk_keys):
            due = len(arrivals) + len(hashes) // HASH_BYTES
            for raw, parts, num_tokens in self._native.get(namespace, hashes, self._deadline_s):
                key = chunk_keys[len(arrivals)]
                try:
                    form = None if parts is None else _form(*parts)
                    memory_obj = described(raw, form, num_tokens if form else None)
                except Exception as error:
                    # Whole, and yet of a form that this version does not know.
                    self.faults.note("form", "batched_get", None, key=key, error=error)
                    return arrivals
                record = ChunkRecord(str(key), raw.nbytes, 0, form, num_tokens)
                arrivals.append(Arrival(memory_obj, record))
            if len(arrivals) < due:
                break
        self._speak()
        return arrivals

    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Reads chunks, from the first to the first gap; None from there on."""
        found: list[MemoryObj | None] = []
        for memory_obj, _ in self.fetch(keys):
            memory_obj.seal()
            found.append(memory_obj)
        return found + [None] * (len(keys) - len(found))

    def batched_get_non_blocking(
        self, keys: Sequence[CacheEngineKey]
    ) -> Future[list[MemoryObj | None]]:
        """As `batched_get_blocking`, without waiting."""
        try:
            return self._waiting.submit(self.batched_get_blocking, list(keys))
        except RuntimeError:
            # Closed: nothing is there.
            future: Future[list[MemoryObj | None]] = Future()
            future.set_result([None] * len(keys))
            return future

    def remove(self, key: CacheEngineKey) -> bool:
        """Forgets a chunk, a put that waits included; whether it was there."""
        (chunk_key,) = _chunk_keys([key])
        return self._native.remove(chunk_key.namespace, chunk_key.chunk_hash)

    def clear(self, prefix: str | None = None) -> int:
        """Removes every chunk of every process, or those whose namespace begins with `prefix`; how
        many."""
        return self._native.clear(prefix)

    def retain(self, prefix: str) -> int:
        """Removes the chunks whose namespace does not begin with `prefix`; how many."""
        return self._native.retain(prefix)

    def flush(self, deadline_s: float) -> bool:
        """Waits until every put submitted before is done; false if the deadline came first."""
        return self._native.flush(deadline_s)

    def stats(self) -> dict[str, int]:
        """What was put, got, evicted and dropped, what waits, what is there; faults by reason."""
        faults = {f"faults_{reason}": count for reason, count in self.faults.counts.items()}
        return self._native.stats() | faults

    def close(self, deadline_s: float = 10.0) -> bool:
        """Ends the tier, pending puts done first; false if the deadline came first."""
        self._waiting.shutdown(wait=False, cancel_futures=True)
        return self._native.close(deadline_s)


def _chunk_keys(keys: Sequence[CacheEngineKey]) -> list[CacheEngineKey]:
    """A layer's key is an address into its chunk."""
    return [key.to_chunk_key() if isinstance(key, LayerCacheEngineKey) else key for key in keys]


def _form(fmt: str, num_layers: int, hidden: int, dtype: str, block_tokens: int) -> StoredForm:
    return StoredForm(MemoryFormat[fmt], num_layers, hidden, dtype, block_tokens)


def _given(
    memory_obj: _native.MemoryObj,
) -> tuple[_native.MemoryObj, tuple[str, int, int, str, int] | None, int]:
    metadata = memory_obj.metadata if isinstance(memory_obj, MemoryObj) else None
    if metadata is None:
        return memory_obj, None, 0
    form = metadata.form()
    parts = (form.fmt.name, form.num_layers, form.hidden, form.dtype, form.block_tokens)
    return memory_obj, parts, metadata.num_tokens
