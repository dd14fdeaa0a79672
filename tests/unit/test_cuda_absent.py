"""Where there is no GPU: host tensors are copied as ever, and nothing looks for a driver."""

from __future__ import annotations

import pytest
import torch

from lmcache_rs import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata, _native
from lmcache_rs.gpu_connector import residence

SWITCH = "LMCACHE_RS_LIBCUDA"


def test_a_device_without_a_driver_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "/nowhere/libcuda.so.1")
    with pytest.raises(_native.CudaError, match="no CUDA driver|no CUDA kernels"):
        _native.CudaDevice(0)
    assert issubclass(_native.CudaError, RuntimeError)


def test_host_tensors_need_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "/nowhere/libcuda.so.1")
    caches = [torch.randn(2, 8, 4, 2, 8) for _ in range(2)]
    assert residence.of(caches[0]) == ("cpu", 0, 0)
    settings = LMCacheEngineConfig.from_defaults(chunk_size=8, max_local_cpu_size=0.002)
    with LMCacheEngine(settings, LMCacheMetadata("m", 1, 0, "float32")) as engine:
        where = {"kvcaches": caches, "slot_mapping": list(range(16))}
        assert engine.store(list(range(16)), **where) == 16  # type: ignore[arg-type]
        assert engine.registered is not None
        assert (engine.registered.device, engine.registered.copy_path) == (None, "by the CPU")
        assert engine.page_locked_bytes == 0
