"""An engine's KV tensors: their registration for copies, and the trial of it.

A registration is only good once it has been tried: random bytes are written through torch, and what
our copies gather and scatter must be what torch's own indexing says. A layout of addressable
tokens that fails is copied in whole blocks where blocks are certain, and refused otherwise.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmcache_rs import _native
from lmcache_rs.gpu_connector import residence
from lmcache_rs.gpu_connector.registered import RegisteredCache
from lmcache_rs.layouts import (
    Layout,
    LayoutError,
    MemoryFormat,
    StoredForm,
    TokenAxes,
    require_layout,
    token_axes,
)

if TYPE_CHECKING:
    import torch

__all__ = ["RegisteredCache", "identity", "int64_tensor", "register", "slots_of"]

logger = logging.getLogger("lmcache_rs")
# Slots tried at registration: half of them gathered from, the others scattered to.
_TRIED_SLOTS = 6


def register(
    kvcaches: Sequence[torch.Tensor],
    layout: Layout,
    *,
    block_tokens: int | None = None,
    copy_threads: int | None = None,
) -> RegisteredCache:
    """Registers one tensor a layer, all layers alike, and tries the registration.

    The trial overwrites a few blocks and restores them: nothing else may use the tensors meanwhile.

    Args:
        kvcaches: The layers' tensors, in host memory or all on one GPU.
        layout: What their axes mean; see docs/layouts.md.
        block_tokens: Tokens of a block; needed for `opaque`, whose tensors do not show it.
        copy_threads: How many threads a large copy may use, the caller's own included; unset: four.

    Raises:
        LayoutError: The tensors differ, are elsewhere, or cannot have this layout.
        CudaError: They are on a GPU, and its driver cannot be used; the text says what to change.
    """
    require_layout(layout)
    _require_alike(kvcaches)
    if layout == "opaque":
        if block_tokens is None or block_tokens < 1:
            raise LayoutError(
                "the opaque layout needs block_tokens, the number of tokens of a block"
            )
        return _register_opaque(kvcaches, block_tokens, copy_threads)
    first = kvcaches[0]
    axes = token_axes(layout, first.shape, first.stride())
    if block_tokens not in (None, axes.block_tokens):
        raise LayoutError(
            f"block_size is {block_tokens}, but a block of layout {layout!r} of "
            f"{list(first.shape)} has {axes.block_tokens} tokens; state that or leave it out"
        )
    try:
        registered = _register_tokens(kvcaches, layout, axes, copy_threads)
        _try_tokens(registered, kvcaches, axes)
    except (LayoutError, ValueError) as error:
        return _fall_back(kvcaches, layout, axes, copy_threads, str(error))
    return registered


def _require_alike(kvcaches: Sequence[torch.Tensor]) -> None:
    if not len(kvcaches):
        raise LayoutError("no KV tensor given; give one a layer")
    first = kvcaches[0]
    where = residence.of(first)
    if where.device_type not in ("cpu", "cuda"):
        raise LayoutError(
            f"layer 0 is on {first.device}; KV is copied in host memory and on CUDA GPUs only"
        )
    for number, tensor in enumerate(kvcaches):
        if residence.of(tensor)[:2] != where[:2]:
            raise LayoutError(
                f"layer {number} is on {tensor.device}, layer 0 on {first.device}; all layers must "
                "be on one device"
            )
        alike = (tensor.shape, tensor.stride(), tensor.dtype)
        if alike != (first.shape, first.stride(), first.dtype):
            raise LayoutError(
                f"layer {number} is {tuple(tensor.shape)} {tensor.dtype}, layer 0 "
                f"{tuple(first.shape)} {first.dtype}; all layers must be alike"
            )


def _register_tokens(
    kvcaches: Sequence[torch.Tensor], layout: Layout, axes: TokenAxes, copy_threads: int | None
) -> RegisteredCache:
    element = kvcaches[0].element_size()
    native = _registered(
        kvcaches,
        "tokens",
        axes.num_blocks,
        copy_threads,
        block_tokens=axes.block_tokens,
        block_stride=axes.block_stride * element,
        token_stride=axes.token_stride * element,
        planes=axes.planes,
        plane_stride=axes.plane_stride * element,
        heads=axes.heads,
        head_stride=axes.head_stride * element,
        run_bytes=axes.head_size * element,
    )
    form = StoredForm(
        fmt=axes.stored_format,
        num_layers=len(kvcaches),
        hidden=axes.heads * axes.head_size,
        dtype=_dtype_name(kvcaches[0]),
    )
    return RegisteredCache(
        native,
        layout,
        axes.layout_id,
        form,
        axes.block_tokens,
        axes.num_blocks,
        axes.heads,
        tensor=kvcaches[0],
    )


def _registered(
    kvcaches: Sequence[torch.Tensor],
    kind: str,
    num_blocks: int,
    copy_threads: int | None,
    **numbers: int,
) -> _native.PagedCache | _native.CudaCache:
    """The native registration, where the tensors are."""
    where = residence.of(kvcaches[0])
    ranges, owners = _address_ranges(kvcaches), _owners(kvcaches)
    if where.device_type == "cuda":
        device = _native.CudaDevice(where.ordinal)
        for notice in device.take_notices():
            logger.warning("lmcache_rs: %s", notice)
        on_gpu = getattr(_native.CudaCache, kind)
        native: _native.CudaCache = on_gpu(device, ranges, num_blocks, keep_alive=owners, **numbers)
        return native
    in_host = getattr(_native.PagedCache, kind)
    paged: _native.PagedCache = in_host(
        ranges, num_blocks, keep_alive=owners, copy_threads=copy_threads, **numbers
    )
    return paged


def _fall_back(
    kvcaches: Sequence[torch.Tensor],
    layout: Layout,
    axes: TokenAxes,
    copy_threads: int | None,
    reason: str,
) -> RegisteredCache:
    try:
        if axes.order[0] != "B":
            raise LayoutError("a block is not one run of bytes")
        registered = _register_opaque(kvcaches, axes.block_tokens, copy_threads, reason)
    except (LayoutError, ValueError) as error:
        raise LayoutError(
            f"layout {layout!r} cannot be certified: {reason}; nor can whole blocks: {error}; "
            "use an engine layout whose blocks are contiguous, or name the layout it has"
        ) from error
    logger.warning(
        "lmcache_rs: layout %r cannot be certified (%s); KV is copied in whole blocks of %d tokens",
        layout,
        reason,
        axes.block_tokens,
    )
    return registered


def _register_opaque(
    kvcaches: Sequence[torch.Tensor],
    block_tokens: int,
    copy_threads: int | None,
    reason: str | None = None,
) -> RegisteredCache:
    first = kvcaches[0]
    num_blocks, *inner = first.shape if first.dim() else (0,)
    # Whole blocks are copied as runs of bytes: within a block nothing may be left out or shared.
    if not num_blocks or not inner or not first[0].is_contiguous():
        raise LayoutError(
            f"a block of layer 0 is not one run of bytes ({list(first.shape)} with strides "
            f"{list(first.stride())}); set the engine's KV layout to one whose blocks are "
            "contiguous"
        )
    element = first.element_size()
    native = _registered(
        kvcaches,
        "opaque",
        num_blocks,
        copy_threads,
        block_tokens=block_tokens,
        block_bytes=first[0].numel() * element,
        block_stride=first.stride(0) * element,
    )
    form = StoredForm(
        fmt=MemoryFormat.OPAQUE,
        num_layers=len(kvcaches),
        hidden=first[0].numel(),
        dtype=_dtype_name(first),
        block_tokens=block_tokens,
    )
    axes = "x".join(str(size) for size in inner)
    registered = RegisteredCache(
        native,
        "opaque",
        f"OPAQUE-{block_tokens}t-{axes}",
        form,
        block_tokens,
        num_blocks,
        fallback_reason=reason,
        tensor=first,
    )
    _try_blocks(registered, kvcaches)
    return registered


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _owners(kvcaches: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """What keeps the tensors' memory: a tensor may be given another (`.data = …`, `set_`), and then
    holds its old one no more."""
    return tuple((tensor, tensor.untyped_storage()) for tensor in kvcaches)


def _address_ranges(kvcaches: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Address and reach in bytes of each tensor: from its first element to the end of its last."""
    ranges = []
    for tensor in kvcaches:
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        ranges.append((tensor.data_ptr(), (last + 1) * tensor.element_size()))
    return ranges


# --- the trial --------------------------------------------------------------------------------


def _token_view(tensor: torch.Tensor, axes: TokenAxes) -> torch.Tensor:
    """The bytes of a layer as torch sees them: `[blocks, block, planes, heads, run]`, a view."""
    import torch

    order = axes.order
    view = tensor.view(torch.uint8)
    if "C" in order:
        view = view.unfold(-1, view.shape[-1] // 2, view.shape[-1] // 2)
        order = order.replace("C", "KD")
    view = view.permute([order.index(axis) for axis in "BNKHD" if axis in order])
    for place, axis in enumerate("BNKHD"):
        if axis not in order:
            view = view.unsqueeze(place)
    return view


def _try_tokens(
    registered: RegisteredCache, kvcaches: Sequence[torch.Tensor], axes: TokenAxes
) -> None:
    """Raises LayoutError unless gather and scatter of some slots equal torch's own indexing."""
    import torch

    slots = torch.tensor(_some_of(axes.num_blocks * axes.block_tokens))
    block_ids = torch.unique(slots // axes.block_tokens)
    # A single slot can only be read.
    sources, targets = slots[: -(-len(slots) // 2)], slots[-(-len(slots) // 2) :]

    def rows(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.searchsorted(block_ids, slots // axes.block_tokens), slots % axes.block_tokens

    # vLLM's tensors are made in inference mode and can only be written there.
    with torch.inference_mode():
        views = [_token_view(tensor, axes) for tensor in kvcaches]
        held = [view[block_ids] for view in views]
        try:
            noise = [torch.randint_like(blocks, 256) for blocks in held]
            for view, blocks in zip(views, noise, strict=True):
                view[block_ids] = blocks
            expected = torch.stack([blocks[rows(sources)] for blocks in noise])
            scratch = _scratch(registered, len(sources))
            registered.gather([scratch], [0], [len(sources)], slots_of(sources))
            if scratch.to_bytes() != expected.cpu().numpy().tobytes():
                raise LayoutError("gathered tokens are not what the tensor has at their slots")
            if not len(targets):
                return
            scratch = _scratch(registered, len(targets))
            registered.gather([scratch], [0], [len(targets)], slots_of(sources[: len(targets)]))
            registered.scatter([scratch], [0], [len(targets)], slots_of(targets))
            registered.settle()
            for view, blocks, layer in zip(views, noise, expected, strict=True):
                blocks[rows(targets)] = layer[: len(targets)]
                if not torch.equal(view[block_ids], blocks):
                    raise LayoutError("scattered tokens are not what the tensor has at their slots")
        finally:
            for view, blocks in zip(views, held, strict=True):
                view[block_ids] = blocks


def _try_blocks(registered: RegisteredCache, kvcaches: Sequence[torch.Tensor]) -> None:
    """Raises LayoutError unless gather and scatter of a block equal torch's own indexing."""
    import torch

    some = _some_of(registered.num_blocks)
    blocks = sorted({some[0], some[len(some) // 2], some[-1]})
    source, target = blocks[0], blocks[-1]
    tokens = registered.block_tokens
    with torch.inference_mode():
        # Layer by layer, the bytes of each tried block, as views.
        views = [
            [layer[block].view(-1).view(torch.uint8) for block in blocks] for layer in kvcaches
        ]
        held = [[block.clone() for block in layer] for layer in views]
        try:
            for layer in views:
                for block in layer:
                    block.copy_(torch.randint_like(block, 256))
            expected = [[block.clone() for block in layer] for layer in views]
            scratch = _scratch(registered, tokens)
            slots = torch.arange(tokens)
            registered.gather([scratch], [0], [tokens], slots_of(slots + source * tokens))
            gathered = torch.stack([layer[0] for layer in expected])
            if scratch.to_bytes() != gathered.cpu().numpy().tobytes():
                raise LayoutError("a gathered block is not what the tensor has there")
            registered.scatter([scratch], [0], [tokens], slots_of(slots + target * tokens))
            registered.settle()
            for layer, wanted in zip(views, expected, strict=True):
                wanted[-1] = wanted[0]
                if not all(map(torch.equal, layer, wanted)):
                    raise LayoutError("a scattered block is not what the tensor has there")
        finally:
            for layer, was in zip(views, held, strict=True):
                for block, bytes_before in zip(layer, was, strict=True):
                    block.copy_(bytes_before)


def _some_of(count: int) -> list[int]:
    """Some places out of `count`, each once, the first and the last among them."""
    inner = range(1, count - 1)
    chosen = [0, *random.Random(count).sample(inner, min(_TRIED_SLOTS - 2, len(inner)))]
    return chosen + ([count - 1] if count > 1 else [])


def _scratch(registered: RegisteredCache, num_tokens: int) -> _native.MemoryObj:
    """Memory for so many tokens, in a pool of its own."""
    nbytes = registered.native.chunk_bytes(num_tokens)
    objects = _native.LocalCpu(nbytes + (1 << 16), 1000).allocate([nbytes])
    assert objects is not None, "the pool is larger than what is asked of it"
    return objects[0]


# --- for engines that move memory objects themselves --------------------------------------------


def identity(kvcaches: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """Tells one set of KV tensors from another: where they lie and how.

    Raises:
        TypeError: They are no tensors.
    """
    for tensor in kvcaches:
        if not hasattr(tensor, "data_ptr"):
            raise TypeError(
                f"kvcaches has a {type(tensor).__name__} where a tensor is due; give the tensors "
                "themselves, one a layer"
            )
    return tuple((t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in kvcaches)


def int64_tensor(values: torch.Tensor | Sequence[int], what: str) -> torch.Tensor:
    """One int64 a token, as a tensor in host memory.

    Raises:
        ValueError, TypeError: More than one axis, or another element type.
    """
    import torch

    tensor = torch.as_tensor(values).detach().cpu()
    if tensor.dim() != 1:
        raise ValueError(f"{what} must have one dimension, got {tensor.dim()}")
    if tensor.dtype != torch.int64 and tensor.numel():
        raise TypeError(f"{what} has dtype {tensor.dtype}; it must be int64")
    return tensor.to(torch.int64)


def slots_of(slot_mapping: torch.Tensor | Sequence[int], num_tokens: int | None = None) -> Any:
    """The slot mapping as int64 in host memory.

    Raises:
        ValueError, TypeError: Another length than `num_tokens`, or another element type.
    """
    if num_tokens is not None and len(slot_mapping) != num_tokens:
        raise ValueError(
            f"slot_mapping has {len(slot_mapping)} entries for {num_tokens} tokens; "
            "give one a token"
        )
    if hasattr(slot_mapping, "detach"):
        slots = slot_mapping.detach().cpu().numpy()
        if str(slots.dtype) != "int64":
            raise TypeError(f"slot_mapping has dtype {slots.dtype}; it must be int64")
        return slots
    return slot_mapping
