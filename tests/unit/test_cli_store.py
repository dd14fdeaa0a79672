"""`lmcache-rs store`: what it prints of a folder, and what it removes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_rs import CacheEngineKey, MemoryObj, _native
from lmcache_rs.cli import main
from lmcache_rs.storage import LocalDiskBackend


def key(model: str, number: int) -> CacheEngineKey:
    return CacheEngineKey(model, 1, 0, number.to_bytes(4, "big") * 8, "float32")


@pytest.fixture
def tier(tmp_path: Path) -> LocalDiskBackend:
    pool = _native.LocalCpu(1 << 20, 1000)
    made = LocalDiskBackend([tmp_path], 1 << 24, pool)
    keys = [key("a", 1), key("a", 2), key("b", 3)]
    for each in keys:
        allocated = pool.allocate([5000])
        assert allocated is not None
        memory_obj = MemoryObj(allocated[0])
        memory_obj.seal()
        assert made.submit_put_task(each, memory_obj)
    assert made.flush(20.0)
    return made


def damage(tier: LocalDiskBackend, of: CacheEngineKey) -> Path:
    path = Path(tier.local_disk.path_of(of.namespace, of.chunk_hash))
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    return path


def test_chunks_are_listed_and_counted(
    tier: LocalDiskBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[-1] for line in lines) == sorted(
        str(each) for each in (key("a", 1), key("a", 2), key("b", 3))
    )
    assert main(["store", "stat", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "model=a: 2 chunks, 24576 bytes, 0 tokens",
        "model=b: 1 chunks, 12288 bytes, 0 tokens",
        "total: 3 chunks, 36864 bytes, 0 tokens",
    ]


def test_damage_is_found_named_and_removed(
    tier: LocalDiskBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "verify", str(tmp_path)]) == 0
    capsys.readouterr()
    path = damage(tier, key("a", 2))
    other = Path(tier.local_disk.path_of(key("b", 3).namespace, key("b", 3).chunk_hash))
    foreign = other.with_name("00" + "1" * 62 + path.suffix)
    foreign.write_bytes(other.read_bytes())
    assert main(["store", "verify", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert f"checksum: {path}" in told
    assert f"foreign: {foreign}" in told
    assert "4 chunks" in told
    assert main(["store", "rm", "--damaged", str(tmp_path)]) == 0
    assert "2 removed, 0 left" in capsys.readouterr().out
    assert main(["store", "verify", str(tmp_path)]) == 0
    assert not tier.contains(key("a", 2))
    assert tier.contains(key("a", 1))
    assert tier.stats()["used_bytes"] == 2 * (12288 + 256)


def test_a_prefix_is_removed_for_every_process(
    tier: LocalDiskBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "rm", "--prefix", "model=a", str(tmp_path)]) == 0
    assert "2 removed" in capsys.readouterr().out
    assert not tier.contains(key("a", 1))
    assert tier.batched_get_blocking([key("a", 1)]) == [None]
    assert tier.contains(key("b", 3))
    assert main(["store", "rm", "--all", str(tmp_path)]) == 0
    assert tier.batched_get_blocking([key("b", 3)]) == [None]


def test_a_folder_that_is_none_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in (["ls"], ["stat"], ["verify"], ["rm", "--all"]):
        assert main(["store", *action, str(tmp_path)]) == 2
        assert "name a folder of local_disk" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
