"""What must hold after every step, and at the end of every schedule.

The judge listens at vLLM's side of the connector's hooks: what was promised, to whom, for which
blocks. It trusts nothing that the connector says of itself, the books of the pool apart, which are
walked entry by entry.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from runner import Outcome, Pass, Sequence
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from world import BLOCK, CHUNK, GARBAGE_TOKEN, PagedMemory, stored_form

from lmcache_rs import _native
from lmcache_rs.vllm_v1.metadata import LMCacheConnectorMetadata, ReqMeta
from lmcache_rs.vllm_v1.steps import first_of

HASH_BYTES = 32


class Violation(AssertionError):
    """A rule that was broken."""


def require(holds: bool, rule: str, *found: object) -> None:
    """Raises Violation with the rule and what was found unless it holds."""
    if not holds:
        raise Violation(": ".join([rule, *map(str, found)]))


@dataclass
class Promise:
    """Tokens from `start` to `end` of a request that vLLM counts on.

    In the step that begins the load; or, where the request waits for it, once that is said to be
    over.
    """

    start: int
    end: int
    # The full hit: the last token is computed, and written into a block that was loaded whole.
    last_is_computed: bool
    table: list[int]
    is_async: bool = False
    # Of one that is waited for: what the worker half was told, and what was written since.
    req: ReqMeta | None = None
    written: list[set[int]] = field(default_factory=list)

    def slots(self, memory: PagedMemory) -> set[int]:
        """Where they lie; what lies behind a window has no block."""
        slots = memory.slots(self.table, self.start, self.end)
        return set(slots[slots >= BLOCK].tolist())

    def may_be_written(self, memory: PagedMemory) -> set[int]:
        """Where a load may write."""
        return set(memory.slots(self.table, self.start, self.end + self.last_is_computed).tolist())


class Judge:
    """See the module's description.

    Args:
        connector: The connector in its SCHEDULER role; the judge listens at its hooks from now on.
        memory: The engine's KV memory.
        loads: Whether this engine's role lets it load.
        recovers: Whether vLLM recovers from a load that fails in the step that computes on it.
        has_tiers: Whether chunks may come back from below host memory at any time.
        block_table: The blocks that vLLM holds for a request; None if it knows no such request.
    """

    def __init__(
        self,
        connector: KVConnectorBase_V1,
        memory: PagedMemory,
        loads: bool,
        recovers: bool,
        has_tiers: bool,
        block_table: Callable[[str], list[int] | None],
    ) -> None:
        self._memory = memory
        self._loads = loads
        self._recovers = recovers
        self._has_tiers = has_tiers
        self._block_table = block_table
        # Answers above zero that were neither taken up nor called off: each holds a lease.
        self._open_answers: dict[str, tuple[int, int, bool]] = {}
        # Requests whose last answer is not there yet: what is leased for them may change meanwhile.
        self._unanswered: set[str] = set()
        self._promised: dict[str, Promise] = {}
        # Loads that the worker half was told of and that are not said to be over.
        self.waited_for: dict[str, Promise] = {}
        self._known_chunks: dict[tuple[str, bytes], bytes] = {}
        # Ended requests whose blocks vLLM keeps until they are named.
        self.kept: set[str] = set()
        # Chunks that a schedule has put in place of the connector's.
        self.foreign: dict[tuple[str, bytes], int] = {}
        # Exceptions that a schedule has raised in the connector, by the place that notes them.
        self.raised: collections.Counter[str] = collections.Counter()
        self.seen: collections.Counter[str] = collections.Counter()
        self._listen(connector, "get_num_new_matched_tokens", self._looked_up)
        self._listen(connector, "update_state_after_alloc", self._allocated)
        self._listen(connector, "request_finished", self._finished)

    def _listen(self, connector: Any, hook: str, hear: Callable[..., None]) -> None:
        real = getattr(connector, hook)

        def heard(*arguments: Any) -> Any:
            answer = real(*arguments)
            hear(answer, *arguments)
            return answer

        setattr(connector, hook, heard)

    # --- the scheduler's hooks ----------------------------------------------------------------

    def _looked_up(self, answer: tuple[int | None, bool], request: Request, local: int) -> None:
        num_new, is_async = answer
        self.seen["lookups"] += 1
        if num_new is None:
            # What an earlier answer leased may stay leased.
            self.seen["pending answers"] += 1
            self._open_answers.pop(request.request_id, None)
            self._unanswered.add(request.request_id)
            return
        self._unanswered.discard(request.request_id)
        self._open_answers.pop(request.request_id, None)
        require(num_new >= 0, "an answer is never negative", num_new)
        end = local + num_new
        require(
            num_new == 0 or end <= request.num_tokens - (not is_async),
            "a synchronous promise leaves a token to compute",
            f"local {local} + {num_new} of {request.num_tokens}",
        )
        require(not num_new or self._loads, "a producer loads nothing")
        require(
            not num_new or is_async or self._recovers,
            "what may fail for good is not waited for by the step",
        )
        if num_new and not request.skip_reading_prefix_cache:
            self._open_answers[request.request_id] = (local, end, is_async)

    def _allocated(
        self, _: None, request: Request, blocks: KVCacheBlocks, num_external: int
    ) -> None:
        answer = self._open_answers.pop(request.request_id, None)
        if not num_external:
            return
        assert answer is not None, "the engine counts on tokens that were promised"
        start, end, is_async = answer
        assert num_external == end - start
        full = end >= request.num_tokens - 1
        self.seen["promises"] += 1
        self.seen["promises that are waited for"] += is_async
        self.seen["full hits"] += full
        table = list(blocks.get_block_ids()[0])
        last_is_computed = end == request.num_tokens - 1 and end % BLOCK > 0
        self._promised[request.request_id] = Promise(start, end, last_is_computed, table, is_async)

    def _finished(self, answer: tuple[bool, object], request: Request, _: object) -> None:
        self._open_answers.pop(request.request_id, None)
        self._unanswered.discard(request.request_id)
        if answer[0]:
            self.kept.add(request.request_id)
            self.seen["requests kept for their saves"] += 1

    def take_promises(self) -> dict[str, Promise]:
        """What the step that was just described is promised."""
        promised, self._promised = self._promised, {}
        return promised

    # --- after a step was executed --------------------------------------------------------------

    def check_loads(
        self,
        promises: dict[str, Promise],
        outcome: Outcome,
        loading: set[str],
        pool: _native.LocalCpu,
        just_stored: set[tuple[str, bytes]],
    ) -> None:
        """Loads wrote what was promised, or it is reported; and nothing else.

        `loading` are the requests whose loads are not over, as the worker half has heard;
        `just_stored` are chunks whose copies have ended since the last call.
        """
        memory, failed = self._memory, outcome.failed_blocks
        in_step = {req_id: each for req_id, each in promises.items() if not each.is_async}
        over = self._take_finished(outcome, loading)
        allowed: set[int] = set()
        for promise in in_step.values():
            allowed |= promise.may_be_written(memory)
        for layer, written in enumerate(outcome.written):
            stray = written - allowed
            require(not stray, "a load writes promised slots only", f"layer {layer}", stray)
        promised_blocks: set[int] = set()
        for req_id, promise in {**in_step, **over}.items():
            slots = promise.slots(memory)
            promised_blocks |= {slot // BLOCK for slot in slots}
            written_to = promise.written if promise.is_async else outcome.written
            missing = {slot // BLOCK for written in written_to for slot in slots - written}
            if not written_to:
                missing = {slot // BLOCK for slot in slots}
            self.seen["failed loads that were waited for"] += promise.is_async and bool(missing)
            spec = None if promise.req is None else promise.req.load_spec
            is_streamed = spec is not None and spec.stream is not None
            if req_id in outcome.failed:
                # What was lost of a stream may have been behind a window.
                is_lost = bool(missing) or is_streamed
                require(is_lost, "what was delivered is not said to have failed", req_id)
                continue
            require(
                missing <= failed,
                "what was promised is delivered or reported",
                f"request {req_id} blocks {missing - failed}",
            )
            whole = {slot // BLOCK for slot in slots} - missing
            if is_streamed:
                # Its copies are in order: what was copied behind one that has failed is lost.
                whole -= set(promise.table[first_of(missing, promise.table) :])
            require(not whole & failed, "blocks that were delivered are not reported", whole)
        require(failed <= promised_blocks, "only promised blocks are reported", failed)
        self.seen["failed loads"] += bool(failed | outcome.failed)
        for promise in {**in_step, **over}.values():
            self._check_index(promise, failed, pool, just_stored)

    def begin_loads(self, metadata: LMCacheConnectorMetadata, promises: dict[str, Promise]) -> None:
        """The worker half hears of these promises now."""
        for req in metadata.requests:
            promise = promises.get(req.req_id)
            if req.load_spec is not None and promise is not None:
                promise.req = req
        self.waited_for |= {req_id: each for req_id, each in promises.items() if each.is_async}

    def check_late_writes(self, req_id: str, written: list[set[int]]) -> None:
        """A load that its request waits for has written, between two hooks or in one."""
        promise = self.waited_for.get(req_id)
        require(promise is not None, "a load that is said to be over writes nothing", req_id)
        assert promise is not None
        blocks = self._block_table(req_id)
        require(blocks == promise.table, "a load writes into its own request's blocks", req_id)
        for layer, slots in enumerate(written):
            stray = slots - promise.may_be_written(self._memory)
            require(not stray, "a load writes promised slots only", f"layer {layer}", stray)
        before = promise.written or [set() for _ in written]
        promise.written = [one | two for one, two in zip(before, written, strict=True)]

    def _take_finished(self, outcome: Outcome, loading: set[str]) -> dict[str, Promise]:
        """The loads that are said to be over."""
        over: dict[str, Promise] = {}
        for req_id in outcome.finished:
            require(req_id in self.waited_for, "a load is said to be over once", req_id)
            over[req_id] = self.waited_for.pop(req_id)
        require(outcome.failed <= outcome.finished, "a load that failed is over", outcome.failed)
        forgotten = self.waited_for.keys() - loading
        require(not forgotten, "a load that is over is said to be", forgotten)
        return over

    def _check_index(
        self,
        promise: Promise,
        failed_blocks: set[int],
        pool: _native.LocalCpu,
        just_stored: set[tuple[str, bytes]],
    ) -> None:
        """A chunk that failed has left the index, or it would be promised again and again.

        Unless somebody else's copy of it has ended since: that is another chunk, and a right one.
        """
        req = promise.req
        if req is not None and not self._has_tiers:
            blocks = promise.table[promise.start // BLOCK : -(-promise.end // BLOCK)]
            at = next((at for at, block in enumerate(blocks) if block in failed_blocks), None)
            # Behind a window it may have been any chunk before that block.
            if at is None or blocks[0] < 1:
                return
            chunk = (promise.start + at * BLOCK) // CHUNK
            failed_hash = req.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]
            is_new = (req.namespace, failed_hash) in just_stored
            gone = is_new or not pool.get(req.namespace, failed_hash)
            require(gone, "a failed chunk leaves the index before it is reported", req.req_id)

    def check_reads(self, passes: list[Pass], reported_blocks: set[int]) -> None:
        """What a request computed on was its own prefix, or vLLM is told to compute it again."""
        for run in passes:
            if run.first_wrong is None:
                continue
            block_at = run.first_wrong // BLOCK
            computed = run.table[: -(-run.start // BLOCK)]
            reported = not reported_blocks.isdisjoint(computed[: block_at + 1])
            require(
                reported,
                "a request reads its own prefix",
                f"request {run.req_id} computing {run.start} to {run.end}: position "
                f"{run.first_wrong}, block {run.table[block_at]} holds something else",
            )
            self.seen["passes on failed blocks"] += 1

    def check_saves(
        self,
        metadata: LMCacheConnectorMetadata,
        sequences: dict[str, Sequence],
        pool: _native.LocalCpu,
    ) -> None:
        """Chunks that may have been stored in this step hold the KV of their prefix."""
        for req in metadata.requests:
            if req.save_spec is None:
                continue
            prefix = sequences[req.req_id].prefix
            num_chunks = req.num_tokens // CHUNK
            require(
                num_chunks * CHUNK <= len(prefix.tokens),
                "only known tokens are saved",
                req.req_id,
            )
            kv = prefix.kv(0, num_chunks * CHUNK)
            for chunk in range(num_chunks):
                key = req.namespace, req.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]
                bytes_of = stored_form(kv[:, chunk * CHUNK : (chunk + 1) * CHUNK])
                known = self._known_chunks.setdefault(key, bytes_of)
                require(known == bytes_of, "a key names one prefix", req.req_id, chunk)
                self._check_chunk(pool, key)

    def check_stored(self, keys: list[tuple[str, bytes]], pool: _native.LocalCpu) -> None:
        """Chunks whose copies have just ended hold the KV of their prefix."""
        for key in keys:
            self._check_chunk(pool, key)

    def check_sent(self, output: ModelRunnerOutput) -> None:
        """Ended requests are named once, and only those that vLLM waits for."""
        assert output.kv_connector_output is not None
        sent = output.kv_connector_output.finished_sending or set()
        stray = sent - self.kept
        require(not stray, "only requests that vLLM waits for are named as sent", stray)
        self.kept -= sent

    def check_all_sent(self) -> None:
        """None of them was forgotten."""
        require(not self.kept, "requests that vLLM waits for are named as sent", self.kept)

    def _check_chunk(self, pool: _native.LocalCpu, key: tuple[str, bytes]) -> bool:
        """Whether the chunk is stored."""
        found = pool.get(*key)
        for stored in found:
            if stored.nbytes == self.foreign.get(key):
                continue
            require(
                stored.to_bytes() == self._known_chunks[key],
                "a stored chunk holds the KV of its prefix",
                key[1].hex()[:8],
            )
        return bool(found)

    def check_output(self, outputs: dict[int, Any]) -> None:
        """No token that a user gets was made of somebody else's KV."""
        for of_client in outputs.values():
            for output in of_client.outputs:
                require(
                    GARBAGE_TOKEN not in output.new_token_ids,
                    "a delivered token was computed on its own prefix",
                    output.request_id,
                )
                self.seen["tokens"] += len(output.new_token_ids)

    def check_faults(self, faults: collections.Counter[str]) -> None:
        """No exception of ours was swallowed on the way, but those that a schedule has raised."""
        require(faults == self.raised, "no hook fails", dict(faults), dict(self.raised))

    def check_leases(
        self, books: dict[str, int], num_undelivered: int, num_loading: int, is_idle: bool
    ) -> None:
        """Leases are held for open answers and for promises on their way, and for nothing else."""
        expected = len(self._open_answers) + num_undelivered
        doubtful = len(self._unanswered)
        require(
            expected <= books["leases"] <= expected + doubtful,
            "leases are live lookups",
            f"{books['leases']} leases for {expected} open answers",
        )
        held = expected + doubtful + num_loading
        require(held > 0 or books["leased_bytes"] == 0, "leased bytes are those", books)
        reserves = bool(books["reserved_bytes"])
        require(not (reserves and is_idle), "memory is reserved for copies under way only", books)

    # --- at the end -----------------------------------------------------------------------------

    def check_end(self, books: dict[str, int], pool: _native.LocalCpu) -> None:
        """Everything was given back, and what is stored is right."""
        require(not self.waited_for, "every load is said to be over", list(self.waited_for))
        held = {name: books[name] for name in ("leases", "leased_bytes", "reserved_bytes")}
        require(not any(held.values()), "an idle engine holds nothing", held)
        whole = books["free_bytes"] + books["cached_bytes"]
        require(whole == books["capacity_bytes"], "every byte is free or cached", books)
        stored = sum(self._check_chunk(pool, key) for key in self._known_chunks)
        require(stored == books["chunks"], "what is stored was saved by a request", stored, books)
        self.seen["chunks stored at the end"] += stored
        self.seen["evicted chunks"] += books["evicted_chunks"]
