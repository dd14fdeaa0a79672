"""The tiers that the promises here are held against: add yours to `TIERS`."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import redis_servers
import s3_server
from lmcache_rs import CacheEngineKey, LMCacheEngineConfig, MemoryObj, StorageManager, _native
from lmcache_rs.storage import (
    LocalCPUBackend,
    LocalDiskBackend,
    RemoteBackend,
    StorageBackend,
    StorageBackendInterface,
    allocate_and_copy_objects,
)
from lmcache_rs.storage.tier import BackendTier

PAGE = 4096
POOL_BYTES = 2048 * PAGE
DEADLINE_S = 20.0
PATIENCE_S = 60.0
"""Seconds within which what must come has come."""


def example(name: str) -> ModuleType:
    """A module of examples/, which is no package."""
    path = Path(__file__).resolve().parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class DictBackend(StorageBackend):
    """The least that is a backend, and the keys besides, so that it can be cleared."""

    def __init__(self) -> None:
        self.chunks: dict[CacheEngineKey, tuple[bytes, bytes]] = {}

    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        self.chunks[key] = bytes(data), metadata

    def get(self, key: CacheEngineKey) -> tuple[bytes, bytes] | None:
        return self.chunks.get(key)

    def contains(self, key: CacheEngineKey) -> bool:
        return key in self.chunks

    def remove(self, key: CacheEngineKey) -> bool:
        return self.chunks.pop(key, None) is not None

    def keys(self) -> list[CacheEngineKey]:
        return list(self.chunks)


def key(number: int, **changes: Any) -> CacheEngineKey:
    chunk_hash = number.to_bytes(4, "big") * 8
    return CacheEngineKey("m", 1, 0, chunk_hash, "float32", **changes)


def chain(*numbers: int) -> list[CacheEngineKey]:
    return [key(number) for number in numbers]


class Subject:
    """A tier, and the pool that objects for it come from.

    Args:
        tier: The tier.
        lose: Takes a chunk away behind the tier's back.
        reopen: Opens what the tier has kept, after its close; None if it keeps nothing.
        exchange: Lays the object of the second key under the first, behind the tier's back; None if
            nobody can.
    """

    def __init__(
        self,
        tier: StorageBackendInterface,
        pool: _native.LocalCpu,
        lose: Callable[[CacheEngineKey], None],
        *,
        reopen: Callable[[], StorageBackendInterface] | None = None,
        exchange: Callable[[CacheEngineKey, CacheEngineKey], None] | None = None,
    ) -> None:
        self.tier = tier
        self.pool = pool
        self.lose = lose
        self.reopen = reopen
        self.exchange = exchange

    def objects(self, *payloads: bytes) -> list[MemoryObj]:
        """Sealed objects of these bytes, in memory that the tier takes."""
        allocated = self.pool.allocate([len(payload) for payload in payloads])
        assert allocated is not None
        objects = [MemoryObj(raw) for raw in allocated]
        for memory_obj, payload in zip(objects, payloads, strict=True):
            memoryview(memory_obj)[:] = payload  # type: ignore[arg-type]
            memory_obj.seal()
        if self.tier.allocator is None:
            return objects
        return list(allocate_and_copy_objects(self.tier.allocator, objects))

    def put(self, keys: Sequence[CacheEngineKey], *payloads: bytes) -> int:
        """Puts, waits, and says how many were taken."""
        taken = self.tier.batched_submit_put_task(keys, self.objects(*payloads))
        assert self.tier.flush(DEADLINE_S)
        return taken

    def got(self, *keys: CacheEngineKey) -> list[bytes | None]:
        """The bytes that the tier has for these keys."""
        objects = self.tier.batched_get_blocking(keys)
        return [None if each is None else each.to_bytes() for each in objects]

    def in_use(self) -> int:
        """Bytes of the pool that somebody still holds."""
        books = self.pool.audit()
        return books["capacity_bytes"] - books["free_bytes"]


def assert_at_rest(subject: Subject) -> None:
    """No byte is held and no put waits, walked; a tier whose last answers nobody took is given the
    time to end them."""
    due = time.monotonic() + DEADLINE_S
    while subject.in_use() and time.monotonic() < due:
        time.sleep(0.01)
    assert subject.in_use() == 0
    stats = subject.tier.stats()
    assert stats.get("queued_chunks", 0) == stats.get("queued_bytes", 0) == 0
    assert stats.get("leased_bytes", 0) == stats.get("leases", 0) == 0


def _local_cpu(tmp_path: Path) -> Subject:
    local_cpu = _native.LocalCpu(POOL_BYTES, 1000)

    def lose(key: CacheEngineKey) -> None:
        assert local_cpu.remove(key.namespace, key.chunk_hash)

    return Subject(LocalCPUBackend(local_cpu), _native.LocalCpu(POOL_BYTES, 1000), lose)


def python_tier(
    backend: StorageBackend,
    lose: Callable[[CacheEngineKey], None],
    *,
    deadline_s: float = DEADLINE_S,
    max_queued_bytes: int | None = None,
    kind: type[BackendTier] = BackendTier,
) -> Subject:
    """A backend in Python as the manager drives it."""
    pool = _native.LocalCpu(POOL_BYTES, 1000)
    limits = {"deadline_s": deadline_s, "max_queued_bytes": max_queued_bytes or POOL_BYTES}
    tier = kind("mine", backend, pool=pool, **limits)  # type: ignore[arg-type]
    return Subject(tier, pool, lose)


def python_dict(
    kind: type[BackendTier] = BackendTier, backend: DictBackend | None = None
) -> Subject:
    """The least that is a backend, as a tier of this kind."""
    backend = backend or DictBackend()
    made = python_tier(backend, lambda key: backend.chunks.pop(key) and None, kind=kind)

    def reopen() -> StorageBackendInterface:
        limits = {"deadline_s": DEADLINE_S, "max_queued_bytes": POOL_BYTES}
        return kind("again", backend, pool=made.pool, **limits)  # type: ignore[arg-type]

    def exchange(key: CacheEngineKey, other: CacheEngineKey) -> None:
        backend.chunks[key] = backend.chunks[other]

    made.reopen, made.exchange = reopen, exchange
    return made


def _python_dict(tmp_path: Path) -> Subject:
    return python_dict()


def _python_files(tmp_path: Path) -> Subject:
    def opened() -> Any:
        return example("python_backend").FolderBackend(tmp_path / "chunks")

    backend = opened()

    def lose(key: CacheEngineKey) -> None:
        backend.path(key).unlink()

    def reopen() -> StorageBackendInterface:
        limits = {"deadline_s": DEADLINE_S, "max_queued_bytes": POOL_BYTES}
        return BackendTier("again", opened(), pool=made.pool, **limits)  # type: ignore[arg-type]

    def exchange(key: CacheEngineKey, other: CacheEngineKey) -> None:
        shutil.copyfile(backend.path(other), backend.path(key))

    made = python_tier(backend, lose)
    made.reopen, made.exchange = reopen, exchange
    return made


def _local_disk(path: Path) -> Subject:
    pool = _native.LocalCpu(POOL_BYTES, 1000)

    def reopen() -> LocalDiskBackend:
        return LocalDiskBackend([path], 64 << 20, pool, max_queued_bytes=POOL_BYTES)

    backend = reopen()

    def file_of(key: CacheEngineKey) -> Path:
        return Path(backend.local_disk.path_of(key.namespace, key.chunk_hash))

    def lose(key: CacheEngineKey) -> None:
        file_of(key).unlink()

    def exchange(key: CacheEngineKey, other: CacheEngineKey) -> None:
        shutil.copyfile(file_of(other), file_of(key))

    return Subject(backend, pool, lose, reopen=reopen, exchange=exchange)


def _local_disk_in_memory(tmp_path: Path) -> Subject:
    memory = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else tmp_path)
    made = _local_disk(Path(memory))
    weakref.finalize(made, shutil.rmtree, memory, ignore_errors=True)
    return made


def _remote(server: redis_servers.Server | redis_servers.Cluster, url: str) -> Subject:
    """A tier on a server that others use, too: all names of this one begin alike."""
    pool = _native.LocalCpu(POOL_BYTES, 1000)
    url = redis_servers.with_prefix(url, f"{secrets.token_hex(8)}:")
    backend = RemoteBackend(url, pool, max_queued_bytes=POOL_BYTES, deadline_s=DEADLINE_S)

    def lose(key: CacheEngineKey) -> None:
        name = backend.remote.name_of(key.namespace, key.chunk_hash)
        assert server.ask("DEL", name) == 1

    return Subject(backend, pool, lose)


def _redis(tmp_path: Path) -> Subject:
    redis_servers.require()
    server = redis_servers.plain()
    return _remote(server, server.url)


def _redis_socket(tmp_path: Path) -> Subject:
    redis_servers.require()
    server = redis_servers.plain()
    return _remote(server, f"redis+unix://{server.socket_path}")


def _redis_tls(tmp_path: Path) -> Subject:
    redis_servers.require()
    server = redis_servers.encrypted()
    return _remote(server, server.url)


def _redis_cluster(tmp_path: Path) -> Subject:
    redis_servers.require()
    server = redis_servers.cluster()
    return _remote(server, server.url)


def _s3(tmp_path: Path, serde: str = "naive") -> Subject:
    s3_server.require()
    server = s3_server.shared_server()
    pool = _native.LocalCpu(POOL_BYTES, 1000)
    with s3_server.credentials():
        backend = RemoteBackend(
            server.url(secrets.token_hex(8)),
            pool,
            max_queued_bytes=POOL_BYTES,
            deadline_s=DEADLINE_S,
            serde=serde,
        )

    def lose(key: CacheEngineKey) -> None:
        name = backend.remote.name_of(key.namespace, key.chunk_hash)
        assert server.request("HEAD", name)[0] == 200
        assert server.request("DELETE", name)[0] == 204

    return Subject(backend, pool, lose)


def _s3_lossless(tmp_path: Path) -> Subject:
    return _s3(tmp_path, "lossless")


TIERS = {
    "local_cpu": _local_cpu,
    "python_dict": _python_dict,
    "python_files": _python_files,
    "local_disk": _local_disk,
    "local_disk_in_memory": _local_disk_in_memory,
    "redis": _redis,
    "redis_socket": _redis_socket,
    "redis_tls": _redis_tls,
    "redis_cluster": _redis_cluster,
    "s3": _s3,
    "s3_lossless": _s3_lossless,
}


def serve_beside_a_dead_tier(config: LMCacheEngineConfig) -> dict[str, int]:
    """Stores and loads over two remote tiers, the first of which is out of reach; the other one's
    counters."""
    store = StorageManager(config)
    assert list(store.backends) == ["LocalCPUBackend", "RemoteBackend", "RemoteBackend1"]
    objects = store.batched_allocate([1000, 1000])
    assert objects is not None
    for memory_obj in objects:
        memoryview(memory_obj)[:] = b"x" * 1000  # type: ignore[arg-type]
    store.batched_put(chain(1, 2), objects)
    del objects, memory_obj
    assert store.flush(PATIENCE_S)
    assert store.backends["LocalCPUBackend"].clear() == 2
    assert store.contains(key(1)) == "RemoteBackend1"
    assert store.batched_contains(chain(1, 2, 3)) == 2
    found = store.batched_get(chain(1, 2))
    assert [each and each.to_bytes() for each in found] == [b"x" * 1000] * 2
    assert store.contains(key(1)) == "LocalCPUBackend"
    stats = store.stats()
    assert stats["RemoteBackend"]["faults_unreachable"] >= 1
    assert not any(name.startswith("faults_") for name in stats["RemoteBackend1"])
    del found
    assert store.close(PATIENCE_S)
    return stats["RemoteBackend1"]
