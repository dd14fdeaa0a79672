"""A connector that watches the real one, byte by byte.

``ProbeConnector`` is the shipped connector with its worker hooks wrapped. It keeps a
copy of every chunk the engine computed, compares each block a load has written with
the copy, and can spoil the engine's KV memory on request. It runs where the worker
runs; a test reaches it through ``ProbeWorker``, whose methods vLLM adds to its worker.
Load it with ``kv_connector_module_path="probe"`` and this folder on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from probe_breaks import LoadBreaker
from probe_layers import LayerWatch
from probe_names import FAULTS, FOLDER_VARIABLE, LIGHT_VARIABLE, SCHEDULER_FILE

from lmcache_rs import _native
from lmcache_rs.vllm_v1 import LMCacheConnectorV1Dynamic

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

HASH_BYTES = 32
# A chunk may be computed twice and differ in its last bits; each such version is kept.
MAX_VERSIONS = 8
# Two computations of one chunk differ by rounding; more than this is another chunk.
ROUNDING = 1e-2
NOISE_SCALE = 3.0

# One chunk's key, and one computation of it: a tensor [blocks, ...] per layer.
Key = tuple[str, bytes]
Version = list[torch.Tensor]

_worker_probe: ProbeConnector | None = None


@dataclass
class Target:
    """One engine block that a load must write, and where its bytes come from.

    ``is_shared``: the chunk holds a token that the engine computes itself.
    """

    block_id: int
    key: Key
    block_in_chunk: int
    is_shared: bool


class ProbeConnector(LMCacheConnectorV1Dynamic):
    """The shipped connector under watch."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        global _worker_probe
        super().__init__(vllm_config, role, kv_cache_config)
        self._probe_meta: Any = None
        self._probe_is_worker = role.name == "WORKER"
        if not self._probe_is_worker:
            folder = os.environ.get(FOLDER_VARIABLE)
            self._probe_file = Path(folder) / SCHEDULER_FILE if folder else None
            return
        self.block_size = int(vllm_config.cache_config.block_size)
        assert vllm_config.kv_transfer_config is not None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        default = -(-256 // self.block_size) * self.block_size
        self.chunk_size = int(extra.get("lmcache.chunk_size", default))
        self._is_light = os.environ.get(LIGHT_VARIABLE) == "1"
        self._is_layerwise = bool(extra.get("lmcache.use_layerwise", False))
        self._watch: LayerWatch | None = None
        self._numbers: dict[str, int] = {}
        self.layers: list[torch.Tensor] = []
        self.recorded: dict[Key, list[Version]] = {}
        self.fault: str | None = None
        self.breaker: LoadBreaker | None = None
        # Of loads that will fail in this step: the first chunk that is not loaded.
        self._broken: dict[str, int] = {}
        # Loads that their requests wait for, and those of them that are said to be over.
        self._awaited: dict[str, list[Target]] = {}
        self._arrived: set[str] = set()
        self.totals: Counter[str] = Counter()
        self.details: list[str] = []
        _worker_probe = self

    # The scheduler's half.

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta: KVConnectorMetadata = super().build_connector_meta(scheduler_output)
        self._write_scheduler_file()
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        self._write_scheduler_file()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        answer = super().request_finished(request, block_ids)
        self._write_scheduler_file()
        return answer

    def _write_scheduler_file(self) -> None:
        if self._probe_file is not None:
            scratch = self._probe_file.with_suffix(".new")
            scratch.write_text(json.dumps(self.counters() | self._pending()), encoding="utf-8")
            scratch.replace(self._probe_file)

    def _pending(self) -> dict[str, int]:
        """Requests whose lookups have not ended, and those that may hold a lease for one."""
        half = self._manager.scheduler
        client: Any = getattr(half, "_client", None)
        # The client that routes holds the one that asks.
        client = getattr(client, "_client", client)
        if client is None:
            return {}
        return {"pending_lookups": len(client._records), "pending_leases": len(client._leased)}

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        names = sorted(kv_caches, key=_layer_number)
        self.layers = [kv_caches[name] for name in names]
        self._numbers = {name: number for number, name in enumerate(names)}

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._probe_meta = connector_metadata
        self._watch = None
        if self._probe_is_worker and self.breaker is not None:
            requests = getattr(connector_metadata, "requests", [])
            self._broken = self.breaker.begin_step(requests)
        super().bind_connector_metadata(connector_metadata)

    @torch.inference_mode()
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._is_light:
            super().start_load_kv(forward_context, **kwargs)
            return
        if self._is_layerwise:
            watch = self._watch = self._watch or LayerWatch(self, forward_context)
            if not watch.loads:
                super().start_load_kv(forward_context, **kwargs)
                return
            if self.fault is not None:
                watch.fault, self.fault = self.fault, None
                self.totals["planted"] += 1
            watch.before_start()
            super().start_load_kv(forward_context, **kwargs)
            watch.after_start()
            return
        targets = self.load_targets()
        if not targets:
            super().start_load_kv(forward_context, **kwargs)
            return
        self._wait_for_copies()
        # What the blocks hold now may be right by chance: a block freed a moment ago.
        self.fill_with_noise([target.block_id for target in targets])
        self.wait_for_copies()
        before = [layer.clone() for layer in self.layers]
        others = self.other_blocks(targets)
        # Every bit is flipped while the load runs, so that a write of what a block held
        # already is seen too. The load must be done when the call returns.
        for layer in self.layers:
            _bits(layer)[others] = ~_bits(layer)[others]
        super().start_load_kv(forward_context, **kwargs)
        self._restore_others(others, before)
        if self.fault is not None:
            self.plant_in(self.fault, targets, before, range(len(self.layers)))
            self.totals["planted"] += 1
            self.fault = None
        self.compare(targets)

    @torch.inference_mode()
    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        if self._watch is not None and self._watch.loads:
            self._watch.after_wait(self._numbers[layer_name])

    @torch.inference_mode()
    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        super().save_kv_layer(layer_name, *args, **kwargs)
        if self._is_layerwise and not self._is_light:
            # In a step without a load the pass comes before start_load_kv.
            watch = self._watch = self._watch or LayerWatch(self, None)
            watch.after_save(self._numbers[layer_name])

    @torch.inference_mode()
    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self._is_light:
            return
        if self._watch is not None:
            self._watch.finish()
            self._watch = None
        for request in getattr(self._probe_meta, "requests", []):
            spec = request.save_spec
            # What a step computed on a load that failed must never be found again.
            if spec is None or not spec.can_save or self._is_suspect():
                continue
            first = spec.skip_leading_tokens // self.chunk_size
            for chunk in range(first, request.num_tokens // self.chunk_size):
                self._record(self._key(request, chunk), self._chunk_blocks(request, chunk))
        self.totals["steps"] += 1

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for req_id in results.failed_recving:
            self._awaited.pop(req_id, None)
        self._arrived |= set(results.finished_recving)
        return results

    @torch.inference_mode()
    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = super().get_block_ids_with_load_errors()
        for req_id in self._arrived:
            targets = self._awaited.pop(req_id, [])
            self.compare([target for target in targets if target.block_id not in failed])
        self._arrived.clear()
        if self.breaker is not None and failed:
            for name in self.breaker.found_again():
                self.note("unremoved_chunks", f"{name}: its load failed, and it is still found")
        return failed

    # What the test asks for.

    @torch.inference_mode()
    def poison(self, seed: int) -> int:
        """Overwrites every block of the engine's KV memory; returns the bytes written."""
        self._wait_for_copies()
        generator = torch.Generator().manual_seed(seed)
        written = 0
        for layer in self.layers:
            layer.normal_(0.0, NOISE_SCALE, generator=generator)
            written += layer.numel() * layer.element_size()
        return written

    def report(self) -> dict[str, Any]:
        """What was seen since the last report, and the connector's own accounts."""
        self._wait_for_copies()
        seen = {
            "probe": dict(self.totals),
            "details": self.details[:10],
            "memory": self.memory_stats(),
            "counters": self.counters(),
            "layer_shape": list(self.layers[0].shape) if self.layers else [],
            "layer_bytes": sum(t.numel() * t.element_size() for t in self.layers),
            "pid": os.getpid(),
        }
        self.totals.clear()
        self.details.clear()
        return seen

    # How it is done.

    def _wait_for_copies(self) -> None:
        """Saves go on behind their step, and read what is to be spoiled here."""
        worker = self._manager.worker
        if worker is not None:
            worker._saves.wait()

    def _key(self, request: Any, chunk: int) -> Key:
        start = chunk * HASH_BYTES
        return str(request.namespace), bytes(request.hashes[start : start + HASH_BYTES])

    def _chunk_blocks(self, request: Any, chunk: int) -> list[int]:
        per_chunk = self.chunk_size // self.block_size
        return list(request.block_ids[chunk * per_chunk : (chunk + 1) * per_chunk])

    def load_targets(self) -> list[Target]:
        """Blocks that the step's loads write before the forward pass reads them.

        Loads that their requests wait for are noted on the side: they end in a later step.
        """
        every = []
        for request in getattr(self._probe_meta, "requests", []):
            spec = request.load_spec
            if spec is None or not spec.can_load:
                continue
            if spec.vllm_cached_tokens % self.block_size:
                self.note("unaligned_starts", f"{request.req_id}: {spec}")
            is_async = getattr(spec, "is_async", False)
            targets: list[Target] = []
            first = spec.vllm_cached_tokens // self.block_size
            last = -(-spec.lmcache_cached_tokens // self.block_size)
            for block in range(first, last):
                chunk, inside = divmod(block * self.block_size, self.chunk_size)
                if chunk >= self._broken.get(request.req_id, last):
                    break
                key = self._key(request, chunk)
                end = spec.lmcache_cached_tokens if is_async else spec.computed_from
                is_shared = (chunk + 1) * self.chunk_size > end
                block_in_chunk = inside // self.block_size
                targets.append(Target(request.block_ids[block], key, block_in_chunk, is_shared))
            self.totals["loads"] += 1
            if is_async:
                self.totals["async_loads"] += 1
                self.fill_with_noise([target.block_id for target in targets])
                self._awaited[request.req_id] = targets
            else:
                every += targets
        return every

    def _record(self, key: Key, block_ids: list[int]) -> None:
        version = [layer[block_ids].clone() for layer in self.layers]
        versions = self.recorded.setdefault(key, [])
        if any(_same(version, known) for known in versions):
            return
        if versions and not _close(version, versions[0]):
            # Not kept: a fault planted once must not become what is right.
            self.note("diverging_chunks", f"{key[1].hex()[:16]} was computed twice, unlike")
            return
        if len(versions) == MAX_VERSIONS:
            versions.pop(1)
        versions.append(version)
        self.totals["recorded_chunks"] += 1

    def _is_suspect(self) -> bool:
        """Whether the step computes on blocks whose load was made to fail."""
        requests = getattr(self._probe_meta, "requests", [])
        return any(
            request.req_id in self._broken and not getattr(request.load_spec, "is_async", False)
            for request in requests
        )

    def saved_blocks(self) -> list[int]:
        """Blocks of the chunks that this step saves."""
        blocks: dict[int, None] = {}
        for request in getattr(self._probe_meta, "requests", []):
            spec = request.save_spec
            if spec is not None and spec.can_save:
                num_blocks = request.num_tokens // self.block_size
                blocks |= dict.fromkeys(request.block_ids[:num_blocks])
        return list(blocks)

    def compare(self, targets: list[Target]) -> None:
        """Holds all layers of the blocks against what was stored."""
        numbers = range(len(self.layers))
        wrong = [
            [
                [number for number in numbers if not self.is_right(target, version, number)]
                for version in self.recorded.get(target.key, [])
            ]
            for target in targets
        ]
        self.account(targets, wrong)

    def account(self, targets: list[Target], wrong: list[list[list[int]]]) -> None:
        """Counts loaded blocks. ``wrong``: per block and known version, the layers that differ."""
        block_bytes = sum(t[0].numel() * t.element_size() for t in self.layers)
        for target, by_version in zip(targets, wrong, strict=True):
            self.totals["loaded_blocks"] += 1
            self.totals["loaded_bytes"] += block_bytes
            name = f"block {target.block_id} of chunk {target.key[1].hex()[:16]}"
            if not by_version:
                self.note("unknown_blocks", f"{name}: loaded, never seen stored")
                continue
            least = min(by_version, key=len)
            if least:
                self.note("wrong_blocks", f"{name}: differs in layers {least}")

    def is_right(self, target: Target, version: Version, number: int) -> bool:
        """Whether one layer of the block is the stored one, bit by bit."""
        found = self.layers[number][target.block_id]
        return torch.equal(_bits(found), _bits(version[number][target.block_in_chunk]))

    def bits(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory as integers."""
        return _bits(tensor)

    def other_blocks(self, targets: list[Target]) -> torch.Tensor:
        """A mask of the blocks that no load may write now: not these, nor awaited ones."""
        others = torch.ones(self.layers[0].shape[0], dtype=torch.bool)
        for awaited in (targets, *self._awaited.values()):
            others[[target.block_id for target in awaited]] = False
        return others

    def wait_for_copies(self) -> None:
        """Returns when no save reads the engine's blocks any more: they are to be spoiled."""
        until = time.monotonic() + 5
        while self.memory_stats().get("reserved_bytes") and time.monotonic() < until:
            time.sleep(1e-3)

    def _restore_others(self, others: torch.Tensor, before: Version) -> None:
        keep = others.nonzero().flatten()
        for number, (layer, old) in enumerate(zip(self.layers, before, strict=True)):
            # Compared as integers: a NaN equals itself.
            written = (_bits(layer)[keep] != ~_bits(old)[keep]).flatten(1).any(1)
            for block in keep[written].tolist():
                self.note("stray_blocks", f"block {block} layer {number}: not to be written")
            layer[keep] = old[keep]

    def note(self, kind: str, text: str) -> None:
        self.totals[kind] += 1
        self.details.append(f"{kind}: {text}")

    def fill_with_noise(self, block_ids: list[int]) -> None:
        for layer in self.layers:
            layer[block_ids] = (
                torch.randn(len(block_ids), *layer.shape[1:]).mul_(NOISE_SCALE).to(layer.dtype)
            )

    def plant_in(
        self, fault: str, targets: list[Target], before: Version, numbers: Iterable[int]
    ) -> None:
        """Spoils the given layers of what a load has written."""
        by_chunk: dict[Key, list[Target]] = {}
        for target in targets:
            by_chunk.setdefault(target.key, []).append(target)
        chunks = list(by_chunk.values())
        ids = [target.block_id for target in targets]
        one = [target.block_id for target in chunks[0]]
        for number in numbers:
            layer = self.layers[number]
            if fault == "nothing_loaded":
                layer[ids] = before[number][ids]
            elif fault == "chunk_zeroed":
                layer[one] = 0
            elif fault in ("chunks_swapped", "chunks_reordered"):
                other = chunks[1] if fault == "chunks_reordered" else chunks[-1]
                two = [target.block_id for target in other]
                held = layer[one].clone()
                layer[one] = layer[two]
                layer[two] = held
            elif fault == "kv_swapped":
                for block in ids:
                    # Inside each (block, head): the plane of K, then the plane of V.
                    planes = layer[block].view(layer.shape[1], 2, -1)
                    planes.copy_(planes.flip(1))
            elif fault in ("byte_first_layer", "byte_last_layer"):
                if number == (0 if fault == "byte_first_layer" else len(self.layers) - 1):
                    self._flip_byte(layer[ids[0]])
            else:
                raise ValueError(f"no fault named {fault!r}; choose one of {', '.join(FAULTS)}")

    def _flip_byte(self, block: torch.Tensor) -> None:
        """Flips the top exponent bit of one V number of a moderate size.

        The number becomes huge, so the flip cannot round away: one byte changes and
        the attention of every later token sees it.
        """
        values = block.view(block.shape[0], 2, -1)[0, 1]
        moderate = ((values.abs() > 1e-3) & (values.abs() < 0.5)).nonzero().flatten()
        place = int(moderate[0])
        bits = values.view(torch.int32)
        bits[place] = int(bits[place]) ^ 0x4000_0000


class ProbeWorker:
    """Methods added to vLLM's worker, for ``collective_rpc`` by name."""

    def probe_report(self) -> dict[str, Any]:
        return _probe().report()

    def probe_poison(self, seed: int) -> int:
        return _probe().poison(seed)

    def probe_chunks(self) -> list[bytes]:
        """The hashes of every chunk that the connector's memory holds."""
        pool = _probe()._manager.worker.local_cpu  # type: ignore[union-attr]
        return [chunk_hash for _, chunk_hash in pool.chunks()]

    def probe_fault(self, fault: str) -> None:
        _probe().fault = fault

    def probe_break_loads(self, how: str, one_in: int = 1, limit: int | None = None) -> None:
        """See ``LoadBreaker``; ``"nothing"`` breaks none from now on."""
        probe = _probe()
        probe.breaker = None if how == "nothing" else LoadBreaker(probe, how, one_in, limit)
        probe._broken = {}

    def probe_break_loads_of(self, rank: int, how: str, limit: int) -> bool:
        """Breaks the next loads of one rank alone; whether that is this one."""
        is_meant = _probe()._manager._rank == rank
        if is_meant:
            self.probe_break_loads(how, 1, limit)
        return is_meant

    def probe_settle(self) -> None:
        """Returns once the tiers below have what they were offered."""
        worker = _probe()._manager.worker
        assert worker is not None
        worker._saves.wait()
        worker._saves.collect()
        storage = worker._tiers.storage
        assert storage is None or storage.flush(30.0)

    def probe_forget(self) -> None:
        """Host memory loses every chunk, once the tiers below have what they were offered."""
        self.probe_settle()
        worker = _probe()._manager.worker
        assert worker is not None
        # A rank that reads another's has none.
        if worker.local_cpu is not None:
            worker.local_cpu.clear()

    def probe_keep_seen(self, path: str) -> None:
        """Writes what the engine was seen to store, for the probe of another engine."""
        _probe()._wait_for_copies()
        if _probe()._manager._rank == 0:
            torch.save(_probe().recorded, path)

    def probe_take_seen(self, path: str) -> None:
        _probe().recorded |= torch.load(path)

    def probe_slow_copies(self, bytes_per_second: int) -> None:
        worker = _probe()._manager.worker
        assert worker is not None
        assert worker._engine is not None
        worker._engine._transfers = _native.TransferQueue(bytes_per_second)


def _probe() -> ProbeConnector:
    if _worker_probe is None:
        raise RuntimeError("this worker holds no ProbeConnector: start the engine with one")
    return _worker_probe


def _layer_number(name: str) -> tuple[int, str]:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return (numbers[0] if numbers else 0), name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(width[tensor.element_size()])


def _same(one: Version, two: Version) -> bool:
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(one, two, strict=True))


def _close(one: Version, two: Version) -> bool:
    return all(
        torch.allclose(a, b, rtol=ROUNDING, atol=ROUNDING) for a, b in zip(one, two, strict=True)
    )
