"""The shipped connector, claiming what it does not: that it serves several groups of blocks."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from lmcache_rs.vllm_v1 import LMCacheConnectorV1Dynamic


class SeveralGroups(LMCacheConnectorV1Dynamic, SupportsHMA):
    """vLLM then gives models with windows a group for each kind of layer."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])
