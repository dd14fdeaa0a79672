"""`lmcache-rs store` and `doctor` on servers: what they print, remove and warn of."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import redis_servers
import s3_server
from lmcache_rs import CacheEngineKey, MemoryObj, _native
from lmcache_rs.cli import main
from lmcache_rs.storage import RemoteBackend

Capture = pytest.CaptureFixture[str]


@dataclass
class Shelf:
    """A server with a prefix of the test's own.

    Args:
        url: What `remote_url` is.
        read: The value of a name, as a bare client reads it.
        write: Writes one.
        names: All names under the prefix.
    """

    url: str
    read: Callable[[str], bytes]
    write: Callable[[str, bytes], None]
    names: Callable[[], list[str]]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("LMCACHE_"):
            monkeypatch.delenv(name)


def redis_shelf() -> Shelf:
    redis_servers.require()
    server = redis_servers.plain()
    prefix = f"{secrets.token_hex(8)}:"

    def names() -> list[str]:
        return sorted(name.decode() for name in server.ask("KEYS", f"{prefix}*"))

    return Shelf(
        redis_servers.with_prefix(server.url, prefix),
        lambda name: bytes(server.ask("GET", name)),
        lambda name, data: server.ask("SET", name, data),
        names,
    )


def s3_shelf() -> Shelf:
    s3_server.require()
    server = s3_server.shared_server()
    prefix = secrets.token_hex(8)

    def write(name: str, data: bytes) -> None:
        assert server.request("PUT", name, data)[0] == 200

    return Shelf(
        server.url(prefix),
        lambda name: server.request("GET", name)[1],
        write,
        lambda: server.names(prefix),
    )


@pytest.fixture(params=["redis", "s3"])
def shelf(request: pytest.FixtureRequest) -> Iterator[Shelf]:
    with s3_server.credentials():
        yield {"redis": redis_shelf, "s3": s3_shelf}[request.param]()


def key(model: str, number: int) -> CacheEngineKey:
    return CacheEngineKey(model, 1, 0, number.to_bytes(4, "big") * 8, "float32")


KEYS = [key("a", 1), key("a", 2), key("b", 3)]
PAYLOAD = bytes(at * at % 7 for at in range(5000))


def fill(shelf: Shelf) -> dict[CacheEngineKey, str]:
    """Two chunks as they are and one packed, with the name of each."""
    names = {}
    for serde, keys in (("naive", KEYS[:2]), ("lossless", KEYS[2:])):
        pool = _native.LocalCpu(1 << 20, 1000)
        tier = RemoteBackend(shelf.url, pool, serde=serde, deadline_s=20.0)
        for each in keys:
            allocated = pool.allocate([len(PAYLOAD)])
            assert allocated is not None
            memory_obj = MemoryObj(allocated[0])
            memoryview(memory_obj)[:] = PAYLOAD  # type: ignore[arg-type]
            memory_obj.seal()
            assert tier.submit_put_task(each, memory_obj)
            names[each] = tier.remote.name_of(each.namespace, each.chunk_hash)
        assert tier.flush(20.0)
        assert tier.close(20.0)
    assert sorted(names.values()) == shelf.names()
    return names


def test_chunks_are_listed_and_counted(shelf: Shelf, capsys: Capture) -> None:
    fill(shelf)
    assert main(["store", "ls", shelf.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[-1] for line in lines) == sorted(str(each) for each in KEYS)
    assert all(line.split()[:2] == ["5000", "bytes"] for line in lines)
    assert main(["store", "stat", shelf.url]) == 0
    a, b, total = capsys.readouterr().out.splitlines()
    assert a == "model=a: 2 chunks, 18192 bytes, 0 tokens"
    assert b.startswith("model=b: 1 chunks, ")
    packed = int(b.split()[3])
    assert 4096 < packed < 9096
    assert total == f"total: 3 chunks, {18192 + packed} bytes, 0 tokens"


def test_damage_is_found_named_and_removed(shelf: Shelf, capsys: Capture) -> None:
    names = fill(shelf)
    assert main(["store", "verify", shelf.url]) == 0
    assert "3 chunks" in capsys.readouterr().out
    damaged = bytearray(shelf.read(names[KEYS[1]]))
    damaged[5000] ^= 1
    shelf.write(names[KEYS[1]], bytes(damaged))
    packed = bytearray(shelf.read(names[KEYS[2]]))
    packed[-1] ^= 1
    shelf.write(names[KEYS[2]], bytes(packed))
    foreign = names[KEYS[0]][:-4] + "0000"
    shelf.write(foreign, shelf.read(names[KEYS[0]]))
    assert main(["store", "verify", shelf.url]) == 1
    told = capsys.readouterr().out
    assert f"checksum: {names[KEYS[1]]}" in told
    assert f"checksum: {names[KEYS[2]]}" in told
    assert f"foreign: {foreign}" in told
    assert "4 chunks" in told
    assert "3 damaged" in told
    assert main(["store", "rm", "--damaged", shelf.url]) == 0
    assert "3 removed, 0 left" in capsys.readouterr().out
    assert main(["store", "verify", shelf.url]) == 0
    assert shelf.names() == [names[KEYS[0]]]


def test_a_key_that_names_no_chunk_is_foreign(shelf: Shelf, capsys: Capture) -> None:
    names = fill(shelf)
    odd = names[KEYS[2]][:-4] + "0000"
    # A whole object, under a name of ours, whose key has no hash.
    shelf.write(odd, _native.pack_object(bytes(64), "float32"))
    assert main(["store", "verify", shelf.url]) == 1
    told = capsys.readouterr().out
    assert f"foreign: {odd}" in told
    assert "4 chunks" in told
    assert "1 damaged" in told
    for action in ("ls", "stat"):
        assert main(["store", action, shelf.url]) == 0
    assert main(["store", "rm", "--damaged", shelf.url]) == 0
    assert shelf.names() == sorted(names.values())
    # Nobody could use it: it goes with any prefix.
    shelf.write(odd, _native.pack_object(bytes(64), "float32"))
    assert main(["store", "rm", "--prefix", "model=none", shelf.url]) == 0
    assert shelf.names() == sorted(names.values())


def test_more_chunks_than_one_page_are_removed_page_by_page(
    shelf: Shelf, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(shelf)
    name = shelf.names()[0][:-4]
    for number in range(0x1000, 0x1000 + 1200):
        shelf.write(f"{name}{number:04x}", b"x")
    other = name[: name.rindex("/")] + "/of-others"
    shelf.write(other, b"x")
    asked: list[float] = []
    remote = _native.Remote

    class Watched:
        """A tier whose clear, which has one time for all, is not to be used."""

        def __init__(self, *given: Any, **named: Any) -> None:
            self.tier = remote(*given, **named)

        def __getattr__(self, name: str) -> Any:
            assert name != "clear"
            return getattr(self.tier, name)

        def remove_names(self, names: list[str], within_s: float) -> int:
            asked.append(within_s)
            return self.tier.remove_names(names, within_s)

    monkeypatch.setattr(_native, "Remote", Watched)
    assert main(["store", "rm", "--all", shelf.url]) == 0
    assert "1203 removed" in capsys.readouterr().out
    assert shelf.names() == [other]
    assert len(asked) >= 4


def test_a_prefix_is_removed_and_nothing_of_others(shelf: Shelf, capsys: Capture) -> None:
    names = fill(shelf)
    other = names[KEYS[0]].split("lmcache_rs.")[0] + "of-others"
    shelf.write(other, b"x")
    assert main(["store", "rm", "--prefix", "model=a", shelf.url]) == 0
    assert "2 removed" in capsys.readouterr().out
    assert shelf.names() == sorted([names[KEYS[2]], other])
    assert main(["store", "rm", "--all", shelf.url]) == 0
    assert "1 removed" in capsys.readouterr().out
    assert shelf.names() == [other]


def test_a_server_that_is_not_there_and_a_wrong_url_are_said(capsys: Capture) -> None:
    port = redis_servers.free_port()
    for url in (
        f"redis://:hunter2@127.0.0.1:{port}/",
        f"s3://bucket/p?endpoint=http://127.0.0.1:{port}&signature=none",
    ):
        for action in (["ls"], ["stat"], ["verify"], ["rm", "--all"]):
            assert main(["store", *action, url]) == 1
            told = capsys.readouterr().err
            assert "unreachable" in told
            assert "hunter2" not in told
    for url in ("gopher://me:hunter2@h/p", "s3://me:hunter2@h/p"):
        assert main(["store", "ls", url]) == 2
        assert "hunter2" not in capsys.readouterr().err


def doctor(capsys: Capture, tmp_path: Path, **given: object) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and what it found of the servers."""
    path = tmp_path / "lmcache.yaml"
    given = {"max_local_cpu_size": 0.01, "blocking_timeout_secs": 5.0, **given}
    path.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in given.items()))
    code = main(["doctor", "--json", "--config", str(path)])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return code, [each for each in findings if each["check"].startswith("remote")]


@pytest.mark.parametrize("serde", ["naive", "lossless"])
def test_the_doctor_uses_a_server_as_an_engine_would(
    shelf: Shelf, tmp_path: Path, capsys: Capture, serde: str
) -> None:
    code, found = doctor(capsys, tmp_path, remote_url=shelf.url, remote_serde=serde)
    assert code == 0, found
    words = " ".join(each["found"] for each in found)
    assert " ms" in words
    assert "it stores, reads, lists and removes" in words
    assert "4 chunks stored and loaded back, checksums equal" in words
    # Nothing is left.
    assert shelf.names() == []


def test_the_doctor_warns_of_a_redis_without_a_limit(tmp_path: Path, capsys: Capture) -> None:
    redis_servers.require()
    server = redis_servers.Server()
    try:
        _, found = doctor(capsys, tmp_path, remote_url=server.url)
        assert [each["verdict"] for each in found if "maxmemory" in each["found"]] == ["note"]
        server.ask("CONFIG", "SET", "maxmemory", "64mb")
        server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        _, found = doctor(capsys, tmp_path, remote_url=server.url)
        (memory,) = [each for each in found if "noeviction" in each["found"]]
        assert memory["verdict"] == "note"
        server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        code, found = doctor(capsys, tmp_path, remote_url=server.url)
        assert code == 0
        assert {each["verdict"] for each in found} == {"ok"}
    finally:
        server.close()


def test_the_doctor_tells_what_an_engine_would_miss(tmp_path: Path, capsys: Capture) -> None:
    s3_server.require()
    server = s3_server.shared_server()
    proxy = s3_server.Proxy(server.port)
    try:
        with s3_server.credentials():
            url = proxy.url(secrets.token_hex(8))
            proxy.fault = s3_server.Fault(
                "status", methods=("PUT",), status=403, code="AccessDenied"
            )
            code, found = doctor(capsys, tmp_path, remote_url=url)
            assert code == 1
            (problem,) = [each for each in found if each["verdict"] == "problem"]
            assert "PutObject" in problem["found"]
            proxy.fault = s3_server.Fault("status", status=404, code="NoSuchBucket")
            code, found = doctor(capsys, tmp_path, remote_url=url)
            assert code == 1
            assert "no such bucket" in found[0]["found"]
            proxy.fault = None
            code, found = doctor(capsys, tmp_path, remote_url=f"{url}, {url}")
            assert code == 0
            assert {each["check"] for each in found} == {"remote 0", "remote 1"}
            code, found = doctor(capsys, tmp_path, remote_url=url, remote_ttl=60)
            assert code == 1
            assert "lifecycle" in found[0]["found"]
            proxy.stop()
            code, found = doctor(capsys, tmp_path, remote_url=url)
            assert code == 1
            assert "reach" in found[0]["found"]
    finally:
        proxy.stop()


def test_a_packing_that_loses_bits_is_wrong_usage(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "lmcache.yaml"
    for serde, words in (("cachegen", "changes the numbers"), ("zip", "naive or lossless")):
        path.write_text(f"remote_serde: {serde}\n")
        assert main(["doctor", "--config", str(path)]) == 2
        assert words in capsys.readouterr().err
