"""A real vLLM answers questions about a long text, first by itself, then from lmcache_rs.

    make demo            # or: python examples/demo.py, in an environment with vLLM and lmcache_rs

Five acts, each watched by vLLM's own counters:

1. SmolLM2-135M comes from PyPI and is converted once (smollm2.py).
2. The control: vLLM without lmcache_rs answers every question about the handbook. Before each one
   its prefix cache is emptied, so every prompt is computed in full: the cold time to first token.
3. vLLM with lmcache_rs answers the same questions twice. The first round fills lmcache_rs. Before
   every question vLLM's prefix cache is emptied again, so what the second round does not compute
   it can only have from lmcache_rs: the warm time to first token.
4. That engine is ended and another one started over the same folder on disk: it is still warm.
   The handbook comes from disk with the first question, and is in host memory for the others.
5. vLLM's OpenAI server, started with the one line an operator needs, answers over HTTP.

The exit status is 0 only if, in the second round and after the restart, every question had at least
90 % of its full chunks from lmcache_rs, the words of the control, and its first token in half the
cold time or less.

Everything runs in float32. A hit computes a shorter tail than a cold run does, so the order of
sums differs. In float32 that moves a log-probability by 1e-5, and the words chosen here lead
their runners-up by 0.3, so equal words are no luck. In bfloat16 the same effect reaches whole
units on this model, and two runs of vLLM alone may differ in their words.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from smollm2 import cache_root, ensure_model
from stage import DemoError, Server, Stage, children, end_processes, free_port

if TYPE_CHECKING:
    from vllm import LLM

HANDBOOK = Path(__file__).with_name("harbour_handbook.txt")
INSTRUCTION = "Answer in one short sentence, with the handbook's words."
QUESTIONS = (
    "How tall is the lighthouse?",
    "What is the name of the ferry?",
    "Who is the keeper of the light?",
    "What is the lifeboat called?",
    "How long does the crossing take?",
)

# The one line. The demo, the README and an operator's shell all use it as it stands.
KV_TRANSFER_CONFIG = (
    '{"kv_connector":"LMCacheRsConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute"}'
)
CHUNK_TOKENS = 256
MAX_ANSWER_TOKENS = 24
MAX_MODEL_LEN = 4096
DTYPE: Final = "float32"

LEAST_CHUNKS_FROM_LMCACHE = 0.9
MOST_WARM_SHARE_OF_COLD = 0.5

MODEL_LIMIT_SECONDS = 420
START_LIMIT_SECONDS = 240
ANSWER_LIMIT_SECONDS = 120
RESET_SECONDS = 10.0
STOP_LIMIT_SECONDS = 60


@dataclass(frozen=True)
class Answer:
    """One reply of vLLM, and where its prompt's tokens came from by vLLM's own counters."""

    text: str
    prompt_tokens: int
    tokens_from_vllm: int
    tokens_from_lmcache: int
    ttft_seconds: float


def main() -> int:
    options = parse_arguments()
    for note in prepare_environment():
        print(note)
    stage = Stage(cache_root() / "demo.log")
    try:
        return play(stage, with_lmcache=not options.without_lmcache)
    except DemoError as error:
        stage.say(f"\nFAILED: {error}")
        return 1
    except SystemExit as stop:
        stage.say("\nStopped; ending vLLM's processes")
        return int(stop.code or 0)
    except Exception as error:
        traceback.print_exc()
        stage.say(f"\nFAILED: {error}\n\nThe last lines of the log, {stage.log_file}:")
        for line in stage.log_tail():
            stage.detail(line)
        return 1
    finally:
        end_processes(children())
        shutil.rmtree(disk_folder(), ignore_errors=True)
        stage.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A real vLLM answers from lmcache_rs.")
    parser.add_argument(
        "--without-lmcache",
        action="store_true",
        help="leave the connector out everywhere: shows that the checks at the end then fail",
    )
    return parser.parse_args()


def prepare_environment() -> list[str]:
    """Set what vLLM's processes inherit; returns one line for each thing a user may wonder about.

    Nothing phones home, and the demo runs on lmcache_rs's defaults but for a smaller pool and a
    folder on disk.
    """
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        # vLLM sets one more core aside when a KV connector is configured. The control and the
        # engine under test have to compute with the same cores.
        VLLM_CPU_NUM_OF_RESERVED_CPU="0",
        # Lets the last act empty the server's own prefix cache over HTTP.
        VLLM_SERVER_DEV_MODE="1",
    )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    notes = []
    for name in sorted(os.environ):
        if name.startswith("LMCACHE_") and not name.startswith("LMCACHE_RS_"):
            del os.environ[name]
            notes.append(f"note: {name} is left out, the demo runs on the defaults")
    os.environ["LMCACHE_MAX_LOCAL_CPU_SIZE"] = "1.0"
    os.environ["LMCACHE_LOCAL_DISK"] = str(disk_folder())
    os.environ["LMCACHE_MAX_LOCAL_DISK_SIZE"] = "1.0"
    shutil.rmtree(disk_folder(), ignore_errors=True)
    return notes


def disk_folder() -> Path:
    """What lmcache_rs keeps on disk: empty when the demo begins, and gone when it ends."""
    return cache_root() / "demo-disk"


def play(stage: Stage, with_lmcache: bool) -> int:
    if importlib.util.find_spec("lmcache_rs") is None and with_lmcache:
        raise DemoError("lmcache_rs is not installed in this environment: run `make setup` first")
    stage.say(f"Everything vLLM prints goes to {stage.log_file}")

    stage.chapter("The model: SmolLM2-135M-Instruct")
    with stage.step("getting the model folder ready", MODEL_LIMIT_SECONDS):
        try:
            model = ensure_model(report=stage.detail)
        except RuntimeError as error:
            raise DemoError(str(error)) from error
    with stage.step("importing vLLM", START_LIMIT_SECONDS):
        import vllm
    stage.detail(f"vLLM {vllm.__version__}, {len(os.sched_getaffinity(0))} cores, {DTYPE}")

    stage.chapter("The control: vLLM alone, its prefix cache emptied before each question")
    with engine(stage, "vLLM", model, None) as llm:
        control = ask_all(stage, llm)

    stage.chapter("vLLM with lmcache_rs, its prefix cache emptied before each question as well")
    connector = KV_TRANSFER_CONFIG if with_lmcache else None
    with engine(stage, "vLLM with lmcache_rs", model, connector) as llm:
        stage.say("  First round: lmcache_rs is empty; the handbook is stored as it is computed")
        ask_all(stage, llm)
        stage.say("  Second round: the same questions")
        warm = ask_all(stage, llm)

    stage.chapter("vLLM with lmcache_rs, started anew over the same folder on disk")
    with engine(stage, "vLLM with lmcache_rs", model, connector) as llm:
        restarted = ask_all(stage, llm)

    stage.chapter("vLLM's OpenAI server with lmcache_rs")
    server_failures = serve(stage, model, connector, expected=control[0].text)

    stage.chapter("Result")
    print_table(stage, control, warm, restarted)
    failures = shortcomings(control, warm) + shortcomings(control, restarted) + server_failures
    if failures:
        stage.say()
        for failure in failures:
            stage.say(f"  FAILED: {failure}")
        return 1
    stage.say("\n  To use lmcache_rs with a vLLM server of your own, add to its command:\n")
    stage.say(f"  --kv-transfer-config '{KV_TRANSFER_CONFIG}'\n")
    return 0


@contextmanager
def engine(stage: Stage, name: str, model: Path, connector: str | None) -> Iterator[LLM]:
    """A vLLM in its default process layout: this process, the engine's, and the worker's."""
    from vllm import LLM, SamplingParams

    log_start = stage.log_position()
    try:
        with stage.step(f"starting {name} (engine and worker processes)", START_LIMIT_SECONDS):
            llm = LLM(
                model=str(model),
                dtype=DTYPE,
                max_model_len=MAX_MODEL_LEN,
                enforce_eager=True,  # compiling takes longer than it saves here
                disable_log_stats=False,  # or vLLM counts nothing
                kv_transfer_config=json.loads(connector) if connector else None,
            )
            llm.generate("Hello", SamplingParams(max_tokens=1), use_tqdm=False)
        for line in stage.log_since(log_start):
            _, mark, words = line.partition("] lmcache_rs: ")
            if mark and not words.startswith("request "):
                stage.detail(f"lmcache_rs: {words}")
        processes = children()
        try:
            yield llm
        finally:
            with stage.step(f"stopping {name}", STOP_LIMIT_SECONDS):
                llm.llm_engine.engine_core.shutdown()
                end_processes(processes)
    finally:
        end_processes(children())


def until_true(reset: Callable[[], bool]) -> bool:
    """vLLM refuses while blocks of an ended request are still being saved; soon they are."""
    until = time.monotonic() + RESET_SECONDS
    while not (is_done := reset()) and time.monotonic() < until:
        time.sleep(0.05)
    return is_done


def ask_all(stage: Stage, llm: LLM) -> list[Answer]:
    answers = []
    for number, question in enumerate(QUESTIONS, start=1):
        with stage.step(f"{number}/{len(QUESTIONS)} {question}", ANSWER_LIMIT_SECONDS):
            if not until_true(llm.reset_prefix_cache):
                raise DemoError(
                    "reset_prefix_cache() returned False: vLLM still holds blocks of an earlier "
                    "request, so its own cache cannot be told from lmcache_rs"
                )
            answer = ask(llm, question)
        stage.detail(f"“{answer.text}”")
        stage.detail(
            f"first token after {answer.ttft_seconds:.2f} s; {answer.prompt_tokens} prompt tokens, "
            f"{answer.tokens_from_vllm} from vLLM, {answer.tokens_from_lmcache} from lmcache_rs"
        )
        answers.append(answer)
    return answers


def messages(question: str) -> list[dict[str, str]]:
    handbook = HANDBOOK.read_text(encoding="utf-8")
    return [{"role": "user", "content": f"{handbook}\n\n{INSTRUCTION} {question}"}]


def ask(llm: LLM, question: str) -> Answer:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=MAX_ANSWER_TOKENS)
    vllm_before, lmcache_before = hit_tokens(llm)
    conversation: Any = messages(question)
    output = llm.chat(conversation, sampling, use_tqdm=False)[0]
    vllm_after, lmcache_after = hit_tokens(llm)
    if output.metrics is None or output.prompt_token_ids is None:
        raise DemoError("vLLM returned an answer without its timings; this demo needs them")
    return Answer(
        text=output.outputs[0].text.strip(),
        prompt_tokens=len(output.prompt_token_ids),
        tokens_from_vllm=vllm_after - vllm_before,
        tokens_from_lmcache=lmcache_after - lmcache_before,
        # vLLM's own measure, in this process: from the request's arrival to its first token.
        ttft_seconds=output.metrics.first_token_latency,
    )


def hit_tokens(llm: LLM) -> tuple[int, int]:
    """Prompt tokens vLLM has found so far in (its own prefix cache, its KV connector)."""
    from vllm.v1.metrics.reader import Counter

    values = {m.name: m.value for m in llm.get_metrics() if isinstance(m, Counter)}
    return values["vllm:prefix_cache_hits"], values["vllm:external_prefix_cache_hits"]


def serve(stage: Stage, model: Path, connector: str | None, expected: str) -> list[str]:
    """Run the OpenAI server, ask it the first question twice; what went wrong, one line each."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "smollm2"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", DTYPE, "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"]
    if connector:
        command += ["--kv-transfer-config", connector]
    request = {
        "model": "smollm2",
        "messages": messages(QUESTIONS[0]),
        "temperature": 0,
        "max_tokens": MAX_ANSWER_TOKENS,
    }
    request_file = cache_root() / "demo-request.json"
    request_file.write_text(json.dumps(request, indent=1) + "\n", encoding="utf-8")
    stage.say(f"  $ python {shlex.join(command[1:])}")
    failures: list[str] = []
    server = Server(command, port, stage)
    try:
        with stage.step("starting the server", START_LIMIT_SECONDS):
            server.wait_until_healthy()
        stage.say(f"  $ curl {server.url}/v1/chat/completions \\")
        stage.say(f"      -H 'Content-Type: application/json' -d @{request_file}")
        hits = "vllm:external_prefix_cache_hits_total"
        for label in ("asking", "asking again, vLLM's own prefix cache emptied"):
            hits_before = server.counter(hits)
            with stage.step(label, ANSWER_LIMIT_SECONDS):
                if not until_true(lambda: server.post("/reset_prefix_cache")["success"]):
                    raise DemoError("POST /reset_prefix_cache said that blocks are still held")
                begun = time.monotonic()
                reply = server.post("/v1/chat/completions", request)
                seconds = time.monotonic() - begun
            loaded = server.counter(hits) - hits_before
            text = reply["choices"][0]["message"]["content"].strip()
            stage.detail(f"“{text}”")
            stage.detail(f"whole answer after {seconds:.2f} s, {loaded} tokens from lmcache_rs")
            if text != expected:
                failures.append(f"the server said “{text}”; the control said “{expected}”")
    finally:
        with stage.step("stopping the server", STOP_LIMIT_SECONDS):
            server.stop()
    least = LEAST_CHUNKS_FROM_LMCACHE * full_chunk_tokens(reply["usage"]["prompt_tokens"])
    if loaded < least:
        failures.append(
            f"the server took {loaded} tokens from lmcache_rs; expected {least:.0f} or more"
        )
    return failures


def full_chunk_tokens(prompt_tokens: int) -> int:
    return prompt_tokens // CHUNK_TOKENS * CHUNK_TOKENS


def print_table(
    stage: Stage, control: list[Answer], warm: list[Answer], restarted: list[Answer]
) -> None:
    """Tokens are those of the round after the restart; cold is the control's time."""
    stage.say(
        "  Time to first token: cold = vLLM alone, warm = with lmcache_rs, second round,\n"
        "  restart = the engine started anew, the handbook from disk with the first question.\n"
    )
    heads = ("prompt", "from", "from", "TTFT", "TTFT", "TTFT", "speed-", "answer =")
    units = ("tokens", "vLLM", "lmcache_rs", "cold", "warm", "restart", "up", "control")
    for row in (heads, units):
        stage.say(f"  {'':34}" + "".join(f"{cell:>11}" for cell in row))
    for question, cold, hot, new in zip(QUESTIONS, control, warm, restarted, strict=True):
        cells = (
            f"{new.prompt_tokens}",
            f"{new.tokens_from_vllm}",
            f"{new.tokens_from_lmcache}",
            f"{cold.ttft_seconds:.2f} s",
            f"{hot.ttft_seconds:.2f} s",
            f"{new.ttft_seconds:.2f} s",
            f"{cold.ttft_seconds / new.ttft_seconds:.1f} x",
            "yes" if hot.text == new.text == cold.text else "NO",
        )
        stage.say(f"  {question:34}" + "".join(f"{cell:>11}" for cell in cells))


def shortcomings(control: list[Answer], warm: list[Answer]) -> list[str]:
    """Every promise of this demo that the warm round did not keep, one line each."""
    found = []
    for question, cold, hot in zip(QUESTIONS, control, warm, strict=True):
        full = full_chunk_tokens(hot.prompt_tokens)
        if hot.tokens_from_lmcache < LEAST_CHUNKS_FROM_LMCACHE * full:
            found.append(
                f"{question} {hot.tokens_from_lmcache} of the {full} tokens in full chunks came "
                f"from lmcache_rs; expected {LEAST_CHUNKS_FROM_LMCACHE:.0%} or more"
            )
        if hot.text != cold.text:
            found.append(f"{question} answered “{hot.text}”; the control said “{cold.text}”")
        if hot.ttft_seconds > MOST_WARM_SHARE_OF_COLD * cold.ttft_seconds:
            found.append(
                f"{question} first token after {hot.ttft_seconds:.2f} s; expected at most half of "
                f"the control's {cold.ttft_seconds:.2f} s"
            )
    return found


if __name__ == "__main__":
    sys.exit(main())
