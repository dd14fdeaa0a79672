"""`StorageManager`: the tiers in order, as one store."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, overload

from lmcache_rs import _native
from lmcache_rs._native import LocalCpu
from lmcache_rs.config import LMCacheEngineConfig
from lmcache_rs.key import CacheEngineKey, LayerCacheEngineKey
from lmcache_rs.layouts import MemoryFormat, StoredForm
from lmcache_rs.storage.backend import StorageBackend, StorageBackendInterface
from lmcache_rs.storage.events import EventManager, EventType
from lmcache_rs.storage.local_cpu import LocalCPUBackend
from lmcache_rs.storage.local_disk import LocalDiskBackend
from lmcache_rs.storage.memory_obj import LayerView, MemoryObj, MemoryObjMetadata, described
from lmcache_rs.storage.native_tier import NativeTier
from lmcache_rs.storage.prefetch import Prefetched, PrefetchThread, Room
from lmcache_rs.storage.reads import ReadLog, TierRead
from lmcache_rs.storage.remote import RemoteBackend
from lmcache_rs.storage.tier import BackendTier

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("lmcache_rs")

L1 = "LocalCPUBackend"
L2 = "LocalDiskBackend"
L3 = "RemoteBackend"
DEADLINE_S = 5.0
"""Seconds after which a backend's answer is taken as a miss, unless it is added with others."""
CLOSE_DEADLINE_S = 10.0
"""Seconds that a close waits for pending puts, all tiers together."""


class StorageManager:
    """The tiers in order, as one store: host memory, then what `add_backend` adds.

    Args:
        config: Settings.
        local_cpu: The pool to use; None makes one of `max_local_cpu_size`.
        form: The form of chunks whose namespace nothing else is known of.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        *,
        local_cpu: LocalCpu | None = None,
        form: StoredForm | None = None,
    ) -> None:
        self._config = config
        self.form = form
        # What was put under a namespace: all chunks of one are alike but for their tokens.
        self._forms: dict[str, StoredForm] = {}
        self.backends: dict[str, StorageBackendInterface] = {}
        # Tiers that the settings ask for and that could not be made, with the reason.
        self.unavailable: dict[str, Exception] = {}
        # Where objects are allocated: L1's pool, or without L1 one that only stages.
        self._pool: LocalCpu | None = None
        self._local: LocalCPUBackend | None = None
        # Held for moments and never over a call into a user's backend: what was read before a clear
        # is not published after it.
        self._publishing = threading.Lock()
        self._num_clears = 0
        self.event_manager = EventManager()
        self._prefetch = PrefetchThread()
        # What prefetches have read from lower tiers.
        self.reads = ReadLog()
        weakref.finalize(self, self._prefetch.close).atexit = False
        # Held while a tier is added.
        self._adding = threading.Lock()
        self._closed = False
        self._sink: _native.EventSink | None = None
        if local_cpu is None and config.local_cpu:
            local_cpu = self._new_pool()
        if local_cpu is not None:
            self._pool = local_cpu
            self._local = LocalCPUBackend(local_cpu)
            self.backends[L1] = self._local
        if config.wants_local_disk:
            self._add_local_disk()
        for number, url in enumerate(config.remote_urls):
            self._add_remote(f"{L3}{number or ''}", url)

    def _add_local_disk(self) -> None:
        try:
            if self._pool is None:
                self._pool = self._new_pool()
            self.backends[L2] = LocalDiskBackend.from_config(self._config, self._pool)
        except (OSError, MemoryError) as error:
            if self._config.strict:
                raise
            self.unavailable[L2] = error
            logger.warning(
                "lmcache_rs: SERVING WITHOUT THE LOCAL DISK TIER: %s. Check that local_disk can be "
                "written and that memory is left; `strict: true` makes this a stop.",
                error,
            )

    def _add_remote(self, name: str, url: str) -> None:
        try:
            if self._pool is None:
                self._pool = self._new_pool()
            made = RemoteBackend.from_config(self._config, url, self._pool, name)
            self.backends[name] = made
        except (OSError, MemoryError, ValueError) as error:
            if self._config.strict:
                raise
            self.unavailable[name] = error
            logger.warning(
                "lmcache_rs: SERVING WITHOUT A REMOTE TIER: %s. Check remote_url and that memory "
                "is left; `strict: true` makes this a stop.",
                error,
            )

    def _new_pool(self) -> LocalCpu:
        of = self._config
        return LocalCpu(of.max_local_cpu_bytes, of.lease_timeout_ms, of.cache_policy)

    def tell(self, sink: _native.EventSink) -> None:
        """From here on the tiers below host memory tell this sink of chunks that come and go; host
        memory tells the sink that was made for it. Tiers that were there are told of as they are
        used."""
        with self._adding:
            self._sink = sink
            for backend in self._lower():
                if isinstance(backend, BackendTier):
                    backend.sink = sink

    def add_backend(
        self,
        name: str,
        backend: StorageBackend | StorageBackendInterface,
        *,
        deadline_s: float = DEADLINE_S,
        max_queued_bytes: int | None = None,
    ) -> None:
        """Adds a tier below those that are there.

        Args:
            name: The tier's name in answers, counters and logs.
            backend: A `StorageBackend` of your own, which is called from one thread of its own; or
                a whole tier.
            deadline_s: Seconds after which an answer of the backend is taken as a miss.
            max_queued_bytes: Bytes of the puts that may wait for the backend, which they hold in
                host memory; more are dropped and counted. A quarter of the pool unless given.

        Raises:
            ValueError: There is a tier of that name or with that backend, or a number is not
                positive.
            TypeError: The backend is none.
            RuntimeError: The store is closed.
            MemoryError: There is no L1, and no memory of `max_local_cpu_size` to stage chunks in.
        """
        if not deadline_s > 0 or (max_queued_bytes is not None and max_queued_bytes <= 0):
            raise ValueError(
                f"deadline_s is {deadline_s} and max_queued_bytes {max_queued_bytes}; "
                "both must be above 0"
            )
        if not isinstance(backend, StorageBackend | StorageBackendInterface):
            raise TypeError(
                f"a backend is a StorageBackend, not {type(backend).__name__}; subclass it"
            )
        with self._adding:
            self._add(name, backend, deadline_s, max_queued_bytes)

    def _add(
        self,
        name: str,
        backend: StorageBackend | StorageBackendInterface,
        deadline_s: float,
        max_queued_bytes: int | None,
    ) -> None:
        if self._closed:
            raise RuntimeError("this StorageManager is closed; make a new one")
        if name in self.backends:
            raise ValueError(f"there is a tier {name!r} already; choose another name")
        for other, tier in self.backends.items():
            if backend is (tier.backend if isinstance(tier, BackendTier) else tier):
                raise ValueError(
                    f"this backend is tier {other!r} already, and is called by one thread; make a "
                    "backend of its own for each tier"
                )
        if self._pool is None:
            self._pool = self._new_pool()
        if isinstance(backend, StorageBackend):
            tier = BackendTier(
                name,
                backend,
                pool=self._pool,
                deadline_s=deadline_s,
                max_queued_bytes=max_queued_bytes or max(1, self._pool.capacity_bytes // 4),
            )
            tier.sink = self._sink
            weakref.finalize(self, tier.lane.abandon).atexit = False
            backend = tier
        # A new dict: others may be going through the old one.
        self.backends = {**self.backends, name: backend}

    @overload
    def batched_allocate(self, nbytes: Sequence[int], /) -> list[MemoryObj] | None: ...

    @overload
    def batched_allocate(
        self,
        shape: Sequence[int],
        /,
        dtype: torch.dtype,
        fmt: MemoryFormat,
        count: int = 1,
        *,
        block_tokens: int = 1,
        cached_positions: Sequence[torch.Tensor] | None = None,
    ) -> list[MemoryObj] | None: ...

    def batched_allocate(
        self,
        shape: Sequence[int],
        /,
        dtype: torch.dtype | None = None,
        fmt: MemoryFormat | None = None,
        count: int = 1,
        *,
        block_tokens: int = 1,
        cached_positions: Sequence[torch.Tensor] | None = None,
    ) -> list[MemoryObj] | None:
        """Writable memory: all of it, or None.

        Either objects of the given sizes in bytes, or `count` objects of one shape, element type
        and format; see `MemoryObjMetadata`.

        Raises:
            TypeError, ValueError: The arguments do not describe a chunk.
        """
        if (dtype is None) != (fmt is None):
            raise TypeError("give dtype and fmt together, or sizes in bytes alone")
        if dtype is None or fmt is None:
            return self._allocate(list(shape), [None] * len(shape))
        one = MemoryObjMetadata(tuple(shape), dtype, fmt, block_tokens)
        each: list[MemoryObjMetadata | None] = [one] * count
        if cached_positions is not None:
            each = [
                replace(one, cached_positions=positions)
                for positions, _ in zip(cached_positions, each, strict=True)
            ]
        return self._allocate([one.nbytes] * count, each)

    def _allocate(
        self, sizes: list[int], metadata: list[MemoryObjMetadata | None]
    ) -> list[MemoryObj] | None:
        objects = None if self._pool is None else self._pool.allocate(sizes)
        if objects is None:
            return None
        return [MemoryObj(raw, what) for raw, what in zip(objects, metadata, strict=True)]

    def put(self, *_: object, **__: object) -> None:
        """There is one way in, and it takes many.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("put is not available; use batched_put, which takes lists")

    def batched_put(
        self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[_native.MemoryObj]
    ) -> None:
        """Seals the objects and gives each to every tier under its key. A known key keeps what it
        has. L1 has them when this returns; the other tiers take them as they can.

        All objects are checked before the first is put: an error leaves none of them stored.

        Raises:
            ValueError: Not as many objects as keys, of another form than the namespace's, or
                memory of another pool.
            BufferError: A memoryview or tensor of an object could still write to it.
            RuntimeError: An object was put before, or is given twice.
        """
        if len(keys) != len(memory_objs):
            raise ValueError(
                f"{len(keys)} keys for {len(memory_objs)} memory objects; give one object a key"
            )
        if self._pool is None:
            return
        self._pool.require_puttable(memory_objs)
        forms = dict(self._forms)
        for key, memory_obj in zip(keys, memory_objs, strict=True):
            self._learn_form(forms, key.namespace, memory_obj)
        self._forms = forms
        for key, memory_obj in zip(keys, memory_objs, strict=True):
            if self._local is None:
                memory_obj.seal()
            else:
                self._local.submit_put_task(key, memory_obj)
        # A pool that was closed meanwhile has sealed nothing.
        ready = [pair for pair in zip(keys, memory_objs, strict=True) if pair[1].sealed]
        for backend in self._lower():
            _offer(backend, [key for key, _ in ready], [memory_obj for _, memory_obj in ready])

    def _lower(self) -> list[StorageBackendInterface]:
        return [backend for backend in self.backends.values() if backend is not self._local]

    def batched_get(
        self, keys: Sequence[CacheEngineKey], location: str | None = None
    ) -> list[MemoryObj | None]:
        """The objects in order; None from the first chunk on that no tier has.

        Neighbouring chunks may come from several tiers. If every chunk arrived, those that came
        from below L1 are in L1 from now on.

        Args:
            keys: The chunks of one chain, in order.
            location: The name of the only tier to ask; all in order unless given.

        Raises:
            ValueError: There is no tier of that name.
        """
        return self._get(keys, location, publish_prefix=False)

    def _get(
        self, keys: Sequence[CacheEngineKey], location: str | None, *, publish_prefix: bool
    ) -> list[MemoryObj | None]:
        """As `batched_get`; with `publish_prefix` what arrived is in L1 if it is not all, too."""
        tiers = self.backends
        if location is not None:
            if location not in tiers:
                raise ValueError(f"there is no tier {location!r}; there are {', '.join(tiers)}")
            tiers = {location: tiers[location]}
        return self._get_from(tiers, keys, publish_prefix=publish_prefix)

    def _get_from(
        self,
        tiers: dict[str, StorageBackendInterface],
        keys: Sequence[CacheEngineKey],
        *,
        publish_prefix: bool | None,
        note: Callable[[str, int, list[MemoryObj], float], None] | None = None,
    ) -> list[MemoryObj | None]:
        with self._publishing:
            num_clears = self._num_clears
        found: list[MemoryObj] = []
        # Those that came from below L1: their places, and the memory to publish.
        below: list[tuple[int, MemoryObj]] = []
        while len(found) < len(keys):
            before = len(found)
            for name, backend in tiers.items():
                rest = keys[len(found) :]
                if backend is self._local:
                    found += self._known(rest, backend.batched_get_blocking(rest))
                else:
                    rest, began = self._up_to_local(rest, tiers), time.perf_counter()
                    arrived = self._from_below(backend, rest)
                    if note is not None:
                        note(name, len(rest), arrived, time.perf_counter() - began)
                    below += enumerate(arrived, len(found))
                    found += arrived
                if len(found) > before:
                    break
            else:
                break
        whole = publish_prefix is not None and len(found) == len(keys)
        publish = bool(publish_prefix) or whole
        gone = self._write_back(keys, below, publish=publish, num_clears=num_clears)
        if gone is not None:
            del found[gone:]
        return [*found, *([None] * (len(keys) - len(found)))]

    def get_prefix(self, keys: Sequence[CacheEngineKey], *, publish: bool) -> list[MemoryObj]:
        """The objects up to the first chunk that no tier has. Those from below L1 are in L1 from
        now on if `publish` says so; otherwise they are the caller's alone."""
        found = self._get_from(self.backends, keys, publish_prefix=publish or None)
        return [memory_obj for memory_obj in found if memory_obj is not None]

    def _known(
        self, keys: Sequence[CacheEngineKey], objects: Iterable[MemoryObj | None]
    ) -> Iterator[MemoryObj]:
        """The objects up to the first gap, with what is known of their namespace."""
        for key, memory_obj in zip(keys, objects, strict=False):
            if memory_obj is None:
                return
            form = self._forms.get(key.namespace, self.form)
            yield _known_as(memory_obj, form) if memory_obj.metadata is None else memory_obj

    def _up_to_local(
        self, keys: Sequence[CacheEngineKey], tiers: dict[str, StorageBackendInterface]
    ) -> Sequence[CacheEngineKey]:
        """The keys before the next one that L1 has: no other tier need read that."""
        local = self._local
        if local is None or L1 not in tiers:
            return keys
        has = (at for at, key in enumerate(keys) if local.contains(key))
        return keys[: next(has, len(keys))]

    def _from_below(
        self,
        backend: StorageBackendInterface,
        keys: Sequence[CacheEngineKey],
        into: LocalCpu | None = None,
    ) -> list[MemoryObj]:
        """What a tier below L1 has of these chunks, up to the first gap: in memory of our pool, or
        of the one given, where the tier leaves the place to us, so that it is published without
        another copy."""
        if not isinstance(backend, BackendTier | NativeTier):
            return list(self._known(keys, backend.batched_get_blocking(keys)))
        arrived = []
        for key, (memory_obj, record) in zip(keys, backend.fetch(keys, into), strict=False):
            form = self._forms.get(key.namespace, self.form)
            if record.form is not None and form not in (None, record.form):
                found = f"a chunk of {record.form} where the namespace holds {form}"
                backend.faults.note("form", "batched_get", found, key=key)
                break
            if record.form is None:
                memory_obj = next(self._known([key], [memory_obj]))
            elif form is None:
                self._forms = {**self._forms, key.namespace: record.form}
            arrived.append(memory_obj)
        return arrived

    def _write_back(
        self,
        keys: Sequence[CacheEngineKey],
        below: list[tuple[int, MemoryObj]],
        *,
        publish: bool,
        num_clears: int,
    ) -> int | None:
        """Publishes what came from below, or seals it; where the first is whose memory a close took
        meanwhile."""
        local, gone = self._local, None
        for at, memory_obj in below:
            if publish and local is not None:
                copies = [memory_obj]
                if memory_obj.sealed:
                    copies = list(allocate_and_copy_objects(local.local_cpu, [memory_obj]))
                with self._publishing:
                    # What was read before a clear does not come back by it.
                    if num_clears == self._num_clears:
                        for each in copies:
                            local.submit_put_task(keys[at], each)
            try:
                if not memory_obj.sealed:
                    memory_obj.seal()
            except RuntimeError:
                gone = at if gone is None else gone
        return gone

    def async_lookup_and_prefetch(
        self,
        lookup_id: str,
        keys: Sequence[CacheEngineKey],
        least_chunks: Mapping[str, int] | None = None,
        room: Room | None = None,
    ) -> Future[Prefetched]:
        """Begins to bring the stored prefix of these chunks into L1, without waiting for any tier.

        What L1 has is not read again. The result is the chunks, held in memory; it is a LOADING
        event of `event_manager` under the lookup id too, and whoever pops that has the chunks to
        let go of. A chunk that no tier gives in its deadline ends the prefix.

        Args:
            lookup_id: For whom.
            keys: The chunks of one chain, in order.
            least_chunks: By tier, how many neighbouring chunks it must have to be read from; one
                unless given.
            room: For how many there is room: where more are missing none is read, and the result
                says how many there are. As many as memory takes unless given.

        Raises:
            ValueError: There is such an event already.
        """
        keys = list(keys)

        def fetch() -> Prefetched:
            by_tier = self._prefix_by_tier(keys, least_chunks)
            # Who has too few of them is not asked for those either.
            tiers = {
                name: tier
                for name, tier in self.backends.items()
                if name in by_tier or name not in (least_chunks or {})
            }

            def note(tier: str, asked: int, arrived: list[MemoryObj], seconds: float) -> None:
                wanted = min(asked, len(by_tier.get(tier, ())))
                num_bytes = sum(memory_obj.nbytes for memory_obj in arrived)
                if wanted:
                    read = TierRead(lookup_id, tier, wanted, len(arrived), num_bytes, seconds)
                    self.reads.note(read)

            num_chunks = sum(len(chunks) for chunks in by_tier.values())
            num_missing = num_chunks - len(by_tier.get(L1, ()))
            if room is not None and num_missing > room.num_chunks():
                return Prefetched(num_stored=num_chunks)
            stored = self._get_from(tiers, keys[:num_chunks], publish_prefix=True, note=note)
            brought = Prefetched(memory_obj for memory_obj in stored if memory_obj is not None)
            if len(brought) < num_chunks and room is not None and room.is_full():
                brought.num_stored = num_chunks
            return brought

        future: Future[Prefetched] = Future()
        # Entered before it begins: an id in use starts nothing.
        self.event_manager.add_event(EventType.LOADING, lookup_id, future)
        self._prefetch.submit(future, fetch, Prefetched())
        return future

    @property
    def has_lower_tiers(self) -> bool:
        """Whether there is any tier but L1."""
        return bool(self._lower())

    def write_through(self, keys: Sequence[CacheEngineKey]) -> None:
        """Offers what L1 has of these chunks to the tiers below, which take them as they can."""
        lower = self._lower()
        if not lower or self._local is None:
            return
        objects = list(self._known(keys, self._local.batched_get_blocking(keys)))
        for backend in lower:
            _offer(backend, keys[: len(objects)], objects)

    def put_below(
        self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[_native.MemoryObj]
    ) -> int:
        """Seals objects and gives them to the tiers below L1 alone; how many are new to the one
        that took most."""
        for memory_obj in memory_objs:
            memory_obj.seal()
        taken = [_offer(backend, keys, memory_objs) for backend in self._lower()]
        return max(taken, default=0)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the pool that chunks go through; 0 without one."""
        return 0 if self._pool is None else self._pool.capacity_bytes

    def layerwise_batched_get(
        self,
        keys: Sequence[CacheEngineKey] | Sequence[Sequence[CacheEngineKey]],
        location: str | None = None,
    ) -> Iterator[list[LayerView | None]]:
        """The chunks layer by layer: for each layer one view a chunk, in the order of the keys.

        Views are pieces of whole chunks, which may lie in several tiers; they hold them. A chunk
        that no tier has, and every chunk behind it, is None in each layer. The chunks are read in
        the first step. Unlike LMCache, what is yielded is there: nothing is left to wait for.

        Args:
            keys: The chunks of one chain; or, as LMCache has it, the keys of each layer's parts,
                layer by layer.
            location: The name of the only tier to ask; all in order unless given.

        Raises:
            ValueError: There is no tier of that name, or the layers' keys are not of one chain.
            RuntimeError: The number of layers is neither given by the keys nor known of the chunks.
        """
        chunk_keys, num_layers = _by_chunk(keys)
        chunks = self.batched_get(chunk_keys, location)
        if num_layers is None:
            first = chunks[0] if chunks else None
            form = self._forms.get(chunk_keys[0].namespace, self.form) if chunk_keys else None
            if first is not None:
                num_layers = first._require_metadata().num_layers
            else:
                num_layers = 0 if form is None else form.num_layers
        for layer in range(num_layers):
            yield [None if chunk is None else chunk.layer(layer, num_layers) for chunk in chunks]

    def _learn_form(
        self, forms: dict[str, StoredForm], namespace: str, memory_obj: _native.MemoryObj
    ) -> None:
        metadata = memory_obj.metadata if isinstance(memory_obj, MemoryObj) else None
        if metadata is None:
            return
        form, known = metadata.form(), forms.get(namespace, self.form)
        if known not in (None, form):
            raise ValueError(
                f"a memory object is {form}, but this namespace holds {known}; "
                "put it under a key that names its form"
            )
        forms[namespace] = form

    def contains(self, key: CacheEngineKey) -> str | None:
        """The name of the first tier that has the chunk."""
        holders = (name for name, backend in self.backends.items() if backend.contains(key))
        return next(holders, None)

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many chunks are stored in some tier, from the first to the first gap."""
        return sum(len(chunks) for chunks in self._prefix_by_tier(keys).values())

    def get_block_mapping(
        self, chunks: Iterable[tuple[CacheEngineKey, int, int]]
    ) -> dict[str, list[tuple[CacheEngineKey, int, int]]]:
        """The stored prefix of `(key, start, end)` chunks, by name of the tier that has them."""
        chunks = list(chunks)
        by_tier = self._prefix_by_tier([key for key, _, _ in chunks])
        return {name: [chunks[position] for position in of] for name, of in by_tier.items()}

    def _prefix_by_tier(
        self, keys: Sequence[CacheEngineKey], least_chunks: Mapping[str, int] | None = None
    ) -> dict[str, list[int]]:
        least_chunks = least_chunks or {}
        mapping: dict[str, list[int]] = {}
        tiers = self.backends
        position = 0
        while position < len(keys):
            for name, backend in tiers.items():
                rest = keys[position:]
                if backend is not self._local:
                    rest = self._up_to_local(rest, tiers)
                # A tier of somebody's own may count what it was not asked for.
                count = min(backend.batched_contains(rest), len(rest))
                if count >= max(1, least_chunks.get(name, 1)):
                    mapping.setdefault(name, []).extend(range(position, position + count))
                    position += count
                    break
            else:
                break
        return mapping

    def clear(self, prefix: str | None = None) -> int:
        """Removes every chunk of every tier, or those whose namespace begins with `prefix`.

        Held objects stay as they are for whoever holds them, and are found no more.

        Args:
            prefix: A text that ends where one of the namespace's fields does: `model=a` is the
                beginning of `model=a@world=1…`, not of `model=ab@…`.

        Returns:
            How many were removed, a chunk in two tiers counted twice.
        """
        with self._publishing:
            self._num_clears += 1
            removed = 0 if self._local is None else self._local.clear(prefix)
        return removed + sum(backend.clear(prefix) for backend in self._lower())

    def retain(self, prefix: str) -> int:
        """Removes every chunk that `clear(prefix)` would leave; how many, as there."""
        with self._publishing:
            self._num_clears += 1
            removed = 0 if self._local is None else self._local.retain(prefix)
        return removed + sum(backend.retain(prefix) for backend in self._lower())

    def flush(self, deadline_s: float = CLOSE_DEADLINE_S) -> bool:
        """Waits until every put submitted before is done; false if the deadline came first."""
        due = time.monotonic() + deadline_s
        flushed = [backend.flush(max(0.0, due - time.monotonic())) for backend in self._lower()]
        return all(flushed)

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters by tier and name."""
        return {name: backend.stats() for name, backend in self.backends.items()}

    def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> bool:
        """Ends the tiers for good, pending puts done first. Idempotent.

        Args:
            deadline_s: Seconds to wait for pending puts, all tiers together.

        Returns:
            False if the deadline came first: what was not put by then is dropped.
        """
        with self._adding:
            self._closed = True
        self._prefetch.close()
        due = time.monotonic() + deadline_s
        in_time = [backend.close(max(0.0, due - time.monotonic())) for backend in self._lower()]
        if self._pool is not None:
            self._pool.close()
        return all(in_time)


def _offer(
    backend: StorageBackendInterface,
    keys: Sequence[CacheEngineKey],
    memory_objs: Sequence[_native.MemoryObj],
) -> int:
    """Puts sealed objects: how many are new. A tier with memory of its own gets copies, as far as
    it has room."""
    if backend.allocator is not None and not all(map(backend.allocator.owns, memory_objs)):
        memory_objs = list(allocate_and_copy_objects(backend.allocator, memory_objs))
    return backend.batched_submit_put_task(keys[: len(memory_objs)], memory_objs)


def allocate_and_copy_objects(
    allocator: LocalCpu, memory_objs: Sequence[_native.MemoryObj]
) -> Iterator[MemoryObj]:
    """Writable copies of objects in another pool, first to last, as far as there is room."""
    for memory_obj in memory_objs:
        allocated = allocator.allocate([memory_obj.nbytes])
        if allocated is None:
            return
        (raw,) = allocated
        with memoryview(cast(Any, raw)) as into:
            into[:] = memoryview(cast(Any, memory_obj))
        positions = memory_obj.positions
        if positions is not None:
            raw.set_positions(memoryview(positions).cast("q").tolist())
        metadata = memory_obj.metadata if isinstance(memory_obj, MemoryObj) else None
        yield MemoryObj(raw, metadata)


def _known_as(memory_obj: MemoryObj, form: StoredForm | None) -> MemoryObj:
    """The object with what is known of its namespace; without, if it was put as mere bytes of
    another form."""
    try:
        return described(memory_obj, form)
    except ValueError:
        return MemoryObj(memory_obj)


def _by_chunk(
    keys: Sequence[CacheEngineKey] | Sequence[Sequence[CacheEngineKey]],
) -> tuple[list[CacheEngineKey], int | None]:
    """The chunks' keys, and the number of layers if the keys are given layer by layer."""
    if not keys or isinstance(keys[0], CacheEngineKey):
        return [_chunk_key(cast(CacheEngineKey, key)) for key in keys], None
    layers = cast("Sequence[Sequence[CacheEngineKey]]", keys)
    chunk_keys = [_chunk_key(key) for key in layers[0]]
    for layer in layers[1:]:
        if [_chunk_key(key) for key in layer] != chunk_keys:
            raise ValueError("the layers name different chunks; give each layer all of them")
    return chunk_keys, len(layers)


def _chunk_key(key: CacheEngineKey) -> CacheEngineKey:
    return key.to_chunk_key() if isinstance(key, LayerCacheEngineKey) else key
