"""Real vLLM engines for tests: started, asked, spoiled and accounted for.

Every engine lives in a process of its own, forked from a server that has imported
vLLM once. ``inproc`` keeps scheduler and worker together in that process; ``mp`` is
vLLM's default: an engine process and a worker process beneath it, forked like the first
unless the spec says ``spawned``; ``async`` is the same beneath the asynchronous engine of
vLLM's servers.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import models
from probe_names import FOLDER_VARIABLE, SCHEDULER_FILE
from serving import COUNTERS, serve

HERE = Path(__file__).parent
START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 240.0
FIRST_TOKEN_ID = 3
GIB = 1 << 30
# Set, every test here runs with copies layer by layer.
LAYERWISE = os.environ.get("KV_TEST_LAYERWISE") == "1"

# Set before the fork server starts: it and all engines inherit them.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # Compiling the sampler takes longer than every test here together.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


class EngineStartError(RuntimeError):
    """vLLM did not start; the text holds its error and its whole log."""


class EngineDied(RuntimeError):
    """The engine's process ended or stopped answering; the text holds its log's end."""


@dataclass(frozen=True)
class Prompt:
    """One request: token ids, and what else may keep its cache apart.

    ``lora`` names a made adapter; ``lora_path`` and ``lora_id`` take another folder or loading in
    its place. ``configs`` are the request's settings for the connector.
    """

    tokens: tuple[int, ...]
    salt: str | None = None
    lora: str | None = None
    lora_path: str | None = None
    lora_id: int | None = None
    configs: tuple[tuple[str, Any], ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class EngineSpec:
    """How to start one engine. Sizes in tokens unless the name says otherwise.

    ``connector``: ``probe`` watches the shipped connector, ``plain`` is the shipped
    connector by its registered name, None is vLLM alone; several, with ``+`` between them, are
    children of vLLM's MultiConnector, and ``module:Class`` is a connector of the tests.
    ``pool_bytes`` is the size of the connector's memory; ``extra`` holds further ``lmcache.*``
    settings, ``options`` further arguments of ``vllm.LLM`` as JSON.
    """

    connector: str | None = "probe"
    layout: str = "inproc"
    model: str = "tiny-llama"
    dtype: str = "float32"
    block_size: int = 32
    chunk_size: int | None = 64
    max_model_len: int = 1024
    num_blocks: int | None = 160
    max_num_batched_tokens: int = 4096
    max_num_seqs: int = 64
    prefix_caching: bool = True
    pool_bytes: int = 256 << 20
    kv_role: str = "kv_both"
    lora: bool = False
    layerwise: bool = LAYERWISE
    extra: tuple[tuple[str, Any], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    # Where vLLM publishes KV events, if it is to.
    events_endpoint: str | None = None
    load_failure_policy: str = "recompute"
    start_timeout_s: float = START_TIMEOUT_S
    options: str = "{}"
    # Anything else may use the same model from a folder of its own.
    model_path: str | None = None
    # vLLM starts its processes as it does for its users on CPU: each imports everything again.
    spawned: bool = False

    @property
    def has_probe(self) -> bool:
        """Whether a probe watches."""
        return "probe" in (self.connector or "").split("+")

    def connector_config(self) -> dict[str, Any] | None:
        """The value of vLLM's ``kv_transfer_config``, or None without a connector."""
        if self.connector is None:
            return None
        configs = [self._config_of(name) for name in self.connector.split("+")]
        if len(configs) == 1:
            return configs[0] | {"kv_load_failure_policy": self.load_failure_policy}
        return {
            "kv_connector": "MultiConnector",
            "kv_role": self.kv_role,
            "kv_load_failure_policy": self.load_failure_policy,
            "kv_connector_extra_config": {"connectors": configs},
        }

    def _config_of(self, name: str) -> dict[str, Any]:
        settings: dict[str, Any] = {"lmcache.max_local_cpu_size": self.pool_bytes / GIB}
        # Which loads are made, and waited for, must not hang on how busy this machine is.
        settings["lmcache.max_sync_load_ms"] = 60_000.0
        settings["lmcache.refuse_slow_loads"] = False
        if self.chunk_size is not None:
            settings["lmcache.chunk_size"] = self.chunk_size
        if self.layerwise:
            settings["lmcache.use_layerwise"] = True
        config: dict[str, Any] = {"kv_role": self.kv_role}
        if name == "plain":
            config |= {"kv_connector": "LMCacheRsConnector"}
        else:
            module, _, kind = (name if ":" in name else "probe:ProbeConnector").partition(":")
            config |= {"kv_connector": kind, "kv_connector_module_path": module}
        return config | {"kv_connector_extra_config": settings | dict(self.extra)}

    def llm_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``vllm.LLM``, connector aside."""
        arguments: dict[str, Any] = {
            "model": self.model_path or str(models.tiny_model(self.model)),
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "enforce_eager": True,
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "kv_cache_memory_bytes": GIB,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "enable_prefix_caching": self.prefix_caching,
            "disable_log_stats": False,
            "seed": 0,
        }
        if self.events_endpoint is not None:
            events = {"enable_kv_cache_events": True, "endpoint": self.events_endpoint}
            arguments["kv_events_config"] = events
        if self.num_blocks is not None:
            arguments["num_gpu_blocks_override"] = self.num_blocks
        if self.has_probe:
            arguments["worker_extension_cls"] = "probe.ProbeWorker"
        if self.model == "tiny-mla":
            # vLLM 0.32's CPU kernel of interleaved rotary embeddings rotates wrong numbers, and
            # others in a batch than alone: a chunk's KV would not be a function of its tokens.
            arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
            # Where the processor has AMX, vLLM would take kernels that know no float32.
            arguments["attention_config"] = {"backend": "CPU_MLA"}
        if self.lora:
            arguments |= {"enable_lora": True, "max_lora_rank": models.LORA_RANK, "max_loras": 2}
        return arguments | json.loads(self.options)


@dataclass(frozen=True)
class Answer:
    """What one request got. ``logprobs`` has, per token, its likeliest ids."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    cached_tokens: int
    finish_reason: str = ""


@dataclass(frozen=True)
class Reply:
    """What one call got, with vLLM's own counters over the call."""

    answers: tuple[Answer, ...]
    local_tokens: int
    external_tokens: int
    external_queries: int
    preemptions: int
    drafted_tokens: int
    accepted_tokens: int
    seconds: float


@dataclass
class Report:
    """What the probe saw since the last report, and the connector's accounts."""

    probe: dict[str, int]
    details: list[str]
    memory: dict[str, int]
    counters: dict[str, int]
    layer_shape: list[int]
    layer_bytes: int
    pid: int
    scheduler: dict[str, int] = field(default_factory=dict)

    def byte_faults(self) -> dict[str, int]:
        """Counts of blocks that hold something else than what was stored."""
        kinds = (
            "wrong_blocks",
            "unknown_blocks",
            "stray_blocks",
            "unaligned_starts",
            "diverging_chunks",
            "early_layers",
            "unremoved_chunks",
        )
        return {kind: self.probe[kind] for kind in kinds if self.probe.get(kind)}

    def assert_bytes_right(self) -> None:
        """Raises AssertionError unless every restored block is the stored one."""
        assert not self.byte_faults(), f"{self.byte_faults()}: " + "\n".join(self.details)

    def assert_no_faults(self) -> None:
        """Raises AssertionError if the connector swallowed an error or failed a load."""
        assert not self.counters.get("faults"), self.counters
        assert not self.counters.get("failed_loads"), self.counters
        assert not self.scheduler.get("faults"), self.scheduler

    def after(self, earlier: Report) -> Report:
        """This report with an earlier one's findings added."""
        for name, count in earlier.probe.items():
            self.probe[name] = self.probe.get(name, 0) + count
        self.details = earlier.details + self.details
        return self

    def held(self) -> dict[str, int]:
        """What is held for requests, by name: leases, reserved bytes, lookups, trackers."""
        memory = {name: self.memory[name] for name in ("leases", "leased_bytes", "reserved_bytes")}
        names = ("tracked_requests", "pending_lookups", "pending_leases")
        requests = {name: self.scheduler.get(name, 0) for name in names}
        return {name: count for name, count in (memory | requests).items() if count}

    def assert_settled(self) -> None:
        """Raises AssertionError if a lease is left or bytes are unaccounted for."""
        memory = self.memory
        assert memory["leases"] == 0, memory
        assert memory["leased_bytes"] == 0, memory
        assert memory["reserved_bytes"] == 0, memory
        assert memory["free_bytes"] + memory["cached_bytes"] == memory["capacity_bytes"], memory


class Engine:
    """A running vLLM in a process of its own. ``close()`` or ``with`` ends it."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._folder = tempfile.TemporaryDirectory(prefix="kv-probe-")
        self._log = Path(self._folder.name) / "log"
        environment = {
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if spec.layout == "inproc" else "1",
            "PYTHONPATH": os.pathsep.join(
                [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            FOLDER_VARIABLE: self._folder.name,
            **dict(spec.env),
        }
        context = _context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, spec, environment, str(self._log)), daemon=False
        )
        self._process.start()
        theirs.close()
        _OPEN.append(self)
        try:
            kind, value = self._receive(spec.start_timeout_s)
        except EngineDied as error:
            self.close()
            raise EngineStartError(str(error)) from error
        if kind != "ready":
            text = f"{value}\n{self.log()}"
            self.close()
            raise EngineStartError(text)
        self._counters: dict[str, int] = dict.fromkeys(COUNTERS.values(), 0)
        self._is_scripted = False
        self._poison_seed = 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """False once the engine was closed, by a test or after an error."""
        return self in _OPEN

    @property
    def pid(self) -> int:
        """The process that holds the LLM object."""
        assert self._process.pid is not None
        return int(self._process.pid)

    def ask(
        self, prompts: Sequence[Prompt], max_tokens: int = 4, *, timeout: float = CALL_TIMEOUT_S
    ) -> Reply:
        """Generates greedily for all prompts in one call; ends are ignored."""
        if self._is_scripted:
            # What a script has asked is not this call's.
            self._counters, self._is_scripted = self._call("counters"), False
        start = time.monotonic()
        answers, counters = self._call("ask", list(prompts), max_tokens, timeout=timeout)
        moved = {name: value - self._counters[name] for name, value in counters.items()}
        self._counters = counters
        return Reply(tuple(answers), seconds=time.monotonic() - start, **moved)

    def start_twin(self) -> None:
        """Starts a second LLM of the same spec in the same process.

        Raises EngineStartError if vLLM refuses.
        """
        self._pipe.send(("twin", ()))
        kind, value = self._receive(START_TIMEOUT_S)
        if kind != "ok":
            raise EngineStartError(f"{value}\n{self.log()}")

    def ask_of(self, which: int, prompt: Prompt, max_tokens: int = 4) -> Answer:
        """The answer of one of twins, 0 or 1, whose vLLM cache is reset afterwards.

        vLLM's counters belong to a process; of twins only the answers tell hits.
        """
        answers, _ = self._call("ask", [prompt], max_tokens, which)
        assert self._call("reset", False, which)
        answer: Answer = answers[0]
        return answer

    def idle_step(self) -> None:
        """One more step: a request too short to be stored or found."""
        self.ask([Prompt((FIRST_TOKEN_ID,))], 1)

    def reset(self) -> None:
        """Empties vLLM's own prefix cache; raises AssertionError if it will not."""
        for _ in range(3):
            if self._call("reset", False):
                return
            self.idle_step()
        raise AssertionError("reset_prefix_cache() never returned True")

    def reset_connector(self) -> bool:
        """Empties vLLM's own prefix cache and the connector's; vLLM's verdict."""
        return bool(self._call("reset", True))

    def cool(self) -> None:
        """Resets vLLM's prefix cache and overwrites all its KV memory with noise."""
        self.reset()
        if self.spec.has_probe:
            self._poison_seed += 1
            written = self._call("rpc", "probe_poison", self._poison_seed)[0]
            assert written > 0

    def metrics(self) -> dict[str, float]:
        """The connector's Prometheus metrics, as `name` or `name{label}`, ranks left out."""
        return dict(self._call("metrics"))

    def plant(self, fault: str) -> None:
        """Spoils the next load; the faults are named in ``probe_names.FAULTS``."""
        self._call("rpc", "probe_fault", fault)

    def worker(self, method: str, *given: Any) -> Any:
        """What a method of ``ProbeWorker`` returns."""
        return self._call("rpc", method, *given)[0]

    def workers(self, method: str, *given: Any) -> list[Any]:
        """What a method of ``ProbeWorker`` returns on each rank."""
        return list(self._call("rpc", method, *given))

    def reports(self, timeout: float = 10.0) -> list[Report]:
        """A report of each rank, once none of them holds anything for a request."""
        self._call("idle")
        until = time.monotonic() + timeout
        folder = Path(self._folder.name)
        before: list[Report] | None = None
        while True:
            reports = [read_report(seen, folder) for seen in self.workers("probe_report")]
            for report, earlier in zip(reports, before or [], strict=False):
                report.after(earlier)
            held = [report.held() for report in reports]
            if not any(held):
                break
            assert time.monotonic() < until, f"still held after {timeout:.0f} s: {held}"
            before = reports
            time.sleep(0.05)
        for report in reports:
            report.assert_settled()
        return reports

    def script(self, name: str, *given: Any, timeout: float = CALL_TIMEOUT_S) -> Any:
        """Runs ``module:function`` of this folder in the process that holds the LLM object.

        The function gets that object, then what is given here.
        """
        module, _, function = name.partition(":")
        self._is_scripted = True
        return self._call("script", module, function, *given, timeout=timeout)

    def slow_copies(self, bytes_per_second: int) -> None:
        """From now on saves that go on behind their step take so long."""
        self._call("rpc", "probe_slow_copies", bytes_per_second)

    def report(self) -> Report:
        """The probe's findings since the last call, of worker and scheduler."""
        return read_report(self.worker("probe_report"), Path(self._folder.name))

    def settled_report(self) -> Report:
        """A report taken when no lease should be left: after one idle step if need be."""
        report = self.report()
        if report.memory.get("leases") or report.memory.get("reserved_bytes"):
            self.idle_step()
            report = self.report().after(report)
        return report

    def idle_report(self, timeout: float = 10.0) -> Report:
        """A report once nothing is held any more, without any further request.

        Raises AssertionError if that does not come to pass in ``timeout`` seconds.
        """
        self._call("idle")
        return wait_until_idle(self.report, timeout)

    def log(self) -> str:
        """All that the engine's processes have printed."""
        with contextlib.suppress(FileNotFoundError):
            return self._log.read_text(encoding="utf-8", errors="replace")
        return ""

    def close(self) -> None:
        """Ends the engine's processes. Harmless when repeated."""
        if self in _OPEN:
            _OPEN.remove(self)
        with contextlib.suppress(OSError):
            self._pipe.send(("close", ()))
        self._pipe.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    def _call(self, operation: str, *arguments: Any, timeout: float = CALL_TIMEOUT_S) -> Any:
        try:
            self._pipe.send((operation, arguments))
        except OSError as error:
            raise EngineDied(f"{operation}: the engine is gone\n{self._log_end()}") from error
        kind, value = self._receive(timeout)
        if kind == "error":
            # vLLM does not go on after an exception: requests stay unfinished for ever.
            text = f"{operation} raised\n{value}\n{self._log_end()}"
            self.close()
            raise EngineDied(text)
        return value

    def _receive(self, timeout: float) -> tuple[str, Any]:
        try:
            if not self._pipe.poll(timeout):
                self._process.kill()
                text = f"no answer in {timeout:.0f} s\n{self._log_end()}"
                self.close()
                raise EngineDied(text)
            kind, value = self._pipe.recv()
        except EOFError as error:
            self._process.join(5)
            text = f"the process ended with {self._process.exitcode}\n{self._log_end()}"
            self.close()
            raise EngineDied(text) from error
        return str(kind), value

    def _log_end(self) -> str:
        return self.log()[-6000:]


def read_report(seen: dict[str, Any], folder: Path) -> Report:
    """A report from what the worker's probe says and the scheduler's has written."""
    report = Report(**seen)
    path = folder / SCHEDULER_FILE
    if path.exists():
        report.scheduler = json.loads(path.read_text(encoding="utf-8"))
    return report


def wait_until_idle(take_report: Callable[[], Report], timeout: float = 10.0) -> Report:
    """A report in which nothing is held; AssertionError if none comes in ``timeout`` seconds."""
    until = time.monotonic() + timeout
    report = take_report()
    while held := report.held():
        if time.monotonic() >= until:
            raise AssertionError(f"still held {timeout:.0f} s after the last request: {held}")
        time.sleep(0.05)
        report = take_report().after(report)
    report.assert_settled()
    return report


_OPEN: list[Engine] = []


@atexit.register
def _close_all() -> None:
    for engine in list(_OPEN):
        engine.close()


def _context() -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"])
    return context


assert {f.name for f in fields(Reply)} >= set(COUNTERS.values())
