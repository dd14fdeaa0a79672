"""The tiers as one store: `StorageManager`, and the memory objects that move through it."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast, overload

from lmcache_rs import _native
from lmcache_rs._native import LocalCpu
from lmcache_rs.config import LMCacheEngineConfig
from lmcache_rs.key import HASH_BYTES
from lmcache_rs.layouts import MemoryFormat, StoredForm

if TYPE_CHECKING:
    import torch

    from lmcache_rs.key import CacheEngineKey

__all__ = [
    "LocalCPUBackend",
    "MemoryFormat",
    "MemoryObj",
    "MemoryObjMetadata",
    "StorageManager",
]


@dataclass(frozen=True)
class MemoryObjMetadata:
    """What the bytes of a memory object are.

    Args:
        shape: `[layers, tokens, 2, hidden]` for `KV_T2D`, `[layers, tokens, hidden]` for
            `KV_MLA_FMT`, `[2, layers, tokens, hidden]` for `KV_2LTD`, `[layers, blocks, elements of
            a block]` for `OPAQUE`.
        dtype: Element type.
        fmt: How the object is looked at; the bytes lie in `fmt.stored` in any case.
        block_tokens: Tokens of an opaque block; 1 otherwise.
        cached_positions: Positions of the tokens in their prompt, where their maker knows them.

    Raises:
        ValueError: The shape is none of this format.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fmt: MemoryFormat
    block_tokens: int = 1
    cached_positions: torch.Tensor | None = None

    def __post_init__(self) -> None:
        ranks = {MemoryFormat.KV_T2D: 4, MemoryFormat.KV_2LTD: 4}
        planes = {MemoryFormat.KV_T2D: 2, MemoryFormat.KV_2LTD: 0}.get(self.fmt)
        wrong_rank = len(self.shape) != ranks.get(self.fmt, 3)
        if wrong_rank or (planes is not None and self.shape[planes] != 2):
            raise ValueError(
                f"shape {list(self.shape)} is none of {self.fmt.name}, which is layer by layer "
                f"[{self.fmt.value}]; give the shape or the format that fits"
            )
        if min(self.shape) < 1 or self.block_tokens < 1:
            raise ValueError(f"shape {list(self.shape)} holds nothing; every axis needs 1 or more")

    @property
    def num_layers(self) -> int:
        """Layers of the chunk."""
        return self.shape[1] if self.fmt is MemoryFormat.KV_2LTD else self.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        rows = self.shape[2] if self.fmt is MemoryFormat.KV_2LTD else self.shape[1]
        return rows * self.block_tokens

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def form(self) -> StoredForm:
        """The form in which the bytes lie, whatever their number of tokens."""
        dtype = str(self.dtype).removeprefix("torch.")
        return StoredForm(
            self.fmt.stored, self.num_layers, self.shape[-1], dtype, self.block_tokens
        )


class MemoryObj(_native.MemoryObj):
    """A ref-counted piece of host memory: writable until it is put, immutable from then on.

    It is a buffer (`memoryview(obj)`); with metadata it is also a tensor.

    Args:
        of: The handle whose memory this one shares.
        metadata: What the bytes are; None if nobody knows.

    Raises:
        ValueError: The metadata describes another number of bytes.
    """

    metadata: MemoryObjMetadata | None

    def __new__(cls, of: _native.MemoryObj, metadata: MemoryObjMetadata | None = None) -> Self:
        if metadata is not None and metadata.nbytes != of.nbytes:
            raise ValueError(
                f"a memory object of {of.nbytes} bytes cannot be {list(metadata.shape)} of "
                f"{metadata.dtype}, which takes {metadata.nbytes}"
            )
        made = super().__new__(cls, of)
        made.metadata = metadata
        return made

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes as a tensor of the metadata's shape, without a copy.

        `KV_2LTD` is a strided view of the stored form. While a tensor of a writable object lives,
        the object cannot be put. An operation of torch that would write to the tensor of a sealed
        object, or to a view of it, raises RuntimeError.

        Raises:
            RuntimeError: The object has no metadata.
        """
        import torch

        of = self._require_metadata()
        # torch lets go of a buffer at once but keeps what it was given: a memoryview holds on.
        exported = memoryview(cast(Any, self))
        with warnings.catch_warnings():
            # torch warns of read-only memory, which the tensor's type guards.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            tensor = torch.frombuffer(exported, dtype=torch.uint8).view(of.dtype)
        if of.fmt is MemoryFormat.KV_2LTD:
            planes, layers, tokens, hidden = of.shape
            tensor = tensor.view(layers, tokens, planes, hidden).permute(2, 0, 1, 3)
        else:
            tensor = tensor.view(of.shape)
        return tensor.as_subclass(_sealed_tensor()) if exported.readonly else tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The metadata's shape."""
        return self._require_metadata().shape

    @property
    def dtype(self) -> torch.dtype:
        """The metadata's element type."""
        return self._require_metadata().dtype

    @property
    def fmt(self) -> MemoryFormat:
        """The metadata's format."""
        return self._require_metadata().fmt

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self._require_metadata().num_tokens

    @property
    def cached_positions(self) -> torch.Tensor | None:
        """Positions of the tokens in their prompt, where their maker knows them."""
        return self._require_metadata().cached_positions

    def _require_metadata(self) -> MemoryObjMetadata:
        if self.metadata is None:
            raise RuntimeError(
                "this memory object was allocated in bytes and has no shape; allocate it with "
                "shape, dtype and fmt, or put objects that have them under its namespace"
            )
        return self.metadata


# Operations that write without the underscore that names the others.
_WRITERS = frozenset(
    [
        "__set__",
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__ifloordiv__",
        "__imod__",
        "__ipow__",
        "__iand__",
        "__ior__",
        "__ixor__",
        "__ilshift__",
        "__irshift__",
    ]
)


@functools.cache
def _sealed_tensor() -> type[torch.Tensor]:
    """The type of tensors over sealed memory; torch itself has no read-only tensors."""
    import torch

    class SealedTensor(torch.Tensor):
        """A tensor over memory that others read: it and its views are not written."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            name = getattr(func, "__name__", "")
            writes = name in _WRITERS or (name.endswith("_") and not name.endswith("__"))
            into = [args[0]] if writes and args else []
            out = kwargs.get("out")
            into += out if isinstance(out, tuple | list) else [out]
            if any(isinstance(target, cls) for target in into):
                raise RuntimeError(
                    f"{name} would write to memory that was put, which is sealed; change a clone()"
                )
            with torch._C.DisableTorchFunctionSubclass():
                return _views_as(cls, func(*args, **kwargs), args[0] if args else None)

    return SealedTensor


def _views_as(kind: type[torch.Tensor], result: Any, of: Any) -> Any:
    """The result, with the tensors in it that share the memory of a sealed one sealed too."""
    import torch

    if isinstance(result, tuple | list) and type(result) in (tuple, list):
        return type(result)(_views_as(kind, item, of) for item in result)
    is_view = (
        isinstance(result, torch.Tensor)
        and isinstance(of, kind)
        and result.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
    )
    return result.as_subclass(kind) if is_view else result


class LocalCPUBackend:
    """L1: host memory. Evicts by the policy it was made with, never what somebody holds."""

    def __init__(self, local_cpu: LocalCpu) -> None:
        self.local_cpu = local_cpu

    def __str__(self) -> str:
        return "LocalCPUBackend"

    def contains(self, key: CacheEngineKey) -> bool:
        """Whether the chunk is stored."""
        return self.local_cpu.longest_prefix(key.namespace, key.chunk_hash) == 1

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many chunks are stored, from the first to the first gap."""
        count = 0
        for namespace, hashes in _runs(keys):
            found = self.local_cpu.longest_prefix(namespace, hashes)
            count += found
            if found < len(hashes) // HASH_BYTES:
                break
        return count

    def submit_put_task(self, key: CacheEngineKey, memory_obj: _native.MemoryObj) -> bool:
        """Seals and publishes memory that this backend allocated; false if the key was known."""
        return self.local_cpu.put(key.namespace, key.chunk_hash, memory_obj)

    def batched_get_blocking(
        self, keys: Sequence[CacheEngineKey]
    ) -> list[_native.MemoryObj | None]:
        """The objects in order, `None` where a chunk is not stored."""
        found = (self.local_cpu.get(key.namespace, key.chunk_hash) for key in keys)
        return [objects[0] if objects else None for objects in found]

    def remove(self, key: CacheEngineKey) -> bool:
        """Forgets a chunk; whether it was there."""
        return self.local_cpu.remove(key.namespace, key.chunk_hash)


class StorageManager:
    """The tiers in order, as one store.

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
        if local_cpu is None and config.local_cpu:
            local_cpu = LocalCpu(
                config.max_local_cpu_bytes, config.lease_timeout_ms, config.cache_policy
            )
        self._local_cpu = local_cpu
        self._form = form
        # What was put under a namespace: all chunks of one are alike but for their tokens.
        self._forms: dict[str, StoredForm] = {}
        self.backends: dict[str, LocalCPUBackend] = {}
        if local_cpu is not None:
            self.backends["LocalCPUBackend"] = LocalCPUBackend(local_cpu)

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
        if self._local_cpu is None:
            return None
        objects = self._local_cpu.allocate(sizes)
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
        """Seals the objects and publishes each under its key. A known key keeps what it has.

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
        for backend in self.backends.values():
            backend.local_cpu.require_puttable(memory_objs)
        forms = dict(self._forms)
        for key, memory_obj in zip(keys, memory_objs, strict=True):
            self._learn_form(forms, key.namespace, memory_obj)
        self._forms = forms
        for key, memory_obj in zip(keys, memory_objs, strict=True):
            for backend in self.backends.values():
                backend.submit_put_task(key, memory_obj)

    def batched_get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """The objects in order; None from the first chunk on that no tier has."""
        found: list[_native.MemoryObj | None] = []
        for backend in self.backends.values():
            found = backend.batched_get_blocking(keys)
        gap = found.index(None) if None in found else len(found)
        described = [
            self._described(key.namespace, raw)
            for key, raw in zip(keys, found[:gap], strict=False)
            if raw is not None
        ]
        return [*described, *([None] * (len(keys) - gap))]

    def _learn_form(
        self, forms: dict[str, StoredForm], namespace: str, memory_obj: _native.MemoryObj
    ) -> None:
        metadata = getattr(memory_obj, "metadata", None)
        if metadata is None:
            return
        form, known = metadata.form(), forms.get(namespace, self._form)
        if known not in (None, form):
            raise ValueError(
                f"a memory object is {form}, but this namespace holds {known}; "
                "put it under a key that names its form"
            )
        forms[namespace] = form

    def _described(self, namespace: str, raw: _native.MemoryObj) -> MemoryObj:
        """The object with the metadata of its namespace, as far as they are known."""
        form = self._forms.get(namespace, self._form)
        if form is None:
            return MemoryObj(raw)
        import torch

        dtype: torch.dtype = getattr(torch, form.dtype)
        num_tokens = form.num_tokens(raw.nbytes // dtype.itemsize)
        return MemoryObj(
            raw, MemoryObjMetadata(form.shape(num_tokens), dtype, form.fmt, form.block_tokens)
        )

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

    def _prefix_by_tier(self, keys: Sequence[CacheEngineKey]) -> dict[str, list[int]]:
        mapping: dict[str, list[int]] = {}
        position = 0
        while position < len(keys):
            for name, backend in self.backends.items():
                count = backend.batched_contains(keys[position:])
                if count:
                    mapping.setdefault(name, []).extend(range(position, position + count))
                    position += count
                    break
            else:
                break
        return mapping

    def clear(self) -> int:
        """Removes every chunk of every tier; how many there were."""
        return 0 if self._local_cpu is None else self._local_cpu.clear()

    def close(self) -> None:
        """Empties the tiers for good. Idempotent."""
        if self._local_cpu is not None:
            self._local_cpu.close()


def _runs(keys: Sequence[CacheEngineKey]) -> Iterable[tuple[str, bytes]]:
    """Neighbouring keys of one namespace as packed hashes, so that each run is one call."""
    start = 0
    while start < len(keys):
        namespace = keys[start].namespace
        end = start + 1
        while end < len(keys) and keys[end].namespace == namespace:
            end += 1
        yield namespace, b"".join(key.chunk_hash for key in keys[start:end])
        start = end
