"""How KV tensors lie in memory, by name: the axes of each layout, and what a chunk's bytes are.

A layout's name says what the axes of a tensor mean, nothing more. Where the bytes are is read off
the tensor's own shape and strides, so one name covers every order in which an engine may have put
the same axes into memory. What cannot be read off a tensor is never guessed: with one head or one
token to a block, two orders of axes look alike.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Layout = Literal["split", "split_hnd", "blocks_first", "blocks_first_hnd", "fused", "mla", "opaque"]
LAYOUTS: tuple[Layout, ...] = (
    "split",
    "split_hnd",
    "blocks_first",
    "blocks_first_hnd",
    "fused",
    "mla",
    "opaque",
)

# The axes in the tensor's own order: B blocks, N tokens of a block, K the two planes K and V,
# H heads, D elements of a head, C the elements of K and then of V.
_AXES: Mapping[str, tuple[str, ...]] = {
    "split": ("KBNHD",),
    "split_hnd": ("KBHND",),
    "blocks_first": ("BKNHD",),
    "blocks_first_hnd": ("BKHND",),
    "fused": ("BHNC",),
    "mla": ("BND", "BHND"),
}
_WORDS = {
    "B": "blocks",
    "N": "block",
    "K": "2",
    "H": "heads",
    "D": "head",
    "C": "2 * head",
}


class LayoutError(ValueError):
    """The tensors cannot be what the layout says they are."""


class MemoryFormat(enum.Enum):
    """What the bytes of a chunk are. All but `KV_2LTD` are stored forms, one layer after another.

    `KV_2LTD` is a way to look at a chunk in `KV_T2D`: its tensor is a strided view of the same
    bytes.
    """

    KV_T2D = "tokens, 2, hidden"
    KV_MLA_FMT = "tokens, hidden"
    KV_2LTD = "2, layers, tokens, hidden"
    OPAQUE = "engine blocks"

    @property
    def stored(self) -> MemoryFormat:
        """The form in which the bytes lie."""
        return MemoryFormat.KV_T2D if self is MemoryFormat.KV_2LTD else self


TOKEN_FORMS = frozenset({MemoryFormat.KV_T2D.name, MemoryFormat.KV_MLA_FMT.name})
"""Names of the stored forms in which the engine's block size leaves no trace."""


@dataclass(frozen=True)
class StoredForm:
    """The form of every chunk of one namespace.

    Args:
        fmt: A stored form.
        num_layers: Layers of a chunk.
        hidden: Elements of one token in one plane, or of one block where blocks are opaque.
        dtype: Element type, without the `torch.` prefix.
        block_tokens: Tokens of an opaque block; 1 where tokens are addressable.
    """

    fmt: MemoryFormat
    num_layers: int
    hidden: int
    dtype: str
    block_tokens: int = 1

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        """`[layers, tokens, 2, hidden]`, `[layers, tokens, hidden]` or `[layers, blocks, hidden]`.

        Raises:
            LayoutError: The tokens are no whole number of opaque blocks.
        """
        rows, rest = divmod(num_tokens, self.block_tokens)
        if rest:
            raise LayoutError(
                f"{num_tokens} tokens are no whole number of blocks of {self.block_tokens}; "
                "opaque blocks are only stored whole"
            )
        planes = (2,) if self.fmt is MemoryFormat.KV_T2D else ()
        return (self.num_layers, rows, *planes, self.hidden)

    def num_tokens(self, num_elements: int) -> int:
        """Tokens of a chunk of so many elements."""
        return num_elements // math.prod(self.shape(self.block_tokens)) * self.block_tokens


@dataclass(frozen=True)
class TokenAxes:
    """A layout in which every token has an address. Strides in elements."""

    order: str
    num_blocks: int
    block_tokens: int
    planes: int
    heads: int
    head_size: int
    block_stride: int
    token_stride: int
    plane_stride: int
    head_stride: int

    @property
    def stored_format(self) -> MemoryFormat:
        """The form in which chunks of this layout are stored."""
        return MemoryFormat.KV_T2D if self.planes == 2 else MemoryFormat.KV_MLA_FMT

    @property
    def layout_id(self) -> str:
        """The stored form in full; where the engine had the bytes does not enter it."""
        return f"{self.stored_format.name}-{self.heads}x{self.head_size}"


def require_layout(layout: str) -> None:
    """Raises LayoutError unless the layout has one of the known names."""
    if layout not in LAYOUTS:
        raise LayoutError(f"layout {layout!r} is unknown; known are {', '.join(LAYOUTS)}")


def axes_of(layout: str, rank: int) -> str | None:
    """The letters of the axes of a tensor of this rank; None if the layout has no such rank."""
    return next((axes for axes in _AXES[layout] if len(axes) == rank), None)


def describe(layout: str) -> str:
    """The axes in words, e.g. `[2, blocks, block, heads, head]`."""
    return " or ".join(
        "["
        + ", ".join("1" if (layout, axis) == ("mla", "H") else _WORDS[axis] for axis in axes)
        + "]"
        for axes in _AXES[layout]
    )


def token_axes(layout: str, shape: Sequence[int], strides: Sequence[int]) -> TokenAxes:
    """Reads the axes off a tensor of the given layout.

    Raises:
        LayoutError: The shape or the strides cannot belong to this layout.
    """

    def refused(reason: str) -> LayoutError:
        return LayoutError(
            f"{reason}: layout {layout!r} is {describe(layout)}, found {list(shape)} with strides "
            f"{list(strides)}; name another layout, one of {', '.join(LAYOUTS)}"
        )

    axes = axes_of(layout, len(shape))
    if axes is None:
        raise refused(f"a tensor of {len(shape)} axes")
    size = dict(zip(axes, shape, strict=True))
    stride = dict(zip(axes, strides, strict=True))
    if 0 in shape:
        raise refused("an empty tensor")
    if "C" in axes:
        if size["C"] % 2:
            raise refused("a last axis of odd size holds no K and V of equal size")
        size |= {"K": 2, "D": size["C"] // 2}
        stride |= {"K": size["D"], "D": stride["C"]}
    if size.get("K", 2) != 2:
        raise refused(f"{size['K']} planes where K and V are two")
    if layout == "mla" and size.get("H", 1) != 1:
        raise refused(f"{size['H']} heads where there is one vector a token")
    if stride["D"] != 1 and size["D"] * size.get("K", 1) > 1:
        raise refused("the last axis is not contiguous")
    return TokenAxes(
        order=axes,
        num_blocks=size["B"],
        block_tokens=size["N"],
        planes=size.get("K", 1),
        heads=size.get("H", 1),
        head_size=size["D"],
        block_stride=stride["B"],
        token_stride=stride["N"],
        plane_stride=stride.get("K", 0),
        head_stride=stride.get("H", 0),
    )
