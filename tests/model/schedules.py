"""Random legal schedules: who asks for what, when it ends, what fails and what comes late.

Everything is drawn from the seed, so a seed names a schedule.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from engine import Engine, Step, block_hasher
from judge import HASH_BYTES
from settings import MAX_MODEL_LEN, Settings
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from vllm.version import __version__ as vllm_version
from world import BLOCK, CHUNK, CHUNK_BYTES, VOCAB

from lmcache_rs.lookup import LookupClient, Stats, Unknown
from lmcache_rs.vllm_v1.metadata import LMCacheConnectorMetadata, ReqMeta

IDENTITIES: tuple[dict[str, Any], ...] = (
    {},
    {"cache_salt": "a"},
    {"cache_salt": "b"},
    {"lora_request": LoRARequest("adapter", 1, "/adapter")},
)
VANISHED = ("one chunk", "all chunks", "one chunk, and one of another size in its place")
BROKEN = ("unhealthy", "raises")
_FORGETS_REPLACED_TOKENS = vllm_version.split("+")[0] not in ("0.31.0",)
BREAKABLE = {"is_healthy", "load_chunks", "layerwise_step"}
"""What of the worker's engine is replaced while it is broken."""


def _named(identity: dict[str, Any]) -> str:
    return repr(sorted((name, str(value)) for name, value in identity.items()))


class LateAnswers(LookupClient):
    """A lookup client some of whose answers are not there yet when they are first asked for."""

    def __init__(self, client: LookupClient, draw: random.Random, share: float) -> None:
        self._client = client
        self._draw = draw
        self._share = share

    def lookup(self, hashes: bytes, req_id: str, namespace: str) -> int | None:
        if self._draw.random() < self._share:
            return None
        return self._client.lookup(hashes, req_id, namespace)

    def lookup_cache(self, req_id: str) -> int | Unknown | None:
        return self._client.lookup_cache(req_id)

    def end(self, req_id: str, *, release: bool) -> None:
        self._client.end(req_id, release=release)

    def clear(self) -> bool:
        return self._client.clear()

    def stats(self) -> Stats:
        return self._client.stats()

    def close(self) -> None:
        self._client.close()


class Refusing:
    """A step of the native side that takes everything but loads."""

    def __init__(self, native: Any, add_load: Callable[..., Any]) -> None:
        self._native = native
        self.add_load = add_load

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


class Schedule:
    """One run, from an empty engine to an empty engine.

    Args:
        seed: Names the schedule.
        settings: The engine; None draws one.
        num_steps: Turns of the loop before all requests end; None draws it.
    """

    def __init__(
        self, seed: int, settings: Settings | None = None, num_steps: int | None = None
    ) -> None:
        self._draw = draw = random.Random(seed)
        drawn = Settings.drawn(draw)
        self.settings = settings or drawn
        self.num_steps = draw.choice((8, 12, 16, 30)) if num_steps is None else num_steps
        self._arrivals = draw.choice((0.3, 0.6, 0.9))
        self._aborts = draw.choice((0.0, 0.03, 0.15))
        self._resets = draw.choice((0.0, 0.05, 0.2))
        self._losses = draw.choice((0.0, 0.0, 0.05))
        self._failures = draw.choice((0.0, 0.0, 0.3, 0.8))
        self._slowness = draw.choice((0.0, 0.5, 0.9))
        self._aborts_after_failure = draw.choice((0.0, 0.5))
        # vLLM 0.32 itself goes wrong where a streamed prompt's answer ends among agreed drafts.
        self._streams = draw.choice((0.0, 0.0, 0.2)) * (not self.settings.num_drafts)
        # Before 0.32 it keeps the hashes of tokens that a next piece replaces: its own prefix cache
        # then answers wrongly.
        self._streams *= _FORGETS_REPLACED_TOKENS
        self._declined = draw.choice((0.0, 0.0, 0.0, 0.3))
        self._ahead = draw.choice((0.0, 0.5, 1.0))
        self._drains = draw.random() < 0.5
        self._texts = [self._tokens(MAX_MODEL_LEN) for _ in range(draw.choice((1, 1, 2)))]
        self._identities = draw.sample(IDENTITIES, draw.choice((1, 1, 2, 3)))
        # Drawn apart, so that a seed means the same with and without.
        late = random.Random(f"late {seed}")
        self._late = late, late.choice((0.0, 0.5, 0.9, 0.98, 1.0)), late.choice((0.0, 0.0, 0.1))
        self._num_requests = 0
        self._has_failed = False
        self.log: list[str] = []

    def run(self) -> Engine:
        """Runs it and checks it; the engine, closed, for what it has seen."""
        engine = Engine(
            self.settings, self._fail_loads, self._abort_some, self._declines, self._late
        )
        self._engine = engine
        self._delay_lookups()
        self._choose_loads()
        engine.transfers.draw_from(self._draw, self._slowness, self._failures / 4)
        try:
            for _ in range(self.num_steps):
                self._between_steps()
                engine.step(ahead=self._draw.random() < self._ahead)
            if self._drains:
                for _ in range(3 * self.num_steps):
                    if not engine.scheduler.has_requests():
                        break
                    engine.step()
            engine.finish()
        finally:
            engine.close()
        return engine

    # --- requests -------------------------------------------------------------------------------

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(VOCAB) for _ in range(count)]

    def _length(self) -> int:
        """A prompt's length: around a border of chunks or blocks, more often than not."""
        border = self._draw.choice((CHUNK, CHUNK, BLOCK))
        length = border * self._draw.randrange(1, 40 // border + 1)
        return max(1, min(length + self._draw.choice((-1, 0, 0, 1, 2)), 40))

    def new_request(self) -> tuple[Request, str]:
        """A request like some others, and the identity of its KV."""
        draw = self._draw
        text, length = draw.choice(self._texts), self._length()
        shared = length if draw.random() < 0.6 else draw.randrange(length)
        tokens = text[:shared] + self._tokens(length - shared)
        identity = draw.choice(self._identities)
        extra: dict[str, Any] = {}
        if draw.random() < 0.1:
            tag = draw.choice(("lmcache.tag.team", "lmcache.skip_save"))
            extra["extra_args"] = {"kv_transfer_params": {tag: True}}
        if draw.random() < 0.05:
            extra["prompt_logprobs"] = 1
        params = SamplingParams(
            max_tokens=min(draw.choice((1, 1, 2, 5, 2 * CHUNK)), MAX_MODEL_LEN - length),
            ignore_eos=True,
            **extra,
        )
        self._num_requests += 1
        request = Request(
            f"r{self._num_requests}",
            tokens,
            params,
            None,
            arrival_time=float(self._num_requests),
            priority=draw.randrange(3),
            block_hasher=block_hasher,
            **identity,
        )
        return request, _named(identity)

    def _stream(self) -> None:
        """Users who send their prompt piece by piece: another piece, or the end."""
        draw, engine = self._draw, self._engine
        for name in [name for name in engine.scheduler.requests if name.startswith("s")]:
            request = engine.scheduler.requests[name]
            if draw.random() < 0.3:
                fits = request.num_tokens + 2 * BLOCK + len(request.streaming_queue or ()) * 12
                is_last = fits > MAX_MODEL_LEN or draw.random() < 0.4
                piece = self._tokens(draw.randrange(1, BLOCK + 2))
                engine.scheduler.add_request(self._piece(name, piece, is_last=is_last))
        if draw.random() < self._streams:
            self._num_requests += 1
            tokens = self._texts[0][: draw.randrange(1, CHUNK + BLOCK)]
            engine.add(self._piece(f"s{self._num_requests}", tokens), _named({}))

    def _piece(self, name: str, tokens: list[int], *, is_last: bool = False) -> Request:
        params = SamplingParams(max_tokens=self._draw.choice((1, 1, 3)), ignore_eos=True)
        return Request(
            name,
            tokens,
            params,
            None,
            arrival_time=float(self._num_requests),
            block_hasher=block_hasher,
            resumable=not is_last,
        )

    # --- what happens between the hooks -----------------------------------------------------------

    def _between_steps(self) -> None:
        draw, engine = self._draw, self._engine
        if self._streams:
            self._stream()
        while len(engine.scheduler.requests) < 8 and draw.random() < self._arrivals:
            engine.add(*self.new_request())
        self._abort_some()
        if draw.random() < self._resets:
            engine.reset(preempt=draw.random() < 0.5)
        if draw.random() < self._losses:
            engine.pool.clear()

    def _abort_some(self) -> None:
        draw, engine = self._draw, self._engine
        share = self._aborts_after_failure if self._has_failed else self._aborts
        self._has_failed = False
        self._mend_worker()
        engine.transfers.go_on()
        for req_id in list(engine.scheduler.requests):
            if draw.random() < share:
                engine.abort(req_id)

    def _declines(self) -> bool:
        return self._draw.random() < self._declined

    def _delay_lookups(self) -> None:
        half = self._engine.connector._manager.scheduler
        assert half is not None
        if self.settings.lookup_delay and half._client is not None:
            half._client = LateAnswers(half._client, self._draw, self.settings.lookup_delay)

    def _choose_loads(self) -> None:
        half, share = self._engine.connector._manager.scheduler, self.settings.waited_for
        assert half is not None

        def is_async(num_tokens: int) -> bool:
            return self._draw.random() < share

        if 0 < share < 1 and self.settings.recovers_from_sync_load:
            half._load_choice.is_async = is_async  # type: ignore[method-assign]

    # --- what fails -----------------------------------------------------------------------------

    def _fail_loads(self, step: Step) -> None:
        metadata = step.scheduled.kv_connector_metadata
        assert isinstance(metadata, LMCacheConnectorMetadata)
        for req in metadata.requests:
            if req.load_spec is None or self._draw.random() >= self._failures:
                continue
            self._has_failed = True
            fault = self._draw.choice(VANISHED + BROKEN)
            if fault in BROKEN:
                self._break_worker(fault)
            else:
                self._lose_chunks(req, fault)

    def _lose_chunks(self, req: ReqMeta, fault: str) -> None:
        """The deadline of the lease has passed, and what it held has gone."""
        engine = self._engine
        engine.pool.release(req.req_id)
        hashes = [req.hashes[at : at + HASH_BYTES] for at in range(0, len(req.hashes), HASH_BYTES)]
        for victim in hashes if fault == "all chunks" else [self._draw.choice(hashes)]:
            engine.pool.remove(req.namespace, victim)
            if fault.endswith("in its place"):
                foreign = engine.pool.allocate([CHUNK_BYTES // 2])
                if foreign and engine.pool.put(req.namespace, victim, foreign[0]):
                    engine.judge.foreign[req.namespace, victim] = foreign[0].nbytes

    def _break_worker(self, fault: str) -> None:
        """The worker half's store says that it is not to be trusted, or one load of it raises."""
        half, raised = self._engine.worker._manager.worker, self._engine.judge.raised
        assert half is not None
        store: Any = half._engine
        if BREAKABLE & vars(store).keys():
            return

        def raises(*_: object, **__: object) -> None:
            raised["start_load_kv"] += 1
            self._mend_worker()
            raise RuntimeError("the load fails")

        self._engine.transfers.instead = raises if fault == "raises" else None

        if fault == "unhealthy":
            store.is_healthy = lambda: False
        elif self.settings.layerwise:
            step = store.layerwise_step()
            store.layerwise_step = lambda: Refusing(step, raises)
        else:
            store.load_chunks = raises

    def _mend_worker(self) -> None:
        half = self._engine.worker._manager.worker
        assert half is not None
        self._engine.transfers.instead = None
        for name in BREAKABLE:
            vars(half._engine).pop(name, None)
