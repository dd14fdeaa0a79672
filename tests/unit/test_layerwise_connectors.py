"""The generators of the layerwise connectors: their steps, what each moves, and how they end."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from test_layouts import ALL_FORMS, CHUNK, FORMS, HEAD, HEADS, LAYERS, SLOTS, at, random_slots

from lmcache_rs import LMCacheEngineConfig, StorageManager
from lmcache_rs.gpu_connector import (
    LayoutError,
    Rope,
    VLLMBufferLayerwiseGPUConnector,
    VLLMPagedMemGPUConnectorV2,
    VLLMPagedMemLayerwiseGPUConnector,
    by_layer,
)
from lmcache_rs.layouts import Layout, MemoryFormat
from lmcache_rs.storage import MemoryObj

HIDDEN = HEADS * HEAD
Connector = VLLMPagedMemLayerwiseGPUConnector
MAKE: dict[str, Callable[..., Connector]] = {
    "direct": lambda **given: VLLMPagedMemLayerwiseGPUConnector(**given),
    "staged": lambda **given: VLLMPagedMemLayerwiseGPUConnector(use_gpu=True, **given),
    "buffered": lambda **given: VLLMBufferLayerwiseGPUConnector(rope=None, **given),
}
# Chunks that do not touch, the later ones first, and a tail.
STARTS, ENDS = [16, 0, 30], [24, 8, 35]
IN_ORDER = ([0, 16, 30], [8, 24, 35])
NUM_TOKENS = 40


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are not worth threads, which many tests at once would fight for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def storage() -> Iterator[StorageManager]:
    settings = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, max_local_cpu_size=0.002)
    manager = StorageManager(settings)
    yield manager
    manager.close()


def allocate(
    storage: StorageManager, *sizes: int, fmt: MemoryFormat = MemoryFormat.KV_T2D
) -> list[MemoryObj]:
    objects: list[MemoryObj] = []
    for tokens in sizes:
        shape: tuple[int, ...] = (LAYERS, tokens, 2, HIDDEN)
        if fmt is MemoryFormat.KV_2LTD:
            shape = (2, LAYERS, tokens, HIDDEN)
        elif fmt is MemoryFormat.KV_MLA_FMT:
            shape = (LAYERS, tokens, 24)
        objects += storage.batched_allocate(shape, torch.float32, fmt) or []
    assert len(objects) == len(sizes)
    return objects


def sizes(starts: list[int], ends: list[int]) -> list[int]:
    return [end - start for start, end in zip(starts, ends, strict=True)]


def free_bytes(storage: StorageManager) -> int:
    gc.collect()
    books = storage.backends["LocalCPUBackend"].local_cpu.audit()
    assert books["leases"] == 0
    return books["capacity_bytes"] - books["free_bytes"]


def drain(steps: Generator[Any, Any, Any], layers: Any) -> int:
    """Runs a load to its end; how often it yielded."""
    next(steps)
    count = 1
    for views in layers:
        assert steps.send(views) is None
        count += 1
    return count + len(list(steps))


def fill(objects: list[MemoryObj]) -> None:
    generator = torch.Generator().manual_seed(4)
    for memory_obj in objects:
        memory_obj.tensor.copy_(torch.randn(memory_obj.shape, generator=generator))


# --- the steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MAKE)
def test_a_store_is_a_set_up_and_one_step_a_layer(storage: StorageManager, path: str) -> None:
    caches, slots = FORMS["split"][1](), random_slots(NUM_TOKENS, 1)
    objects = allocate(storage, *sizes(STARTS, ENDS))
    for memory_obj in objects:
        memory_obj.tensor.zero_()
    steps = MAKE[path]().batched_from_gpu(
        list(by_layer(objects)), STARTS, ENDS, slot_mapping=slots, kvcaches=caches
    )
    for done in range(LAYERS + 1):
        assert next(steps) is None
        for memory_obj, start, end in zip(objects, STARTS, ENDS, strict=True):
            for layer, cache in enumerate(caches):
                rows = at(cache, "split", slots[start:end])
                wanted = rows if layer < done else torch.zeros_like(rows)
                assert torch.equal(memory_obj.tensor[layer], wanted), (done, layer)
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(steps)


@pytest.mark.parametrize("path", MAKE)
def test_a_load_is_a_set_up_a_layer_each_and_a_wait(storage: StorageManager, path: str) -> None:
    starts, ends = IN_ORDER
    caches, slots = FORMS["split"][1](), random_slots(NUM_TOKENS, 1)
    objects = allocate(storage, *sizes(starts, ends))
    fill(objects)
    steps = MAKE[path]().batched_to_gpu(starts, ends, slot_mapping=slots, kvcaches=caches)
    before = [cache.clone() for cache in caches]
    layers = list(by_layer(objects))

    def written() -> list[bool]:
        done = []
        for layer, (cache, was) in enumerate(zip(caches, before, strict=True)):
            whole = all(
                torch.equal(at(cache, "split", slots[start:end]), memory_obj.tensor[layer])
                for memory_obj, start, end in zip(objects, starts, ends, strict=True)
            )
            assert whole or torch.equal(cache, was), "a layer is written whole or not at all"
            done.append(whole)
        return done

    # Yield 0 asks for layer 0; the buffered pipeline writes a layer two iterations after it came.
    behind = 1 if path == "buffered" else 0
    assert next(steps) is None
    assert written() == [False] * LAYERS
    for layer, views in enumerate(layers):
        assert steps.send(views) is None
        assert written() == [at_layer <= layer - behind for at_layer in range(LAYERS)], layer
    assert next(steps) is None
    assert written() == [True] * LAYERS
    after = [cache.clone() for cache in caches]
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(steps)
    assert all(map(torch.equal, caches, after))


@pytest.mark.parametrize("path", MAKE)
@pytest.mark.parametrize("sync", [False, True])
def test_the_number_of_steps_is_the_same_when_there_is_nothing_to_move(
    path: str, sync: bool
) -> None:
    caches = FORMS["split"][1]()
    before = [cache.clone() for cache in caches]
    connector, slots = MAKE[path](), random_slots(8, 1)
    connector.initialize_kvcaches_ptr(caches)
    store = connector.batched_from_gpu([[]] * LAYERS, [], [], slot_mapping=slots, sync=sync)
    assert list(store) == [None] * (LAYERS + 1)
    load = connector.batched_to_gpu([], [], slot_mapping=slots, sync=sync)
    assert drain(load, [[]] * LAYERS) == LAYERS + 2
    assert all(map(torch.equal, caches, before))


# --- what is moved ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_FORMS)
@pytest.mark.parametrize("path", MAKE)
def test_layer_by_layer_equals_bulk_in_every_layout(
    storage: StorageManager, path: str, name: str
) -> None:
    layout, make = ALL_FORMS[name]
    starts, ends = IN_ORDER
    caches, slots = make(), random_slots(NUM_TOKENS, 2)
    fmt = MemoryFormat.KV_MLA_FMT if layout == "mla" else MemoryFormat.KV_T2D
    bulk, ours = (allocate(storage, *sizes(starts, ends), fmt=fmt) for _ in range(2))
    by_bulk = VLLMPagedMemGPUConnectorV2(layout=layout)
    by_bulk.batched_from_gpu(bulk, starts, ends, slot_mapping=slots, kvcaches=caches)
    connector = MAKE[path](layout=layout)
    views = list(by_layer(ours))
    list(connector.batched_from_gpu(views, starts, ends, slot_mapping=slots, kvcaches=caches))
    assert [one.to_bytes() for one in ours] == [one.to_bytes() for one in bulk]

    targets, others = make(), random_slots(NUM_TOKENS, 3)
    before = [target.clone() for target in targets]
    drain(connector.batched_to_gpu(starts, ends, slot_mapping=others, kvcaches=targets), views)
    moved = torch.cat([others[start:end] for start, end in zip(starts, ends, strict=True)])
    source = torch.cat([slots[start:end] for start, end in zip(starts, ends, strict=True)])
    for cache, target, was in zip(caches, targets, before, strict=True):
        assert torch.equal(at(target, layout, moved), at(cache, layout, source))
        rest = torch.ones(SLOTS, dtype=torch.bool)
        rest[others[starts[0] : ends[-1]] if path == "buffered" else moved] = False
        untouched = rest.nonzero().flatten()
        assert torch.equal(at(target, layout, untouched), at(was, layout, untouched))


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_tokens_without_a_slot_are_left_alone(storage: StorageManager, path: str) -> None:
    caches, slots = FORMS["fused LBHNC"][1](), random_slots(NUM_TOKENS, 5)
    holed = slots.clone()
    holed[[1, 17, 18, 34]] = -1
    objects = allocate(storage, *sizes(STARTS, ENDS))
    for memory_obj in objects:
        memory_obj.tensor.fill_(5.0)
    connector = MAKE[path](layout="fused")
    views = list(by_layer(objects))
    list(connector.batched_from_gpu(views, STARTS, ENDS, slot_mapping=holed, kvcaches=caches))
    for memory_obj, start, end in zip(objects, STARTS, ENDS, strict=True):
        for layer, cache in enumerate(caches):
            wanted = at(cache, "fused", slots[start:end]).clone()
            wanted[holed[start:end] == -1] = 5.0
            assert torch.equal(memory_obj.tensor[layer], wanted)
    before = [cache.clone() for cache in caches]
    for memory_obj in objects:
        memory_obj.tensor.fill_(6.0)
    drain(connector.batched_to_gpu(STARTS, ENDS, slot_mapping=holed), views)
    for cache, was in zip(caches, before, strict=True):
        holes = slots[holed == -1]
        assert torch.equal(at(cache, "fused", holes), at(was, "fused", holes))


def test_opaque_blocks_go_whole(storage: StorageManager) -> None:
    layout, make = FORMS["fused LBHNC"]
    caches, targets = make(), make()
    slots = torch.tensor([block * 4 + token for block in (7, 2, 9, 4) for token in range(4)])
    for path in ("direct", "staged"):
        connector = MAKE[path](layout="opaque", block_tokens=4)
        connector.initialize_kvcaches_ptr(caches)
        shape = (LAYERS, 2, caches[0][0].numel())
        objects = storage.batched_allocate(
            shape, torch.float32, MemoryFormat.OPAQUE, 2, block_tokens=4
        )
        assert objects is not None
        views = list(by_layer(objects))
        assert views[0][0].tensor.shape == shape[1:]
        list(connector.batched_from_gpu(views, [8, 0], [16, 8], slot_mapping=slots))
        drain(
            connector.batched_to_gpu([8, 0], [16, 8], slot_mapping=slots, kvcaches=targets), views
        )
        for cache, target in zip(caches, targets, strict=True):
            assert torch.equal(at(target, layout, slots), at(cache, layout, slots))
            target.zero_()
        with pytest.raises(ValueError, match="blocks of 4 tokens"):
            next(connector.batched_to_gpu([0], [6], slot_mapping=slots))


@pytest.mark.parametrize("path", MAKE)
def test_a_layer_may_be_a_view_an_object_a_tensor_or_a_buffer(
    storage: StorageManager, path: str
) -> None:
    starts, ends = IN_ORDER
    caches, slots = FORMS["split"][1](), random_slots(NUM_TOKENS, 6)
    whole = allocate(storage, *sizes(starts, ends), fmt=MemoryFormat.KV_2LTD)
    own: list[list[Any]] = []
    for _ in range(LAYERS):
        (raw,) = storage.batched_allocate([8 * 2 * HIDDEN * 4]) or []
        own.append([raw, torch.zeros(8, 2, HIDDEN), bytearray(5 * 2 * HIDDEN * 4)])
    connector = MAKE[path]()
    views = list(by_layer(whole))
    assert views[1][0].tensor.shape == (8, 2, HIDDEN)
    for layers in (views, own):
        connector_steps = connector.batched_from_gpu(
            layers, starts, ends, slot_mapping=slots, kvcaches=caches
        )
        list(connector_steps)
    for layer, of_layer in enumerate(own):
        for view, mine, start, end in zip(views[layer], of_layer, starts, ends, strict=True):
            rows = at(caches[layer], "split", slots[start:end])
            assert torch.equal(view.tensor, rows)
            buffer = mine.numpy() if isinstance(mine, torch.Tensor) else mine
            assert bytes(memoryview(buffer)) == rows.contiguous().numpy().tobytes()
    targets = FORMS["split"][1]()
    drain(connector.batched_to_gpu(starts, ends, slot_mapping=slots, kvcaches=targets), own)
    for cache, target in zip(caches, targets, strict=True):
        for start, end in zip(starts, ends, strict=True):
            of_chunk = slots[start:end]
            assert torch.equal(at(target, "split", of_chunk), at(cache, "split", of_chunk))


@pytest.mark.parametrize("path", MAKE)
def test_generators_of_one_connector_do_not_mix(storage: StorageManager, path: str) -> None:
    connector, starts, ends = MAKE[path](), [0, 8], [8, 16]
    requests = []
    for number in range(3):
        caches, slots = FORMS["split"][1](), random_slots(16, number)
        objects = allocate(storage, 8, 8)
        fill(objects)
        for memory_obj in objects:
            memory_obj.tensor.add_(number)
        steps = connector.batched_to_gpu(starts, ends, slot_mapping=slots, kvcaches=caches)
        next(steps)
        requests.append((caches, slots, objects, steps, by_layer(objects)))
    for _, (_, _, _, steps, layers) in itertools.product(range(LAYERS), requests):
        steps.send(next(layers))
    for caches, slots, objects, steps, _ in requests:
        assert list(steps) == [None]
        for layer, cache in enumerate(caches):
            wanted = torch.cat([memory_obj.tensor[layer] for memory_obj in objects])
            assert torch.equal(at(cache, "split", slots), wanted)


# --- gaps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", range(1, CHUNK))
@pytest.mark.parametrize("rope", [None, Rope.of_base(1e4, HEAD)])
def test_what_lies_between_restored_chunks_is_zero(
    storage: StorageManager, gap: int, rope: Rope | None
) -> None:
    caches, slots = FORMS["split"][1](), random_slots(40, gap)
    starts, ends = [3, 11 + gap, 19 + gap], [11, 19 + gap, 24 + gap]
    objects = allocate(storage, *sizes(starts, ends))
    fill(objects)
    hole = int(slots[11])
    mapping = slots.clone()
    if gap > 1:
        mapping[11] = -1
    connector = VLLMBufferLayerwiseGPUConnector(rope=rope)
    stored = [torch.arange(100, 100 + size) for size in sizes(starts, ends)]
    before = [cache.clone() for cache in caches]
    load = connector.batched_to_gpu(
        starts, ends, slot_mapping=mapping, kvcaches=caches, cached_positions=stored
    )
    drain(load, by_layer(objects))
    zeroed = [token for token in range(11, 11 + gap) if mapping[token] != -1]
    assert zeroed
    for layer, (cache, was) in enumerate(zip(caches, before, strict=True)):
        assert not at(cache, "split", slots[zeroed]).any()
        if gap > 1:
            assert torch.equal(
                at(cache, "split", torch.tensor([hole])), at(was, "split", torch.tensor([hole]))
            )
        outside = torch.cat([slots[:3], slots[24 + gap :]])
        assert torch.equal(at(cache, "split", outside), at(was, "split", outside))
        for memory_obj, start, end in zip(objects, starts, ends, strict=True):
            rows = at(cache, "split", slots[start:end])
            assert torch.equal(rows[:, 1], memory_obj.tensor[layer, :, 1])
            assert torch.equal(rows[:, 0], memory_obj.tensor[layer, :, 0]) == (rope is None)


# --- how it ends --------------------------------------------------------------------------------


class Stop(Exception):
    """What an engine may throw into a generator."""


@pytest.mark.parametrize("path", MAKE)
@pytest.mark.parametrize("how", ["close", "throw", "forget"])
@pytest.mark.parametrize("after", range(LAYERS + 2))
def test_a_load_left_early_keeps_whole_layers_and_nothing_else(
    storage: StorageManager, path: str, how: str, after: int
) -> None:
    starts, ends = IN_ORDER
    caches, slots = FORMS["split"][1](), random_slots(NUM_TOKENS, 8)
    objects = allocate(storage, *sizes(starts, ends))
    fill(objects)
    kv = [memory_obj.tensor.clone() for memory_obj in objects]
    before = [cache.clone() for cache in caches]
    steps = MAKE[path]().batched_to_gpu(starts, ends, slot_mapping=slots, kvcaches=caches)
    if after:
        next(steps)
    for views in itertools.islice(by_layer(objects), max(0, after - 1)):
        steps.send(views)
    views = None
    del objects
    assert free_bytes(storage) == 0, "an object outlives its step"
    if how == "close":
        steps.close()
    elif how == "throw":
        with pytest.raises(Stop):
            steps.throw(Stop())
    del steps
    behind = 1 if path == "buffered" else 0
    for layer, (cache, was) in enumerate(zip(caches, before, strict=True)):
        if layer < after - 1 - behind:
            for rows, start, end in zip(kv, starts, ends, strict=True):
                assert torch.equal(at(cache, "split", slots[start:end]), rows[layer])
        else:
            assert torch.equal(cache, was)


@pytest.mark.parametrize("path", MAKE)
@pytest.mark.parametrize("how", ["close", "throw"])
def test_a_store_left_early_leaves_objects_that_can_be_put(
    storage: StorageManager, path: str, how: str
) -> None:
    caches, slots = FORMS["split"][1](), random_slots(NUM_TOKENS, 9)
    objects = allocate(storage, *sizes(STARTS, ENDS))
    steps = MAKE[path]().batched_from_gpu(
        list(by_layer(objects)), STARTS, ENDS, slot_mapping=slots, kvcaches=caches
    )
    next(steps)
    next(steps)
    if how == "close":
        steps.close()
    else:
        with pytest.raises(Stop):
            steps.throw(Stop())
    # Raises if a buffer of one of them were still exported, or one were still lent.
    storage.backends["LocalCPUBackend"].local_cpu.require_puttable(objects)
    del objects, steps
    assert free_bytes(storage) == 0


@pytest.mark.parametrize("path", MAKE)
def test_a_layer_that_does_not_fit_moves_no_byte_of_it(storage: StorageManager, path: str) -> None:
    starts, ends = [0, 8], [8, 16]
    caches, slots = FORMS["split"][1](), random_slots(16, 10)
    connector = MAKE[path]()
    connector.initialize_kvcaches_ptr(caches)
    one, two = allocate(storage, 8, 8)
    small, mla = allocate(storage, 7), allocate(storage, 8, fmt=MemoryFormat.KV_MLA_FMT)
    fill([one, two])
    before = [cache.clone() for cache in caches]
    wrong: list[tuple[Any, str]] = [
        (None, "no objects; give them with .send"),
        ([one.layer(0)], "1 memory objects for 2 chunks"),
        ([one.layer(0), two.layer(1)], "layer 1 is given where layer 0 is due"),
        ([one.layer(0), small[0].layer(0)], "give one layer of the chunk"),
        ([one.layer(0), two], "num_layers=1"),
        ([one.layer(0), mla[0].layer(0)], "KV_MLA_FMT"),
        ([one.layer(0), torch.zeros(8, 2, HIDDEN, dtype=torch.float16)], "float16 for KV of"),
        ([one.layer(0), bytes(9)], "memory of 9 bytes"),
        ([one.layer(0), one.layer(0)], "named twice"),
    ]
    for views, message in wrong:
        steps = connector.batched_to_gpu(starts, ends, slot_mapping=slots)
        next(steps)
        with pytest.raises((ValueError, RuntimeError), match=message):
            steps.send(views)
        with pytest.raises(StopIteration):
            next(steps)
    assert all(map(torch.equal, caches, before))
    with pytest.raises(ValueError, match="layer 3 is none of 3"):
        one.layer(LAYERS)

    one.tensor.fill_(3.0)
    two.tensor.fill_(3.0)
    for last, message in ((small[0], "give one layer"), (mla[0], "KV_MLA_FMT")):
        layers = [[one.layer(layer), last.layer(layer)] for layer in range(LAYERS)]
        with pytest.raises(ValueError, match=message):
            next(connector.batched_from_gpu(layers, starts, ends, slot_mapping=slots))
    with pytest.raises(ValueError, match=r"of 2 layers for KV tensors of 3"):
        next(connector.batched_from_gpu([[], []], [], [], slot_mapping=slots))
    late = [*list(by_layer([one, two]))[:1], [one.layer(1), small[0].layer(1)], []]
    steps = connector.batched_from_gpu(late, starts, ends, slot_mapping=slots)
    next(steps)
    next(steps)
    with pytest.raises(ValueError, match="give one layer"):
        next(steps)
    assert not (one.tensor[0] == 3.0).any()
    assert bool((one.tensor[1:] == 3.0).all())


@pytest.mark.parametrize("path", MAKE)
def test_spans_and_slots_that_contradict_each_other_are_named_first(path: str) -> None:
    caches = FORMS["split"][1]()
    connector, slots = MAKE[path](), random_slots(16, 11)
    with pytest.raises(RuntimeError, match="give kvcaches once"):
        next(connector.batched_to_gpu([0], [8], slot_mapping=slots))
    connector.initialize_kvcaches_ptr(caches)
    for starts, ends, mapping, message in (
        ([9], [17], slots, "not within a slot_mapping of 16"),
        ([9], [7], slots, "not within a slot_mapping of 16"),
        ([0, 8], [8], slots, "2 starts and 1 ends"),
        ([0], [8], slots + SLOTS, "outside the registered cache"),
        ([0], [8], slots - 200, "outside the registered cache"),
        ([0], [8], slots.int(), "int64"),
        ([0], [8], slots[None], "one dimension|not within"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            next(connector.batched_to_gpu(starts, ends, slot_mapping=mapping))
        with pytest.raises((ValueError, TypeError), match=message):
            next(
                connector.batched_from_gpu(
                    [[None] * len(starts)] * LAYERS, starts, ends, slot_mapping=mapping
                )
            )


def test_the_buffered_connector_wants_order_and_known_positions(storage: StorageManager) -> None:
    caches, slots = FORMS["split"][1](), random_slots(40, 12)
    connector = VLLMBufferLayerwiseGPUConnector(rope=Rope.of_base(1e4, HEAD))
    connector.initialize_kvcaches_ptr(caches)
    load = connector.batched_to_gpu
    for starts, ends in (([8, 0], [16, 8]), ([0, 7], [8, 16])):
        with pytest.raises(ValueError, match="in order, without overlaps"):
            next(load(starts, ends, slot_mapping=slots))
    with pytest.raises(ValueError, match=r"\[3\] positions for 40 slots"):
        next(load([0], [8], slot_mapping=slots, positions=[1, 2, 3]))
    with pytest.raises(TypeError, match="positions has dtype torch.int32"):
        next(load([0], [8], slot_mapping=slots, positions=torch.arange(40).int()))
    with pytest.raises(ValueError, match="positions of 2 chunks for 1"):
        next(load([0], [8], slot_mapping=slots, cached_positions=[torch.arange(8)] * 2))
    with pytest.raises(ValueError, match="8 tokens and stored positions of shape"):
        next(load([0], [8], slot_mapping=slots, cached_positions=[torch.arange(7)]))
    before = [cache.clone() for cache in caches]
    (unknown,) = allocate(storage, 8)
    steps = load([0], [8], slot_mapping=slots)
    next(steps)
    with pytest.raises(ValueError, match="chunk 0 was stored at are not known"):
        steps.send([unknown.layer(0)])
    assert all(map(torch.equal, caches, before))


def test_each_layer_turns_from_the_positions_of_its_own_objects(storage: StorageManager) -> None:
    caches, slots = FORMS["split"][1](), random_slots(8, 14)
    rope, at_zero = Rope.of_base(1e4, HEAD), torch.arange(8)
    objects = []
    for positions in (at_zero, at_zero + 100):
        shape = (LAYERS, 8, 2, HIDDEN)
        objects += (
            storage.batched_allocate(
                shape, torch.float32, MemoryFormat.KV_T2D, cached_positions=[positions]
            )
            or []
        )
    fill(objects)
    layers = [[objects[layer % 2].layer(layer)] for layer in range(LAYERS)]
    connector = VLLMBufferLayerwiseGPUConnector(rope=rope)
    drain(connector.batched_to_gpu([0], [8], slot_mapping=slots, kvcaches=caches), layers)
    for layer, cache in enumerate(caches):
        (view,) = layers[layer]
        same = torch.equal(at(cache, "split", slots), view.tensor)
        assert same == (layer % 2 == 0), "only the second object's keys are elsewhere"


def test_sealed_memory_is_read_and_never_filled(storage: StorageManager) -> None:
    caches, slots = FORMS["split"][1](), random_slots(8, 13)
    objects = allocate(storage, 8)
    fill(objects)
    local_cpu = storage.backends["LocalCPUBackend"].local_cpu
    assert local_cpu.put("ns", bytes(32), objects[0])
    was = objects[0].to_bytes()
    for path, views in itertools.product(
        MAKE,
        (
            list(by_layer(objects)),
            [[view.tensor] for (view,) in by_layer(objects)],
            [[memoryview(view.tensor.numpy()).toreadonly()] for (view,) in by_layer(objects)],
        ),
    ):
        connector = MAKE[path]()
        with pytest.raises((RuntimeError, BufferError), match="sealed|put or released|read-only"):
            list(connector.batched_from_gpu(views, [0], [8], slot_mapping=slots, kvcaches=caches))
        drain(connector.batched_to_gpu([0], [8], slot_mapping=slots), views)
        assert objects[0].to_bytes() == was
        for layer, cache in enumerate(caches):
            assert torch.equal(at(cache, "split", slots), objects[0].tensor[layer])
            cache.zero_()


def test_an_opaque_fallback_is_refused_where_tokens_must_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from test_layouts import five_axes, swap_strides

    swap_strides(monkeypatch)
    layout: Layout = "blocks_first"
    connector = VLLMBufferLayerwiseGPUConnector(rope=None, layout=layout)
    with pytest.raises(LayoutError, match="tokens of opaque blocks"):
        next(
            connector.batched_to_gpu(
                [0], [4], slot_mapping=torch.arange(4), kvcaches=five_axes("BKNHD")(heads=4)
            )
        )
