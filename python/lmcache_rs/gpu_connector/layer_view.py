"""One layer of a chunk: what the layerwise connectors take, and where its bytes are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lmcache_rs import _native
from lmcache_rs.layouts import LayoutError, StoredForm
from lmcache_rs.storage import LayerView, MemoryObj, MemoryObjMetadata

if TYPE_CHECKING:
    import torch

__all__ = ["Piece", "by_layer", "pieces_of"]

Piece = tuple[Any, int, int]
"""Memory, the first byte in it, and a number of bytes."""


def by_layer(memory_objs: Sequence[MemoryObj]) -> Iterator[list[LayerView]]:
    """Whole chunks as lists of views, one list a layer.

    Raises:
        ValueError: The chunks differ in their layers.
        RuntimeError: A chunk has no metadata.
    """
    counts = {memory_obj._require_metadata().num_layers for memory_obj in memory_objs}
    if len(counts) > 1:
        raise ValueError(f"chunks of {sorted(counts)} layers; all must have the same number")
    for layer_id in range(max(counts, default=0)):
        yield [memory_obj.layer(layer_id) for memory_obj in memory_objs]


def pieces_of(
    views: Sequence[Any],
    layer: int,
    sizes: Sequence[int],
    form: StoredForm,
    *,
    writable: bool,
) -> list[Piece]:
    """Where the bytes of one layer of each chunk are.

    Args:
        views: For each chunk its `LayerView`, a memory object of that layer alone, a tensor, or a
            contiguous buffer.
        layer: The layer they must be.
        sizes: Bytes of each chunk in one layer.
        form: The stored form of the engine's tensors.
        writable: Whether they are to be filled.

    Raises:
        ValueError, LayoutError: One is not this layer of its chunk.
        RuntimeError: One is to be filled and is sealed.
    """
    if len(views) != len(sizes):
        raise ValueError(
            f"layer {layer} comes with {len(views)} memory objects for {len(sizes)} chunks; "
            "give one a chunk"
        )
    return [
        _piece(view, layer, nbytes, form, writable)
        for view, nbytes in zip(views, sizes, strict=True)
    ]


def _piece(view: Any, layer: int, nbytes: int, form: StoredForm, writable: bool) -> Piece:
    if isinstance(view, _native.MemoryObj):
        _require_form(getattr(view, "metadata", None), replace(form, num_layers=1))
        _require_size(view.nbytes, nbytes, layer)
        return view, 0, nbytes
    if view is None:
        raise ValueError(
            f"a chunk of layer {layer} is not there; load those that are stored, each with its span"
        )
    if isinstance(view, LayerView):
        chunk = view.chunk
        if view.layer_id != layer:
            raise ValueError(f"a view of layer {view.layer_id} is given where layer {layer} is due")
        _require_form(chunk.metadata, form)
        _require_size(view.nbytes, nbytes, layer)
        return chunk, layer * nbytes, nbytes
    if hasattr(view, "detach"):
        view = _bytes_of_tensor(view, form, writable)
    buffer = memoryview(view)
    _require_size(buffer.nbytes, nbytes, layer)
    return buffer.cast("B"), 0, nbytes


def _require_form(metadata: MemoryObjMetadata | None, form: StoredForm) -> None:
    if metadata is not None and metadata.form() != form:
        raise LayoutError(
            f"a memory object is {metadata.form()}, the KV tensors are {form}; "
            "allocate it with the shape of get_shape(num_tokens)"
        )


def _require_size(found: int, nbytes: int, layer: int) -> None:
    if found != nbytes:
        raise ValueError(
            f"memory of {found} bytes for layer {layer} of a chunk, which takes {nbytes}; "
            "give one layer of the chunk"
        )


def _bytes_of_tensor(tensor: torch.Tensor, form: StoredForm, writable: bool) -> Any:
    import torch

    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on {tensor.device}; give one in host memory")
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in (form.dtype, "uint8"):
        raise LayoutError(f"a tensor of {name} for KV of {form.dtype}; give {form.dtype} or uint8")
    tensor = tensor.detach()
    if writable:
        if not tensor.is_contiguous():
            raise ValueError("a tensor to be filled has gaps in memory; give a contiguous one")
        with torch.inference_mode():
            # Nothing is written; a tensor over sealed memory says here that it is none to fill.
            tensor.view(-1)[:0].zero_()
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()
