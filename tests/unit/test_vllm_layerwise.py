"""The worker half layer by layer, with hooks that come as they please.

What holds in bulk too is in `test_vllm_halves`, which runs in both modes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from test_vllm_halves import BLOCK, CHUNK, LAYER_NAMES, Pair, new_request, promised
from vllm.v1.request import Request

from lmcache_rs import _native
from lmcache_rs.vllm_v1 import LMCacheConnectorV1Dynamic, compat
from lmcache_rs.vllm_v1.metadata import LMCacheConnectorMetadata

FIRST, LAST = LAYER_NAMES[0], LAYER_NAMES[-1]


@pytest.fixture(autouse=True)
def mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "use_layerwise", True)


@pytest.fixture
def pair(mode: None, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(**getattr(request, "param", {}))
    yield pair
    pair.close()


def admit(pair: Pair, num_tokens: int, seed: int = 0) -> tuple[Request, LMCacheConnectorMetadata]:
    """A new request whose whole prompt the described step computes."""
    request = new_request(num_tokens, seed)
    external = pair.ask(request) or 0
    pair.grant(request, external)
    request.num_computed_tokens = external
    return request, pair.describe({request: num_tokens - external})


def end(pair: Pair, metadata: LMCacheConnectorMetadata) -> None:
    pair.worker.wait_for_save(metadata)
    pair.failed = pair.worker.take_failed_block_ids()
    pair.outcome = pair.worker.take_outcomes()
    pair.report()


def assert_next_is_stored_and_hits(pair: Pair, seed: int = 77) -> None:
    """Whatever happened before: a new prompt is stored, and found."""
    tokens = 3 * CHUNK + 1
    assert pair.prefill(first := new_request(tokens, seed)) == 0
    assert pair.prefill(second := new_request(tokens, seed)) == 3 * CHUNK
    for done in (first, second):
        pair.finish(done)
    assert pair.failed == set()


def test_a_layer_is_saved_by_its_hook_and_all_appear_at_the_end(pair: Pair) -> None:
    request, metadata = admit(pair, 2 * CHUNK)
    table = pair.tables[request.request_id]
    wanted = []
    for name, cache in zip(LAYER_NAMES, pair.caches, strict=True):
        pair.worker.wait_for_layer_load(name, metadata)
        wanted.append(cache[table].clone())
        pair.worker.save_kv_layer(name, metadata)
        cache[table] = 0
        assert pair.worker.memory_stats()["cached_bytes"] == 0
    pair.worker.start_load_kv(metadata)
    end(pair, metadata)
    assert pair.worker.counters()["stored_chunks"] == 2
    again, external = new_request(2 * CHUNK), 2 * CHUNK - 1
    assert pair.prefill(again) == external
    for cache, kv in zip(pair.caches, wanted, strict=True):
        assert torch.equal(cache[pair.tables[again.request_id]], kv)
    for done in (request, again):
        pair.finish(done)
    pair.assert_idle()


def test_a_load_is_there_when_its_layer_is_waited_for(pair: Pair) -> None:
    pair.prefill(first := new_request(3 * CHUNK + 1))
    stored = [cache[pair.tables[first.request_id]].clone() for cache in pair.caches]
    request, metadata = admit(pair, 3 * CHUNK + 1)
    table = pair.tables[request.request_id]
    for cache in pair.caches:
        cache[table] = 0
    pair.worker.start_load_kv(metadata)
    for name, cache, kv in zip(LAYER_NAMES, pair.caches, stored, strict=True):
        pair.worker.wait_for_layer_load(name, metadata)
        assert torch.equal(cache[table][:6], kv[:6])
    end(pair, metadata)
    assert pair.worker.counters()["loaded_tokens"] == 3 * CHUNK
    for done in (first, request):
        pair.finish(done)
    pair.assert_idle()


def test_what_shares_a_block_with_a_computed_token_is_there_before_the_pass(pair: Pair) -> None:
    pair.prefill(first := new_request(2 * CHUNK))
    stored = [cache[pair.tables[first.request_id]].clone() for cache in pair.caches]
    request, metadata = admit(pair, 2 * CHUNK)
    table = pair.tables[request.request_id]
    for cache in pair.caches:
        cache[table] = 0
    pair.worker.start_load_kv(metadata)
    # vLLM writes the last token's KV of a layer before it asks for that layer.
    for name, cache, kv in zip(LAYER_NAMES, pair.caches, stored, strict=True):
        assert torch.equal(cache[table][2:], kv[2:]), "the whole last chunk, in every layer"
        cache[table[3], :, BLOCK - 1] = 5.0
        pair.worker.wait_for_layer_load(name, metadata)
        assert bool((cache[table[3], :, BLOCK - 1] == 5.0).all())
        assert torch.equal(cache[table][:3], kv[:3])
    end(pair, metadata)
    assert all(bool((cache[table[3], :, BLOCK - 1] == 5.0).all()) for cache in pair.caches)
    for done in (first, request):
        pair.finish(done)
    pair.assert_idle()


def test_a_layer_computed_in_two_pieces_is_saved_with_both(pair: Pair) -> None:
    request, metadata = admit(pair, 2 * CHUNK)
    table = pair.tables[request.request_id]
    for cache in pair.caches:
        cache[table] = 1.0
    for name in LAYER_NAMES:
        pair.worker.save_kv_layer(name, metadata)
    for name, cache in zip(LAYER_NAMES, pair.caches, strict=True):
        cache[table[2:]] = 2.0
        pair.worker.save_kv_layer(name, metadata)
    end(pair, metadata)
    assert pair.prefill(again := new_request(2 * CHUNK)) == 2 * CHUNK - 1
    for cache in pair.caches:
        found = cache[pair.tables[again.request_id]]
        assert bool((found[:2] == 1.0).all())
        assert bool((found[2:] == 2.0).all())


def test_what_is_loaded_and_saved_in_one_step_is_saved_as_it_was_loaded(pair: Pair) -> None:
    pair.prefill(first := new_request(2 * CHUNK + 1))
    stored = [cache[pair.tables[first.request_id]].clone() for cache in pair.caches]
    pair.finish(first)
    request, metadata = admit(pair, 3 * CHUNK + 1)
    table = pair.tables[request.request_id]
    for cache in pair.caches:
        cache[table[:4]] = 0
    pair.worker.start_load_kv(metadata)
    # What is loaded is gone from the store meanwhile, so the step stores it anew; and nobody waits.
    pair.pool.clear()
    for name in reversed(LAYER_NAMES):
        pair.worker.save_kv_layer(name, metadata)
    end(pair, metadata)
    assert pair.prefill(again := new_request(3 * CHUNK + 1)) == 3 * CHUNK
    for cache, kv in zip(pair.caches, stored, strict=True):
        assert torch.equal(cache[pair.tables[again.request_id]][:4], kv[:4])
    for done in (request, again):
        pair.finish(done)
    pair.assert_idle()


HOOKS: dict[str, Callable[[Pair, LMCacheConnectorMetadata], None]] = {
    "start": lambda pair, metadata: pair.worker.start_load_kv(metadata),
    **{
        f"wait {name}": lambda pair, metadata, name=name: pair.worker.wait_for_layer_load(
            name, metadata
        )
        for name in (*LAYER_NAMES, "no.such.layer")
    },
    **{
        f"save {name}": lambda pair, metadata, name=name: pair.worker.save_kv_layer(name, metadata)
        for name in (*LAYER_NAMES, "no.such.layer")
    },
    "failed?": lambda pair, metadata: pair.worker.record_failed(
        pair.worker.take_failed_block_ids()
    ),
}


@pytest.mark.parametrize("seed", range(60))
def test_any_hooks_in_any_order_any_number_of_times(pair: Pair, seed: int) -> None:
    """A load and a save in every step; whatever hooks come, both are done in the end."""
    luck = random.Random(seed)
    prompt = 2 * CHUNK + 1
    pair.prefill(first := new_request(prompt))
    pair.finish(first)
    for number in range(4):
        loading, _ = promised_request(pair, prompt)
        saving = new_request(CHUNK + 3, seed=10 + number)
        pair.ask(saving)
        pair.grant(saving, 0)
        metadata = pair.describe({loading: 1, saving: CHUNK + 3})
        table = pair.tables[loading.request_id]
        for cache in pair.caches:
            cache[table] = 0
        # vLLM begins the loads before anything else, if there are any.
        pair.worker.start_load_kv(metadata)
        for name in luck.choices(sorted(set(HOOKS) - {"start"}), k=luck.randrange(12)):
            HOOKS[name](pair, metadata)
        stored = pair.worker.counters()["stored_chunks"]
        end(pair, metadata)
        assert pair.failed == set()
        for cache in pair.caches:
            assert bool(cache[table[:4]].any(dim=(1, 2, 3)).all()), "every block is written"
        assert pair.worker.counters()["stored_chunks"] == stored + 1
        # Hooks of a step that is over do nothing.
        for name in luck.choices(sorted(set(HOOKS) - {"start"}), k=4):
            HOOKS[name](pair, metadata)
        for done in (loading, saving):
            pair.finish(done)
    pair.assert_idle()


def promised_request(pair: Pair, num_tokens: int) -> tuple[Request, int]:
    request = new_request(num_tokens)
    external = pair.ask(request)
    assert external
    pair.grant(request, external)
    request.num_computed_tokens = external
    return request, external


def test_a_step_that_was_never_ended_gives_everything_back_and_saves_nothing(pair: Pair) -> None:
    pair.prefill(first := new_request(2 * CHUNK + 1))
    pair.finish(first)
    loading, _ = promised_request(pair, 2 * CHUNK + 1)
    saving = new_request(CHUNK, seed=3)
    pair.ask(saving)
    pair.grant(saving, 0)
    metadata = pair.describe({loading: 1, saving: CHUNK})
    pair.worker.start_load_kv(metadata)
    pair.worker.save_kv_layer(FIRST, metadata)
    assert pair.worker.memory_stats()["reserved_bytes"] > 0
    pair.step({})
    assert pair.worker.memory_stats()["reserved_bytes"] == 0
    for done in (loading, saving):
        pair.finish(done)
    assert_next_is_stored_and_hits(pair)
    assert pair.ask(lost := new_request(CHUNK + 1, seed=3)) == 0
    pair.finish(lost)
    pair.assert_idle()


@pytest.mark.parametrize("at", ["started", "waiting", "saving"])
def test_a_shutdown_in_the_middle_of_a_step(at: str) -> None:
    pair = Pair()
    pair.prefill(first := new_request(2 * CHUNK + 1))
    pair.finish(first)
    loading, _ = promised_request(pair, 2 * CHUNK + 1)
    metadata = pair.describe({loading: 1})
    pair.worker.start_load_kv(metadata)
    if at != "started":
        pair.worker.wait_for_layer_load(FIRST, metadata)
    if at == "saving":
        pair.worker.save_kv_layer(FIRST, metadata)
    pair.close()
    pair.close()
    for hook in HOOKS.values():
        hook(pair, metadata)
    pair.worker.wait_for_save(metadata)


def connector_of(pair: Pair) -> LMCacheConnectorV1Dynamic:
    """The shell around the pair's worker half, as vLLM would hold it."""
    connector = object.__new__(LMCacheConnectorV1Dynamic)
    connector._connector_metadata = None
    connector._unserved_block_ids = set()
    connector._error_before_step = (0, 0)
    connector._manager = SimpleNamespace(  # type: ignore[assignment]
        worker=pair.worker,
        faults=pair.faults,
        promised_block_ids=lambda metadata: metadata.promised_block_ids(BLOCK),
    )
    return connector


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("is_in_handler", [False, True])
def test_a_pass_that_raised_saves_nothing(
    layerwise: bool, is_in_handler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pair, "use_layerwise", layerwise)
    pair = Pair()
    connector = connector_of(pair)

    def run(metadata: LMCacheConnectorMetadata, error: Exception | None) -> None:
        connector.bind_connector_metadata(metadata)
        try:
            connector.save_kv_layer(FIRST, None, None)  # type: ignore[arg-type]
            if error is not None:
                raise error
        finally:
            connector.start_load_kv(None)  # type: ignore[arg-type]
            connector.wait_for_save()
            connector.clear_connector_metadata()

    _, metadata = admit(pair, 2 * CHUNK)
    with pytest.raises(KeyError):
        run(metadata, KeyError("planted"))
    assert pair.worker.counters()["stored_chunks"] == 0
    assert pair.worker.counters()["dropped_saves"] == 1
    assert pair.worker.memory_stats()["reserved_bytes"] == 0
    _, metadata = admit(pair, 2 * CHUNK, seed=5)
    if is_in_handler:
        # One error, raised by two passes: a future's, for example.
        error = KeyError("kept")
        try:
            raise error
        except KeyError:
            with pytest.raises(KeyError, match="kept"):
                run(metadata, error)
        assert pair.worker.counters()["stored_chunks"] == 0
    _, metadata = admit(pair, 2 * CHUNK, seed=4)
    if is_in_handler:
        # An engine may live inside an except block: that is no failure of the pass.
        try:
            raise ValueError
        except ValueError:
            run(metadata, None)
    else:
        run(metadata, None)
    pair.worker._saves.wait()
    assert pair.worker.counters()["stored_chunks"] == 2
    pair.close()


def test_a_load_that_fails_in_the_middle_reports_its_blocks_and_nothing_is_saved(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, external = promised(pair)
    stored = pair.worker.counters()["stored_chunks"]
    metadata = pair.describe({request: request.num_tokens - external})
    connector = connector_of(pair)
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(None)  # type: ignore[arg-type]
    step = pair.worker._step
    assert step is not None

    def fails(layer: int) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(step, "wait_for_layer", fails)
    for name in LAYER_NAMES:
        connector.wait_for_layer_load(name)
        connector.save_kv_layer(name, None, None)  # type: ignore[arg-type]
    connector.wait_for_save()
    assert connector.get_block_ids_with_load_errors() == set(pair.tables[request.request_id][:6])
    assert pair.worker.counters()["stored_chunks"] == stored
    assert pair.worker.memory_stats()["reserved_bytes"] == 0


@pytest.mark.parametrize(
    ("pair", "num_tokens", "stored_chunks"),
    [
        ({"pool_chunks": 1}, 3 * CHUNK, 1),
        ({}, CHUNK - 1, 0),
        ({"kv_role": "kv_consumer"}, 3 * CHUNK, 0),
    ],
    indirect=["pair"],
    ids=["pool too small", "prompt too short", "consumer"],
)
def test_a_step_that_stores_little_or_nothing(
    pair: Pair, num_tokens: int, stored_chunks: int
) -> None:
    pair.prefill(request := new_request(num_tokens))
    assert pair.worker.counters()["stored_chunks"] == stored_chunks
    pair.finish(request)
    for _ in range(3):
        pair.step({})
    if pair.kv_role == "kv_both" and pair.pool_chunks > 1:
        assert_next_is_stored_and_hits(pair)
    pair.assert_idle()


def test_after_all_is_stored_already_the_next_prompt_is_stored_and_hits(pair: Pair) -> None:
    for _ in range(3):
        request = new_request(2 * CHUNK + 1)
        # Asked for nothing, so that it is computed and offered again.
        pair.grant(request, 0)
        pair.step({request: 2 * CHUNK + 1})
        pair.finish(request)
    assert pair.worker.counters()["stored_chunks"] == 2
    assert_next_is_stored_and_hits(pair)
    pair.assert_idle()


def test_after_an_unhealthy_step_the_next_prompt_is_stored_and_hits(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, external = promised(pair, 2 * CHUNK + 1)
    engine = pair.worker._engine
    assert engine is not None
    with monkeypatch.context() as unhealthy:
        unhealthy.setattr(engine, "is_healthy", lambda: False)
        pair.step({request: request.num_tokens - external})
    assert pair.failed == set(pair.tables[request.request_id][:4])
    pair.finish(request)
    assert_next_is_stored_and_hits(pair)
    pair.assert_idle()


def test_two_requests_that_store_the_same_chunk_in_one_step(pair: Pair) -> None:
    requests = [new_request(2 * CHUNK + 1) for _ in range(2)]
    for request in requests:
        pair.ask(request)
        pair.grant(request, 0)
    pair.step(dict.fromkeys(requests, 2 * CHUNK + 1))
    assert pair.worker.counters()["stored_chunks"] == 2
    for request in requests:
        pair.finish(request)
    assert_next_is_stored_and_hits(pair)
    pair.assert_idle()


def test_no_thread_before_a_load_and_one_for_all_of_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = itertools.count()

    def counted() -> _native.Copier:
        next(made)
        return _native.Copier()

    monkeypatch.setattr("lmcache_rs.vllm_v1.layerwise.new_copier", counted)
    pair.prefill(new_request(2 * CHUNK + 1))
    assert next(made) == 0
    for _ in range(3):
        pair.prefill(new_request(2 * CHUNK + 1))
    assert next(made) == 2


@pytest.mark.parametrize(
    ("extra", "answer"),
    [
        ({}, False),
        ({"lmcache.use_layerwise": True}, True),
        ({"lmcache.use_layerwise": False}, False),
        ({"lmcache.no_such_key": 1, "lmcache.use_layerwise": True}, False),
    ],
)
def test_whole_graphs_are_ruled_out_where_hooks_must_run(
    extra: dict[str, object], answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    required = LMCacheConnectorV1Dynamic.requires_piecewise_for_cudagraph
    assert required(extra) is answer
    if not extra:
        # Set elsewhere it counts as well.
        monkeypatch.setenv("LMCACHE_USE_LAYERWISE", "true")
        assert required(extra) is True
        monkeypatch.setenv("LMCACHE_RS_DISABLE", "1")
        assert required(extra) is False


def test_a_fault_in_asking_for_failed_blocks_reports_all_that_was_promised(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, external = promised(pair)
    metadata = pair.describe({request: request.num_tokens - external})
    connector = connector_of(pair)
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(None)  # type: ignore[arg-type]

    def fails(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(pair.worker, "_finish_loads", fails)
    assert connector.get_block_ids_with_load_errors() == set(pair.tables[request.request_id][:6])


def test_a_fault_that_cannot_be_logged_is_counted_and_does_not_reach_vllm(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> bool:
        raise ValueError("a filter that raises")

    def fails(*_: object) -> None:
        raise RuntimeError("planted")

    _, metadata = admit(pair, 2 * CHUNK)
    connector = connector_of(pair)
    connector.bind_connector_metadata(metadata)
    monkeypatch.setattr(pair.worker, "wait_for_save", fails)
    compat.logger.addFilter(refuse)
    try:
        connector.wait_for_save()
    finally:
        compat.logger.removeFilter(refuse)
    assert pair.faults.counts["wait_for_save"] == 1
