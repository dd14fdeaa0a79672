"""A model runner without a model: it computes the KV that a step asks for, and says the next token.

It does to the connector's worker half what vLLM's own runner does, hook by hook and in its order,
and knows about requests only what scheduler outputs say. Before it computes on a prefix it reads
the whole of it back through the request's block table, as attention does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from world import GARBAGE_TOKEN, LAYER_NAMES, PagedMemory, Prefix, garbage


@dataclass
class Sequence:
    """What the runner knows of a request."""

    prefix: Prefix
    num_prompt_tokens: int
    table: list[int]


@dataclass
class Pass:
    """What one request does in a step: the tokens from `start` to `end` are computed.

    The last of them may be drafts, which are tokens of the request only if the model agrees.
    """

    req_id: str
    start: int
    end: int
    sequence: Sequence
    table: list[int]
    drafts: list[int]
    # The first position whose KV was not that of the prefix, once one was found.
    first_wrong: int | None = None


@dataclass
class Outcome:
    """What came of a step.

    Args:
        output: What vLLM's scheduler hears.
        passes: What was computed.
        failed_blocks: The blocks that the connector said not to hold what was promised.
        finished: Requests whose loads are said to be over.
        failed: Those of them that are said to have nothing of theirs.
        written: For each layer, the slots that loads wrote.
    """

    output: ModelRunnerOutput
    passes: list[Pass]
    failed_blocks: set[int]
    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    written: list[set[int]] = field(default_factory=list)


class Runner:
    """See the module's description.

    Args:
        worker: The connector in its WORKER role.
        memory: The engine's KV memory, registered with it.
        identity_of: What besides the tokens decides a request's KV.
        window: Tokens that attention reaches back; 0 for all.
        drafts: Whether a draft model runs behind the forward pass: what the step saves is asked for
            only then, when all that vLLM wants to know of the step has been asked.
    """

    def __init__(
        self,
        worker: KVConnectorBase_V1,
        memory: PagedMemory,
        identity_of: Callable[[str], str],
        window: int = 0,
        *,
        drafts: bool = False,
    ) -> None:
        self.worker = worker
        self.memory = memory
        self.sequences: dict[str, Sequence] = {}
        self._identity_of = identity_of
        self._window = window
        self._drafts = drafts

    def execute(self, scheduled: SchedulerOutput) -> Outcome:
        """One step, with all the hooks around and in it."""
        passes = self._take_in(scheduled)
        worker, metadata = self.worker, scheduled.kv_connector_metadata
        assert metadata is not None
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        loads_first = scheduled.has_sync_kv_loads
        written: list[set[int]] = []
        if loads_first:
            self.memory.watch_writes()
            worker.start_load_kv(None)
        if passes:
            written = self._forward(passes, loads_first)
        if not loads_first:
            self.memory.watch_writes()
            worker.start_load_kv(None)
            written = [self.memory.written_slots(layer) for layer in range(len(LAYER_NAMES))]
        ends_late = self._drafts and bool(passes)
        if not ends_late:
            worker.wait_for_save()
        results = worker.get_transfer_results(scheduled.finished_req_ids)
        connector_output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_cache_events=worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        if ends_late:
            worker.wait_for_save()
        worker.clear_connector_metadata()
        output = self._sampled(passes)
        output.kv_connector_output = connector_output
        return Outcome(
            output,
            passes,
            set(connector_output.invalid_block_ids),
            set(results.finished_recving),
            set(results.failed_recving),
            written,
        )

    def _take_in(self, scheduled: SchedulerOutput) -> list[Pass]:
        """Updates what is known of the requests; what each of them computes."""
        for req_id in scheduled.finished_req_ids:
            self.sequences.pop(req_id, None)
        starts: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            tokens = new.prompt_token_ids or []
            prefix = Prefix(self._identity_of(new.req_id), tokens)
            self.sequences[new.req_id] = Sequence(prefix, len(tokens), list(new.block_ids[0]))
            starts[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for at, req_id in enumerate(cached.req_ids):
            sequence = self.sequences[req_id]
            starts[req_id] = cached.num_computed_tokens[at]
            new_blocks = cached.new_block_ids[at]
            if req_id in cached.resumed_req_ids:
                assert new_blocks is not None
                sequence.table = list(new_blocks[0])
                sequence.prefix.replace(cached.all_token_ids[req_id])
            else:
                sequence.table += new_blocks[0] if new_blocks else []
                # After a failed load vLLM throws the sampled token away.
                known = sequence.num_prompt_tokens + cached.num_output_tokens[at]
                sequence.prefix.truncate(known)
        return [
            Pass(
                req_id,
                starts[req_id],
                starts[req_id] + num_tokens,
                self.sequences[req_id],
                list(self.sequences[req_id].table),
                list(scheduled.scheduled_spec_decode_tokens.get(req_id, ())),
            )
            for req_id, num_tokens in scheduled.num_scheduled_tokens.items()
        ]

    def _forward(self, passes: list[Pass], has_loads: bool) -> list[set[int]]:
        """The layers; for each of them, the slots that loads wrote."""
        memory, written = self.memory, []
        for run in passes:
            run.sequence.prefix.tokens += run.drafts
        kv = [run.sequence.prefix.kv(0, run.end) for run in passes]
        slots = [memory.slots(run.table, 0, run.end) for run in passes]
        for layer, name in enumerate(LAYER_NAMES):
            self.worker.wait_for_layer_load(name)
            written.append(self.memory.written_slots(layer) if has_loads else set())
            cells = memory.cells[layer]
            # As on a device: all requests write their new KV, then all of them attend.
            for run, own, where in zip(passes, kv, slots, strict=True):
                new = own[layer, run.start :]
                cells[where[run.start :]] = new if run.first_wrong is None else garbage(new)
            for run, own, where in zip(passes, kv, slots, strict=True):
                if run.first_wrong is None:
                    first = max(0, run.start - self._window + 1) if self._window else 0
                    wrong = cells[where[first:]] != own[layer, first:]
                    if wrong.any():
                        run.first_wrong = first + int(np.argmax(wrong))
            self.worker.save_kv_layer(name, memory.tensors[name], None)
        return written

    def _sampled(self, passes: list[Pass]) -> ModelRunnerOutput:
        """The next tokens of each request whose tokens are all computed: agreed drafts and one."""
        sampled: list[list[int]] = []
        for run in passes:
            prefix = run.sequence.prefix
            known = len(prefix.tokens) - len(run.drafts)
            if run.end < known:
                sampled.append([])
                continue
            said = [self._said(run, known)]
            while len(said) <= len(run.drafts) and run.drafts[len(said) - 1] == said[-1]:
                said.append(self._said(run, known + len(said)))
            prefix.truncate(known)
            prefix.tokens += said
            sampled.append(said)
        req_ids = [run.req_id for run in passes]
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: at for at, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
        )

    def _said(self, run: Pass, num_tokens: int) -> int:
        prefix = run.sequence.prefix
        return prefix.next_token(num_tokens) if run.first_wrong is None else GARBAGE_TOKEN
