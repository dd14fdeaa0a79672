"""How an engine's rotary position embedding turns its keys; what moving them to others needs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_rs import _native
from lmcache_rs.gpu_connector.registered import RegisteredCache
from lmcache_rs.gpu_connector.registration import slots_of
from lmcache_rs.layouts import MemoryFormat

if TYPE_CHECKING:
    import torch

__all__ = ["Rope"]

# Rows of an engine's table that are compared with the frequencies.
_COMPARED = 1024
# Half a unit in the last place of a value in [0.5, 1], where cosines and sines lie.
_HALF_UNITS = {"float16": 2.0**-12, "bfloat16": 2.0**-9, "float32": 2.0**-25, "float64": 2.0**-54}


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding, by its frequencies.

    Pair `j` of a key at position `m` is turned by `m * inv_freq[j]` (RoFormer, arXiv:2104.09864,
    section 3.2.2), so a key moves from `m` to `n` by a turn of `(n - m) * inv_freq[j]` more. See
    docs/layerwise-connectors.md for the formula and how to get the table of a model.

    Args:
        inv_freq: Inverse frequencies in radians per position, one a pair, scaled as the engine
            scales them; a list or a tensor `[rotary_dim / 2]`.
        interleaved: Pairs are elements `2j, 2j + 1` (GPT-J, DeepSeek); False: `j, j + rotary_dim/2`
            (GPT-NeoX, Llama, Qwen).
        offset: First rotated element of a head. None: 0, and in an MLA latent the last
            `rotary_dim` elements.
        attention_scaling: What the engine's cosines and sines are multiplied with (YaRN). Stored
            keys have it in them, and a shift leaves it as it is; only `require_table` uses it.

    Raises:
        ValueError: A frequency is not finite, or there is none.
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False
    offset: int | None = None
    attention_scaling: float = 1.0

    def __post_init__(self) -> None:
        given: Iterable[float] = self.inv_freq
        if hasattr(given, "tolist"):
            given = given.tolist()
        inv_freq = tuple(float(frequency) for frequency in given)
        if not inv_freq or not all(map(math.isfinite, inv_freq)):
            raise ValueError(
                f"inv_freq is {list(inv_freq)}; give one finite frequency a pair, at least one"
            )
        object.__setattr__(self, "inv_freq", inv_freq)

    @classmethod
    def of_base(cls, base: float, rotary_dim: int, *, interleaved: bool = False) -> Rope:
        """The unscaled embedding: `inv_freq[j] = base ** (-2j / rotary_dim)`.

        Raises:
            ValueError: `rotary_dim` is odd or not positive.
        """
        if rotary_dim < 2 or rotary_dim % 2:
            raise ValueError(f"rotary_dim is {rotary_dim}; pairs need an even number of elements")
        exponents = (-2 * pair / rotary_dim for pair in range(rotary_dim // 2))
        return cls(tuple(base**exponent for exponent in exponents), interleaved)

    @property
    def rotary_dim(self) -> int:
        """Rotated elements of a head."""
        return 2 * len(self.inv_freq)

    def require_table(self, cos_sin_cache: torch.Tensor) -> None:
        """Compares with an engine's table, so that wrong frequencies turn no key.

        The tolerance at position `m` is the table's own rounding plus that of an angle formed in
        single precision: `attention_scaling * (4 * half_unit + 2**-21 * m * inv_freq[j])`.

        Args:
            cos_sin_cache: `[positions, rotary_dim]`, cosines and then sines, as vLLM keeps it.

        Raises:
            ValueError: The table is another one; it says where.
        """
        import torch

        if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] != self.rotary_dim:
            raise ValueError(
                f"a table of {list(cos_sin_cache.shape)} for {len(self.inv_freq)} frequencies; "
                f"it must be [positions, {self.rotary_dim}]"
            )
        num_positions = len(cos_sin_cache)
        step = max(1, num_positions // _COMPARED)
        positions = torch.arange(0, num_positions, step)
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float64)
        angles = positions.double()[:, None] * inv_freq
        wanted = torch.cat([angles.cos(), angles.sin()], dim=1) * self.attention_scaling
        found = cos_sin_cache.detach().cpu()[positions].double()
        half_unit = _HALF_UNITS[str(cos_sin_cache.dtype).removeprefix("torch.")]
        allowed = abs(self.attention_scaling) * (
            4 * half_unit + 2.0**-21 * angles.abs().repeat(1, 2)
        )
        wrong = ~((found - wanted).abs() <= allowed)
        if wrong.any():
            row, column = (int(index[0]) for index in wrong.nonzero(as_tuple=True))
            raise ValueError(
                f"the engine's table has {found[row, column]:.6g} at position "
                f"{int(positions[row])}, column {column}, the frequencies give "
                f"{wanted[row, column]:.6g}; give the engine's own inv_freq and attention_scaling"
            )

    def shift(
        self, registered: RegisteredCache, stored: torch.Tensor, new: torch.Tensor
    ) -> _native.RopeShift | _native.CudaRopeShift:
        """The turn of one row a token in the stored form of these tensors.

        Args:
            registered: The engine's tensors.
            stored: int64 positions that the keys have.
            new: int64 positions that they get.

        Raises:
            ValueError: Heads, element type or positions do not fit; on a GPU float64 does not.
        """
        form = registered.form
        head_size = form.hidden // registered.heads
        offset = self.offset
        if offset is None:
            is_latent = form.fmt is MemoryFormat.KV_MLA_FMT
            offset = max(0, head_size - self.rotary_dim) if is_latent else 0
        return registered.rope_shift(
            self.inv_freq,
            slots_of(stored),
            slots_of(new),
            interleaved=self.interleaved,
            dtype=form.dtype,
            row_elements=form.hidden * (2 if form.fmt is MemoryFormat.KV_T2D else 1),
            heads=registered.heads,
            head_size=head_size,
            offset=offset,
        )
