"""What tests do inside the process that holds the engine, between its steps or beside them.

Run by ``Engine.script``. The first half wants an engine in this process, whose steps are counted
one by one; the second half wants the asynchronous engine.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from serving import AsyncServer, answer_of, run_idle, sampling_for

if TYPE_CHECKING:
    from harness import Answer, Prompt

_ids = itertools.count()


class Steps:
    """Requests of an engine in this process, one step at a time."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.answers: dict[str, Answer] = {}

    def add(self, prompt: Prompt, max_tokens: int) -> str:
        """Queues a request; its id is vLLM's outer one."""
        req_id = f"scripted-{next(_ids)}"
        inputs = {"prompt_token_ids": list(prompt.tokens)}
        self.engine.add_request(req_id, inputs, sampling_for(prompt, max_tokens))
        return req_id

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self.answers[output.request_id] = answer_of(output)

    def to_the_end(self) -> None:
        for _ in range(2000):
            if not self.engine.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("2000 steps and still not done")

    def inner(self, req_id: str) -> Any:
        """The scheduler's own request."""
        found = [r for name, r in self.scheduler.requests.items() if name.startswith(req_id)]
        assert len(found) == 1, (req_id, list(self.scheduler.requests))
        return found[0]

    def step_to_failed_load(self, req_id: str) -> None:
        """Steps until a load of the request has failed and nothing was recomputed yet."""
        until = time.monotonic() + 20
        while time.monotonic() < until:
            self.step()
            request = self.inner(req_id)
            if request.request_id in self.scheduler.failed_recving_kv_req_ids:
                return
            is_taken_back = request.num_computed_tokens < request.num_tokens
            if request.status.name == "RUNNING" and is_taken_back:
                assert not request.num_output_tokens
                return
        raise AssertionError("no load of the request has failed in 20 s")

    def preempt(self, req_id: str) -> None:
        """As the scheduler does it when blocks run out."""
        request = self.inner(req_id)
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic())


def after_failed_load(
    llm: Any, prompts: list[Prompt], event: str, max_tokens: int
) -> list[Answer | None]:
    """Asks for all prompts in one step, in which the first one's load fails.

    Then, before anything is recomputed: nothing, an ``abort`` or a preemption (``preempt``) of the
    first. Returns the answers of all, None for one that was aborted, and then the first prompt's
    once more, asked with vLLM's own cache as it is.
    """
    steps = Steps(llm)
    ids = [steps.add(prompt, max_tokens) for prompt in prompts]
    steps.step_to_failed_load(ids[0])
    if event == "abort":
        steps.engine.abort_request([ids[0]])
    elif event == "preempt":
        steps.preempt(ids[0])
    steps.to_the_end()
    again = steps.add(prompts[0], max_tokens)
    steps.to_the_end()
    run_idle(llm)
    return [steps.answers.get(req_id) for req_id in (*ids, again)]


def ask_in_steps(llm: Any, prompt: Prompt, max_tokens: int, max_steps: int) -> tuple[int, Any]:
    """Asks one prompt in at most so many steps; how many it took, and its answer or None."""
    steps = Steps(llm)
    req_id = steps.add(prompt, max_tokens)
    for number in range(1, max_steps + 1):
        steps.step()
        if req_id in steps.answers:
            run_idle(llm)
            return number, steps.answers[req_id]
    steps.engine.abort_request([req_id])
    run_idle(llm)
    return max_steps, None


def preempt_after(
    llm: Any, prompt: Prompt, max_tokens: int, num_generated: int
) -> tuple[Answer, int]:
    """Preempts a request once it has generated so many tokens, and empties vLLM's own cache.

    Returns its answer, and the external tokens that it went on with.
    """
    steps = Steps(llm)
    req_id = steps.add(prompt, max_tokens)
    while True:
        steps.step()
        if steps.inner(req_id).num_output_tokens >= num_generated:
            break
    steps.preempt(req_id)
    assert steps.scheduler.reset_prefix_cache()
    connector = steps.scheduler.connector
    before = connector.counters()["promised_tokens"]
    steps.to_the_end()
    run_idle(llm)
    return steps.answers[req_id], connector.counters()["promised_tokens"] - before


def guess_drafts(llm: Any, known: list[tuple[int, ...]], seed: str) -> None:
    """Makes vLLM's n-gram drafter guess from these texts, now and then wrongly.

    A random model repeats nothing, so its own drafts would all be refused.
    """
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    rng = random.Random(seed)

    def batch_propose(
        self: Any, num_requests: int, valid: list[int], lengths: Any, tokens: Any, k: int
    ) -> list[list[int]]:
        return [
            draft(tuple(tokens[n, : lengths[n]].tolist()), k) if n in valid else []
            for n in range(num_requests)
        ]

    def draft(text: tuple[int, ...], k: int) -> list[int]:
        for whole in known:
            if whole[: len(text)] == text:
                ahead = list(whole[len(text) : len(text) + k])
                if ahead and rng.random() < 0.5:
                    ahead[rng.randrange(len(ahead))] = 3
                return ahead
        return []

    NgramProposer.batch_propose = batch_propose  # type: ignore[method-assign]


# The asynchronous engine.

Pieces = tuple[dict[str, int], list[tuple[int, "Answer"]]]


def abort_at_random(
    server: AsyncServer, prompts: list[Prompt], count: int, at_once: int, seed: str
) -> Pieces:
    """Asks ``count`` times, ``at_once`` beside each other, and aborts at random moments.

    Returns how many ended which way, and the answers of those that were left alone.
    """
    rng = random.Random(seed)
    ended: Counter[str] = Counter()
    answers: list[tuple[int, Answer]] = []
    # Seconds that a request takes: moments are drawn from one and a half of it.
    took = [0.05]

    async def one() -> None:
        number = rng.randrange(len(prompts))
        inputs = {"prompt_token_ids": list(prompts[number].tokens)}
        sampling = sampling_for(prompts[number], 12)
        luck = rng.random()
        began = time.monotonic()
        if luck < 0.1:
            answers.append((number, answer_of(await server.stream(inputs, sampling))))
            took.append(time.monotonic() - began)
            ended["left alone"] += 1
        elif luck < 0.3:
            stop_at = rng.randrange(1, 12)
            outputs = server.engine.generate(inputs, sampling, f"abort-{next(_ids)}")
            async for output in outputs:
                if len(output.outputs[0].token_ids) >= stop_at:
                    break
            await outputs.aclose()
            ended["after some tokens"] += 1
        else:
            task = asyncio.ensure_future(server.stream(inputs, sampling))
            typical = sorted(took[-9:])[len(took[-9:]) // 2]
            await asyncio.sleep(rng.choice([0.0, rng.uniform(0, 1.5 * typical)]))
            ended["too late" if task.done() else "at some moment"] += 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def all_of_them() -> None:
        left = iter(range(count))

        async def one_after_another() -> None:
            for _ in left:
                await one()

        await asyncio.gather(*(one_after_another() for _ in range(at_once)))

    server.run(all_of_them())
    return dict(ended), answers


def ask_repeatedly(
    server: AsyncServer,
    prompts: list[Prompt],
    rounds: int,
    at_once: int,
    max_tokens: int,
    reset_each: int | None = None,
) -> list[tuple[int, Answer]]:
    """Asks all prompts ``rounds`` times, ``at_once`` beside each other, in random order.

    With ``reset_each`` the connector is reset after each so many answers, while others are on
    their way. Returns each answer with the number of its prompt.
    """
    order = [number for _ in range(rounds) for number in range(len(prompts))]
    random.Random(f"order {rounds}").shuffle(order)
    answers: list[tuple[int, Answer]] = []

    async def all_of_them() -> None:
        left = iter(order)

        async def one_after_another() -> None:
            for number in left:
                inputs = {"prompt_token_ids": list(prompts[number].tokens)}
                sampling = sampling_for(prompts[number], max_tokens)
                answers.append((number, answer_of(await server.stream(inputs, sampling))))
                if reset_each is not None and len(answers) % reset_each == 0:
                    await server.engine.reset_prefix_cache(reset_connector=True)

        await asyncio.gather(*(one_after_another() for _ in range(at_once)))

    server.run(all_of_them())
    return answers


def shut_down_in_traffic(server: AsyncServer, prompts: list[Prompt]) -> int:
    """Ends the engine while all prompts are being answered; how many were under way."""

    async def begin() -> list[asyncio.Task[Any]]:
        tasks = []
        for prompt in prompts:
            inputs = {"prompt_token_ids": list(prompt.tokens)}
            tasks.append(asyncio.ensure_future(server.stream(inputs, sampling_for(prompt, 400))))
        await asyncio.sleep(0.7)
        return tasks

    tasks = server.run(begin())
    under_way = sum(not task.done() for task in tasks)
    server.engine.shutdown(timeout=20)

    async def end() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    server.run(end())
    return under_way
