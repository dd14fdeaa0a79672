"""Any sequence of steps, closes and exceptions on the generators of both layerwise connectors.

A model knows which bytes each layer of the engine's memory must have after each step. Several
requests are under way at once, each with slots of its own; whatever they do, no object outlives
its step, no buffer stays exported, and no slot is written that was not named.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lmcache_rs import LMCacheEngineConfig, StorageManager
from lmcache_rs.gpu_connector import (
    Rope,
    VLLMBufferLayerwiseGPUConnector,
    VLLMPagedMemLayerwiseGPUConnector,
)
from lmcache_rs.layouts import MemoryFormat
from lmcache_rs.storage import MemoryObj

LAYERS, BLOCKS, BLOCK, HEADS, HEAD, CHUNK = 3, 40, 4, 2, 4, 6
NUM_SLOTS, HIDDEN = BLOCKS * BLOCK, HEADS * HEAD
ROPE = Rope.of_base(1e4, HEAD)

requests = st.integers(0, 3)
kinds = st.integers(0, 3).map(["buffered", "direct", "staged", "turning"].__getitem__)
# Tokens of each chunk, and of the gap before it.
shapes = st.lists(
    st.tuples(st.integers(0, CHUNK - 1), st.integers(1, CHUNK)), min_size=0, max_size=4
)


# Loads that went through all of their steps, by kind.
finished: Counter[str] = Counter()


class Stop(Exception):
    """What an engine may throw into a generator."""


@dataclass
class Request:
    """A generator under way, and what it may do to whom."""

    steps: Generator[Any, Any, Any]
    kind: str
    slots: torch.Tensor
    spans: list[tuple[int, int]]
    # `[layers, tokens, 2, hidden]` of each chunk: what is stored, or is to be restored.
    kv: list[torch.Tensor]
    shift: int = 0
    objects: list[MemoryObj] = field(default_factory=list)
    # Its slots, those that its mapping leaves out too.
    taken: list[int] = field(default_factory=list)
    # Steps taken.
    done: int = 0


class GeneratorMachine(RuleBasedStateMachine):
    """Loads and stores of both connectors, over one engine's memory."""

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed: int) -> None:
        self.threads = torch.get_num_threads()
        # Small tensors are not worth threads.
        torch.set_num_threads(1)
        config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, max_local_cpu_size=0.002)
        self.storage = StorageManager(config)
        self.local_cpu = self.storage.backends["LocalCPUBackend"].local_cpu
        self.random = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        shape = (2, BLOCKS, BLOCK, HEADS, HEAD)
        self.caches = [torch.randn(shape, generator=generator) for _ in range(LAYERS)]
        self.wanted = [cache.clone() for cache in self.caches]
        self.connectors = {
            "direct": VLLMPagedMemLayerwiseGPUConnector(),
            "staged": VLLMPagedMemLayerwiseGPUConnector(use_gpu=True),
            "buffered": VLLMBufferLayerwiseGPUConnector(rope=None),
            "turning": VLLMBufferLayerwiseGPUConnector(rope=ROPE),
        }
        for connector in self.connectors.values():
            connector.initialize_kvcaches_ptr(self.caches)
        self.free_slots = list(range(NUM_SLOTS))
        self.random.shuffle(self.free_slots)
        self.under_way: dict[int, Request] = {}

    # --- beginnings -----------------------------------------------------------------------------

    def begin(self, number: int, spans_of: Sequence[tuple[int, int]]) -> Request | None:
        """A request with slots that no other has, some of its tokens without one."""
        if number in self.under_way:
            return None
        spans, token = [], 0
        for gap, size in spans_of:
            spans.append((token + gap, token + gap + size))
            token += gap + size
        if token + 2 > len(self.free_slots):
            return None
        taken = [self.free_slots.pop() for _ in range(token + 2)]
        slots = torch.tensor(taken)
        slots[torch.rand(len(slots)) < 0.1] = -1
        kv = [torch.randn(LAYERS, end - start, 2, HIDDEN) for start, end in spans]
        return Request(iter(()), "", slots, spans, kv, taken=taken)  # type: ignore[arg-type]

    @rule(
        number=requests,
        kind=kinds,
        spans=shapes,
        shift=st.sampled_from([0, 0, 7, -90]),
    )
    def begin_a_load(
        self, number: int, kind: str, spans: list[tuple[int, int]], shift: int
    ) -> None:
        request = self.begin(number, spans)
        if request is None:
            return
        starts, ends = [start for start, _ in request.spans], [end for _, end in request.spans]
        given: dict[str, Any] = {}
        if kind == "turning":
            given["cached_positions"] = [
                torch.arange(start, end) - shift for start, end in request.spans
            ]
            request.shift = shift
        request.kind = kind
        request.steps = self.connectors[kind].batched_to_gpu(
            starts, ends, slot_mapping=request.slots, **given
        )
        self.under_way[number] = request

    @rule(number=requests, kind=st.sampled_from(["direct", "staged", "turning"]), spans=shapes)
    def begin_a_store(self, number: int, kind: str, spans: list[tuple[int, int]]) -> None:
        request = self.begin(number, spans)
        if request is None:
            return
        starts, ends = [start for start, _ in request.spans], [end for _, end in request.spans]
        request.kind, request.objects = "store", self.filled(request.kv)
        views = [[one.layer(layer) for one in request.objects] for layer in range(LAYERS)]
        request.steps = self.connectors[kind].batched_from_gpu(
            views, starts, ends, slot_mapping=request.slots
        )
        self.under_way[number] = request

    def filled(self, kv: Sequence[torch.Tensor]) -> list[MemoryObj]:
        objects = []
        for rows in kv:
            (one,) = self.storage.batched_allocate(
                rows.shape, torch.float32, MemoryFormat.KV_T2D
            ) or [None]
            assert one is not None, "the pool is large enough for every request"
            one.tensor.copy_(rows)
            objects.append(one)
        return objects

    # --- steps ----------------------------------------------------------------------------------

    @rule(number=requests, count=st.integers(1, LAYERS))
    def step(self, number: int, count: int) -> None:
        for _ in range(count):
            request = self.under_way.get(number)
            if request is None:
                return
            if request.kind == "store":
                self.step_store(request)
            else:
                self.step_load(request)
            self.only_named_slots_are_written_and_nothing_is_held()

    @rule(
        number=requests,
        kind=kinds,
        spans=shapes,
    )
    def a_whole_load_among_the_others(
        self, number: int, kind: str, spans: list[tuple[int, int]]
    ) -> None:
        if number not in self.under_way:
            self.begin_a_load(number, kind, spans, 7)
            # One step more than there are.
            self.step(number, LAYERS + 3)
            if number in self.under_way:
                self.leave(number, "close")

    def step_store(self, request: Request) -> None:
        if request.done > LAYERS:
            self.expect_the_end(request)
            return
        assert next(request.steps) is None
        request.done += 1
        for one, rows, (start, end) in zip(request.objects, request.kv, request.spans, strict=True):
            slots = request.slots[start:end]
            for layer in range(LAYERS):
                wanted = rows[layer].clone()
                if layer < request.done - 1:
                    there = slots != -1
                    wanted[there] = self.at(self.wanted[layer], slots[there])
                assert torch.equal(one.tensor[layer], wanted)

    def step_load(self, request: Request) -> None:
        if request.done > LAYERS + 1:
            self.expect_the_end(request)
            return
        layer = request.done - 1
        if 0 <= layer < LAYERS:
            objects = self.filled(request.kv)
            # One layer of whole chunks: the other layers' bytes are there too.
            sent = request.steps.send([one.layer(layer) for one in objects])
            assert sent is None
        else:
            assert next(request.steps) is None
        request.done += 1
        self.expect_written(request)

    def expect_written(self, request: Request) -> None:
        """The model's side of a step: which layer it must have written."""
        behind = 0 if request.kind in ("direct", "staged") else 1
        written = request.done - 2 - behind
        if not 0 <= written < LAYERS:
            return
        if behind and request.spans:
            whole = request.slots[request.spans[0][0] : request.spans[-1][1]]
            self.write(written, whole, torch.zeros(len(whole), 2, HIDDEN))
        for rows, (start, end) in zip(request.kv, request.spans, strict=True):
            self.write(written, request.slots[start:end], self.turned(rows[written], request))

    def turned(self, rows: torch.Tensor, request: Request) -> torch.Tensor:
        turned = rows.clone()
        heads = turned[:, 0].view(-1, HEADS, HEAD).double()
        angle = request.shift * torch.tensor(ROPE.inv_freq, dtype=torch.float64)
        first, second = heads[..., : HEAD // 2], heads[..., HEAD // 2 :]
        turned[:, 0] = torch.cat(
            [
                first * angle.cos() - second * angle.sin(),
                second * angle.cos() + first * angle.sin(),
            ],
            dim=-1,
        ).view(-1, HIDDEN)
        return turned

    @rule(number=requests)
    def step_without_objects(self, number: int) -> None:
        request = self.under_way.get(number)
        if request is None or request.kind == "store" or not 1 <= request.done <= LAYERS:
            return
        with pytest.raises(ValueError, match="brought no objects"):
            next(request.steps)
        self.end(number)

    @rule(number=requests, what=st.sampled_from(["count", "layer", "size"]))
    def step_with_wrong_objects(self, number: int, what: str) -> None:
        request = self.under_way.get(number)
        if request is None or request.kind == "store" or not 1 <= request.done <= LAYERS:
            return
        if not request.kv:
            return
        objects = self.filled(request.kv)
        views: list[Any] = [one.layer(request.done - 1) for one in objects]
        if what == "count":
            views.append(views[0])
        elif what == "layer":
            views[-1] = objects[-1].layer(request.done % LAYERS)
        else:
            views[-1] = torch.zeros(CHUNK + 1, 2, HIDDEN)
        with pytest.raises(ValueError, match="give one a chunk|is due|takes"):
            request.steps.send(views)
        self.end(number)

    # --- ends -----------------------------------------------------------------------------------

    @rule(number=requests, how=st.sampled_from(["close", "throw", "forget"]))
    def leave(self, number: int, how: str) -> None:
        request = self.under_way.get(number)
        if request is None:
            return
        if how == "close":
            request.steps.close()
        elif how == "throw":
            with pytest.raises(Stop):
                request.steps.throw(Stop())
        if how != "forget":
            self.expect_the_end(request)
        self.end(number)

    def expect_the_end(self, request: Request) -> None:
        assert next(request.steps, "over") == "over"
        if request.done == LAYERS + 2 and request.spans:
            finished[request.kind] += 1

    def end(self, number: int) -> None:
        request = self.under_way.pop(number)
        self.free_slots = request.taken + self.free_slots
        # Raises if one were still exported, or on loan to a copy.
        self.local_cpu.require_puttable(request.objects)

    # --- what holds at all times ----------------------------------------------------------------

    def at(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return cache[:, slots // BLOCK, slots % BLOCK].transpose(0, 1).flatten(2)

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        there = slots != -1
        slots, rows = slots[there], rows[there].view(-1, 2, HEADS, HEAD)
        self.wanted[layer][:, slots // BLOCK, slots % BLOCK] = rows.transpose(0, 1)

    @invariant()
    def only_named_slots_are_written_and_nothing_is_held(self) -> None:
        if not hasattr(self, "storage"):
            return
        for cache, wanted in zip(self.caches, self.wanted, strict=True):
            # Turned keys differ from the model's by their rounding; all else by nothing.
            assert torch.allclose(cache, wanted, rtol=0, atol=2e-6)
            assert torch.equal(cache[1], wanted[1])
        books = self.local_cpu.audit()
        held = [one for request in self.under_way.values() for one in request.objects]
        taken = books["capacity_bytes"] - books["free_bytes"]
        assert taken == sum(-(-one.nbytes // 4096) * 4096 for one in held)
        assert books["leases"] == 0
        self.local_cpu.require_puttable(held)

    def teardown(self) -> None:
        if not hasattr(self, "storage"):
            return
        for number in list(self.under_way):
            self.leave(number, "forget")
        self.under_way.clear()
        gc.collect()
        books = self.local_cpu.audit()
        assert books["free_bytes"] == books["capacity_bytes"], "all bytes are free"
        self.storage.close()
        torch.set_num_threads(self.threads)


GeneratorMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestGenerators = GeneratorMachine.TestCase


def test_the_machine_takes_many_loads_to_their_end() -> None:
    assert min(finished[kind] for kind in ("direct", "staged", "buffered", "turning")) > 20
