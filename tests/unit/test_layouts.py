"""Layouts by name: what is read off a tensor, what is tried on it, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lmcache_rs import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata
from lmcache_rs.gpu_connector import VLLMPagedMemGPUConnectorV2, register, registration
from lmcache_rs.layouts import Layout, LayoutError, MemoryFormat
from lmcache_rs.storage import MemoryObj

LAYERS, HEADS, HEAD, CHUNK, SLOTS = 3, 2, 8, 8, 96
META = LMCacheMetadata("m", 1, 0, "float32")
Make = Callable[..., list[torch.Tensor]]
# The six orders of vLLM's cache, of the logical axes [L, B, H, N, C].
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def five_axes(axes: str) -> Make:
    def make(block: int = 4, heads: int = HEADS, dtype: torch.dtype = torch.float32) -> Any:
        size = {"K": 2, "B": SLOTS // block, "N": block, "H": heads, "D": HEAD}
        return [random_tensor([size[axis] for axis in axes], dtype) for _ in range(LAYERS)]

    return make


def fused(order: str) -> Make:
    """Layers as vLLM has them: logical [B, H, N, C] views of one storage in the given order."""

    def make(block: int = 4, heads: int = HEADS, dtype: torch.dtype = torch.float32) -> Any:
        logical = (LAYERS, SLOTS // block, heads, block, 2 * HEAD)
        permutation = ORDERS[order]
        storage = random_tensor([logical[axis] for axis in permutation], dtype)
        return list(storage.permute([permutation.index(axis) for axis in range(5)]))

    return make


def permuted(axes: str, logical: str) -> Make:
    """Tensors with the logical axes of one layout in the memory order of another."""

    def make(**changes: Any) -> Any:
        tensors = five_axes(axes)(**changes)
        return [tensor.permute([axes.index(axis) for axis in logical]) for tensor in tensors]

    return make


def mla(axes: str) -> Make:
    def make(block: int = 4, heads: int = 1, dtype: torch.dtype = torch.float32) -> Any:
        size = {"B": SLOTS // block, "H": 1, "N": block, "D": 24}
        return [random_tensor([size[axis] for axis in axes], dtype) for _ in range(LAYERS)]

    return make


def random_tensor(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 1:
        return torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)
    return torch.randn(shape).to(dtype)


FORMS: dict[str, tuple[Layout, Make]] = {
    "split": ("split", five_axes("KBNHD")),
    "split, heads outside tokens in memory": ("split", permuted("KBHND", "KBNHD")),
    "split, blocks outermost in memory": ("split", permuted("BKNHD", "KBNHD")),
    "split_hnd": ("split_hnd", five_axes("KBHND")),
    "blocks_first": ("blocks_first", five_axes("BKNHD")),
    "blocks_first_hnd": ("blocks_first_hnd", five_axes("BKHND")),
    **{f"fused {order}": ("fused", fused(order)) for order in ORDERS},
}
MLA_FORMS: dict[str, tuple[Layout, Make]] = {
    "mla": ("mla", mla("BND")),
    "mla, one head": ("mla", mla("BHND")),
}
ALL_FORMS = FORMS | MLA_FORMS


def settings(**changes: object) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.from_defaults(
        **{"chunk_size": CHUNK, "max_local_cpu_size": 0.002, **changes}
    )


def at(tensor: torch.Tensor, layout: Layout, slots: torch.Tensor) -> torch.Tensor:
    """`[tokens, planes, hidden]` at the given slots, by torch alone."""
    order = {
        "split": "KBNHD",
        "split_hnd": "KBHND",
        "blocks_first": "BKNHD",
        "blocks_first_hnd": "BKHND",
        "fused": "BHNKD",
        "mla": "BND" if tensor.dim() == 3 else "BHND",
    }[layout]
    if layout == "fused":
        tensor = torch.stack(tensor.chunk(2, dim=-1), dim=3)
    wanted = [order.index(axis) for axis in "BNKHD" if axis in order]
    tensor = tensor.permute(wanted)
    planes = 2 if "K" in order else 1
    block = tensor.shape[1]
    return tensor[slots // block, slots % block].reshape(len(slots), planes, -1)


def random_slots(num_tokens: int, seed: int) -> torch.Tensor:
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[:num_tokens]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Compared as bytes: a NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


# --- what is read off a tensor ----------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_FORMS)
def test_every_layout_is_copied_by_token_and_stored_in_one_form(name: str) -> None:
    layout, make = ALL_FORMS[name]
    caches = make()
    registered = register(caches, layout)
    assert (registered.layout, registered.fallback_reason) == (layout, None)
    assert (registered.block_tokens, registered.num_blocks) == (4, SLOTS // 4)
    if name in MLA_FORMS:
        assert registered.layout_id == "KV_MLA_FMT-1x24"
        assert registered.form.shape(5) == (LAYERS, 5, 24)
    else:
        assert registered.layout_id == f"KV_T2D-{HEADS}x{HEAD}"
        assert registered.form.shape(5) == (LAYERS, 5, 2, HEADS * HEAD)


PAIRS = [
    *itertools.product(FORMS, FORMS),
    *itertools.product(MLA_FORMS, MLA_FORMS),
]


@pytest.mark.parametrize(("written", "read"), PAIRS)
def test_a_chunk_written_from_one_layout_loads_into_any_other(written: str, read: str) -> None:
    (from_layout, make_from), (to_layout, make_to) = ALL_FORMS[written], ALL_FORMS[read]
    # The block sizes differ too, and each engine states its own.
    sources, targets = make_from(block=4), make_to(block=6)
    tokens, before, after = list(range(21)), random_slots(21, 1), random_slots(21, 2)
    one = LMCacheEngine(
        settings(save_unfull_chunk=True), replace(META, block_size=4), layout=from_layout
    )
    other = LMCacheEngine(
        settings(save_unfull_chunk=True), replace(META, block_size=6), layout=to_layout
    )
    with one, other:
        assert other.local_cpu is not None
        other.local_cpu.close()
        other.local_cpu = one.local_cpu
        assert one.store(tokens, kvcaches=sources, slot_mapping=before) == 21
        untouched = [target.clone() for target in targets]
        mask = torch.arange(21) >= 5
        ret_mask = other.retrieve(tokens, mask, kvcaches=targets, slot_mapping=after)
        assert torch.equal(ret_mask, mask)
    for source, target, was in zip(sources, targets, untouched, strict=True):
        got, wanted = at(target, to_layout, after), at(source, from_layout, before)
        assert torch.equal(got[5:], wanted[5:])
        others = torch.ones(SLOTS, dtype=torch.bool)
        others[after[5:]] = False
        rest = others.nonzero().flatten()
        assert torch.equal(at(target, to_layout, rest), at(was, to_layout, rest))


@pytest.mark.parametrize("name", ALL_FORMS)
@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.uint8, torch.float16, torch.bfloat16, torch.float32]
)
@pytest.mark.parametrize("heads", [1, 3])
def test_any_element_size_and_number_of_heads(name: str, dtype: torch.dtype, heads: int) -> None:
    layout, make = ALL_FORMS[name]
    caches = make(heads=heads, dtype=dtype)
    tokens, before, after = list(range(16)), random_slots(16, 3), random_slots(16, 4)
    with LMCacheEngine(settings(), META, layout=layout) as engine:
        engine.store(tokens, kvcaches=caches, slot_mapping=before)
        wanted = [bits(at(cache, layout, before)) for cache in caches]
        for cache in caches:
            cache.view(torch.uint8).random_(0, 256)
        assert engine.retrieve(tokens, kvcaches=caches, slot_mapping=after).all()
    for cache, kv in zip(caches, wanted, strict=True):
        assert torch.equal(bits(at(cache, layout, after)), kv)


@pytest.mark.parametrize("name", ["split_hnd", "blocks_first", "fused LBNHC", "mla"])
def test_any_count_of_held_tokens_is_right_and_none_of_them_is_written(name: str) -> None:
    layout, make = ALL_FORMS[name]
    caches, slots, tokens = make(), random_slots(21, 9), list(range(21))
    with LMCacheEngine(settings(save_unfull_chunk=True), META, layout=layout) as engine:
        engine.store(tokens, kvcaches=caches, slot_mapping=slots)
        kv = [at(cache, layout, slots).clone() for cache in caches]
        for num_false in range(2 * CHUNK + 1):
            for cache in caches:
                cache.zero_()
            mask = torch.arange(21) >= num_false
            ret_mask = engine.retrieve(tokens, mask, kvcaches=caches, slot_mapping=slots)
            assert torch.equal(ret_mask, mask)
            for cache, wanted in zip(caches, kv, strict=True):
                got = at(cache, layout, slots)
                assert torch.equal(got[num_false:], wanted[num_false:])
                assert not got[:num_false].any()


@pytest.mark.parametrize("name", ALL_FORMS)
def test_block_tables_say_the_same_as_slots(name: str) -> None:
    layout, make = ALL_FORMS[name]
    caches = make()
    table = [5, 2, 9, 3]
    slots = torch.tensor([block * 4 + offset for block in table for offset in range(4)])
    with LMCacheEngine(settings(), META, layout=layout) as engine:
        engine.register_kv_caches(caches)
        hashes = bytes(range(64))
        assert engine.store_chunks("ns", hashes, table).tokens == 16
        kv = [at(cache, layout, slots).clone() for cache in caches]
        for cache in caches:
            cache.zero_()
        # From inside a block on, into other blocks.
        moved = torch.tensor([block * 4 + offset for block in (7, 0, 1, 8) for offset in range(4)])
        assert engine.load_chunks("r", "ns", hashes, [7, 0, 1, 8], skip=3).tokens == 13
        for cache, wanted in zip(caches, kv, strict=True):
            assert torch.equal(at(cache, layout, moved)[3:], wanted[3:])
            assert not at(cache, layout, moved)[:3].any()


def test_a_block_table_refuses_chunks_that_begin_inside_a_block() -> None:
    with LMCacheEngine(settings(chunk_size=6), META) as engine:
        engine.register_kv_caches(five_axes("KBNHD")())
        with pytest.raises(ValueError, match=r"blocks of 4 tokens, but the chunk size.* is 6"):
            engine.store_chunks("ns", bytes(64), [0, 1, 2])
        with pytest.raises(ValueError, match=r"blocks of 4 tokens, but the chunk size.* is 6"):
            engine.load_chunks("r", "ns", bytes(64), [0, 1, 2], skip=0)


@pytest.mark.parametrize("copy_threads", [1, 4])
def test_the_setting_bounds_the_threads_of_a_copy(copy_threads: int) -> None:
    with LMCacheEngine(settings(copy_threads=copy_threads), META) as engine:
        registered = engine.register_kv_caches(five_axes("KBNHD")())
        assert registered.native.copy_threads == copy_threads
    with LMCacheEngine(
        settings(copy_threads=copy_threads), replace(META, block_size=4), layout="opaque"
    ) as engine:
        registered = engine.register_kv_caches(fused("BLHNC")(), block_tokens=4)
        assert registered.native.copy_threads == copy_threads


def test_the_block_size_is_part_of_the_key_of_opaque_blocks_alone() -> None:
    def namespace(layout: Layout, caches: list[torch.Tensor], block_size: int) -> str:
        meta = replace(META, block_size=block_size)
        with LMCacheEngine(settings(), meta, layout=layout) as engine:
            engine.register_kv_caches(caches, block_tokens=block_size)
            assert engine._registration is not None
            return engine._registration.namespaces.text()

    make = fused("LBHNC")
    by_token = {namespace("fused", make(block=block), block) for block in (4, 8)}
    by_token |= {namespace("split", five_axes("KBNHD")(block=block), block) for block in (4, 8)}
    assert len(by_token) == 1
    opaque = {namespace("opaque", make(block=block), block) for block in (4, 8)}
    assert len(opaque | by_token) == 3


# --- what is tried on it ----------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ALL_FORMS, "opaque"])
def test_registration_leaves_every_byte_as_it_was(name: str) -> None:
    layout, make = ALL_FORMS.get(name, ("opaque", fused("LBHNC")))
    with torch.inference_mode():
        # As vLLM's: they can only be written in inference mode.
        caches = make()
    before = [bits(cache.clone()) for cache in caches]
    register(caches, layout, block_tokens=4)
    assert all(map(torch.equal, map(bits, caches), before))


def swap_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants what a wrong idea of an engine's axes would do."""
    honest = registration.token_axes

    def swapped(*given: Any) -> Any:
        axes = honest(*given)
        return replace(axes, token_stride=axes.head_stride, head_stride=axes.token_stride)

    monkeypatch.setattr(registration, "token_axes", swapped)


@pytest.mark.parametrize("name", FORMS)
def test_strides_that_are_not_the_tensors_own_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout, make = FORMS[name]
    # As many heads as tokens of a block, so that the shape cannot tell.
    caches = make(heads=4)
    before = [bits(cache.clone()) for cache in caches]
    swap_strides(monkeypatch)
    whole_blocks = caches[0][0].is_contiguous() and not layout.startswith("split")
    if whole_blocks:
        registered = register(caches, layout)
        assert registered.layout == "opaque"
        assert registered.form.fmt is MemoryFormat.OPAQUE
        assert registered.fallback_reason is not None
        assert "whole blocks" in caplog.text
    else:
        with pytest.raises(LayoutError, match="cannot be certified: gathered tokens are not what"):
            register(caches, layout)
    assert all(map(torch.equal, map(bits, caches), before)), "restored after a failure too"


def test_a_fallback_is_another_key_and_never_what_was_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caches = five_axes("BKNHD")(heads=4)
    swap_strides(monkeypatch)
    stated = replace(META, stored_form=MemoryFormat.KV_T2D.name)
    with (
        LMCacheEngine(settings(), stated, layout="blocks_first") as engine,
        pytest.raises(LayoutError, match="state stored_form KV_T2D, these tensors .* OPAQUE"),
    ):
        engine.register_kv_caches(caches)
    with LMCacheEngine(settings(), META, layout="blocks_first") as engine:
        tokens, slots = list(range(16)), torch.arange(16)
        assert engine.store(tokens, kvcaches=caches, slot_mapping=slots) == 16
        assert "OPAQUE-4t-2x4x4x8" in engine._registration.namespaces.text()
        kv = [cache[:4].clone() for cache in caches]
        for cache in caches:
            cache.zero_()
        assert engine.retrieve(tokens, kvcaches=caches, slot_mapping=slots).all()
        assert all(torch.equal(cache[:4], was) for cache, was in zip(caches, kv, strict=True))


@pytest.mark.parametrize(
    ("layout", "tensor", "message"),
    [
        ("split", torch.zeros(4, 2, 4, 16), "a tensor of 4 axes"),
        ("split", torch.zeros(3, 4, 4, 2, 8), "3 planes where K and V are two"),
        ("split", torch.zeros(2, 0, 4, 2, 8), "an empty tensor"),
        ("split", torch.zeros(2, 4, 4, 2, 8).transpose(3, 4), "last axis is not contiguous"),
        ("split_hnd", torch.zeros(2, 4, 4, 8), "a tensor of 4 axes"),
        ("blocks_first", torch.zeros(2, 4, 4, 2, 8), "4 planes"),
        ("fused", torch.zeros(4, 2, 4, 15), "odd size"),
        ("fused", torch.zeros(2, 4, 4, 2, 8), "a tensor of 5 axes"),
        ("mla", torch.zeros(4, 2, 4, 16), "2 heads where there is one vector"),
        ("mla", torch.zeros(64, 16), "a tensor of 2 axes"),
        ("split", torch.zeros(2, 4, 1, 2, 8).expand(2, 4, 4, 2, 8), "overlaps"),
        ("fused", torch.zeros(4, 2, 4, 16).expand(4, 2, 4, 16)[:, :1].expand(4, 2, 4, 16), "overl"),
        ("opaque", torch.zeros(4, 2, 4, 16).transpose(1, 2), "not one run of bytes"),
        ("opaque", torch.zeros(4), "not one run of bytes"),
        ("split", torch.zeros(2, 4, 4, 2, 8, device="meta"), "is on meta"),
        ("paged", torch.zeros(2, 4, 4, 2, 8), "known are split, split_hnd"),
    ],
)
def test_tensors_that_cannot_have_the_layout_are_named(
    layout: Layout, tensor: torch.Tensor, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        register([tensor, tensor], layout, block_tokens=None if layout != "opaque" else 4)


def test_a_stated_block_size_must_be_the_tensors_own() -> None:
    with pytest.raises(LayoutError, match=r"block_size is 8, .* has 4 tokens"):
        register(five_axes("KBNHD")(), "split", block_tokens=8)
    with pytest.raises(LayoutError, match="needs block_tokens"):
        register(five_axes("BKNHD")(), "opaque")


# --- the bulk connector -------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[LMCacheEngine]:
    with LMCacheEngine(settings(), META) as engine:
        yield engine


def allocate(engine: LMCacheEngine, fmt: MemoryFormat, *sizes: int) -> list[MemoryObj]:
    objects: list[MemoryObj] = []
    hidden = HEADS * HEAD
    for tokens in sizes:
        shape = (2, LAYERS, tokens, hidden)
        if fmt is MemoryFormat.KV_T2D:
            shape = (LAYERS, tokens, 2, hidden)
        objects += engine.storage_manager.batched_allocate(shape, torch.float32, fmt) or []
    assert len(objects) == len(sizes)
    return objects


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("fmt", [MemoryFormat.KV_T2D, MemoryFormat.KV_2LTD])
def test_the_connector_moves_objects_both_ways(
    engine: LMCacheEngine, name: str, fmt: MemoryFormat
) -> None:
    layout, make = FORMS[name]
    caches, others = make(), make()
    before, after = random_slots(20, 5), random_slots(20, 6)
    objects = allocate(engine, fmt, 8, 5)
    starts, ends = [0, 10], [8, 15]
    connector = VLLMPagedMemGPUConnectorV2(HEADS * HEAD, LAYERS, layout=layout)
    moved = connector.batched_from_gpu(objects, starts, ends, slot_mapping=before, kvcaches=caches)
    assert moved == sum(memory_obj.nbytes for memory_obj in objects)
    for memory_obj, start, end in zip(objects, starts, ends, strict=True):
        rows = torch.stack([at(cache, layout, before[start:end]) for cache in caches])
        if fmt is MemoryFormat.KV_2LTD:
            rows = rows.permute(2, 0, 1, 3)
        assert torch.equal(memory_obj.tensor, rows)
    holed = after.clone()
    holed[12] = -1
    was = [other.clone() for other in others]
    connector.batched_to_gpu(objects, starts, ends, slot_mapping=holed, kvcaches=others)
    written = torch.tensor([*range(8), 10, 11, 13, 14])
    for source, target, old in zip(caches, others, was, strict=True):
        assert torch.equal(at(target, layout, after[written]), at(source, layout, before[written]))
        rest = torch.ones(SLOTS, dtype=torch.bool)
        rest[after[written]] = False
        assert torch.equal(
            at(target, layout, rest.nonzero().flatten()), at(old, layout, rest.nonzero().flatten())
        )


def test_the_connector_writes_what_is_sealed_and_never_into_it(engine: LMCacheEngine) -> None:
    caches, slots = five_axes("KBNHD")(), random_slots(8, 7)
    tokens = list(range(8))
    engine.store(tokens, kvcaches=caches, slot_mapping=slots)
    ((_, _, chunk_hash),) = engine.token_database.process_tokens(tokens, make_key=False)
    ((_, _, key),) = engine._registration.namespaces.keys([(0, 0, chunk_hash)])
    (memory_obj,) = engine.storage_manager.batched_get([key])
    assert memory_obj is not None
    assert memory_obj.shape == (LAYERS, 8, 2, HEADS * HEAD)
    connector = VLLMPagedMemGPUConnectorV2()
    connector.initialize_kvcaches_ptr(caches)
    kv = [at(cache, "split", slots).clone() for cache in caches]
    for cache in caches:
        cache.zero_()
    connector.batched_to_gpu([memory_obj], [0], [8], slot_mapping=slots)
    for cache, wanted in zip(caches, kv, strict=True):
        assert torch.equal(at(cache, "split", slots), wanted)
    with pytest.raises(RuntimeError, match="put or released before"):
        connector.batched_from_gpu([memory_obj], [0], [8], slot_mapping=slots)


def test_what_contradicts_itself_is_named_and_moves_nothing(engine: LMCacheEngine) -> None:
    caches, slots = five_axes("KBNHD")(), random_slots(16, 8)
    connector = VLLMPagedMemGPUConnectorV2()
    one, two = allocate(engine, MemoryFormat.KV_T2D, 8, 8)
    move = connector.batched_from_gpu
    with pytest.raises(RuntimeError, match="give kvcaches once"):
        move([one], [0], [8], slot_mapping=slots)
    connector.initialize_kvcaches_ptr(caches)
    one.tensor.zero_()
    with pytest.raises(ValueError, match="bytes for 7 tokens"):
        move([two, one], [0, 0], [8, 7], slot_mapping=slots)
    with pytest.raises(ValueError, match="not within a slot_mapping of 16"):
        move([one], [9], [17], slot_mapping=slots)
    with pytest.raises(ValueError, match="1 memory objects, 2 starts and 1 ends"):
        move([one], [0, 8], [8], slot_mapping=slots)
    with pytest.raises(ValueError, match="outside the registered cache"):
        move([one, two], [0, 8], [8, 16], slot_mapping=slots + torch.arange(16) // 15 * SLOTS)
    with pytest.raises(TypeError, match="int64"):
        move([one], [0], [8], slot_mapping=slots.int())
    with pytest.raises(RuntimeError, match="named twice"):
        move([one, one], [0, 8], [8, 16], slot_mapping=slots)
    (other,) = engine.storage_manager.batched_allocate(
        (LAYERS, 8, 2 * HEADS * HEAD), torch.float32, MemoryFormat.KV_MLA_FMT
    ) or [one]
    with pytest.raises(LayoutError, match="KV_MLA_FMT"):
        move([other], [0], [8], slot_mapping=slots)
    assert not one.tensor.any()
    assert move([one], [0], [8], slot_mapping=slots) == one.nbytes
    for stated in ((7, LAYERS), (HEADS * HEAD, 1)):
        with pytest.raises(LayoutError, match="but the KV tensors have"):
            VLLMPagedMemGPUConnectorV2(*stated).initialize_kvcaches_ptr(caches)
