"""What a GPU's start learns and says: what copies cost, and kernels that its driver refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from imitated import Imitated

from lmcache_rs import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata, _native

BLOCKS, BLOCK, HEADS, HEAD = 24, 4, 2, 8
META = LMCacheMetadata("m", 1, 0, "float32")
TOKENS, SLOTS = list(range(16)), torch.arange(16) + 8
# What a driver answers for code that is newer than it.
UNSUPPORTED_PTX = 222
WAYS = ["engine", "kernel", "single", "staged"]


@pytest.fixture
def fresh(tmp_path: Path) -> Imitated:
    """A driver that nobody in this process has opened."""
    return Imitated(apart=tmp_path)


def engine() -> LMCacheEngine:
    settings = LMCacheEngineConfig.from_defaults(chunk_size=8, max_local_cpu_size=0.002)
    return LMCacheEngine(settings, META)


def caches(seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn((2, BLOCKS, BLOCK, HEADS, HEAD), generator=random) for _ in range(3)]


def store_and_load(cached: LMCacheEngine) -> None:
    source, target = caches(1), caches(2)
    assert cached.store(TOKENS, kvcaches=source, slot_mapping=SLOTS) == 16
    cached.retrieve(TOKENS, kvcaches=target, slot_mapping=SLOTS)
    for was, now in zip(source, target, strict=True):
        assert torch.equal(was[:, 2:6], now[:, 2:6])


def test_what_copies_cost_is_learnt_once_and_remembered(fresh: Imitated) -> None:
    with fresh.gpu() as device:
        notices, launches = device.take_notices(), fresh.calls("cuLaunchKernel")
        assert launches > 0
        files = list(Path(fresh.caches.name).glob("lmcache_rs/cuda-costs-*"))
        # A machine that is busy now measures nothing within a second, and says so.
        if notices:
            assert "too busy for measuring" in notices[0], notices
            assert files == []
        else:
            assert [oct(file.stat().st_mode & 0o777) for file in files] == ["0o600"]
        assert device.take_notices() == []
    del device
    for file in files:
        file.unlink()
    with fresh.gpu() as device:
        assert (device.take_notices(), fresh.calls("cuLaunchKernel")) == ([], launches)


def test_costs_that_cannot_be_measured_are_one_notice(
    fresh: Imitated, caplog: pytest.LogCaptureFixture
) -> None:
    # Memory on the device for what is timed.
    fresh.fail("cuMemAlloc")
    with fresh.gpu(), caplog.at_level("WARNING"), engine() as cached:
        store_and_load(cached)
        told = [text for text in caplog.messages if "what copies cost" in text]
        assert len(told) == 1
        assert "cannot be measured (cuMemAlloc failed" in told[0]


def test_kernels_that_the_driver_refuses_leave_the_copy_engines(
    fresh: Imitated, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.fail("cuModuleLoadData", UNSUPPORTED_PTX)
    with fresh.gpu() as device, caplog.at_level("WARNING"), engine() as cached:
        store_and_load(cached)
        list(cached.store_layer(TOKENS[::-1], kvcaches=caches(3), slot_mapping=SLOTS))
        told = [text for text in caplog.messages if "refuses this build's kernels" in text]
        assert len(told) == 1
        assert "serves CUDA 13.0" in told[0]
        needed = _native.build_info()["nvcc"]
        assert f"which need {str(needed).rpartition('.')[0]}" in told[0]
        copies = device.copies()
        assert sorted(copies) == WAYS
        assert copies["engine"] + copies["single"] > 0
        assert (copies["kernel"], copies["staged"]) == (0, 0)
        assert fresh.calls("cuLaunchKernel") == 0


def test_keys_are_not_turned_where_the_driver_refuses_the_kernels(fresh: Imitated) -> None:
    fresh.fail("cuModuleLoadData", UNSUPPORTED_PTX)
    with fresh.gpu() as device:
        buffer = _native.CudaLayerBuffer(device, 16 * HEADS * HEAD * 4, storing=False)
        shift = _native.CudaRopeShift(
            device,
            [1.0] * (HEAD // 2),
            list(range(16)),
            list(range(1, 17)),
            interleaved=False,
            dtype="float32",
            row_elements=HEADS * HEAD,
            heads=HEADS,
            head_size=HEAD,
            offset=0,
        )
        with pytest.raises(_native.CudaError, match=r"serves CUDA 13\.0 and refuses"):
            buffer.rotate(shift)


@pytest.mark.parametrize("num_gaps", [3, 4, 9])
def test_gaps_are_zero_and_nothing_else_is(
    imitated: Imitated, gpu: _native.CudaDevice, num_gaps: int
) -> None:
    """Few by fills, many by one kernel."""
    row, rows = 96, 64
    buffer = _native.CudaLayerBuffer(gpu, rows * row, storing=False)
    wanted = bytearray(os.urandom(rows * row))
    buffer.load([(bytes(wanted), 0, rows * row)], [0])
    gaps = [(at * 6 * row, (at * 6 + 2) * row) for at in range(num_gaps)]
    for start, end in gaps:
        wanted[start:end] = bytes(end - start)
    before = imitated.calls("cuLaunchKernel")
    for _ in range(3):
        buffer.zero(gaps)
    assert imitated.calls("cuLaunchKernel") - before == (3 if num_gaps >= 4 else 0)
    assert buffer.to_bytes() == bytes(wanted)
    # Other gaps, another table.
    buffer.zero([(start + row, end + row) for start, end in gaps])
    for start, end in gaps:
        wanted[start + row : end + row] = bytes(end - start)
    assert buffer.to_bytes() == bytes(wanted)
