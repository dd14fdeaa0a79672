"""What runs in an engine's own process: vLLM, and a loop that does what the test asks."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import models

if TYPE_CHECKING:
    from harness import EngineSpec, Prompt

HERE = os.path.dirname(os.path.abspath(__file__))
NUM_LOGPROBS = 5
IDLE_TIMEOUT_S = 30.0
COUNTERS = {
    "vllm:prefix_cache_hits": "local_tokens",
    "vllm:external_prefix_cache_hits": "external_tokens",
    "vllm:external_prefix_cache_queries": "external_queries",
    "vllm:num_preemptions": "preemptions",
    "vllm:spec_decode_num_draft_tokens": "drafted_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}


def serve(pipe: Any, spec: EngineSpec, environment: dict[str, str], log: str) -> None:
    """The engine's process: starts vLLM, then answers until told to close."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    if HERE not in sys.path:
        sys.path.insert(0, HERE)
    if not spec.spawned:
        _fork_beneath(pipe)
    try:
        llms = [_start(spec)]
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        return
    pipe.send(("ready", None))
    operations: dict[str, Callable[..., Any]] = {
        "ask": lambda prompts, max_tokens, which=0: _generate(llms[which], prompts, max_tokens),
        "reset": lambda connector, which=0: _reset(llms[which], connector),
        "rpc": lambda method, *given: llms[0].collective_rpc(method, args=given),
        "twin": lambda: llms.append(_start(spec)),
        "script": lambda module, name, *given: getattr(importlib.import_module(module), name)(
            llms[0], *given
        ),
        "counters": lambda: _counters(llms[0]),
        "idle": lambda: run_idle(llms[0]),
        "metrics": _metrics,
    }
    while True:
        try:
            operation, given = pipe.recv()
        except EOFError:
            break
        if operation == "close":
            break
        try:
            pipe.send(("ok", operations[operation](*given)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))
    for llm in llms:
        with contextlib.suppress(Exception):
            llm.llm_engine.engine_core.shutdown()
    sys.stdout.flush()


def _fork_beneath(pipe: Any) -> None:
    """Has vLLM fork its processes, as it does by default elsewhere: this one has imported vLLM, and
    on CPU each process would import it again."""
    from vllm.platforms.cpu import CpuPlatform

    as_given = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        as_given(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
    # Whoever waits for this process sees it end, whatever is still there beneath it.
    os.register_at_fork(after_in_child=pipe.close)


def _start(spec: EngineSpec) -> Any:
    from vllm.config import KVTransferConfig

    from vllm import LLM

    arguments = spec.llm_arguments()
    if (events := arguments.get("kv_events_config")) is not None:
        from vllm.config.kv_events import KVEventsConfig

        arguments["kv_events_config"] = KVEventsConfig(**events)
    config = spec.connector_config()
    if config is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**config)
    return AsyncServer(arguments) if spec.layout == "async" else LLM(**arguments)


class AsyncServer:
    """vLLM's asynchronous engine, which serving programs use, with the face of ``vllm.LLM``.

    ``run`` does a coroutine in its event loop, which lives in a thread; ``engine`` is the
    ``AsyncLLM``, whose core is a process of its own with a worker process beneath it.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self._count = 0

        async def start() -> AsyncLLM:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        self.engine = self.run(start())
        self.llm_engine = self.engine

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def stream(self, prompt: dict[str, Any], sampling: Any) -> Any:
        """The last output of one request; cancelled, it aborts the request."""
        self._count += 1
        last = None
        async for output in self.engine.generate(prompt, sampling, f"async-{self._count}"):
            last = output
        return last

    def generate(self, inputs: list[dict[str, Any]], sampling: list[Any], **_: Any) -> list[Any]:
        async def together() -> list[Any]:
            pairs = zip(inputs, sampling, strict=True)
            return await asyncio.gather(*(self.stream(*pair) for pair in pairs))

        outputs: list[Any] = self.run(together())
        return outputs

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        return bool(self.run(self.engine.reset_prefix_cache(reset_connector=reset_connector)))

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        answers: list[Any] = self.run(self.engine.collective_rpc(method, args=args))
        return answers

    def get_metrics(self) -> Any:
        from vllm.v1.metrics.reader import get_metrics_snapshot

        return get_metrics_snapshot()


def run_idle(llm: Any) -> None:
    """Steps an engine in this process for as long as vLLM has something left to do.

    An engine process of its own does that by itself; no request is added here either.
    """
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    until = time.monotonic() + IDLE_TIMEOUT_S
    while core is not None and core.scheduler.has_requests() and time.monotonic() < until:
        llm.llm_engine.step()


def _reset(llm: Any, connector: bool) -> bool:
    """vLLM refuses while it keeps blocks of an ended request that is still being saved."""
    run_idle(llm)
    until = time.monotonic() + 5
    # An engine process of its own goes on by itself.
    while not (is_done := bool(llm.reset_prefix_cache(reset_connector=connector))):
        if connector or time.monotonic() > until:
            break
        time.sleep(0.02)
    return is_done


def sampling_for(prompt: Prompt, max_tokens: int) -> Any:
    """Greedy, to the last token."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        logprobs=NUM_LOGPROBS,
        detokenize=False,
        ignore_eos=True,
        extra_args={"kv_transfer_params": dict(prompt.configs)} if prompt.configs else None,
    )


def answer_of(output: Any) -> Any:
    """What a finished request got."""
    from harness import Answer

    completion = output.outputs[0]
    return Answer(
        tuple(completion.token_ids),
        tuple(
            {token: entry.logprob for token, entry in position.items()}
            for position in completion.logprobs or ()
        ),
        output.num_cached_tokens or 0,
        completion.finish_reason or "",
    )


def _generate(llm: Any, prompts: list[Prompt], max_tokens: int) -> Any:
    from vllm.lora.request import LoRARequest

    inputs: list[dict[str, Any]] = []
    adapters: list[LoRARequest | None] = []
    for prompt in prompts:
        entry: dict[str, Any] = {"prompt_token_ids": list(prompt.tokens)}
        if prompt.salt is not None:
            entry["cache_salt"] = prompt.salt
        inputs.append(entry)
        if prompt.lora is None:
            adapters.append(None)
        else:
            seed = sum(prompt.lora.encode())
            folder = prompt.lora_path or str(models.lora_adapter(prompt.lora, seed))
            adapters.append(LoRARequest(prompt.lora, prompt.lora_id or seed, folder))
    outputs = llm.generate(
        inputs,
        [sampling_for(prompt, max_tokens) for prompt in prompts],
        use_tqdm=False,
        lora_request=adapters if any(adapters) else None,
    )
    return [answer_of(output) for output in outputs], _counters(llm)


def _counters(llm: Any) -> dict[str, int]:
    """vLLM's own counters since the start."""
    counters = dict.fromkeys(COUNTERS.values(), 0)
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            counters[COUNTERS[metric.name]] += int(metric.value)
    return counters


def _metrics() -> dict[str, float]:
    """The connector's own metrics."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    found: dict[str, float] = {}
    for metric in get_prometheus_registry().collect():
        if metric.name.startswith("vllm:lmcache_rs_"):
            name = metric.name.removeprefix("vllm:lmcache_rs_")
            for sample in metric.samples:
                if sample.name.removeprefix(metric.name) in ("", "_total", "_count"):
                    ours = {"tier", "path", "place", "direction", "source"} & sample.labels.keys()
                    label = "".join(f"{{{sample.labels[each]}}}" for each in ours)
                    found[name + label] = sample.value
    return found
