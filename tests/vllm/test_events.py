"""KV events over vLLM's own publisher, and Prometheus metrics out of a real engine.

vLLM's default layout: the connector's store is in the worker's process, what is published and
scraped in two others.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import harness
import models
import msgspec
import pytest
import zmq
from harness import EngineSpec, Prompt
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash, maybe_convert_block_hash

from lmcache_rs import ChunkedTokenDatabase, LMCacheEngineConfig, LMCacheMetadata

BLOCK, CHUNK, POOL_CHUNKS = 32, 64, 12
MODEL = json.loads((models.tiny_model("tiny-llama") / "config.json").read_text())
CHUNK_BYTES = (
    MODEL["num_hidden_layers"] * MODEL["num_key_value_heads"] * MODEL["head_dim"] * 2 * 4 * CHUNK
)
SETTLED_S = 20.0


@dataclass
class Subscriber:
    """What vLLM publishes, decoded without any type of vLLM's, and replayed."""

    endpoint: str
    held: dict[str, set[int]] = field(default_factory=dict)
    batches: int = 0
    stored: int = 0
    removed: int = 0

    def __post_init__(self) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.subscribe(b"")
        self.socket.connect(self.endpoint)

    def take_in(self) -> None:
        """Everything that has arrived."""
        while self.socket.poll(50):
            _, number, payload = self.socket.recv_multipart()
            assert int.from_bytes(number) == self.batches, "no batch was missed"
            self.batches += 1
            for event in msgspec.msgpack.decode(payload)[1]:
                self._replay(event)

    def _replay(self, event: dict[str, object]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.held["GPU"] = set()
            return
        blocks = self.held.setdefault(str(event["medium"]), set())
        hashes = event["block_hashes"]
        assert isinstance(hashes, list)
        if event["medium"] == "CPU":
            assert blocks.isdisjoint(hashes) == (event["type"] == "BlockStored"), event
        if event["type"] == "BlockStored":
            blocks.update(hashes)
            self.stored += len(hashes)
        else:
            blocks.difference_update(hashes)
            self.removed += len(hashes)

    def close(self) -> None:
        self.socket.close(linger=0)


@pytest.fixture(scope="module")
def engine(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[harness.Engine, Subscriber]]:
    endpoint = f"ipc://{tmp_path_factory.mktemp('events')}/socket"
    subscriber = Subscriber(endpoint)
    spec = EngineSpec(
        layout="mp",
        block_size=BLOCK,
        chunk_size=CHUNK,
        pool_bytes=POOL_CHUNKS * CHUNK_BYTES,
        events_endpoint=endpoint,
    )
    with harness.Engine(spec) as engine:
        yield engine, subscriber
    subscriber.close()


def prompt(length: int, seed: int) -> Prompt:
    draw = random.Random(seed)
    return Prompt(tuple(draw.randrange(3, MODEL["vocab_size"]) for _ in range(length)))


class Names:
    """vLLM's names of the blocks of each of our chunks, made here from the prompts."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK)
        metadata = LMCacheMetadata(model_name="m", world_size=1, worker_id=0, kv_dtype="float32")
        self.database = ChunkedTokenDatabase(config, metadata)
        self.blocks: dict[bytes, set[int]] = {}

    def learn(self, prompts: list[Prompt]) -> None:
        for each in prompts:
            links: list[bytes] = []
            for start in range(0, len(each) - BLOCK + 1, BLOCK):
                tokens = each.tokens[start : start + BLOCK]
                links.append(hash_block_tokens(sha256, links[-1] if links else None, tokens))  # type: ignore[arg-type]
            numbers = [maybe_convert_block_hash(link) for link in links]  # type: ignore[arg-type]
            chunks = self.database.process_tokens(list(each.tokens), make_key=False)
            for start, end, chunk_hash in chunks:
                if end - start == CHUNK:
                    own = numbers[start // BLOCK : end // BLOCK]
                    self.blocks[bytes(chunk_hash)] = {int(number) for number in own}


def held_by_store(engine: harness.Engine, names: Names) -> set[int]:
    (chunk_hashes,) = engine._call("rpc", "probe_chunks")
    return {number for chunk_hash in chunk_hashes for number in names.blocks[chunk_hash]}


def assert_replayed(engine: harness.Engine, subscriber: Subscriber, names: Names) -> None:
    deadline = time.monotonic() + SETTLED_S
    while True:
        subscriber.take_in()
        held = held_by_store(engine, names)
        if subscriber.held.get("CPU", set()) == held or time.monotonic() > deadline:
            break
        # What changed after the last step is told with the next one.
        engine.idle_step()
    assert subscriber.held.get("CPU", set()) == held


def test_metrics_equal_what_was_asked(engine: tuple[harness.Engine, Subscriber]) -> None:
    server, _ = engine
    before = server.metrics()
    first, second = prompt(200, 1), prompt(130, 2)
    server.ask([first])
    server.cool()
    server.ask([first])
    server.ask([second])
    server.idle_step()
    after = server.metrics()

    def moved(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    idle_tokens = moved("requested_tokens") - (200 + 200 + 130)
    assert 0 <= idle_tokens <= 5, "requests of one token, which are looked up by nobody"
    expected = {
        "hit_tokens": 192,
        "loaded_tokens": 192,
        "stored_tokens": 192 + 128,
        "stored_chunks": 5,
        "stored_bytes": 5 * CHUNK_BYTES,
        "loaded_chunks": 3,
        "loaded_bytes": 3 * CHUNK_BYTES,
        "refused_chunks": 0,
        "evicted_chunks": 0,
        "failed_loads": 0,
        "dropped_saves": 0,
        "bypassed_requests": 0,
        "lookup_timeouts": 0,
        "lookup_errors": 0,
        "event_overflows": 0,
    }
    assert {name: moved(name) for name in expected} == expected
    # The scheduler half knows whom to ask from the first step on.
    assert moved("lookups") >= moved("lookup_asks") == moved("lookup_round_trip_seconds") == 2
    gauges = {
        "capacity_bytes{local_cpu}": POOL_CHUNKS * CHUNK_BYTES,
        "held_bytes{local_cpu}": 5 * CHUNK_BYTES,
        "resident_chunks{local_cpu}": 5,
        "leased_bytes{local_cpu}": 0,
        "tier_healthy{local_cpu}": 1,
        "copy_path_active{host}": 1,
    }
    assert {name: after[name] for name in gauges} == gauges
    assert not [name for name in after if name.startswith("faults")]
    assert 0 < moved("copy_seconds{store}") < 60
    assert 0 < moved("copy_seconds{load}") < 60


def test_events_replayed_are_the_resident_chunks_under_constant_eviction(
    engine: tuple[harness.Engine, Subscriber],
) -> None:
    server, subscriber = engine
    names, draw = Names(), random.Random(7)
    # What the test above stored.
    names.learn([prompt(200, 1), prompt(130, 2)])
    pool = [prompt(draw.randrange(40, 400), 100 + seed) for seed in range(12)]
    # The same beginnings, parting inside a chunk and between two.
    pool += [
        Prompt(each.tokens[: CHUNK + BLOCK] + prompt(200, 300 + at).tokens)
        for at, each in enumerate(pool[:3])
        if len(each) > CHUNK + BLOCK
    ]
    names.learn(pool)
    assert_replayed(server, subscriber, names)
    for turn in range(8):
        server.ask(draw.sample(pool, 4), 2)
        assert_replayed(server, subscriber, names)
        if turn % 3 == 2:
            server.reset()
    assert subscriber.removed > 4 * POOL_CHUNKS, "evictions all the time"
    assert server.metrics()["evicted_chunks"] > 2 * POOL_CHUNKS
    assert server.reset_connector()
    server.idle_step()
    assert_replayed(server, subscriber, names)
    assert subscriber.held["CPU"] == set()
    # A new epoch: other keys, the same blocks.
    server.ask(pool[:1], 2)
    server.idle_step()
    assert_replayed(server, subscriber, names)
    assert len(subscriber.held["CPU"]) >= CHUNK // BLOCK
