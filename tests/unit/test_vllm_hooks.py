"""Each hook of the connector, by name, with a half that fails at everything: vLLM hears of none.

A hook that this file does not name fails the first test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_halves import BLOCK
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from lmcache_rs.vllm_v1 import LMCacheConnectorV1Dynamic, connector
from lmcache_rs.vllm_v1.compat import HOST_HIT_SOURCE
from lmcache_rs.vllm_v1.faults import Faults
from lmcache_rs.vllm_v1.metadata import LMCacheConnectorMetadata, LoadSpec, ReqMeta, SaveSpec

LAYER = "model.layers.0.self_attn"
NUM_TOKENS = 16
BLOCK_IDS = [3, 4, 5, 6]


class Planted(RuntimeError):
    """What every half raises here."""


class Fails:
    """Has every attribute, and each of them fails when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Fails()

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise Planted


class FailingHalf(Fails):
    """Either half, but for what it is told after a fault."""

    def __init__(self) -> None:
        self.failed: list[Any] = []

    def record_failed(self, block_ids: set[int]) -> None:
        self.failed.append(block_ids)

    def fail_loads(self, metadata: LMCacheConnectorMetadata) -> None:
        self.failed.append(metadata.promised_block_ids(BLOCK))


class Manager(Fails):
    """Holds at most one half; all else it may have fails."""

    def __init__(self, half: FailingHalf | None, *, is_scheduler: bool) -> None:
        self.scheduler = half if is_scheduler else None
        self.worker = None if is_scheduler else half
        self.faults = Faults()

    def promised_block_ids(self, metadata: LMCacheConnectorMetadata) -> set[int]:
        return metadata.promised_block_ids(BLOCK)


def a_step() -> LMCacheConnectorMetadata:
    """A step that loads and saves."""
    request = ReqMeta(
        req_id="a",
        num_tokens=NUM_TOKENS,
        hashes=bytes(64),
        block_ids=BLOCK_IDS,
        namespace="n",
        load_spec=LoadSpec(0, NUM_TOKENS, can_load=True, computed_from=NUM_TOKENS),
        save_spec=SaveSpec(0, can_save=True),
    )
    return LMCacheConnectorMetadata("start", requests=[request])


def connector_with(
    half: FailingHalf | None, *, is_scheduler: bool, monkeypatch: pytest.MonkeyPatch
) -> LMCacheConnectorV1Dynamic:
    """The shell around a half, made by its own constructor, in the middle of a step."""

    def init(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._connector_metadata = None
        self._role = role

    monkeypatch.setattr(KVConnectorBase_V1, "__init__", init)
    monkeypatch.setattr(
        connector,
        "LMCacheManager",
        lambda *_, is_scheduler: Manager(half, is_scheduler=is_scheduler),
    )
    role = KVConnectorRole.SCHEDULER if is_scheduler else KVConnectorRole.WORKER
    made = LMCacheConnectorV1Dynamic(None, role, None)  # type: ignore[arg-type]
    made.bind_connector_metadata(a_step())
    return made


REQUEST = SimpleNamespace(request_id="a", num_tokens=NUM_TOKENS)
SCHEDULER_OUTPUT = SimpleNamespace(num_scheduled_tokens={"a": 1})


def anything(answer: Any) -> bool:
    """Where any answer will do."""
    return True


Call = Callable[[LMCacheConnectorV1Dynamic], Any]

# Per hook: the call, and an answer that means "no cache" (a function where it must be looked at).
SCHEDULER_HOOKS: dict[str, tuple[Call, Any]] = {
    "get_num_new_matched_tokens": (
        lambda c: c.get_num_new_matched_tokens(REQUEST, 0),  # type: ignore[arg-type]
        (0, False),
    ),
    "update_state_after_alloc": (
        lambda c: c.update_state_after_alloc(REQUEST, None, 8),  # type: ignore[arg-type]
        None,
    ),
    "build_connector_meta": (
        lambda c: c.build_connector_meta(SCHEDULER_OUTPUT),  # type: ignore[arg-type]
        lambda metadata: isinstance(metadata, LMCacheConnectorMetadata) and not metadata.requests,
    ),
    "update_connector_output": (
        lambda c: c.update_connector_output(
            SimpleNamespace(invalid_block_ids={3}, kv_connector_worker_meta=None)  # type: ignore[arg-type]
        ),
        None,
    ),
    "request_finished": (
        lambda c: c.request_finished(REQUEST, BLOCK_IDS),  # type: ignore[arg-type]
        (False, None),
    ),
    "reset_cache": (lambda c: c.reset_cache(), False),
    "take_events": (lambda c: list(c.take_events()), []),
    "on_new_request": (lambda c: c.on_new_request(REQUEST), None),  # type: ignore[arg-type]
    "has_pending_block_frees": (lambda c: c.has_pending_block_frees(), anything),
    "has_pending_push_work": (lambda c: c.has_pending_push_work(), anything),
    "get_external_cache_hit_sources": (
        lambda c: c.get_external_cache_hit_sources(REQUEST, 8),  # type: ignore[arg-type]
        lambda sources: sum(sources.values()) == 8,
    ),
    "bind_kv_cache_manager": (
        lambda c: c.bind_kv_cache_manager(
            SimpleNamespace(evict_blocks=None, block_pool=None)  # type: ignore[arg-type]
        ),
        None,
    ),
    "shutdown": (lambda c: c.shutdown(), None),
}
if HOST_HIT_SOURCE is None:
    # vLLM asks for it since 0.32.
    del SCHEDULER_HOOKS["get_external_cache_hit_sources"]
WORKER_HOOKS: dict[str, tuple[Call, Any]] = {
    "start_load_kv": (lambda c: c.start_load_kv(None), None),  # type: ignore[arg-type]
    "wait_for_layer_load": (lambda c: c.wait_for_layer_load(LAYER), None),
    "save_kv_layer": (lambda c: c.save_kv_layer(LAYER, None, None), None),  # type: ignore[arg-type]
    "wait_for_save": (lambda c: c.wait_for_save(), None),
    "get_block_ids_with_load_errors": (
        lambda c: c.get_block_ids_with_load_errors(),
        # Whatever was promised was not loaded.
        set(BLOCK_IDS),
    ),
    "build_connector_worker_meta": (lambda c: c.build_connector_worker_meta(), None),
    "handle_preemptions": (lambda c: c.handle_preemptions(a_step()), None),
    "get_finished": (lambda c: c.get_finished({"b"}), lambda ids: not any(ids)),
    "get_transfer_results": (
        lambda c: c.get_transfer_results({"b"}),
        lambda results: not results.finished_sending and not results.finished_recving,
    ),
    "get_kv_connector_stats": (lambda c: c.get_kv_connector_stats(), None),
    "get_kv_connector_kv_cache_events": (lambda c: c.get_kv_connector_kv_cache_events(), None),
    "bind_connector_metadata": (lambda c: c.bind_connector_metadata(a_step()), None),
    "shutdown": (lambda c: c.shutdown(), None),
}
# They must stop a start, or are the tests' own, or touch no half.
NOT_GUARDED = {
    "register_kv_caches": "what cannot be served rightly stops the start",
    "requires_piecewise_for_cudagraph": "asked before there is a connector",
    "requires_kv_delivery": "a constant",
    "build_kv_connector_stats": "makes a plain value of what it is given",
    "build_prom_metrics": "made where no half is",
    "counters": "for operators and tests",
    "memory_stats": "for operators and tests",
}


def test_every_hook_of_the_connector_is_named_here() -> None:
    own = {
        name
        for name, member in vars(LMCacheConnectorV1Dynamic).items()
        if not name.startswith("_")
        and (callable(member) or isinstance(member, property | classmethod))
    }
    named = SCHEDULER_HOOKS.keys() | WORKER_HOOKS.keys() | NOT_GUARDED.keys()
    assert own - named == set()
    known = {name for name, _ in inspect.getmembers(KVConnectorBase_V1)}
    assert {*SCHEDULER_HOOKS, *WORKER_HOOKS} <= known


@pytest.mark.parametrize("hook", SCHEDULER_HOOKS)
def test_a_fault_in_the_scheduler_half_is_no_cache_and_no_error(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, no_cache = SCHEDULER_HOOKS[hook]
    shell = connector_with(FailingHalf(), is_scheduler=True, monkeypatch=monkeypatch)
    assert_no_cache(call(shell), no_cache)


@pytest.mark.parametrize("hook", WORKER_HOOKS)
def test_a_fault_in_the_worker_half_is_no_cache_and_no_error(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, no_cache = WORKER_HOOKS[hook]
    half = FailingHalf()
    shell = connector_with(half, is_scheduler=False, monkeypatch=monkeypatch)
    assert_no_cache(call(shell), no_cache)
    if hook in ("start_load_kv", "wait_for_layer_load"):
        # Nobody may compute on what was promised.
        assert half.failed == [set(BLOCK_IDS)]


@pytest.mark.parametrize("hook", [*SCHEDULER_HOOKS, *WORKER_HOOKS])
def test_without_its_half_no_hook_fails(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start has failed, and the engine serves."""
    is_scheduler = hook in SCHEDULER_HOOKS
    call, _ = (SCHEDULER_HOOKS if is_scheduler else WORKER_HOOKS)[hook]
    call(connector_with(None, is_scheduler=is_scheduler, monkeypatch=monkeypatch))


def assert_no_cache(answer: Any, no_cache: Any) -> None:
    assert no_cache(answer) if callable(no_cache) else answer == no_cache, answer
