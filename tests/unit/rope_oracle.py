"""Rotary position embedding in double precision, in torch, and what rounding may add to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from lmcache_rs.gpu_connector import Rope

# Half a unit in the last place, relative, and of the smallest numbers.
HALF_UNITS = {
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float32: (2.0**-24, 2.0**-150),
    torch.float64: (2.0**-53, 0.0),
}
# Three roundings of a sum of two products in single precision: factor, product, sum.
SINGLE = 3 * 2.0**-24


@dataclass(frozen=True)
class Family:
    """A model family's rotary embedding: its own formula here, and vLLM's name for it."""

    heads: int
    head_size: int
    rope: Rope
    vllm: dict[str, Any] = field(hash=False)

    @property
    def offset(self) -> int:
        return self.rope.offset or 0


def plain(base: float, rotary_dim: int) -> list[float]:
    return [1.0 / base ** (2 * pair / rotary_dim) for pair in range(rotary_dim // 2)]


def llama3(base: float, rotary_dim: int, factor: float, low: float, high: float, was: int) -> Any:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    scaled = []
    for frequency in plain(base, rotary_dim):
        wavelength = 2 * math.pi / frequency
        share = (was / wavelength - low) / (high - low)
        share = min(1.0, max(0.0, share))
        scaled.append((1 - share) * frequency / factor + share * frequency)
    return scaled


def yarn(base: float, rotary_dim: int, factor: float, fast: float, slow: float, was: int) -> Any:
    """YaRN (arXiv:2309.00071): a ramp over the pairs between `fast` and `slow` turns of `was`."""

    def pair_of(turns: float) -> float:
        return rotary_dim * math.log(was / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair_of(fast)), 0), min(math.ceil(pair_of(slow)), rotary_dim - 1)
    scaled = []
    for pair, frequency in enumerate(plain(base, rotary_dim)):
        slowed = min(1.0, max(0.0, (pair - low) / max(high - low, 0.001)))
        scaled.append(slowed * frequency / factor + (1 - slowed) * frequency)
    return scaled


FAMILIES = {
    "Llama 3.1": Family(
        heads=2,
        head_size=128,
        rope=Rope(llama3(500_000.0, 128, 8.0, 1.0, 4.0, 8192)),
        vllm={
            "head_size": 128,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "Qwen2": Family(
        heads=2,
        head_size=64,
        rope=Rope.of_base(1e6, 64),
        vllm={
            "head_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "GPT-J": Family(
        heads=3,
        head_size=64,
        rope=Rope.of_base(10_000.0, 16, interleaved=True),
        vllm={
            "head_size": 64,
            "is_neox_style": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "GPT-NeoX": Family(
        heads=2,
        head_size=96,
        rope=Rope.of_base(10_000.0, 24),
        vllm={
            "head_size": 96,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "DeepSeek": Family(
        heads=1,
        head_size=64,
        rope=Rope(
            yarn(10_000.0, 64, 4.0, 32, 1, 1024),
            interleaved=True,
            attention_scaling=0.1 * math.log(4.0) + 1,
        ),
        vllm={
            "head_size": 64,
            "is_neox_style": False,
            "rope_parameters": {
                "rope_type": "deepseek_yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
            },
        },
    ),
}


def pairs_of(rope: Rope, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second element of each pair."""
    pairs = torch.arange(len(rope.inv_freq))
    if rope.interleaved:
        return offset + 2 * pairs, offset + 2 * pairs + 1
    return offset + pairs, offset + pairs + len(pairs)


def partners(heads: torch.Tensor, rope: Rope, offset: int) -> torch.Tensor:
    """Of each element the other of its pair, with the sign that it has in the turn; 0 if none."""
    first, second = pairs_of(rope, offset)
    other = torch.zeros_like(heads)
    other[..., first] = -heads[..., second]
    other[..., second] = heads[..., first]
    return other


def angles(positions: torch.Tensor, rope: Rope, head_size: int, offset: int) -> torch.Tensor:
    """`[tokens, 1, head]`: the angle of each element; 0 where it is not rotated."""
    of_element = torch.zeros(head_size, dtype=torch.float64)
    for half in pairs_of(rope, offset):
        of_element[half] = torch.tensor(rope.inv_freq, dtype=torch.float64)
    return positions.double()[:, None, None] * of_element


def rotated(
    heads: torch.Tensor, positions: torch.Tensor, rope: Rope, offset: int = 0
) -> torch.Tensor:
    """`[tokens, heads, head]` turned to their positions, in double precision, scale left out."""
    heads = heads.double()
    turn = angles(positions, rope, heads.shape[-1], offset)
    return heads * turn.cos() + partners(heads, rope, offset) * turn.sin()


def shift_tolerance(
    stored: torch.Tensor, wanted: torch.Tensor, shift: torch.Tensor, rope: Rope, offset: int = 0
) -> torch.Tensor:
    """`u |wanted| + 3 * 2**-24 (|a| + |b|)`, and in double precision its own roundings."""
    unit, smallest = HALF_UNITS[stored.dtype]
    exact = stored.double()
    size = exact.abs() + partners(exact, rope, offset).abs()
    arithmetic: Any = SINGLE
    if stored.dtype == torch.float64:
        arithmetic = 2.0**-52 * (1 + angles(shift, rope, exact.shape[-1], offset).abs())
    return unit * wanted.abs() * (1 + 1e-6) + smallest + arithmetic * size
