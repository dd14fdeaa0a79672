"""`lmcache-rs doctor`: what it finds on real folders, and how it says so."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plain_shelf import Shelf

from lmcache_rs import CacheEngineKey, cli, doctor


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("LMCACHE_"):
            monkeypatch.delenv(name)


class Damaged(Shelf):
    """One that gives back other bytes."""

    def get(self, key: CacheEngineKey) -> tuple[bytes, bytes] | None:
        found = super().get(key)
        return None if found is None else (b"?" + found[0][1:], found[1])


class Forgetful(Shelf):
    """One that stores nothing."""

    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        pass


class Unreachable(Shelf):
    """One that cannot be made."""

    def __init__(self) -> None:
        raise ConnectionRefusedError("nobody listens")


def settings(tmp_path: Path, **given: object) -> Path:
    path = tmp_path / "lmcache.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in given.items()))
    return path


def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, **given: object
) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the findings."""
    given = {"max_local_cpu_size": 0.01, **given}
    code = cli.main(["doctor", "--json", "--config", str(settings(tmp_path, **given))])
    told = json.loads(capsys.readouterr().out)
    findings: list[dict[str, Any]] = told["findings"]
    assert told["ok"] == all(each["verdict"] != "problem" for each in findings)
    assert code == (0 if told["ok"] else 1)
    for each in findings:
        assert each["verdict"] != "problem" or each["change"], "and what to do about it"
    return code, findings


def problems(findings: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["check"], each["found"]) for each in findings if each["verdict"] == "problem"]


def disk(tmp_path: Path) -> dict[str, object]:
    return {"local_disk": str(tmp_path / "disk"), "max_local_disk_size": 0.1}


def test_a_sound_machine_has_no_problems_and_every_tier_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backends = {"shelf": "plain_shelf:Shelf"}
    code, findings = run(capsys, tmp_path, **disk(tmp_path), storage_backends=backends)
    assert (code, problems(findings)) == (0, [])
    tried = [each["check"] for each in findings if "checksums equal" in each["found"]]
    assert tried == ["local_cpu", "local_disk", "shelf"]
    checks = {each["check"] for each in findings}
    assert checks >= {"settings", "engine", "native part", "GPU driver", "memory", "memory locks"}
    # Nothing of the trial is left.
    assert not list((tmp_path / "disk" / "lmcache_rs.v1").glob("[0-3][0-9a-f]/*"))
    assert not list((tmp_path / "disk").glob(".lmcache_rs-doctor*"))


def test_chunks_of_others_stay_even_where_there_are_more_than_the_limit_allows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lmcache_rs import MemoryObj, _native
    from lmcache_rs.storage import LocalDiskBackend

    pool = _native.LocalCpu(1 << 22, 1000)
    tier = LocalDiskBackend([tmp_path / "disk"], 1 << 30, pool, max_queued_bytes=1 << 22)
    allocated = pool.allocate([1 << 20] * 2)
    assert allocated is not None
    keys = [CacheEngineKey("m", 1, 0, bytes([number]) * 32, "uint8") for number in range(2)]
    for memory_obj in allocated:
        memory_obj.seal()
    assert tier.batched_submit_put_task(keys, [MemoryObj(raw) for raw in allocated]) == 2
    assert tier.flush(20.0)
    run(capsys, tmp_path, **{**disk(tmp_path), "max_local_disk_size": 3 / 1024})
    assert tier.batched_contains(keys) == 2
    tier.close(20.0)


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "disk").write_bytes(b"")
    code, findings = run(capsys, tmp_path, **disk(tmp_path))
    ((check, found),) = problems(findings)
    assert (code, check) == (1, "local_disk")
    assert str(tmp_path / "disk") in found


def test_a_folder_without_the_right_to_write_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of the kernel's own: no user may, root included.
    code, findings = run(capsys, tmp_path, local_disk="/proc/self", max_local_disk_size=0.1)
    ((check, found),) = problems(findings)
    assert (code, check) == (1, "local_disk")
    assert found.startswith("/proc/self cannot be used: ")


def test_a_disk_smaller_than_its_limit_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, findings = run(capsys, tmp_path, **{**disk(tmp_path), "max_local_disk_size": 2.0**30})
    ((check, found),) = problems(findings)
    assert (code, check) == (1, "local_disk")
    assert "free" in found


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte; skipped where nobody may mount one."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_found_by_trying(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tried = {"local_disk": str(tiny), "max_local_disk_size": 0.1}
    code, findings = run(capsys, tiny.parent, **tried)
    assert code == 1
    found = [words for _, words in problems(findings)]
    assert any("max_local_disk_size is 0.10 GB" in words for words in found)
    assert any("not stored: no_space" in words for words in found)


def test_a_size_that_is_missing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, findings = run(capsys, tmp_path, local_disk=str(tmp_path / "disk"))
    assert code == 1
    assert [check for check, _ in problems(findings)] == ["local_disk"]
    assert not (tmp_path / "disk").exists(), "nothing is made that is not used"


def test_more_memory_than_there_is_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, findings = run(capsys, tmp_path, max_local_cpu_size=2.0**20)
    assert (code, [check for check, _ in problems(findings)]) == (1, ["memory"])


def test_memory_that_a_control_group_may_not_have_is_not_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    8000 kB\n")
    assert doctor.available_bytes(meminfo, tmp_path) == 8000 << 10
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    assert doctor.available_bytes(meminfo, tmp_path) == 1000000
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.available_bytes(meminfo, tmp_path) == 8000 << 10
    assert doctor.available_bytes(tmp_path / "none", tmp_path) == 0


def test_a_limit_of_locked_memory_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = []
    for limit in (resource.RLIM_INFINITY, 1 << 40, 4096):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        _, findings = run(capsys, tmp_path)
        verdicts += [each["verdict"] for each in findings if each["check"] == "memory locks"]
    assert verdicts == ["ok", "ok", "note"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Damaged", "did not come back, checksum 1"),
        ("Forgetful", "not stored"),
        ("Unreachable", "ConnectionRefusedError: nobody listens"),
        ("Missing", "AttributeError"),
        ("pytest", "no StorageBackend"),
    ],
)
def test_a_backend_that_breaks_its_promises_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, words: str
) -> None:
    made_by = "collections:Counter" if kind == "pytest" else f"{__name__}:{kind}"
    code, findings = run(capsys, tmp_path, storage_backends={"shelf": made_by})
    ((check, found),) = problems(findings)
    assert (code, check) == (1, "shelf")
    assert words in found


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("0.32.0+cpu", "ok"), ("0.99.0", "note"), (None, "note"), ("0.1.0", "problem")],
)
def test_the_engine_s_version_is_held_against_the_table(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    version: str | None,
    verdict: str,
) -> None:
    monkeypatch.setattr(doctor, "_vllm_version", lambda: version)
    monkeypatch.setattr(doctor, "BROKEN_VERSIONS", {"0.1.0": "of the tests"})
    _, findings = run(capsys, tmp_path)
    assert [each["verdict"] for each in findings if each["check"] == "engine"] == [verdict]


def test_settings_that_stop_the_start_are_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = settings(tmp_path, chunk_sise=3, max_local_cpu_size="five")
    assert cli.main(["doctor", "--json", "--config", str(path)]) == 2
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert not told["ok"]
    assert len(told["findings"]) == 2
    assert "chunk_size" in captured.err
    assert cli.main(["doctor", "--config", str(tmp_path / "none.yaml")]) == 2


def test_people_get_a_line_for_each_finding_and_the_number_of_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "0.01")
    monkeypatch.setenv("LMCACHE_RS_DISABLE", "1")
    assert cli.main(["doctor"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "0 problems found"
    assert {line.split()[0] for line in lines} <= {"ok", "note"}
    assert any("LMCACHE_RS_DISABLE is on" in line for line in lines)
    assert any("max_local_cpu_size 0.01 (env:LMCACHE_MAX_LOCAL_CPU_SIZE)" in line for line in lines)


def test_another_kind_of_tier_adds_its_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> list[doctor.Finding]:
        raise ValueError("of the check")

    def finds(_: object) -> list[doctor.Finding]:
        return [doctor.Finding("far", "problem", "nobody answers", "start it")]

    monkeypatch.setitem(doctor.TIER_CHECKS, "far", finds)
    monkeypatch.setitem(doctor.TIER_CHECKS, "broken", fails)
    code, findings = run(capsys, tmp_path)
    assert code == 1
    assert [check for check, _ in problems(findings)] == ["far", "broken"]
