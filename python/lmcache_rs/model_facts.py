"""What a chunk's bytes depend on beside its tokens: the model, its split, and the stored form."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lmcache_rs.layouts import TOKEN_FORMS

UNSTATED = "unstated"
"""Stands in a key for a fact its caller left out, so that stating it later is another key."""

_COUNTS = ("block_size", "num_layers", "num_kv_heads", "head_size")
_RANKS = (
    ("tensor_parallel_rank", "tensor_parallel_size"),
    ("pipeline_parallel_rank", "pipeline_parallel_size"),
)


@dataclass(frozen=True)
class LMCacheMetadata:
    """Facts of the model and of this worker's share of it.

    All of them are part of every key: chunks stored under other facts are never loaded. A fact
    left out (None) is part of the key as `unstated`.

    Args:
        model_name: The model's name as the engine serves it.
        world_size: Number of workers the model is split over, at least 1.
        worker_id: This worker's number, from 0 to world_size - 1.
        kv_dtype: Element type of the KV cache, resolved: `bfloat16`, `fp8_e4m3`, never `auto`.
        model_fingerprint: Digest of configuration, quantisation and weights.
        stored_form: How a chunk's bytes are laid out in memory: a name of `MemoryFormat`.
        layout_id: The engine's layout of its paged KV cache, as far as it shows in a chunk.
        block_size: Tokens of one block of the engine; leaves the key where the stored form has
            tokens side by side, whatever the engine's blocks.
        num_layers: Layers this worker holds.
        num_kv_heads: KV heads of a layer on this worker.
        head_size: Elements of one head.
        tensor_parallel_rank: This worker's tensor-parallel rank; needs its size.
        tensor_parallel_size: Number of tensor-parallel ranks.
        pipeline_parallel_rank: This worker's pipeline stage; needs its size.
        pipeline_parallel_size: Number of pipeline stages.

    Raises:
        ValueError: A fact is impossible or ambiguous; the message names it and what to change.
    """

    model_name: str
    world_size: int
    worker_id: int
    kv_dtype: str
    model_fingerprint: str | None = dataclasses.field(default=None, kw_only=True)
    stored_form: str | None = dataclasses.field(default=None, kw_only=True)
    layout_id: str | None = dataclasses.field(default=None, kw_only=True)
    block_size: int | None = dataclasses.field(default=None, kw_only=True)
    num_layers: int | None = dataclasses.field(default=None, kw_only=True)
    num_kv_heads: int | None = dataclasses.field(default=None, kw_only=True)
    head_size: int | None = dataclasses.field(default=None, kw_only=True)
    tensor_parallel_rank: int | None = dataclasses.field(default=None, kw_only=True)
    tensor_parallel_size: int | None = dataclasses.field(default=None, kw_only=True)
    pipeline_parallel_rank: int | None = dataclasses.field(default=None, kw_only=True)
    pipeline_parallel_size: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("model_name", "kv_dtype"):
            _require_text(name, getattr(self, name))
        for name in ("model_fingerprint", "stored_form", "layout_id"):
            if getattr(self, name) is not None:
                _require_text(name, getattr(self, name))
        if self.kv_dtype.strip().lower() == "auto":
            raise ValueError(
                "kv_dtype is 'auto', which names no element type; state the resolved one, for "
                "example 'bfloat16'"
            )
        if self.kv_dtype.startswith("torch."):
            # Two spellings of one type would be two keys.
            raise ValueError(
                f"kv_dtype is {self.kv_dtype!r}; write it without the prefix: "
                f"{self.kv_dtype.removeprefix('torch.')!r}"
            )
        for name in _COUNTS:
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name), at_least=1)
        _require_rank("worker_id", self.worker_id, "world_size", self.world_size)
        for rank_name, size_name in _RANKS:
            rank, size = getattr(self, rank_name), getattr(self, size_name)
            if (rank is None) != (size is None):
                raise ValueError(f"{rank_name} and {size_name} must be stated together or not")
            if rank is not None:
                _require_rank(rank_name, rank, size_name, size)

    def facts(self) -> dict[str, str]:
        """Every fact by name, as text, always all of them and in the same order."""
        facts = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            facts[field.name] = UNSTATED if value is None else str(value)
        if self.stored_form in TOKEN_FORMS:
            facts["block_size"] = "any"
        return facts


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} needs text, found {value!r} ({type(value).__name__})")
    if not value.strip():
        raise ValueError(f"{name} is blank; state it, or leave it out where it is optional")
    if value == UNSTATED:
        raise ValueError(f"{name} is {UNSTATED!r}, the word for a fact left out; leave it out")


def _require_count(name: str, value: object, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} needs a whole number, found {value!r} ({type(value).__name__})")
    if value < at_least:
        raise ValueError(f"{name} needs a whole number of at least {at_least}, found {value}")


def _require_rank(rank_name: str, rank: object, size_name: str, size: object) -> None:
    _require_count(size_name, size, at_least=1)
    _require_count(rank_name, rank, at_least=0)
    if int(str(rank)) >= int(str(size)):
        raise ValueError(f"{rank_name} is {rank}, but {size_name} {size} has ranks below {size}")
