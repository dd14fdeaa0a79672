"""What is right: vLLM's answers without a connector, and the comparison with them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import models
from harness import (
    CALL_TIMEOUT_S,
    FIRST_TOKEN_ID,
    Answer,
    Engine,
    EngineSpec,
    Prompt,
    Reply,
    Report,
)

TOLERANCE = 1e-3


def differences(answers: Sequence[Answer], wanted: Sequence[Answer]) -> list[str]:
    """How the answers differ from the wanted ones; empty when they are the same.

    The same: equal tokens, and every logprob both list within ``TOLERANCE``. A NaN is
    never the same.
    """
    if len(answers) != len(wanted):
        return [f"{len(answers)} answers, {len(wanted)} wanted"]
    found = []
    for number, (got, want) in enumerate(zip(answers, wanted, strict=True)):
        if got.tokens != want.tokens:
            found.append(f"answer {number}: tokens {got.tokens}, wanted {want.tokens}")
            continue
        worst = 0.0
        for here, there in zip(got.logprobs, want.logprobs, strict=True):
            shared = [abs(here[token] - there[token]) for token in here.keys() & there.keys()]
            if not shared or any(math.isnan(delta) for delta in shared):
                worst = math.inf
            else:
                worst = max(worst, *shared)
        if worst > TOLERANCE:
            found.append(f"answer {number}: a logprob differs by {worst:.3g}")
    return found


class Baseline:
    """vLLM without a connector and without any prefix cache: what is right.

    Answers are kept, so a prompt is computed once in a session.
    """

    def __init__(self) -> None:
        self._engines: dict[tuple[str, bool], Engine] = {}
        self._known: dict[tuple[Any, ...], Answer] = {}

    def ask(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int,
        *,
        model: str = "tiny-llama",
        model_path: str | None = None,
        lora: bool = False,
        dtype: str = "float32",
    ) -> list[Answer]:
        """The right answers; salts and settings change nothing and are left out."""
        name = model_path or model
        plain = [replace(prompt, salt=None, configs=()) for prompt in prompts]
        keys = [(name, lora, dtype, prompt, max_tokens) for prompt in plain]
        missing = {
            key: prompt for key, prompt in zip(keys, plain, strict=True) if key not in self._known
        }
        if missing:
            engine = self._engines.get((name, lora))
            if engine is None:
                spec = EngineSpec(
                    connector=None,
                    model=model,
                    model_path=model_path,
                    lora=lora,
                    dtype=dtype,
                    prefix_caching=False,
                    max_model_len=4096,
                    num_blocks=1024 if model_path is None else 256,
                )
                engine = self._engines[name, lora] = Engine(spec)
            # One adapter at a time: on the CPU vLLM gives a request without an adapter
            # the one of its neighbour in the batch.
            for adapter in {(p.lora, p.lora_path, p.lora_id) for p in missing.values()}:
                group = {
                    key: p
                    for key, p in missing.items()
                    if (p.lora, p.lora_path, p.lora_id) == adapter
                }
                reply = engine.ask(list(group.values()), max_tokens)
                self._known.update(zip(group, reply.answers, strict=True))
        return [self._known[key] for key in keys]

    def close(self) -> None:
        """Ends the engines; the answers stay known."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()


class Prompts:
    """Random prompts that depend on a name alone: each test has its own."""

    def __init__(self, name: str, vocab_size: int = models.VOCAB_SIZE) -> None:
        self._random = random.Random(name)
        self._vocab_size = vocab_size

    def fresh(self, num_tokens: int) -> Prompt:
        """A prompt that shares no chunk with any other."""
        return Prompt(self._tokens(num_tokens))

    def fork(self, prompt: Prompt, at: int, num_tokens: int) -> Prompt:
        """A prompt equal to another before position ``at`` and different there."""
        tail = self._tokens(num_tokens - at)
        if at < len(prompt) and tail and tail[0] == prompt.tokens[at]:
            other = FIRST_TOKEN_ID + (tail[0] - FIRST_TOKEN_ID + 1) % 100
            tail = (other, *tail[1:])
        return Prompt(prompt.tokens[:at] + tail)

    def shuffle(self, items: list[Any]) -> None:
        """Shuffles in place, the same way in every run."""
        self._random.shuffle(items)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(FIRST_TOKEN_ID, self._vocab_size) for _ in range(count))


def check(
    engine: Engine,
    baseline: Baseline,
    prompts: Sequence[Prompt],
    expected: Iterable[tuple[int, int]] | None = None,
    *,
    max_tokens: int = 4,
    timeout: float = CALL_TIMEOUT_S,
    may_fail: bool = False,
) -> tuple[Reply, Report]:
    """Asks, and holds everything the engine said and did against what is right.

    Tokens and logprobs equal the baseline's; restored blocks equal the stored ones;
    no lease is left and every byte is free or cached. ``expected`` has, per prompt, the
    tokens from vLLM's own cache and those from the connector; with it the counters of
    vLLM, of each request and of the probe must agree. With ``may_fail`` loads may fail.
    Whatever is held must be given back without any further request.
    """
    spec = engine.spec
    wanted = baseline.ask(
        prompts,
        max_tokens,
        model=spec.model,
        model_path=spec.model_path,
        lora=spec.lora,
        dtype=spec.dtype,
    )
    reply = engine.ask(prompts, max_tokens, timeout=timeout)
    report = engine.idle_report()
    # Hits first: a wrong one explains wrong tokens, not the other way round.
    if expected is not None:
        pairs = list(expected)
        got = [answer.cached_tokens for answer in reply.answers]
        assert got == [local + external for local, external in pairs], (got, pairs)
        assert reply.local_tokens == sum(local for local, _ in pairs), (reply, pairs)
        assert reply.external_tokens == sum(external for _, external in pairs), (reply, pairs)
        blocks = sum(
            -(-(local + external) // spec.block_size) - local // spec.block_size
            for local, external in pairs
            if external
        )
        assert report.probe.get("loaded_blocks", 0) == blocks, (report, pairs)
    if not may_fail:
        report.assert_no_faults()
    report.assert_bytes_right()
    found = differences(reply.answers, wanted)
    assert not found, "\n".join(found)
    return reply, report


def chunk_bytes(spec: EngineSpec) -> int:
    """The bytes of one chunk of a tiny dense model in the engine's own dtype."""
    config = json.loads((models.CONFIGS / spec.model / "config.json").read_text())
    per_token = 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    assert spec.chunk_size is not None
    assert spec.dtype == "float32"
    return int(per_token * config["num_hidden_layers"] * spec.chunk_size)
