"""The generators: a fixed number of steps, whatever there is to do, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lmcache_rs import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata, _native

LAYERS, BLOCKS, BLOCK, HEADS, HEAD, CHUNK = 3, 24, 4, 2, 8, 8
META = LMCacheMetadata("m", 1, 0, "float32")
TOKENS = list(range(20))


def make(**changes: object) -> LMCacheEngine:
    settings = {"chunk_size": CHUNK, "max_local_cpu_size": 0.002, **changes}
    return LMCacheEngine(LMCacheEngineConfig.from_defaults(**settings), META)


@pytest.fixture
def engine() -> Iterator[LMCacheEngine]:
    with make() as engine:
        yield engine
        assert_idle(engine)


def assert_idle(engine: LMCacheEngine) -> None:
    assert engine.local_cpu is not None
    books = engine.local_cpu.audit()
    assert (books["leased_bytes"], books["reserved_bytes"], books["leases"]) == (0, 0, 0)
    assert books["free_bytes"] + books["cached_bytes"] == books["capacity_bytes"]


def caches(seed: int = 0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (2, BLOCKS, BLOCK, HEADS, HEAD)
    return [torch.randn(shape, generator=random) for _ in range(LAYERS)]


def slots(seed: int = 0, num_tokens: int = len(TOKENS)) -> torch.Tensor:
    order = torch.randperm(BLOCKS * BLOCK, generator=torch.Generator().manual_seed(seed))
    return order[:num_tokens].to(torch.int64)


def kv(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return cache[:, slots // BLOCK, slots % BLOCK]


def test_a_layer_is_copied_by_the_step_after_it_and_all_appear_with_the_last(
    engine: LMCacheEngine,
) -> None:
    source, where = caches(1), slots(1)
    storer = engine.store_layer(TOKENS, kvcaches=source, slot_mapping=where)
    assert next(storer) is None
    wanted = []
    for cache in source:
        wanted.append(kv(cache, where).clone())
        assert engine.lookup(TOKENS) == 0
        assert next(storer) is None
        # Copied by now: what comes later is not stored.
        cache.zero_()
    assert engine.lookup(TOKENS) == 16, "visible with the last layer, before the generator ends"
    assert list(storer) == []
    target = caches(2)
    assert engine.retrieve(TOKENS, kvcaches=target, slot_mapping=slots(3)).sum() == 16
    for cache, rows in zip(target, wanted, strict=True):
        assert torch.equal(kv(cache, slots(3))[:, :16], rows[:, :16])


def test_a_layer_is_written_by_its_step_and_no_sooner(engine: LMCacheEngine) -> None:
    source, where = caches(1), slots(1)
    engine.store(TOKENS, kvcaches=source, slot_mapping=where)
    target, mask = caches(2), torch.arange(len(TOKENS)) >= 5
    before = [cache.clone() for cache in target]
    retriever = engine.retrieve_layer(TOKENS, mask, kvcaches=target, slot_mapping=where)
    assert next(retriever) == 11
    for layer in range(LAYERS):
        for later in range(layer, LAYERS):
            assert torch.equal(target[later], before[later])
        assert next(retriever) is None
        assert torch.equal(kv(target[layer], where)[:, 5:16], kv(source[layer], where)[:, 5:16])
        assert torch.equal(kv(target[layer], where)[:, :5], kv(before[layer], where)[:, :5])
    assert next(retriever) is None
    ret_mask = next(retriever)
    assert isinstance(ret_mask, torch.Tensor)
    assert ret_mask.tolist() == [5 <= at < 16 for at in range(20)]
    assert list(retriever) == []


@pytest.mark.parametrize("stored_by", ["bulk", "layer"])
@pytest.mark.parametrize("loaded_by", ["bulk", "layer"])
def test_bulk_and_layerwise_share_their_chunks(
    engine: LMCacheEngine, stored_by: str, loaded_by: str
) -> None:
    source, target = caches(1), caches(2)
    if stored_by == "bulk":
        engine.store(TOKENS, kvcaches=source, slot_mapping=slots(1))
    else:
        list(engine.store_layer(TOKENS, kvcaches=source, slot_mapping=slots(1)))
    assert engine.store(TOKENS, kvcaches=source, slot_mapping=slots(1)) == 0
    if loaded_by == "bulk":
        ret_mask = engine.retrieve(TOKENS, kvcaches=target, slot_mapping=slots(2))
    else:
        *_, last = engine.retrieve_layer(TOKENS, kvcaches=target, slot_mapping=slots(2))
        assert isinstance(last, torch.Tensor)
        ret_mask = last
    assert ret_mask.sum() == 16
    for here, there in zip(source, target, strict=True):
        assert torch.equal(kv(here, slots(1))[:, :16], kv(there, slots(2))[:, :16])


def steps_of(
    engine: LMCacheEngine, tokens: list[int], **options: object
) -> tuple[int, list[object]]:
    """Steps of a store, and what a retrieve yields."""
    where = {"kvcaches": caches(), "slot_mapping": slots(0, len(tokens)), **options}
    stored = list(engine.store_layer(tokens, **where))  # type: ignore[arg-type]
    assert all(step is None for step in stored)
    return len(stored), list(engine.retrieve_layer(tokens, **where))  # type: ignore[arg-type]


@pytest.mark.parametrize("sync", [False, True])
def test_counts_of_steps_when_all_is_well(engine: LMCacheEngine, sync: bool) -> None:
    num_steps, loaded = steps_of(engine, TOKENS, sync=sync)
    assert num_steps == LAYERS + 1
    assert len(loaded) == LAYERS + 3
    assert loaded[0] == 16
    assert loaded[1:-1] == [None] * (LAYERS + 1)


@pytest.mark.parametrize(
    ("tokens", "options", "settings"),
    [
        (TOKENS[:5], {}, {}),
        ([], {}, {}),
        (TOKENS, {"mask": [False] * 20}, {}),
        (TOKENS, {"slot_mapping": [-1] * 20}, {}),
        (TOKENS, {}, {"local_cpu": False}),
    ],
    ids=["shorter than a chunk", "empty", "all masked", "no slots", "no memory"],
)
def test_counts_of_steps_when_nothing_is_stored(
    tokens: list[int], options: dict[str, object], settings: dict[str, object]
) -> None:
    with make(**settings) as engine:
        num_steps, loaded = steps_of(engine, tokens, **options)
        assert num_steps == LAYERS + 1
        assert len(loaded) == LAYERS + 3
        assert loaded[:-1] == [0] + [None] * (LAYERS + 1)
        assert isinstance(loaded[-1], torch.Tensor)
        assert loaded[-1].tolist() == [False] * len(tokens)


def test_counts_of_steps_when_all_is_stored_already(engine: LMCacheEngine) -> None:
    for _ in range(2):
        num_steps, loaded = steps_of(engine, TOKENS)
        assert (num_steps, len(loaded)) == (LAYERS + 1, LAYERS + 3)


def test_counts_of_steps_when_memory_ends(engine: LMCacheEngine) -> None:
    # A chunk takes a page. One is left.
    assert engine.local_cpu is not None
    held = engine.local_cpu.allocate([4096] * (engine.local_cpu.capacity_bytes // 4096 - 1))
    assert held is not None
    num_steps, loaded = steps_of(engine, TOKENS)
    assert (num_steps, len(loaded)) == (LAYERS + 1, LAYERS + 3)
    assert loaded[0] == 8, "the chunk that fits is kept"
    engine.local_cpu.clear()
    del held


def test_counts_of_steps_when_unhealthy(
    engine: LMCacheEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.store(TOKENS, kvcaches=caches(), slot_mapping=slots())
    monkeypatch.setattr(engine, "is_healthy", lambda: False)
    num_steps, loaded = steps_of(engine, TOKENS)
    assert (num_steps, len(loaded)) == (LAYERS + 1, LAYERS + 3)
    assert loaded[0] == 0


@pytest.mark.parametrize("num_steps", range(LAYERS + 1))
@pytest.mark.parametrize("ending", ["close", "throw", "forget"])
def test_a_store_that_ends_early_was_never_there(
    engine: LMCacheEngine, num_steps: int, ending: str
) -> None:
    storer = engine.store_layer(TOKENS, kvcaches=caches(), slot_mapping=slots())
    for _ in range(num_steps):
        next(storer)
    if ending == "close":
        storer.close()
    elif ending == "throw":
        # Held to the end of the test, and with it the generator's frame.
        with pytest.raises(KeyError) as raised:
            storer.throw(KeyError())
        assert raised.traceback
    del storer
    assert engine.lookup(TOKENS) == 0
    assert_idle(engine)
    assert engine.store(TOKENS, kvcaches=caches(), slot_mapping=slots()) == 16


@pytest.mark.parametrize("num_steps", range(LAYERS + 3))
@pytest.mark.parametrize("ending", ["close", "throw", "forget"])
def test_a_retrieve_that_ends_early_gives_its_leases_back(
    engine: LMCacheEngine, num_steps: int, ending: str
) -> None:
    engine.store(TOKENS, kvcaches=caches(1), slot_mapping=slots())
    assert engine.lookup(TOKENS, lookup_id="r") == 16
    retriever = engine.retrieve_layer(TOKENS, kvcaches=caches(2), slot_mapping=slots(), req_id="r")
    for _ in range(num_steps):
        next(retriever)
    if ending == "close":
        retriever.close()
    elif ending == "throw":
        # Held to the end of the test, and with it the generator's frame.
        with pytest.raises(KeyError) as raised:
            retriever.throw(KeyError())
        assert raised.traceback
    del retriever
    if num_steps == 0:
        engine.release("r")
    assert_idle(engine)


def test_what_is_held_by_a_retrieve_is_not_evicted_under_it(engine: LMCacheEngine) -> None:
    source, target = caches(1), caches(2)
    engine.store(TOKENS, kvcaches=source, slot_mapping=slots())
    retriever = engine.retrieve_layer(TOKENS, kvcaches=target, slot_mapping=slots())
    assert next(retriever) == 16
    assert engine.local_cpu is not None
    engine.local_cpu.clear()
    *_, last = retriever
    assert isinstance(last, torch.Tensor)
    assert last.sum() == 16
    for here, there in zip(source, target, strict=True):
        assert torch.equal(kv(here, slots())[:, :16], kv(there, slots())[:, :16])


def test_errors_are_those_of_store_and_retrieve(engine: LMCacheEngine) -> None:
    for walk in (engine.store_layer, engine.retrieve_layer):
        with pytest.raises(ValueError, match="slot_mapping has 3 entries"):
            next(walk(TOKENS, kvcaches=caches(), slot_mapping=[0, 1, 2]))
        with pytest.raises(ValueError, match="mask"):
            next(walk(TOKENS, [True, False] * 10, kvcaches=caches(), slot_mapping=slots()))
    closed = make()
    closed.close()
    for walk in (closed.store_layer, closed.retrieve_layer):
        with pytest.raises(RuntimeError, match="closed"):
            next(walk(TOKENS, kvcaches=caches(), slot_mapping=slots()))


@pytest.mark.parametrize("num_steps", range(1, LAYERS + 2))
def test_an_engine_may_be_closed_between_any_two_steps(num_steps: int) -> None:
    with make() as engine:
        engine.store(TOKENS[:16], kvcaches=caches(), slot_mapping=slots(0, 16))
        walks = [
            engine.store_layer(TOKENS[4:], kvcaches=caches(), slot_mapping=slots(1, 16)),
            engine.retrieve_layer(TOKENS, kvcaches=caches(), slot_mapping=slots()),
        ]
        for walk in walks:
            for _ in range(num_steps):
                next(walk)
    left = [len(list(walk)) for walk in walks]
    assert left == [LAYERS + 1 - num_steps, LAYERS + 3 - num_steps]


# The native step, where hooks call it in ways that generators do not.


def native_step(engine: LMCacheEngine) -> _native.LayerwiseStep:
    engine.store(TOKENS, kvcaches=caches(), slot_mapping=slots())
    step = engine.layerwise_step()
    assert step is not None
    return step


def test_a_layer_that_is_not_there_is_refused_and_loads_are_added_before_they_begin(
    engine: LMCacheEngine,
) -> None:
    step = native_step(engine)
    assert step.num_layers == LAYERS
    with pytest.raises(ValueError, match="layer 3 of a cache of 3 layers"):
        step.save(LAYERS)
    step.start_loads()
    step.start_loads()
    step.wait(LAYERS + 5)
    with pytest.raises(RuntimeError, match="have begun"):
        step.add_load("r", "ns", bytes(32), num_tokens=CHUNK, slots=list(range(CHUNK)))
    step.close()
    step.close()
    assert step.finish_loads() == []
    assert step.commit() == []
    step.wait(0)


def test_a_copier_needs_a_rate_above_nothing_and_ends_more_than_once() -> None:
    with pytest.raises(ValueError, match="bytes_per_second"):
        _native.Copier(0)
    copier = _native.Copier()
    copier.close()
    copier.close()


@pytest.mark.parametrize("as_list", [False, True])
def test_ret_mask_is_of_the_slots_that_were_given(engine: LMCacheEngine, as_list: bool) -> None:
    source, where = caches(1), slots(1)
    engine.store(TOKENS, kvcaches=source, slot_mapping=where)
    given = where.clone()
    given[3] = -1
    mapping = given.tolist() if as_list else given
    retriever = engine.retrieve_layer(TOKENS, kvcaches=caches(2), slot_mapping=mapping)
    assert next(retriever) == 15
    # A buffer of the engine's, which it fills for its next call.
    mapping[3] = int(where[3])
    *_, ret_mask = retriever
    assert isinstance(ret_mask, torch.Tensor)
    assert ret_mask.tolist() == [at < 16 and at != 3 for at in range(20)]


def test_tensors_keep_their_memory_for_a_generator_whatever_they_are_given(
    engine: LMCacheEngine,
) -> None:
    source, where = caches(1), slots(1)
    wanted = [kv(cache, where).clone() for cache in source]
    storer = engine.store_layer(TOKENS, kvcaches=source, slot_mapping=where)
    next(storer)
    for cache in source:
        cache.data = torch.empty(0)
    # Takes the memory that is free.
    noise = [torch.full((2, BLOCKS, BLOCK, HEADS, HEAD), 7.0) for _ in range(8 * LAYERS)]
    assert len(list(storer)) == LAYERS
    del noise
    target = caches(2)
    assert engine.retrieve(TOKENS, kvcaches=target, slot_mapping=where).sum() == 16
    for cache, rows in zip(target, wanted, strict=True):
        assert torch.equal(kv(cache, where)[:, :16], rows[:, :16])


def test_caches_that_are_no_tensors_are_named(engine: LMCacheEngine) -> None:
    by_name = {f"layer.{at}": cache for at, cache in enumerate(caches())}
    with pytest.raises(TypeError, match="a str where a tensor is due"):
        engine.store(TOKENS, kvcaches=by_name, slot_mapping=slots())  # type: ignore[arg-type]


@pytest.mark.parametrize("end", ["clear", "close"])
def test_what_was_copied_before_a_clear_or_close_does_not_appear_after_it(end: str) -> None:
    engine, where = make(), slots(1)
    storer = engine.store_layer(TOKENS, kvcaches=caches(1), slot_mapping=where)
    next(storer)
    next(storer)
    getattr(engine, end)()
    assert len(list(storer)) == LAYERS - 1
    assert_idle(engine)
    assert engine.local_cpu is not None
    assert engine.local_cpu.audit()["chunks"] == 0
    if end == "clear":
        assert engine.lookup(TOKENS) == 0
        assert engine.store(TOKENS, kvcaches=caches(1), slot_mapping=where) == 16
        engine.close()
