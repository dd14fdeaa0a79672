"""What `StorageManager` makes of the settings of the disk tier."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tiers import chain

from lmcache_rs import LMCacheEngineConfig, StorageManager, _native
from lmcache_rs.storage import LocalDiskBackend


def opened(path: Path, **settings: Any) -> StorageManager:
    return StorageManager(
        LMCacheEngineConfig.from_defaults(
            **{
                "local_disk": str(path),
                "max_local_disk_size": 0.1,
                "max_local_cpu_size": 0.01,
                **settings,
            }
        )
    )


def put(store: StorageManager, payloads: list[bytes]) -> None:
    objects = store.batched_allocate([len(payload) for payload in payloads])
    assert objects is not None
    for memory_obj, payload in zip(objects, payloads, strict=True):
        memoryview(memory_obj)[:] = payload  # type: ignore[arg-type]
    store.batched_put(chain(*range(len(payloads))), objects)
    del objects
    assert store.flush(20.0)


@pytest.mark.parametrize("local_cpu", [True, False])
def test_a_restart_is_warm_and_what_comes_from_disk_is_in_memory_then(
    tmp_path: Path, local_cpu: bool
) -> None:
    payloads = [random.Random(number).randbytes(50_000) for number in range(4)]
    keys = chain(*range(4))
    first = opened(tmp_path, local_cpu=local_cpu)
    assert list(first.backends) == ["LocalCPUBackend"] * local_cpu + ["LocalDiskBackend"]
    put(first, payloads)
    assert first.close(20.0)
    second = opened(tmp_path, local_cpu=local_cpu)
    assert second.contains(keys[0]) == "LocalDiskBackend"
    assert second.batched_contains(keys) == 4
    found = second.batched_get(keys)
    assert [each and each.to_bytes() for each in found] == payloads
    if local_cpu:
        assert second.contains(keys[0]) == "LocalCPUBackend"
    assert second.stats()["LocalDiskBackend"]["put_chunks"] == 0
    assert second.close(20.0)


def test_on_exit_delete_leaves_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path, local_disk_on_exit="delete")
    put(store, [b"x"])
    assert store.close(20.0)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_costs_the_tier_and_stops_a_strict_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = opened(tmp_path / "file")
    assert list(store.backends) == ["LocalCPUBackend"]
    assert "SERVING WITHOUT THE LOCAL DISK TIER" in caplog.text
    assert store.close(20.0)
    with pytest.raises(OSError, match="make folders"):
        opened(tmp_path / "file", strict=True)


@pytest.mark.parametrize("sync", [None, True])
def test_the_settings_reach_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool | None
) -> None:
    given: dict[str, object] = {}

    def noting(*args: Any, **settings: Any) -> _native.LocalDisk:
        given.update(settings)
        return _native.LocalDisk(*args, **settings)

    monkeypatch.setattr("lmcache_rs.storage.local_disk.LocalDisk", noting)
    asked = {} if sync is None else {"local_disk_sync": sync}
    store = opened(tmp_path, local_disk_threads=3, local_disk_direct_io=False, **asked)
    put(store, [b"x" * 5000])
    found = store.batched_get(chain(0))
    assert [each and each.to_bytes() for each in found] == [b"x" * 5000]
    del found
    assert (given["threads"], given["direct"], given["sync"]) == (3, False, sync or False)
    assert store.close(20.0)


def test_a_read_ends_at_its_deadline_with_the_prefix_that_came(tmp_path: Path) -> None:
    payloads = [random.Random(number).randbytes(200_000) for number in range(20)]
    keys = chain(*range(20))
    store = opened(tmp_path)
    put(store, payloads)
    assert store.close(20.0)
    pool = _native.LocalCpu(8 << 20, 1000)
    for deadline_s in (0.0, 1e-4, 1e-3, 20.0):
        tier = LocalDiskBackend([tmp_path], 1 << 27, pool, deadline_s=deadline_s)
        found = tier.batched_get_blocking(keys)
        came = [each.to_bytes() for each in found if each is not None]
        assert came == payloads[: len(came)]
        assert found[len(came) :] == [None] * (20 - len(came))
        assert len(came) == 20 or tier.stats()["faults_deadline"] == 1
        del found
        assert tier.close(20.0)
        # Whoever reads still when the tier ends has done so soon after.
        due = time.monotonic() + 20.0
        while pool.audit()["free_bytes"] < pool.capacity_bytes:
            assert time.monotonic() < due
    assert len(came) == 20


def test_several_folders_and_file_urls_are_read(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    store = opened(tmp_path, local_disk=f"file://{folders[0]}, {folders[1]},")
    put(store, [os.urandom(10) for _ in range(2)])
    assert all((folder / "lmcache_rs.v1").is_dir() for folder in folders)
    assert store.close(20.0)
