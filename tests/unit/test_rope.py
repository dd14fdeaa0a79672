"""Keys that move: the buffered connector's turns against double precision and vLLM's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rope_oracle import (
    FAMILIES,
    HALF_UNITS,
    SINGLE,
    Family,
    angles,
    partners,
    rotated,
    shift_tolerance,
)

from lmcache_rs import _native
from lmcache_rs.gpu_connector import (
    LayoutError,
    Rope,
    VLLMBufferLayerwiseGPUConnector,
)

LAYERS, BLOCK, BLOCKS = 2, 4, 24
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SHIFTS = [-700, -256, -17, -1, 1, 2, 255, 700]
Caches = list[torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are not worth threads, which many tests at once would fight for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def caches_of(heads: int, head_size: int, dtype: torch.dtype, layers: int = LAYERS) -> Caches:
    shape = (2, BLOCKS, BLOCK, heads, head_size)
    return [torch.full(shape, 7.0, dtype=dtype) for _ in range(layers)]


def slots_of(num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randperm(BLOCKS * BLOCK, generator=generator)[:num_tokens]


def rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`[tokens, 2, heads, head]` at the slots."""
    return cache[:, slots // BLOCK, slots % BLOCK].transpose(0, 1)


def run(steps: Iterator[Any], layers: Sequence[Any]) -> None:
    next(steps)
    for views in layers:
        steps.send(views)  # type: ignore[attr-defined]
    assert list(steps) == [None]


def restore(
    kv: Sequence[torch.Tensor],
    rope: Rope | Sequence[Rope | None] | None,
    stored: torch.Tensor,
    new: torch.Tensor,
) -> list[torch.Tensor]:
    """`[tokens, 2, heads, head]` a layer, stored at some positions and restored at others."""
    num_tokens, _, heads, head_size = kv[0].shape
    caches = caches_of(heads, head_size, kv[0].dtype, len(kv))
    connector = VLLMBufferLayerwiseGPUConnector(rope=rope)
    slots = slots_of(num_tokens)
    steps = connector.batched_to_gpu(
        [0],
        [num_tokens],
        slot_mapping=slots,
        kvcaches=caches,
        positions=new,
        cached_positions=[stored],
    )
    run(steps, [[layer.flatten(2)] for layer in kv])
    return [rows(cache, slots) for cache in caches]


def random_kv(family: Family, dtype: torch.dtype, num_tokens: int = 9) -> list[torch.Tensor]:
    shape = (num_tokens, 2, family.heads, family.head_size)
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(LAYERS)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shift_equals_double_precision_within_the_types_rounding(
    name: str, dtype: torch.dtype
) -> None:
    family = FAMILIES[name]
    rope, first = family.rope, family.offset
    kv = random_kv(family, dtype)
    for shift in SHIFTS:
        stored = torch.arange(1000, 1009)
        got = restore(kv, rope, stored, stored + shift)
        moved = torch.full((9,), shift)
        for before, after in zip(kv, got, strict=True):
            wanted = rotated(before[:, 0], moved, rope, first)
            allowed = shift_tolerance(before[:, 0], wanted, moved, rope, first)
            assert bool(((after[:, 0].double() - wanted).abs() <= allowed).all()), shift
            assert torch.equal(bits(after[:, 1]), bits(before[:, 1])), "V was touched"
            rest = slice(first + rope.rotary_dim, None)
            assert torch.equal(bits(after[:, 0, :, rest]), bits(before[:, 0, :, rest]))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_and_shifted_equals_computed_at_the_new_position(
    name: str, dtype: torch.dtype
) -> None:
    family = FAMILIES[name]
    rope = family.rope
    generator = torch.Generator().manual_seed(3)
    shape = (8, family.heads, family.head_size)
    keys = torch.randn(shape, generator=generator, dtype=torch.float64)
    unit, smallest = HALF_UNITS[dtype]
    # Tokens that move by different numbers of positions, one that stays.
    stored = torch.tensor([0, 1, 5, 700, 701, 4000, 12, 13])
    new = torch.tensor([700, 701, 5, 0, 1, 3300, 712, 13])
    exact = rotated(keys, stored, rope) * rope.attention_scaling
    before = exact.to(dtype)
    kv = torch.stack([before, torch.randn(shape).to(dtype)], dim=1)
    (got,) = restore([kv], rope, stored, new)
    wanted = rotated(keys, new, rope) * rope.attention_scaling
    size = exact.abs() + partners(exact, rope, 0).abs()
    allowed = shift_tolerance(before, wanted, new - stored, rope) + 2 * unit * size + smallest
    if dtype == torch.float64:
        # The oracle's own angles are rounded too.
        allowed += 2.0**-52 * angles(stored + new, rope, family.head_size, 0) * size
    assert bool(((got[:, 0].double() - wanted).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shift_by_zero_changes_no_bit(dtype: torch.dtype) -> None:
    # Any bit pattern: not-a-numbers with payloads, subnormal numbers, negative zeros.
    noise = torch.randint(0, 256, (9, 2, 2, 8 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    positions = torch.arange(9) * 100
    for rope in (Rope.of_base(1e4, 8), Rope.of_base(1e4, 4, interleaved=True), None):
        (got,) = restore([noise], rope, positions, positions)
        assert torch.equal(bits(got), bits(noise))


@pytest.mark.parametrize("shift", [-1_000_000, 1_000_000, 999_983])
def test_far_shifts_stay_exact(shift: int) -> None:
    family = FAMILIES["Qwen2"]
    (before,) = random_kv(family, torch.float32)[:1]
    stored = torch.arange(9) + 1_000_000
    (after,) = restore([before], family.rope, stored, stored + shift)
    moved = torch.full((9,), shift)
    wanted = rotated(before[:, 0], moved, family.rope)
    allowed = shift_tolerance(before[:, 0], wanted, moved, family.rope)
    # An angle in single precision would be off by a sixteenth of a radian.
    assert bool(((after[:, 0].double() - wanted).abs() <= allowed).all())


def test_there_and_back_and_in_two_steps() -> None:
    family = FAMILIES["Llama 3.1"]
    kv = random_kv(family, torch.float64)
    here, there, away = (torch.arange(9) + at for at in (0, 700, 123_456))
    back = restore(restore(kv, family.rope, here, there), family.rope, there, here)
    once = restore(kv, family.rope, here, away)
    twice = restore(restore(kv, family.rope, here, there), family.rope, there, away)
    for pair in (zip(kv, back, strict=True), zip(once, twice, strict=True)):
        for one, other in pair:
            assert torch.allclose(one, other, rtol=0, atol=1e-9)


def test_a_shift_keeps_the_length_of_scaled_keys() -> None:
    """YaRN's factor is in the stored keys once and stays in them once."""
    family = FAMILIES["DeepSeek"]
    assert family.rope.attention_scaling > 1.1
    (before,) = random_kv(family, torch.float64)[:1]
    (after,) = restore([before], family.rope, torch.arange(9), torch.arange(9) + 321)
    assert torch.allclose(after[:, 0].norm(dim=-1), before[:, 0].norm(dim=-1), rtol=1e-12)


def test_each_layer_turns_by_its_own_frequencies_or_not_at_all() -> None:
    generator = torch.Generator().manual_seed(5)
    kv = [torch.randn(9, 2, 2, 16, generator=generator) for _ in range(3)]
    ropes = [Rope.of_base(1e4, 16), None, Rope.of_base(1e6, 8, interleaved=True)]
    moved = torch.full((9,), 40)
    got = restore(kv, ropes, torch.arange(9), torch.arange(9) + 40)
    for rope, before, after in zip(ropes, kv, got, strict=True):
        wanted = before[:, 0].double() if rope is None else rotated(before[:, 0], moved, rope)
        assert torch.allclose(after[:, 0].double(), wanted, rtol=0, atol=1e-5)
    assert torch.equal(got[1], kv[1])
    with pytest.raises(LayoutError, match="3 rotary embeddings for 2 layers"):
        restore(kv[:2], ropes, torch.arange(9), torch.arange(9))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 10, 64])
def test_of_a_latent_only_its_last_elements_turn(interleaved: bool, rotary_dim: int) -> None:
    rope, dim = Rope.of_base(1e4, rotary_dim, interleaved=interleaved), 96
    caches = [torch.zeros(BLOCKS, BLOCK, dim, dtype=torch.bfloat16)]
    latent = torch.randn(9, dim, generator=torch.Generator().manual_seed(2)).bfloat16()
    slots, stored = slots_of(9), torch.arange(9)
    connector = VLLMBufferLayerwiseGPUConnector(dim, 1, rope=rope, layout="mla")
    steps = connector.batched_to_gpu(
        [0], [9], slot_mapping=slots, kvcaches=caches, positions=stored + 500,
        cached_positions=[stored],
    )  # fmt: skip
    run(steps, [[latent]])
    after = caches[0][slots // BLOCK, slots % BLOCK]
    first = dim - rotary_dim
    moved = torch.full((9,), 500)
    wanted = rotated(latent[:, None], moved, rope, first)[:, 0]
    allowed = shift_tolerance(latent[:, None], wanted[:, None], moved, rope, first)[:, 0]
    assert bool(((after.double() - wanted).abs() <= allowed).all())
    assert torch.equal(bits(after[:, :first]), bits(latent[:, :first]))


# --- against the engine's own embedding -------------------------------------------------------


@pytest.fixture(scope="module")
def engine_ropes() -> Iterator[dict[str, Any]]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        yield {
            name: get_rope(max_position=4096, dtype=torch.float32, **family.vllm)
            for name, family in FAMILIES.items()
        }


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_of_the_engine_become_those_it_computes_elsewhere(
    name: str, engine_ropes: dict[str, Any]
) -> None:
    family, engine = FAMILIES[name], engine_ropes[name]
    stored, new = torch.arange(3, 12), torch.arange(703, 712)
    raw = torch.randn(9, family.heads * family.head_size)
    flat = (9, family.heads, family.head_size)

    def at(positions: torch.Tensor) -> torch.Tensor:
        shaped = raw.clone() if name != "DeepSeek" else raw.clone().view(flat)
        query = torch.zeros_like(shaped)
        return engine.forward_native(positions, query, shaped)[1].view(flat)  # type: ignore[no-any-return]

    before = at(stored)
    kv = torch.stack([before, torch.zeros(flat)], dim=1)
    (after,) = restore([kv], family.rope, stored, new)
    wanted = at(new).double()
    exact = before.double()
    size = exact.abs() + partners(exact, family.rope, 0).abs()
    # The engine forms its angles in single precision, at both positions.
    angle = angles(new, family.rope, family.head_size, 0).abs()
    allowed = (4 * SINGLE + 2.0**-22 * angle) * size
    assert bool(((after[:, 0].double() - wanted).abs() <= allowed).all())


def test_an_engines_own_frequencies_make_its_rope(engine_ropes: dict[str, Any]) -> None:
    for name, engine in engine_ropes.items():
        yarn = hasattr(engine, "mscale")
        rope = Rope(
            engine._compute_inv_freq(engine.scaling_factor if yarn else engine.base),
            interleaved=not engine.is_neox_style,
            attention_scaling=engine.mscale if yarn else 1.0,
        )
        rope.require_table(engine.cos_sin_cache)
        assert rope.interleaved == FAMILIES[name].rope.interleaved
        assert rope.inv_freq == pytest.approx(FAMILIES[name].rope.inv_freq, rel=1e-6)


def test_the_engines_table_tells_right_frequencies_from_wrong_ones(
    engine_ropes: dict[str, Any],
) -> None:
    for name, engine in engine_ropes.items():
        rope = FAMILIES[name].rope
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            rope.require_table(engine.cos_sin_cache.to(dtype))
    for one, other in itertools.permutations(FAMILIES, 2):
        table = engine_ropes[other].cos_sin_cache
        with pytest.raises(ValueError, match="a table of|the engine's table has"):
            FAMILIES[one].rope.require_table(table)
    scaled = FAMILIES["DeepSeek"].rope
    table = engine_ropes["DeepSeek"].cos_sin_cache
    with pytest.raises(ValueError, match="at position 0, column 0"):
        replace(scaled, attention_scaling=1.0).require_table(table)
    slightly = list(scaled.inv_freq)
    slightly[-1] *= 1.01
    with pytest.raises(ValueError, match="give the engine's own inv_freq"):
        replace(scaled, inv_freq=tuple(slightly)).require_table(table)


# --- what does not fit ------------------------------------------------------------------------


def test_what_cannot_turn_is_named_before_anything_moves() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Rope([])
    with pytest.raises(ValueError, match="finite"):
        Rope([float("inf")])
    with pytest.raises(ValueError, match="even number"):
        Rope.of_base(1e4, 7)
    with pytest.raises(ValueError, match="must be \\[positions, 8\\]"):
        Rope.of_base(1e4, 8).require_table(torch.zeros(4, 6))

    def started(rope: Rope, dtype: torch.dtype = torch.float32) -> None:
        caches = [torch.zeros(2, BLOCKS, BLOCK, 2, 16).to(dtype)]
        connector = VLLMBufferLayerwiseGPUConnector(rope=rope)
        next(connector.batched_to_gpu([0], [4], slot_mapping=torch.arange(4), kvcaches=caches))

    started(Rope.of_base(1e4, 16))
    with pytest.raises(ValueError, match="do not fit a head of 16"):
        started(Rope.of_base(1e4, 18))
    with pytest.raises(ValueError, match="do not fit a head of 16"):
        started(Rope((1.0,), offset=15))
    with pytest.raises(ValueError, match="float8_e4m3fn cannot be shifted"):
        started(Rope.of_base(1e4, 16), torch.float8_e4m3fn)
    with pytest.raises(LayoutError, match="tokens of opaque blocks"):
        VLLMBufferLayerwiseGPUConnector(rope=None, layout="opaque")


def test_frequencies_come_as_a_list_or_a_tensor() -> None:
    table = torch.tensor([1.0, 0.5, 0.25])
    rope = Rope(table)  # type: ignore[arg-type]
    assert rope == Rope([1.0, 0.5, 0.25])  # type: ignore[arg-type]
    assert rope.rotary_dim == 6
    assert isinstance(rope.shift, object)
    with pytest.raises(ValueError, match="stored and 2 new"):
        _native.RopeShift(
            [1.0], [0], [0, 1], interleaved=False, dtype="float32", row_elements=4, heads=1,
            head_size=4, offset=0,
        )  # fmt: skip
