"""What a tier is: the verbs through which `StorageManager` drives one, and the class to subclass
for one of your own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from lmcache_rs import _native
from lmcache_rs._native import LocalCpu

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from lmcache_rs.key import CacheEngineKey
    from lmcache_rs.storage.memory_obj import MemoryObj


class StorageBackend(ABC):
    """A place of your own where chunks are kept: subclass it and give it to
    `StorageManager.add_backend`.

    Contract:
        A chunk is named by its key, i.e. its namespace and hash. Equal keys mean equal bytes, so a
        backend that is given a known key may keep what it has. `str(key)` is a name for it in any
        store: injective, and `CacheEngineKey.from_string` reads it back.

        A chunk is two byte strings, its data and its metadata. The metadata say what the data are,
        how many, and their checksum; to a backend they are opaque.

        An implementer MUST

        - give back exactly the bytes that were put, data and metadata, or nothing: a chunk that is
          truncated, damaged or of an older format is a miss, and so is one behind a server or a
          file that is gone;
        - make a chunk visible only when it is whole;
        - be done with `data` when `put` returns: it is a view of memory that is leased as long as
          anything refers to it. What is to be kept is copied;
        - let `get` disagree with an earlier `contains`: chunks come and go between the two.

        An implementer MAY

        - raise any exception: what was asked is then a miss, what was to be stored is not stored.
          It is counted and logged now and then, and nobody else sees it;
        - evict chunks by itself; it then calls `self.evicted(key)`, so that whoever keeps count of
          what is stored where hears of it at once and not when the chunk is next asked for;
        - take its time: callers wait for a deadline and no longer, and after it they are told that
          nothing is there until the call has come back.

        The caller guarantees that every call comes from one thread of the backend's own, never two
        at a time, with no lock of ours held, and never on the path of a model's step; that `keys`
        is one chain in order, or a single chunk; and that whatever comes back is checked before
        use. An answer of the wrong type or size, or of another chunk, is a miss, and the chunk is
        removed.
    """

    @abstractmethod
    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        """Stores a chunk that is not there yet.

        Args:
            key: The chunk's name.
            data: Its bytes, read-only, one dimension of unsigned bytes; may be empty.
            metadata: Their description, some hundred bytes, and 8 a token where positions
                are kept.
        """

    @abstractmethod
    def get(self, key: CacheEngineKey) -> tuple[Buffer, bytes] | None:
        """Reads a chunk: its data and its metadata as they were put; None if it is not there."""

    @abstractmethod
    def contains(self, key: CacheEngineKey) -> bool:
        """Whether the chunk is stored."""

    @abstractmethod
    def remove(self, key: CacheEngineKey) -> bool:
        """Forgets a chunk, e.g. because it could not be loaded. Whether it was there."""

    def touch(self, key: CacheEngineKey) -> None:  # noqa: B027
        """Notes that a chunk was used or put again; for backends that evict."""

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many chunks of the chain are stored, counted from its first to the first gap."""
        count = 0
        for key in keys:
            if not self.contains(key):
                break
            count += 1
        return count

    def batched_get(self, keys: Sequence[CacheEngineKey]) -> Iterable[tuple[Buffer, bytes] | None]:
        """Reads chunks in order, from the first to the first gap; nothing is taken behind one.

        Each is taken as it comes: what came before the deadline is used.
        """
        for key in keys:
            yield self.get(key)

    def keys(self) -> Iterable[CacheEngineKey]:
        """Every key that is stored, which `clear` and `retain` go through.

        Without it they leave the backend as it is, and say so.
        """
        raise NotImplementedError

    def evicted(self, key: CacheEngineKey) -> None:
        """To be called by a backend that drops a chunk by itself, from any of its calls."""
        if self._on_evicted is not None:
            self._on_evicted(key)

    _on_evicted: Callable[[CacheEngineKey], None] | None = None

    def close(self) -> None:  # noqa: B027
        """Ends the backend, after the last put. What is stored stays stored."""


class StorageBackendInterface(ABC):
    """A tier as `StorageManager` drives it. No verb raises because of what lies behind it.

    A chunk is named by its key, i.e. its namespace and hash. Equal keys mean equal bytes, so a put
    of a known key only refreshes it. Between two verbs chunks come and go: only a held object is a
    promise. Verbs may be called by several threads at once.
    """

    @property
    @abstractmethod
    def allocator(self) -> LocalCpu | None:
        """The pool from which the objects given to this tier must come; None: any."""

    @abstractmethod
    def submit_put_task(self, key: CacheEngineKey, memory_obj: _native.MemoryObj) -> bool:
        """Takes a chunk in; false if it was known or there was no room. Does not wait for it to be
        stored; the object is held until it is."""

    @abstractmethod
    def contains(self, key: CacheEngineKey) -> bool:
        """Whether the chunk is stored."""

    @abstractmethod
    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many chunks of the chain are stored, counted from its first to the first gap."""

    @abstractmethod
    def batched_async_contains(self, keys: Sequence[CacheEngineKey]) -> Future[int]:
        """As `batched_contains`, without waiting. Unlike LMCache's coroutines, a future of
        `concurrent.futures`; its `result()` comes by the tier's deadline."""

    @abstractmethod
    def batched_get_blocking(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Reads chunks, from the first to the first gap; None from there on. They are sealed."""

    @abstractmethod
    def batched_get_non_blocking(
        self, keys: Sequence[CacheEngineKey]
    ) -> Future[list[MemoryObj | None]]:
        """As `batched_get_blocking`, without waiting; see `batched_async_contains`."""

    @abstractmethod
    def remove(self, key: CacheEngineKey) -> bool:
        """Forgets a chunk. Whether it was there."""

    @abstractmethod
    def clear(self, prefix: str | None = None) -> int:
        """Removes every chunk, or those whose namespace begins with `prefix`, a text that ends
        where one of the namespace's fields does; how many."""

    @abstractmethod
    def retain(self, prefix: str) -> int:
        """Removes every chunk that `clear(prefix)` would leave; how many."""

    @abstractmethod
    def flush(self, deadline_s: float) -> bool:
        """Waits until every put submitted before is done; false if the deadline came first."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Counters by name."""

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """Ends the tier, pending puts done first; false if the deadline came first. Idempotent."""

    def batched_submit_put_task(
        self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[_native.MemoryObj]
    ) -> int:
        """Takes chunks in, first to last, as far as there is room; how many are new."""
        pairs = zip(keys, memory_objs, strict=True)
        return sum(self.submit_put_task(key, memory_obj) for key, memory_obj in pairs)
