"""One arm of the vLLM lines: an engine in this process, bound to a core, that answers questions."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from answering import Answers

if TYPE_CHECKING:
    import torch

POOL_GB = 0.5
OURS = {"lmcache.chunk_size": 256, "lmcache.max_local_cpu_size": POOL_GB}
CONNECTORS: dict[str, dict[str, Any]] = {
    "noop": {"kv_connector": "NoopConnector", "kv_connector_module_path": "noop_connector"},
    "ours": {"kv_connector": "LMCacheRsConnector", "kv_connector_extra_config": OURS},
    "bucket": {
        "kv_connector": "LMCacheRsConnector",
        "kv_connector_extra_config": {
            **OURS,
            "lmcache.storage_backends": {"bucket": "bucket_tier:Bucket"},
        },
    },
    "layerwise": {
        "kv_connector": "LMCacheRsConnector",
        "kv_connector_extra_config": {**OURS, "lmcache.use_layerwise": True},
    },
}


class Arm:
    """A tiny model in a vLLM of its own."""

    def __init__(self, arm: str) -> None:
        import models
        from vllm.config import KVTransferConfig

        from vllm import LLM

        arguments: dict[str, Any] = {
            "model": str(models.tiny_model("tiny-llama")),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 128,
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "kv_cache_memory_bytes": 256 << 20,
            "seed": 0,
        }
        # A second no-op arm says how far two equal arms are apart.
        connector = CONNECTORS.get(arm.partition("-")[0])
        if connector is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(
                kv_role="kv_both", kv_load_failure_policy="recompute", **connector
            )
        self.llm = LLM(**arguments)
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def ask(
        self,
        seed: int,
        prompts: int,
        tokens: int,
        max_tokens: int,
        reset: bool = False,
        head_seed: int = 0,
        head_tokens: int = 0,
    ) -> dict[str, int]:
        """Nanoseconds of one call to `generate`, by clock and by processor, and cached tokens.

        Each prompt has `tokens` drawn by `seed`, behind `head_tokens` drawn by `head_seed`.
        """
        import numpy

        from vllm import SamplingParams

        head = numpy.random.default_rng(head_seed).integers(3, 1000, head_tokens).tolist()
        draw = numpy.random.default_rng(seed)
        asked: Any = [
            {"prompt_token_ids": head + draw.integers(3, 1000, tokens).tolist()}
            for _ in range(prompts)
        ]
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True
        )
        if reset:
            # Saves behind the last step are heard of in the next one.
            core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
            while core is not None and core.scheduler.has_requests():
                self.llm.llm_engine.step()
            assert self.llm.reset_prefix_cache(), "vLLM's own prefix cache is still in use"
        began, busy = time.perf_counter_ns(), time.process_time_ns()
        outputs = self.llm.generate(asked, sampling, use_tqdm=False)
        took, busy = time.perf_counter_ns() - began, time.process_time_ns() - busy
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return {"ns": took, "cpu_ns": busy, "cached": cached}

    def forget(self) -> None:
        """Host memory loses every chunk, once the tiers below have what they were offered."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker: Any = get_kv_transfer_group()._manager.worker
        worker._saves.wait()
        worker._saves.collect()
        assert worker._tiers.storage.flush(60.0)
        worker.local_cpu.clear()

    def bucket(self, bytes_per_second: float, burst_bytes: float) -> None:
        """The tier behind a token bucket gives so much from here on."""
        from bucket_tier import Bucket

        Bucket.newest.slow_to(bytes_per_second, burst_bytes)

    def slow(self, bytes_per_second: int) -> None:
        """Slows down the loads of this process, none of which may have begun yet."""
        from lmcache_rs import _native
        from lmcache_rs.vllm_v1 import layerwise

        layerwise.new_copier = lambda: _native.Copier(bytes_per_second)

    def copy(self, nbytes: int) -> dict[str, int]:
        """Nanoseconds of one plain copy of as many bytes, between memory gone from the cache."""
        import torch

        if not self._buffers or self._buffers[0][0].numel() != nbytes:
            count = max(2, (256 << 20) // nbytes)
            self._buffers = [
                (torch.ones(nbytes, dtype=torch.int8), torch.zeros(nbytes, dtype=torch.int8))
                for _ in range(count)
            ]
        source, target = self._buffers.pop(0)
        self._buffers.append((source, target))
        began = time.perf_counter_ns()
        target.copy_(source)
        return {"ns": time.perf_counter_ns() - began}


def main() -> None:
    name, core = sys.argv[1:]
    # Before anything starts a thread: all of them inherit it.
    os.sched_setaffinity(0, {int(core)})
    answers = Answers()
    arm = Arm(name)
    verbs = {"ask": arm.ask, "copy": arm.copy, "slow": arm.slow}
    answers.serve({**verbs, "forget": arm.forget, "bucket": arm.bucket})


if __name__ == "__main__":
    main()
