"""How an engine's KV tensors lie in memory, and their registration for copies.

Two forms are known. `split`: one tensor a layer, `[2, blocks, block, heads, head]`, K and V apart,
every token with an address. `opaque`: one tensor a layer with the block as its first axis, of which
only whole blocks have a meaning, e.g. vLLM's CPU attention, which packs K across the tokens of a
block in a way no stride shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lmcache_rs import _native

if TYPE_CHECKING:
    import torch

Layout = Literal["split", "opaque"]
LAYOUTS: tuple[Layout, ...] = ("split", "opaque")


class LayoutError(ValueError):
    """The tensors cannot be what the layout says they are."""


@dataclass(frozen=True)
class RegisteredCache:
    """An engine's KV tensors, registered for copies.

    Args:
        native: The registration; keeps the tensors alive.
        layout: Which form they have.
        layout_id: Everything about the form that decides a chunk's bytes, as text.
        block_tokens: Tokens of a block.
        num_blocks: Blocks of each layer.
        num_layers: Registered layers.
        kv_dtype: Element type, without the `torch.` prefix.
    """

    native: _native.PagedCache
    layout: Layout
    layout_id: str
    block_tokens: int
    num_blocks: int
    num_layers: int
    kv_dtype: str


def register(
    kvcaches: Sequence[torch.Tensor], layout: Layout, *, block_tokens: int | None = None
) -> RegisteredCache:
    """Registers one tensor a layer; all layers alike.

    Args:
        kvcaches: The layers' tensors, in host memory.
        layout: `split` or `opaque`.
        block_tokens: Tokens of a block; needed for `opaque`, whose tensors do not show it.

    Raises:
        LayoutError: The tensors differ, are not in host memory, or cannot have this layout.
    """
    if layout not in LAYOUTS:
        raise LayoutError(f"layout {layout!r} is unknown; known are {', '.join(LAYOUTS)}")
    if not kvcaches:
        raise LayoutError("no KV tensor given; give one a layer")
    first = kvcaches[0]
    for number, tensor in enumerate(kvcaches):
        if tensor.device.type != "cpu":
            raise LayoutError(
                f"layer {number} is on {tensor.device}; this version copies KV in host memory only"
            )
        alike = (tensor.shape, tensor.stride(), tensor.dtype)
        if alike != (first.shape, first.stride(), first.dtype):
            raise LayoutError(
                f"layer {number} is {tuple(tensor.shape)} {tensor.dtype}, layer 0 "
                f"{tuple(first.shape)} {first.dtype}; all layers must be alike"
            )
    if layout == "split":
        return _register_split(kvcaches)
    if block_tokens is None or block_tokens < 1:
        raise LayoutError("the opaque layout needs block_tokens, the number of tokens of a block")
    return _register_opaque(kvcaches, block_tokens)


def _register_split(kvcaches: Sequence[torch.Tensor]) -> RegisteredCache:
    first = kvcaches[0]
    if first.dim() != 5 or first.shape[0] != 2:
        raise LayoutError(
            f"a split layer is [2, blocks, block, heads, head], found {list(first.shape)}; "
            "make the engine with another layout"
        )
    _, num_blocks, block_tokens, heads, head_size = first.shape
    element = first.element_size()
    plane, block, token, head, unit = (stride * element for stride in first.stride())
    if unit != element:
        raise LayoutError("the last axis of a KV tensor must be contiguous")
    native = _native.PagedCache.tokens(
        _address_ranges(kvcaches),
        num_blocks,
        block_tokens=block_tokens,
        block_stride=block,
        token_stride=token,
        planes=2,
        plane_stride=plane,
        heads=heads,
        head_stride=head,
        run_bytes=head_size * element,
        keep_alive=tuple(kvcaches),
    )
    # The stored form has the tokens side by side, so the engine's block size does not enter it.
    layout_id = f"tokens-2x{heads}x{head_size}"
    return _registered(native, kvcaches, "split", layout_id, block_tokens, num_blocks)


def _register_opaque(kvcaches: Sequence[torch.Tensor], block_tokens: int) -> RegisteredCache:
    first = kvcaches[0]
    num_blocks, *inner = first.shape
    element = first.element_size()
    # Whole blocks are copied as runs of bytes: within a block nothing may be left out or shared.
    if not first[0].is_contiguous():
        raise LayoutError(
            f"a block of layer 0 is not one run of bytes (strides {first.stride()}); "
            "set the engine's KV layout to one whose blocks are contiguous"
        )
    block_bytes = first[0].numel() * element
    native = _native.PagedCache.opaque(
        _address_ranges(kvcaches),
        num_blocks,
        block_tokens=block_tokens,
        block_bytes=block_bytes,
        block_stride=first.stride(0) * element,
        keep_alive=tuple(kvcaches),
    )
    axes = "x".join(str(size) for size in inner)
    layout_id = f"opaque-{block_tokens}t-{axes}"
    return _registered(native, kvcaches, "opaque", layout_id, block_tokens, num_blocks)


def _registered(
    native: _native.PagedCache,
    kvcaches: Sequence[torch.Tensor],
    layout: Layout,
    layout_id: str,
    block_tokens: int,
    num_blocks: int,
) -> RegisteredCache:
    return RegisteredCache(
        native=native,
        layout=layout,
        layout_id=layout_id,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        num_layers=len(kvcaches),
        kv_dtype=str(kvcaches[0].dtype).removeprefix("torch."),
    )


def _address_ranges(kvcaches: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Address and reach in bytes of each tensor: from its first element to the end of its last."""
    ranges = []
    for tensor in kvcaches:
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        ranges.append((tensor.data_ptr(), (last + 1) * tensor.element_size()))
    return ranges
