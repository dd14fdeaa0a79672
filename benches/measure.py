"""Samples, their medians and ratios, and what a bench line says in the end."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Args:
        work: What was done.
        must: The limit, in words.
        measured: What was found, in words.
        reached: Whether the limit is met; None where there is none, and the row only informs.
        pairs: How many interleaved pairs the figure rests on.
        data: Numbers behind the words.
    """

    work: str
    must: str
    measured: str
    reached: bool | None
    pairs: int
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return {True: "reached", False: "**short**", None: "–"}[self.reached]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a series."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    count = len(ordered)
    return Spread(
        statistics.median(ordered), ordered[count // 4], ordered[min(count - 1, 3 * count // 4)]
    )


def ratios(ours: Sequence[float], limit: Sequence[float]) -> Spread:
    """Ours over the limit, pair by pair."""
    return spread([a / b for a, b in zip(ours, limit, strict=True)])


def bootstrap_upper(values: Sequence[float], share: float = 0.95, rounds: int = 10_000) -> float:
    """The bound below which the median of `values` lies with probability `share`."""
    draw = random.Random(7)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(rounds))
    return medians[int(share * rounds)]
