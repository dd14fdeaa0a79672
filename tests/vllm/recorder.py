"""A second connector beside ours: keeps whole blocks in this process and notes what vLLM says.

As small as a connector can be that loads real KV. It works where scheduler and worker share a
process, and offers what it has only while ``Recorder.offers`` is set.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

Pair = tuple[bytes, int]


@dataclass
class RecorderMetadata(KVConnectorMetadata):
    """Blocks to load and to keep, each by its hash."""

    loads: list[Pair] = field(default_factory=list)
    saves: list[Pair] = field(default_factory=list)


class Recorder(KVConnectorBase_V1):
    """See the module's description."""

    offers: ClassVar[bool] = False
    seen: ClassVar[Counter[str]] = Counter()
    kept: ClassVar[dict[bytes, dict[str, torch.Tensor]]] = {}

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = int(vllm_config.cache_config.block_size)
        self._requests: dict[str, Any] = {}
        self._loads: list[Pair] = []
        self._layers: dict[str, torch.Tensor] = {}
        self._new: dict[bytes, dict[str, torch.Tensor]] = {}

    # The scheduler's half.

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self._requests[request.request_id] = request
        if not self.offers:
            return 0, False
        first = num_computed_tokens // self._block_size
        known = first
        while known < len(request.block_hashes) and request.block_hashes[known] in self.kept:
            known += 1
        end = min(known * self._block_size, request.num_tokens - 1)
        return max(0, end - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = blocks.get_block_ids()[0]
        if num_external_tokens == 0:
            self.seen["not_chosen"] += 1
            self.seen["not_chosen_without_blocks"] += not ids
            return
        self.seen["chosen"] += 1
        end = request.num_computed_tokens + num_external_tokens
        first = request.num_computed_tokens // self._block_size
        for block in range(first, -(-end // self._block_size)):
            self._loads.append((request.block_hashes[block], ids[block]))

    def build_connector_meta(self, scheduler_output: Any) -> RecorderMetadata:
        metadata = RecorderMetadata(loads=self._loads)
        self._loads = []
        for req_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[req_id]
            computed = min(request.num_computed_tokens + scheduled, request.num_tokens)
            ids = scheduler_output.kv_connector_block_state.get_block_ids(req_id)[0]
            full = computed // self._block_size
            metadata.saves += zip(request.block_hashes[:full], ids[:full], strict=False)
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        self._requests.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool | None:
        self.kept.clear()
        return True

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RecorderMetadata)
        for block_hash, block in metadata.loads:
            self.seen["loaded_blocks"] += 1
            for name, kept in self.kept[block_hash].items():
                self._layers[name][block] = kept

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        # Now and not at the end: a probe beside us may spoil blocks that are saved until then.
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RecorderMetadata)
        for block_hash, block in metadata.saves:
            if block_hash not in self.kept:
                new = self._new.setdefault(block_hash, {})
                new[layer_name] = self._layers[layer_name][block].clone()

    def wait_for_save(self) -> None:
        for block_hash, layers in self._new.items():
            self.kept[block_hash] = layers
        self._new = {}


def offer(llm: Any, offers: bool) -> None:
    """Whether it offers from now on what it has kept."""
    Recorder.offers = offers


def take_seen(llm: Any) -> dict[str, int]:
    """What was seen since the last call."""
    seen = dict(Recorder.seen)
    Recorder.seen.clear()
    return seen
