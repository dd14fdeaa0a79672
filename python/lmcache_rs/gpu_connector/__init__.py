"""An engine's KV tensors: their registration for copies, and the connectors over them."""

from __future__ import annotations

from lmcache_rs.gpu_connector.buffered import VLLMBufferLayerwiseGPUConnector
from lmcache_rs.gpu_connector.layer_view import by_layer
from lmcache_rs.gpu_connector.layerwise import VLLMPagedMemLayerwiseGPUConnector
from lmcache_rs.gpu_connector.paged import VLLMPagedMemGPUConnectorV2
from lmcache_rs.gpu_connector.registered import RegisteredCache
from lmcache_rs.gpu_connector.registration import identity, register, slots_of
from lmcache_rs.gpu_connector.rope import Rope
from lmcache_rs.layouts import LAYOUTS, Layout, LayoutError
from lmcache_rs.storage import LayerView

__all__ = [
    "LAYOUTS",
    "LayerView",
    "Layout",
    "LayoutError",
    "RegisteredCache",
    "Rope",
    "VLLMBufferLayerwiseGPUConnector",
    "VLLMPagedMemGPUConnectorV2",
    "VLLMPagedMemLayerwiseGPUConnector",
    "by_layer",
    "identity",
    "register",
    "slots_of",
]
