"""vLLM's OpenAI server as a process, with the probe inside."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import models
from harness import ENVIRONMENT, HERE, EngineSpec, Prompt, Report, read_report, wait_until_idle
from probe_names import FOLDER_VARIABLE

START_TIMEOUT_S = 300.0
Stream = tuple[int, tuple[int, ...] | None]


class Server:
    """A running server; ``with`` ends it. Raises RuntimeError with its log if it does not start."""

    def __init__(self, spec: EngineSpec, more: dict[str, str] | None = None) -> None:
        self.spec = spec
        self._folder = tempfile.TemporaryDirectory(prefix="kv-serve-")
        self.sockets = Path(self._folder.name) / "run"
        self.sockets.mkdir(mode=0o700)
        self._log = Path(self._folder.name) / "log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        model = models.tiny_model(spec.model)
        arguments = {
            "--host": "127.0.0.1",
            "--port": str(self._port),
            "--model": str(model),
            "--served-model-name": spec.model,
            "--tokenizer": str(models.tokenizer()),
            "--dtype": spec.dtype,
            "--block-size": str(spec.block_size),
            "--max-model-len": str(spec.max_model_len),
            "--kv-cache-memory-bytes": str(1 << 30),
            "--num-gpu-blocks-override": str(spec.num_blocks),
            "--max-num-batched-tokens": str(spec.max_num_batched_tokens),
            "--max-num-seqs": str(spec.max_num_seqs),
            "--seed": "0",
            "--kv-transfer-config": json.dumps(spec.connector_config()),
            "--worker-extension-cls": "probe.ProbeWorker",
            **(more or {}),
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        command += [part for pair in arguments.items() for part in pair]
        environment = {
            **os.environ,
            **ENVIRONMENT,
            # Opens /collective_rpc, by which the probe is asked.
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": str(HERE),
            "XDG_RUNTIME_DIR": str(self.sockets),
            FOLDER_VARIABLE: self._folder.name,
            **dict(spec.env),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}{path}"

    def _wait_until_healthy(self) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended while it started\n{self.log()[-6000:]}")
            try:
                with urllib.request.urlopen(self._url("/health"), timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise RuntimeError(f"no health after {START_TIMEOUT_S:.0f} s\n{self.log()[-6000:]}")

    def log(self) -> str:
        """All that the server's processes have printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def worker(self, method: str, *given: Any) -> Any:
        """What a method of ``ProbeWorker`` returns; of replicas, the first one's. All do it."""
        return self._post("/collective_rpc", {"method": method, "args": list(given)})["results"][0]

    def complete(self, prompt: Prompt, max_tokens: int, replica: int) -> tuple[int, ...]:
        """The tokens that one replica says to a prompt."""
        body = {
            "model": self.spec.model,
            "prompt": list(prompt.tokens),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {"X-data-parallel-rank": str(replica)}
        return tuple(self._post("/v1/completions", body, headers)["choices"][0]["token_ids"])

    def reset(self) -> None:
        """Empties vLLM's own prefix cache, of all replicas."""
        self._post("/reset_prefix_cache", {})

    def metrics(self, name: str) -> dict[int, float]:
        """A counter of the connector's, by replica."""
        with urllib.request.urlopen(self._url("/metrics"), timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        pattern = re.compile(rf'vllm:lmcache_rs_{name}_total{{.*engine="(\d+)".*}} (.*)')
        found = [pattern.fullmatch(line) for line in lines]
        return {int(match[1]): float(match[2]) for match in found if match}

    def _post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        headers = {"Content-Type": "application/json"} | (headers or {})
        request = urllib.request.Request(self._url(path), json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def idle_report(self) -> Report:
        """A report once nothing is held any more, without any further completion."""
        folder = Path(self._folder.name)
        return wait_until_idle(lambda: read_report(self.worker("probe_report"), folder))

    def stream(
        self, prompts: list[Prompt], max_tokens: int, num_clients: int, each: int, leaving: float
    ) -> list[Stream]:
        """Clients beside each other that ask ``each`` time for a random prompt, streaming.

        A share of ``leaving`` requests is left by its client in the middle. Returns, per request,
        the prompt's number and the tokens, or None where the client has left.
        """
        rng = random.Random("clients")

        async def client(session: aiohttp.ClientSession) -> list[Stream]:
            got: list[Stream] = []
            for _ in range(each):
                number = rng.randrange(len(prompts))
                leave_after = rng.randrange(max_tokens) if rng.random() < leaving else None
                tokens = await self._one(session, prompts[number], max_tokens, leave_after)
                got.append((number, tokens))
            return got

        async def together() -> list[Stream]:
            timeout = aiohttp.ClientTimeout(total=300)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
                every = await asyncio.gather(*(client(session) for _ in range(num_clients)))
            return [stream for got in every for stream in got]

        return asyncio.run(together())

    async def _one(
        self,
        session: aiohttp.ClientSession,
        prompt: Prompt,
        max_tokens: int,
        leave_after: int | None,
    ) -> tuple[int, ...] | None:
        body = {
            "model": self.spec.model,
            "prompt": list(prompt.tokens),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        tokens: list[int] = []
        async with session.post(self._url("/v1/completions"), json=body) as answer:
            answer.raise_for_status()
            if leave_after == 0:
                answer.close()
                return None
            async for line in answer.content:
                text = line.decode().strip().removeprefix("data: ")
                if not text or text == "[DONE]":
                    continue
                tokens += json.loads(text)["choices"][0]["token_ids"] or []
                if leave_after is not None and len(tokens) >= leave_after:
                    # The connection is closed: vLLM aborts the request.
                    answer.close()
                    return None
        return tuple(tokens)

    def close(self) -> int:
        """Ends the server as an operator does; its exit code. Harmless when repeated."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        return self._process.returncode
