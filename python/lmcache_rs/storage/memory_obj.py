"""Memory objects: pieces of host memory, what their bytes are, and tensors over them."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

from lmcache_rs import _native
from lmcache_rs.layouts import MemoryFormat, StoredForm

if TYPE_CHECKING:
    import torch


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
        cached_positions: int64 `[num_tokens]`, the positions of the tokens in their prompt, where
            their maker knows them. They stay with the chunk, in every tier.

    Raises:
        ValueError: The shape is none of this format, or the positions are not one int64 a token.
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
        positions = self.cached_positions
        if positions is None:
            return
        if str(positions.dtype) != "torch.int64" or tuple(positions.shape) != (self.num_tokens,):
            raise ValueError(
                f"cached_positions are {positions.dtype} {list(positions.shape)}; give int64 "
                f"[{self.num_tokens}], one position a token"
            )

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
        if metadata is not None and metadata.cached_positions is not None and not of.sealed:
            # They belong to the memory, whoever holds it next.
            made.set_positions(metadata.cached_positions.tolist())
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
        of = self._require_metadata()
        exported = memoryview(cast(Any, self))
        tensor = _tensor_over(exported, of.dtype)
        if of.fmt is MemoryFormat.KV_2LTD:
            planes, layers, tokens, hidden = of.shape
            tensor = tensor.view(layers, tokens, planes, hidden).permute(2, 0, 1, 3)
        else:
            tensor = tensor.view(of.shape)
        return tensor.as_subclass(_sealed_tensor()) if exported.readonly else tensor

    def layer(self, layer_id: int, num_layers: int | None = None) -> LayerView:
        """One layer of the chunk, as a view.

        Args:
            layer_id: The layer, from 0.
            num_layers: Layers of the chunk; the metadata's unless given.

        Raises:
            RuntimeError: The number of layers is not given and there is no metadata.
            ValueError: The chunk has no such layer.
        """
        return LayerView(self, layer_id, num_layers or self._require_metadata().num_layers)

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


class LayerView:
    """One layer of a chunk: the part of its bytes that is that layer's. Holds the whole chunk.

    A chunk lies layer by layer in memory, so this is a piece of it without gaps. It is a view, no
    object of its own: a layer is neither stored nor evicted alone.

    Args:
        chunk: The whole chunk.
        layer_id: The layer, from 0.
        num_layers: Layers of the chunk.

    Raises:
        ValueError: The chunk has no such layer, or its bytes are no whole number of layers.
    """

    def __init__(self, chunk: MemoryObj, layer_id: int, num_layers: int) -> None:
        stated = None if chunk.metadata is None else chunk.metadata.num_layers
        if num_layers < 1 or stated not in (None, num_layers) or chunk.nbytes % num_layers:
            raise ValueError(
                f"a chunk of {chunk.nbytes} bytes and {stated or 'an unknown number of'} layers "
                f"is asked for as one of {num_layers}; ask for the layers that it has"
            )
        if not 0 <= layer_id < num_layers:
            raise ValueError(f"layer {layer_id} is none of {num_layers}; count from 0")
        self.chunk = chunk
        self.layer_id = layer_id
        self.nbytes = chunk.nbytes // num_layers

    @property
    def data(self) -> memoryview:
        """The layer's bytes; read-only once the chunk is sealed."""
        start = self.layer_id * self.nbytes
        return memoryview(cast(Any, self.chunk))[start : start + self.nbytes]

    @property
    def metadata(self) -> MemoryObjMetadata | None:
        """The chunk's metadata; its shape is that of all layers."""
        return self.chunk.metadata

    @property
    def shape(self) -> tuple[int, ...]:
        """`[tokens, 2, hidden]`, `[tokens, hidden]` or `[blocks, elements of a block]`.

        Raises:
            RuntimeError: The chunk has no metadata.
        """
        of = self.chunk._require_metadata()
        return of.form().shape(of.num_tokens)[1:]

    @property
    def tensor(self) -> torch.Tensor:
        """The layer as a tensor of `shape`, without a copy; sealed as the chunk's own is.

        Raises:
            RuntimeError: The chunk has no metadata.
        """
        of, exported = self.chunk._require_metadata(), self.data
        tensor = _tensor_over(exported, of.dtype).view(self.shape)
        return tensor.as_subclass(_sealed_tensor()) if exported.readonly else tensor


def _tensor_over(exported: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over a buffer, which it keeps."""
    import torch

    with warnings.catch_warnings():
        # torch warns of read-only memory, which the tensor's type guards. It lets go of a buffer at
        # once but keeps what it was given: a memoryview holds on.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(exported, dtype=torch.uint8).view(dtype)


def tokens_of(memory_obj: _native.MemoryObj) -> int:
    """Tokens of an object; 0 where it is not known what its bytes are."""
    known = memory_obj if isinstance(memory_obj, MemoryObj) else None
    return 0 if known is None or known.metadata is None else known.num_tokens


def described(
    raw: _native.MemoryObj, form: StoredForm | None, num_tokens: int | None = None
) -> MemoryObj:
    """The memory with what is known of it.

    Args:
        raw: The memory.
        form: The form of the chunks of its namespace, if that is known.
        num_tokens: Tokens of the chunk; read off its size unless given.
    """
    if form is None:
        return MemoryObj(raw)
    import torch

    dtype: torch.dtype = getattr(torch, form.dtype)
    if num_tokens is None:
        num_tokens = form.num_tokens(raw.nbytes // dtype.itemsize)
    positions = raw.positions
    cached_positions = None
    if positions is not None:
        cached_positions = torch.frombuffer(bytearray(positions), dtype=torch.int64)
    metadata = MemoryObjMetadata(
        form.shape(num_tokens), dtype, form.fmt, form.block_tokens, cached_positions
    )
    return MemoryObj(raw, metadata)


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
