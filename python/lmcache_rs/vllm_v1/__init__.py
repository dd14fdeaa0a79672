"""The vLLM connector. `LMCacheConnectorV1Dynamic` is a shell around one half of it.

Use it with `--kv-transfer-config` and
`{"kv_connector":"LMCacheRsConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute"}`,
or, for engines that load no plugins, with `"kv_connector":"LMCacheConnectorV1Dynamic"` and
`"kv_connector_module_path":"lmcache_rs.vllm_v1"`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LMCacheConnectorV1Dynamic", "register"]

CONNECTOR_NAME = "LMCacheRsConnector"
CLASS_NAME = "LMCacheConnectorV1Dynamic"
"""vLLM's MultiConnector finds a child by this name when it reads its statistics."""


def register() -> None:
    """Makes the connector known to vLLM by name. Called as a plugin, any number of times."""
    for name in (CONNECTOR_NAME, CLASS_NAME):
        make_known(name, "lmcache_rs.vllm_v1.connector", CLASS_NAME)


def make_known(name: str, module: str, class_name: str) -> None:
    """Registers a connector's class with vLLM, unless something has that name already."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, class_name)


def __getattr__(name: str) -> Any:
    # vLLM calls `register` in every process it starts: that must not import the whole connector.
    if name == "LMCacheConnectorV1Dynamic":
        from lmcache_rs.vllm_v1.connector import LMCacheConnectorV1Dynamic

        return LMCacheConnectorV1Dynamic
    raise AttributeError(f"module 'lmcache_rs.vllm_v1' has no attribute {name!r}")
