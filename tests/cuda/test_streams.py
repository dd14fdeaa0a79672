"""What is ordered by what on a GPU, and what happens where its driver refuses."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from imitated import SWITCH, Imitated

from lmcache_rs import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata, StorageManager, _native
from lmcache_rs.gpu_connector import (
    Rope,
    VLLMBufferLayerwiseGPUConnector,
    VLLMPagedMemGPUConnectorV2,
    VLLMPagedMemLayerwiseGPUConnector,
    by_layer,
)
from lmcache_rs.layouts import MemoryFormat
from lmcache_rs.storage import MemoryObj
from lmcache_rs.vllm_v1.faults import Faults
from lmcache_rs.vllm_v1.worker import LMCacheWorkerHalf

LAYERS, BLOCKS, BLOCK, HEADS, HEAD, CHUNK = 3, 24, 4, 2, 8, 8
META = LMCacheMetadata("m", 1, 0, "float32")
TOKENS = list(range(16))
# Long against a copy of a few bytes, short for whoever waits.
VERY_LATE_US = 5000


def settings(**changes: object) -> LMCacheEngineConfig:
    given = {"chunk_size": CHUNK, "max_local_cpu_size": 0.002, **changes}
    return LMCacheEngineConfig.from_defaults(**given)


@pytest.fixture
def engine() -> Iterator[LMCacheEngine]:
    with LMCacheEngine(settings(), META) as engine:
        yield engine


@pytest.fixture
def storage() -> Iterator[StorageManager]:
    manager = StorageManager(settings())
    yield manager
    manager.close()


def caches(seed: int = 0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (2, BLOCKS, BLOCK, HEADS, HEAD)
    return [torch.randn(shape, generator=random) for _ in range(LAYERS)]


def allocate(storage: StorageManager, count: int) -> list[MemoryObj]:
    shape = (LAYERS, 8, 2, HEADS * HEAD)
    objects = storage.batched_allocate(shape, torch.float32, MemoryFormat.KV_T2D, count)
    assert objects is not None
    return objects


def slots(seed: int = 0, num_tokens: int = 16) -> torch.Tensor:
    order = torch.randperm(BLOCKS * BLOCK, generator=torch.Generator().manual_seed(seed))
    return order[:num_tokens].to(torch.int64)


def kv(cache: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return cache[:, where // BLOCK, where % BLOCK]


def written_late(imitated: Imitated, cache: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """The engine's forward pass: its stream has yet to write the layers."""
    imitated.be_late(0)
    for layer, value in zip(cache, values, strict=True):
        imitated.engine_writes(layer, value, VERY_LATE_US)


# --- a store comes behind the engine, and the engine behind the store ---------------------------


@pytest.mark.parametrize("way", ["bulk", "layer"])
def test_a_store_has_what_the_engines_stream_writes_before_it(
    engine: LMCacheEngine, imitated: Imitated, way: str
) -> None:
    cache, values, target = caches(1), caches(2), caches(3)
    wanted = [kv(value, slots()).clone() for value in values]
    where = {"kvcaches": cache, "slot_mapping": slots()}
    engine.register_kv_caches(cache)
    written_late(imitated, cache, values)
    if way == "bulk":
        assert engine.store(TOKENS, **where) == 16  # type: ignore[arg-type]
    else:
        assert len(list(engine.store_layer(TOKENS, **where))) == LAYERS + 1  # type: ignore[arg-type]
    engine.retrieve(TOKENS, kvcaches=target, slot_mapping=slots())
    for layer, rows in zip(target, wanted, strict=True):
        assert torch.equal(kv(layer, slots()), rows)


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_block_is_the_engines_again_only_behind_its_store(
    engine: LMCacheEngine, imitated: Imitated, gpu: _native.CudaDevice, layerwise: bool
) -> None:
    """As vLLM does it: the store is not waited for, and the next step writes the same blocks."""
    cache, target = caches(1), caches(3)
    engine.register_kv_caches(cache)
    wanted = [layer.clone() for layer in cache]
    imitated.be_late(VERY_LATE_US)
    blocks, chain = [3, 4, 7, 9], engine.token_database.new_chain()
    chain.extend(TOKENS)
    where = ("ns", chain.hashes(), blocks)
    if layerwise:
        step = engine.layerwise_step()
        assert step is not None
        step.add_save("ns", chain.hashes(), num_tokens=16, blocks=blocks)
        for layer in range(LAYERS):
            step.save(layer)
        assert [stored[0] for stored in step.commit()] == [2]
    else:
        assert engine.store_chunks(*where).chunks == 2
    assert engine.local_cpu is not None
    assert engine.local_cpu.longest_prefix("ns", chain.hashes()) == 0, "visible before its copies"
    for layer in cache:
        layer.zero_()
    gpu.settle()
    assert engine.local_cpu.longest_prefix("ns", chain.hashes()) == 2
    for layer in target:
        layer.zero_()
    engine.register_kv_caches(target)
    engine.load_chunks("", *where, skip=0)
    for layer, was in zip(target, wanted, strict=True):
        assert torch.equal(layer[:, blocks], was[:, blocks])


def test_what_is_found_is_whole(engine: LMCacheEngine, imitated: Imitated) -> None:
    cache, blocks = caches(1), [3, 4]
    rows = [layer[:, blocks].reshape(2, 8, HEADS * HEAD).transpose(0, 1) for layer in cache]
    wanted = torch.stack(rows).contiguous().numpy().tobytes()
    registered = engine.register_kv_caches(cache)
    chain = engine.token_database.new_chain()
    chain.extend(TOKENS[:8])
    assert engine.local_cpu is not None
    imitated.be_late(VERY_LATE_US)
    where = {"chunk_size": CHUNK, "num_tokens": 8, "blocks": blocks}
    registered.store(engine.local_cpu, "ns", chain.hashes(), wait=True, **where)
    (found,) = engine.local_cpu.get("ns", chain.hashes())
    assert found.to_bytes() == wanted


@pytest.mark.parametrize("connector", ["bulk", "direct", "staged"])
def test_a_connectors_store_has_what_the_engine_writes_before_it(
    storage: StorageManager, imitated: Imitated, connector: str
) -> None:
    cache, values = caches(1), caches(2)
    wanted = [kv(value, slots()).clone() for value in values]
    objects = allocate(storage, 2)
    spans = ([0, 8], [8, 16])
    where = {"slot_mapping": slots(), "kvcaches": cache}
    bulk = VLLMPagedMemGPUConnectorV2()
    layers = VLLMPagedMemLayerwiseGPUConnector(use_gpu=connector == "staged")
    bulk.initialize_kvcaches_ptr(cache)
    layers.initialize_kvcaches_ptr(cache)
    written_late(imitated, cache, values)
    if connector == "bulk":
        bulk.batched_from_gpu(objects, *spans, **where)  # type: ignore[arg-type]
    else:
        steps = layers.batched_from_gpu(list(by_layer(objects)), *spans, **where)  # type: ignore[arg-type]
        assert len(list(steps)) == LAYERS + 1
    imitated.be_late(0)
    for number, memory_obj in enumerate(objects):
        for layer in range(LAYERS):
            rows = wanted[layer][:, number * 8 : number * 8 + 8]
            found = memory_obj.tensor[layer].view(8, 2, HEADS, HEAD).transpose(0, 1)
            assert torch.equal(found, rows)


# --- a load comes behind the engine, and the engine behind the load -----------------------------


@pytest.mark.parametrize("way", ["bulk", "layer"])
def test_a_load_overwrites_nothing_that_an_earlier_step_still_reads(
    engine: LMCacheEngine, imitated: Imitated, way: str
) -> None:
    source, target = caches(1), caches(2)
    engine.store(TOKENS, kvcaches=source, slot_mapping=slots())
    engine.register_kv_caches(target)
    before = [layer.clone() for layer in target]
    read = [torch.empty_like(layer) for layer in target]
    # Made now: whatever a test does with torch waits for the engine.
    where = {"kvcaches": target, "slot_mapping": slots()}
    imitated.be_late(0)
    for layer, copy in zip(target, read, strict=True):
        imitated.engine_writes(copy, layer, VERY_LATE_US)
    if way == "bulk":
        engine.retrieve(TOKENS, **where)  # type: ignore[arg-type]
    else:
        list(engine.retrieve_layer(TOKENS, **where))  # type: ignore[arg-type]
    imitated.drain()
    for was, seen in zip(before, read, strict=True):
        assert torch.equal(was, seen)


@pytest.mark.parametrize("way", ["bulk", "layer", "direct", "staged", "buffered"])
def test_the_engine_reads_a_layer_only_behind_its_load(
    engine: LMCacheEngine, storage: StorageManager, imitated: Imitated, way: str
) -> None:
    source, target = caches(1), caches(2)
    where = {"slot_mapping": slots(), "kvcaches": target}
    engine.store(TOKENS, kvcaches=source, slot_mapping=slots())
    objects = allocate(storage, 2)
    VLLMPagedMemGPUConnectorV2().batched_from_gpu(
        objects, [0, 8], [8, 16], slot_mapping=slots(), kvcaches=source
    )
    engine.register_kv_caches(target)
    connector = {
        "direct": VLLMPagedMemLayerwiseGPUConnector(),
        "staged": VLLMPagedMemLayerwiseGPUConnector(use_gpu=True),
        "buffered": VLLMBufferLayerwiseGPUConnector(rope=None),
    }.get(way)
    read = [torch.empty_like(layer) for layer in target]
    if connector is not None:
        connector.initialize_kvcaches_ptr(target)
    imitated.be_late(VERY_LATE_US)
    if way == "bulk":
        engine.retrieve(TOKENS, **where)  # type: ignore[arg-type]
        for layer in range(LAYERS):
            imitated.engine_writes(read[layer], target[layer])
    elif way == "layer":
        steps = engine.retrieve_layer(TOKENS, **where)  # type: ignore[arg-type]
        next(steps)
        for layer in range(LAYERS):
            next(steps)
            imitated.engine_writes(read[layer], target[layer])
        list(steps)
    else:
        assert connector is not None
        loads = connector.batched_to_gpu([0, 8], [8, 16], **where)  # type: ignore[arg-type]
        next(loads)
        # Its third stage writes a layer with the step after the one that brought it.
        behind = 1 if way == "buffered" else 0
        for layer, views in enumerate(by_layer(objects)):
            loads.send(views)
            if layer >= behind:
                imitated.engine_writes(read[layer - behind], target[layer - behind])
        for layer in range(LAYERS - behind, LAYERS):
            next(loads)
            imitated.engine_writes(read[layer], target[layer])
        list(loads)
    for seen, wanted in zip(read, source, strict=True):
        assert torch.equal(kv(seen, slots()), kv(wanted, slots()))


def test_what_the_engine_computes_in_a_loaded_chunk_is_written_behind_the_load(
    engine: LMCacheEngine, imitated: Imitated, gpu: _native.CudaDevice
) -> None:
    """The load of a chunk that a step computes a part of is over before the step begins."""
    source, target = caches(1), caches(2)
    chain = engine.token_database.new_chain()
    chain.extend(TOKENS)
    blocks = [3, 4, 7, 9]
    engine.register_kv_caches(source)
    engine.store_chunks("ns", chain.hashes(), blocks)
    gpu.settle()
    engine.register_kv_caches(target)
    imitated.be_late(VERY_LATE_US)
    step = engine.layerwise_step()
    assert step is not None
    step.add_load("", "ns", chain.hashes(), num_tokens=16, blocks=blocks, computed_from=15)
    step.start_loads(_native.Copier())
    # The last token of the last block, which the engine computes itself.
    for layer in target:
        layer[:, blocks[-1], BLOCK - 1] = 9.0
    for layer in range(LAYERS):
        step.wait(layer)
    assert step.finish_loads() == [(16, 16, 16 * LAYERS * 2 * HEADS * HEAD * 4)]
    for layer, was in zip(target, source, strict=True):
        assert (layer[:, blocks[-1], BLOCK - 1] == 9.0).all()
        assert torch.equal(layer[:, blocks[:-1]], was[:, blocks[:-1]])


# --- what is held, and given back ---------------------------------------------------------------


def test_chunks_are_leased_until_their_load_is_done(
    engine: LMCacheEngine, imitated: Imitated, gpu: _native.CudaDevice
) -> None:
    source, target = caches(1), caches(2)
    engine.store(TOKENS, kvcaches=source, slot_mapping=slots())
    engine.register_kv_caches(target)
    assert engine.local_cpu is not None
    imitated.hold(True)
    engine.retrieve(TOKENS, kvcaches=target, slot_mapping=slots())
    assert engine.local_cpu.audit()["leased_bytes"] > 0
    assert gpu.num_under_way == 1
    imitated.hold(False)
    gpu.settle()
    assert (engine.local_cpu.audit()["leased_bytes"], gpu.num_under_way) == (0, 0)


def test_memory_of_a_copy_under_way_is_read_behind_it(
    storage: StorageManager, imitated: Imitated
) -> None:
    cache = caches(1)
    (memory_obj,) = allocate(storage, 1)
    connector = VLLMPagedMemLayerwiseGPUConnector()
    connector.initialize_kvcaches_ptr(cache)
    imitated.be_late(VERY_LATE_US)
    steps = connector.batched_from_gpu(
        list(by_layer([memory_obj])), [0], [8], slot_mapping=slots()[:8]
    )
    next(steps)
    next(steps)
    found = memory_obj.tensor[0].view(8, 2, HEADS, HEAD).transpose(0, 1)
    assert torch.equal(found, kv(cache[0], slots()[:8]))
    steps.close()


def test_an_engine_that_closes_leaves_nothing_on_the_device(imitated: Imitated) -> None:
    """Whatever is under way ends first; then every handle goes back, the pool's page-lock too."""
    script = Path(__file__).with_name("close_and_count.py")
    environ = os.environ | {SWITCH: str(imitated.path), "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stdout.strip()) == (0, "0 handles left"), told.stderr


def test_a_pool_is_page_locked_once_and_counted(
    engine: LMCacheEngine, imitated: Imitated, gpu: _native.CudaDevice
) -> None:
    assert engine.local_cpu is not None
    engine.register_kv_caches(caches(1))
    assert engine.page_locked_bytes == engine.local_cpu.capacity_bytes
    before = imitated.calls("cuMemHostRegister")
    assert gpu.lock_pool(engine.local_cpu) == (engine.page_locked_bytes, None)
    assert imitated.calls("cuMemHostRegister") == before


# --- what refuses -------------------------------------------------------------------------------


def test_a_pool_that_cannot_be_page_locked_is_copied_all_the_same(
    imitated: Imitated, gpu: _native.CudaDevice, caplog: pytest.LogCaptureFixture
) -> None:
    imitated.limit_registration(1 << 18)
    imitated.allow_pageable(True)
    try:
        with LMCacheEngine(settings(), META) as engine, caplog.at_level("WARNING"):
            source, target = caches(1), caches(2)
            engine.register_kv_caches(source)
            engine.register_kv_caches(target)
            assert engine.page_locked_bytes == 0
            assert sum("cannot be page-locked" in text for text in caplog.messages) == 1
            before = gpu.copies()
            assert engine.store(TOKENS, kvcaches=source, slot_mapping=slots()) == 16
            engine.retrieve(TOKENS, kvcaches=target, slot_mapping=slots())
            for layer, was in zip(target, source, strict=True):
                assert torch.equal(kv(layer, slots()), kv(was, slots()))
            gpu.settle()
            # Two copies of chunks; the trials' small pools are locked, and go as they are told.
            assert gpu.copies()["single"] - before["single"] >= 2
            others = ("engine", "kernel", "staged")
            assert sum(gpu.copies()[way] - before[way] for way in others) <= 2 * 3 * LAYERS
    finally:
        imitated.limit_registration(None)
        imitated.allow_pageable(False)


@pytest.mark.parametrize(
    ("library", "message"),
    [("/nowhere/libcuda.so.1", "install NVIDIA's driver"), ("libm.so.6", "install 580 or newer")],
)
def test_tensors_on_a_gpu_without_a_driver_are_a_clear_stop(
    imitated: Imitated, monkeypatch: pytest.MonkeyPatch, library: str, message: str
) -> None:
    monkeypatch.setenv(SWITCH, library)
    with (
        LMCacheEngine(settings(), META) as engine,
        pytest.raises(_native.CudaError, match=message),
    ):
        engine.register_kv_caches(caches(1))


def test_a_failure_of_the_device_is_an_error_and_nothing_is_published(
    engine: LMCacheEngine, imitated: Imitated
) -> None:
    cache = caches(1)
    engine.register_kv_caches(cache)
    imitated.break_down(700)
    try:
        with pytest.raises(_native.CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            engine.store(TOKENS, kvcaches=cache, slot_mapping=slots())
    finally:
        imitated.break_down(0)
    assert engine.lookup(TOKENS) == 0
    with pytest.raises(_native.CudaError):
        # What the drops could not say is said once more.
        engine.store(TOKENS, kvcaches=cache, slot_mapping=slots())
    assert engine.store(TOKENS, kvcaches=cache, slot_mapping=slots()) == 16


def test_a_forked_child_may_not_use_the_device(
    engine: LMCacheEngine, gpu: _native.CudaDevice
) -> None:
    cache = caches(1)
    registered = engine.register_kv_caches(cache)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for use in (gpu.settle, gpu.copies, lambda: registered.native.num_layers):
                try:
                    use()
                except RuntimeError as error:
                    code = 0 if "fork" in str(error) else 2
                if code:
                    break
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert engine.store(TOKENS, kvcaches=cache, slot_mapping=slots()) == 16


def test_keys_of_64_bits_are_not_turned_on_a_gpu() -> None:
    cache = [layer.double() for layer in caches(1)]
    connector = VLLMBufferLayerwiseGPUConnector(rope=Rope.of_base(1e4, HEAD))
    with pytest.raises(ValueError, match="64 bits are not turned on a GPU"):
        next(connector.batched_to_gpu([0], [8], slot_mapping=slots()[:8], kvcaches=cache))


# --- vLLM's worker half -------------------------------------------------------------------------


def test_vllms_worker_says_who_copies_and_counts_it(gpu: _native.CudaDevice) -> None:
    metadata = LMCacheMetadata("m", 1, 0, "float32", block_size=BLOCK, stored_form="OPAQUE")
    faults = Faults()
    half = LMCacheWorkerHalf(
        settings(), metadata, "start", in_scheduler_process=False, faults=faults
    )
    tensors = [torch.randn(BLOCKS, BLOCK, 2 * HEADS * HEAD) for _ in range(LAYERS)]
    half.register_kv_caches(tensors, tensors[0][0].nbytes, [f"l{at}" for at in range(LAYERS)])
    try:
        assert half.plan == "copied in whole blocks by GPU 0 (Fake GPU, driver of CUDA 13.0)"
        counters = half.counters()
        assert counters["copy_path"] == "by GPU 0 (Fake GPU, driver of CUDA 13.0)"
        assert counters["page_locked_bytes"] == half.capacity()[0]
        ways = ["engine", "kernel", "single", "staged"]
        assert sorted(gpu.copies()) == ways
        assert sum(counters[f"copies_by_{way}"] for way in ways) > 0
    finally:
        half.shutdown()
    gc.collect()
