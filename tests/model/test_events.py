"""Whoever replays the KV events has exactly what is stored, under random legal schedules.

vLLM's own scheduler publishes; two consumers listen. One takes `AllBlocksCleared` for the
accelerator's blocks alone, and is strict: what comes was not there, what goes was. The other drops
all it knows with it, as consumers do that know no media.
"""

from __future__ import annotations

import time
from typing import Any

import engine as engine_module
import pytest
from engine import Engine, Step
from schedules import Schedule
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens
from vllm.v1.outputs import KVConnectorOutput
from world import BLOCK, CHUNK

from lmcache_rs import _native
from lmcache_rs.key import HASH_BYTES
from lmcache_rs.vllm_v1 import events as kv_events
from lmcache_rs.vllm_v1.metadata import LMCacheConnectorMetadata

NUM_SCHEDULES = 120
LINKS = CHUNK // BLOCK


class Consumer:
    """Knows nothing but what vLLM publishes."""

    def __init__(self, *, is_strict: bool) -> None:
        self.is_strict = is_strict
        self.blocks: dict[bytes, BlockStored] = {}
        self.removed = 0

    def take_in(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                if not self.is_strict:
                    self.blocks.clear()
            elif event.medium == "CPU":
                self._take_in(event)

    def _take_in(self, event: BlockStored | BlockRemoved) -> None:
        for block in event.block_hashes:
            assert isinstance(block, bytes)
            if self.is_strict:
                assert (block in self.blocks) == isinstance(event, BlockRemoved), event
            if isinstance(event, BlockStored):
                self.blocks[block] = event
            else:
                self.blocks.pop(block, None)
                self.removed += 1


class Listened:
    """An engine with both consumers, and what it ever had under which names."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.consumers = [Consumer(is_strict=True), Consumer(is_strict=False)]
        engine.scheduler.kv_event_publisher.publish = self._publish  # type: ignore[method-assign]
        # vLLM's hashes of each chunk that a worker was told of, by namespace and our hash.
        self.chunks: dict[tuple[str, bytes], list[bytes]] = {}
        self.secret: set[bytes] = set()
        self._schedule = engine._schedule
        engine._schedule = self._schedule_and_note  # type: ignore[method-assign]
        self.compared = 0

    def _publish(self, batch: Any) -> None:
        for consumer in self.consumers:
            consumer.take_in(batch)

    def _schedule_and_note(self) -> Step:
        step = self._schedule()
        metadata = step.scheduled.kv_connector_metadata
        assert isinstance(metadata, LMCacheConnectorMetadata)
        for req in metadata.requests:
            request = self.engine.scheduler.requests[req.req_id]
            for at in range(len(req.hashes) // HASH_BYTES):
                chunk_hash = req.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
                links = [bytes(link) for link in request.block_hashes[at * LINKS :][:LINKS]]
                self.chunks[req.namespace, chunk_hash] = links
                if request.cache_salt or request.lora_request:
                    self.secret.update(links)
        return step

    def stored(self) -> set[bytes]:
        pool = self.engine.pool
        resident = pool.chunks()
        return {link for name in resident for link in self.chunks[name]}

    def pass_on(self) -> None:
        """What a step without requests would: the store's news on their way to the consumers."""
        told = self.engine.worker.get_kv_connector_kv_cache_events()
        self.engine.connector.update_connector_output(KVConnectorOutput(kv_cache_events=told))
        self._publish(KVEventBatch(ts=0.0, events=list(self.engine.connector.take_events())))

    def compare(self) -> None:
        # What is under way ends when it ends.
        for _ in range(200):
            self.pass_on()
            if all(set(one.blocks) == self.stored() for one in self.consumers):
                break
            time.sleep(0.01)
        for consumer in self.consumers:
            assert set(consumer.blocks) == self.stored(), consumer.is_strict
        self.compared += 1
        self._check_contents()

    def _check_contents(self) -> None:
        """Tokens and parents are those that vLLM's hashes are made of."""
        for block, event in self.consumers[0].blocks.items():
            assert event.block_size == BLOCK
            assert len(event.token_ids) == BLOCK * len(event.block_hashes) <= CHUNK
            assert event.group_idx == 0
            if block in self.secret:
                assert "cache_salt" not in repr(event)
                continue
            parent = event.parent_block_hash
            for at, link in enumerate(event.block_hashes):
                tokens = event.token_ids[at * BLOCK : (at + 1) * BLOCK]
                made = BlockHash(parent) if isinstance(parent, bytes) else None
                parent = hash_block_tokens(sha256, made, tokens, None)
                assert parent == link


@pytest.fixture(params=[2, 5, 1 << 16], ids=lambda capacity: f"line of {capacity}")
def listened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Listened]:
    """The engines that a test makes, listened to, with a line of some capacity."""
    made: list[Listened] = []
    # Whole hashes, which can be made again from what the events say.
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    sink, config = _native.EventSink, engine_module.vllm_config
    init = Engine.__init__

    def vllm_config(settings: Any) -> Any:
        of = config(settings)
        of.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        return of

    def listen(engine: Engine, *args: Any, **kwargs: Any) -> None:
        init(engine, *args, **kwargs)
        made.append(Listened(engine))

    class Narrow:
        def __new__(cls, local_cpu: _native.LocalCpu) -> Any:
            return sink(local_cpu, request.param)

    monkeypatch.setattr(engine_module, "vllm_config", vllm_config)
    monkeypatch.setattr(Engine, "__init__", listen)
    monkeypatch.setattr(_native, "EventSink", Narrow)
    return made


def test_a_replay_equals_the_store_after_every_step(
    listened: list[Listened], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = dict.fromkeys(("compared", "removed", "stored", "anew"), 0)
    begin_anew, step, finish = kv_events.KVEventStream._begin_anew, Engine.step, Engine.finish

    def count_anew(stream: kv_events.KVEventStream, *args: Any) -> None:
        seen["anew"] += 1
        begin_anew(stream, *args)

    def step_and_compare(engine: Engine, *, ahead: bool = False) -> None:
        step(engine, ahead=ahead)
        if not engine._in_flight:
            listened[-1].compare()

    def finish_and_compare(engine: Engine) -> None:
        finish(engine)
        listened[-1].compare()

    monkeypatch.setattr(kv_events.KVEventStream, "_begin_anew", count_anew)
    monkeypatch.setattr(Engine, "step", step_and_compare)
    monkeypatch.setattr(Engine, "finish", finish_and_compare)
    for seed in range(NUM_SCHEDULES):
        try:
            Schedule(seed).run()
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error!r}") from error
        last = listened.pop()
        seen["compared"] += last.compared
        seen["removed"] += last.consumers[0].removed
        seen["stored"] += len(last.consumers[0].blocks)
    assert min(seen.values()) >= NUM_SCHEDULES, seen
