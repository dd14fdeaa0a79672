"""A tier on an object store that dies, hangs, lies, forgets or is none: misses, and never more.

The server is moto's, which keeps everything in memory. One that comes back with what it had is a
proxy that stops and starts again.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_remote_faults import RECOVERY_S, Remote, assert_prefix, payload
from tiers import PATIENCE_S, chain, key, serve_beside_a_dead_tier

import s3_server
from lmcache_rs import LMCacheEngineConfig, StorageManager
from redis_servers import free_port, wait_until
from s3_server import Fault, Proxy, S3Server

DEADLINE_S = 3.0
# A call may take its deadline, and a busy machine its time.
SLACK_S = 20.0
MUTATIONS = 1000


@pytest.fixture(autouse=True)
def _credentials() -> Iterator[None]:
    with s3_server.credentials():
        yield


@pytest.fixture
def server() -> S3Server:
    """The one that all tests share; each has names of its own."""
    s3_server.require()
    return s3_server.shared_server()


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Proxy]:
    """The way to it."""
    made = Proxy(server.port)
    yield made
    made.stop()


def over(proxy: Proxy, **settings: object) -> Remote:
    settings = {"deadline_s": DEADLINE_S, **settings}
    return Remote(proxy.url(secrets.token_hex(8)), **settings)  # type: ignore[arg-type]


def test_a_server_that_goes_amid_puts_and_gets_is_used_again_when_it_is_back(proxy: Proxy) -> None:
    keys, payloads = chain(*range(12)), [payload(number) for number in range(12)]
    with over(proxy) as remote:
        assert remote.put(keys, payloads) == 12
        hits: list[int] = []
        ending = threading.Event()

        def read() -> None:
            while not ending.is_set():
                hits.append(assert_prefix(remote.got(keys), payloads))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            wait_until("reads are under way", lambda: len(hits) > 1)
            others = chain(*range(100, 116))
            taken = remote.offer(others, [payload(100 + n) for n in range(16)])
            proxy.stop()
            assert remote.tier.flush(PATIENCE_S)
            wait_until("reads are misses", lambda: hits[-1] == 0)
            wait_until("it is left alone", lambda: remote.stat("out_of_reach") == 1)
            done = remote.stat("put_chunks") - 12 + remote.stat("dropped_chunks")
            assert done >= taken
            assert remote.faults().keys() <= {"unreachable", "timeout", "deadline"}
            proxy.start()
            began = time.monotonic()
            wait_until("hits are back", lambda: hits[-1] == 12)
            assert time.monotonic() - began <= RECOVERY_S
        finally:
            ending.set()
            reader.join(PATIENCE_S)
        assert remote.got(keys) == payloads


def test_a_server_that_was_killed_and_comes_back_empty_is_filled_again() -> None:
    s3_server.require()
    server = S3Server()
    keys, payloads = chain(*range(4)), [payload(number) for number in range(4)]
    try:
        with Remote(server.url("p"), deadline_s=DEADLINE_S) as remote:
            assert remote.put(keys, payloads) == 4
            server.kill()
            # What was there a moment ago is hinted at, and is a miss.

            def is_left_alone() -> bool:
                assert remote.got(keys) == [None] * 4
                return remote.stat("out_of_reach") == 1

            wait_until("it is left alone", is_left_alone)
            assert remote.tier.batched_contains(keys) == 0
            assert remote.put(keys, payloads) == 0
            server = S3Server(server.port)

            def refilled() -> bool:
                remote.put(keys, payloads)
                return remote.got(keys) == payloads

            assert wait_until("it is filled again", refilled) <= RECOVERY_S
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        (Fault("status", status=403, code="AccessDenied"), {"denied"}),
        (Fault("status", status=404, code="NoSuchBucket"), {"denied"}),
        (Fault("status", status=500), {"server"}),
        (Fault("status", status=503, code="SlowDown"), {"server"}),
        (Fault("no_http"), {"protocol"}),
        (Fault("hang"), {"timeout", "deadline"}),
        (Fault("slow", seconds=PATIENCE_S), {"timeout", "deadline"}),
        (Fault("cut_answer", methods=("GET",)), {"unreachable"}),
        (Fault("truncate", methods=("GET",)), {"truncated"}),
        (Fault("change", methods=("GET",), change=lambda body: body[::-1]), {"magic"}),
        (Fault("change", methods=("GET",), change=lambda body: b""), {"truncated"}),
        (Fault("change", methods=("GET",), change=lambda body: body * 2), {"length"}),
    ],
    ids=lambda each: f"{each.kind} {each.status}" if isinstance(each, Fault) else None,
)
def test_what_goes_wrong_is_a_miss_in_time_and_counted(
    proxy: Proxy, fault: Fault, reasons: set[str]
) -> None:
    keys, payloads = chain(1, 2, 3), [payload(number, 20_000) for number in range(3)]
    with over(proxy) as remote:
        assert remote.put(keys, payloads) == 3
        proxy.fault = fault
        began = time.monotonic()
        assert remote.got(keys) == [None] * 3
        assert time.monotonic() - began < DEADLINE_S + SLACK_S
        assert remote.faults().keys() & reasons
        began = time.monotonic()
        assert remote.tier.batched_contains(chain(7)) == 0
        remote.put(chain(8), [b"x"])
        assert time.monotonic() - began < 2 * DEADLINE_S + SLACK_S
        proxy.fault = None
        # A damaged chunk was removed; whatever it was, it is stored and found again.

        def is_well() -> bool:
            remote.put(keys, payloads)
            return remote.got(keys) == payloads

        assert wait_until("it is used again", is_well) <= RECOVERY_S


def test_a_put_that_is_cut_leaves_nothing(proxy: Proxy, server: S3Server) -> None:
    with over(proxy) as remote:
        remote.put(chain(0), [b"x"])
        proxy.fault = Fault("cut_request", methods=("PUT",))
        assert remote.put(chain(1), [payload(1)]) == 1
        assert remote.stat("dropped_chunks") == 1
        assert remote.faults().keys() == {"unreachable"}
        proxy.fault = None
        assert server.request("HEAD", remote.name(key(1)))[0] == 404
        wait_until("it is used again", lambda: bool(remote.put(chain(1), [payload(1)])))
        wait_until("it is stored", lambda: remote.got(chain(1)) == [payload(1)])


def test_a_store_that_is_busy_once_is_asked_again(proxy: Proxy) -> None:
    with over(proxy) as remote:
        assert remote.put(chain(1), [b"x"]) == 1
        proxy.fault = Fault("status", methods=("GET",), status=503, code="SlowDown")
        before = proxy.count("GET")
        threading.Thread(
            target=lambda: (
                wait_until("it was asked", lambda: proxy.count("GET") > before),
                setattr(proxy, "fault", None),
            )
        ).start()
        assert remote.got(chain(1)) == [b"x"]
        assert remote.faults() == {}


def test_a_store_that_forbids_puts_is_read_from(proxy: Proxy) -> None:
    with over(proxy) as remote:
        assert remote.put(chain(1), [b"x"]) == 1
        proxy.fault = Fault("status", methods=("PUT",), status=403, code="AccessDenied")
        puts = proxy.count("PUT")
        for number in range(2, 30):
            remote.put(chain(number), [b"y"])
        # Left alone for a while, and not asked thirty times.
        assert proxy.count("PUT") - puts < 10
        assert remote.faults().keys() == {"denied"}
        assert remote.got(chain(1)) == [b"x"]
        assert remote.stat("out_of_reach") == 0


def test_what_others_delete_is_a_miss_and_is_stored_anew(proxy: Proxy, server: S3Server) -> None:
    keys, payloads = chain(*range(6)), [payload(number, 5000) for number in range(6)]
    with over(proxy) as remote:
        for _ in range(3):
            assert remote.put(keys, payloads) == 6
            for lost in keys[3:]:
                assert server.request("DELETE", remote.name(lost))[0] == 204
            assert remote.got(keys) == [*payloads[:3], None, None, None]
            # The failed load has told: no lookup promises it again.
            assert remote.tier.batched_contains(keys) == 3
            remote.put(keys, payloads)
            assert remote.got(keys) == payloads
            for lost in keys:
                server.request("DELETE", remote.name(lost))
            assert remote.got(keys) == [None] * 6
            assert remote.tier.batched_contains(keys) == 0
        assert remote.faults() == {}


def test_a_chunk_of_another_key_or_of_another_packing_is_never_taken(
    proxy: Proxy, server: S3Server
) -> None:
    with over(proxy) as remote, over(proxy, serde="lossless") as packing:
        for each in (remote, packing):
            assert each.put(chain(1, 2), [b"first", b"second"]) == 2
        for each, reason in ((remote, "foreign"), (packing, "foreign")):
            other = server.request("GET", each.name(key(2)))[1]
            server.request("PUT", each.name(key(1)), other)
            assert each.got(chain(1)) == [None]
            assert each.faults() == {reason: 1}
        for each, other in ((remote, packing), (packing, remote)):
            server.request("PUT", each.name(key(2)), server.request("GET", other.name(key(2)))[1])
        for each in (remote, packing):
            if each.got(chain(2)) != [None]:
                # The second was put where the first had been taken from.
                assert each.got(chain(2)) == [b"second"]
            assert each.faults().keys() <= {"foreign", "version"}


@pytest.mark.parametrize("serde", ["naive", "lossless"])
def test_a_thousand_damaged_objects_are_a_thousand_misses(server: S3Server, serde: str) -> None:
    def damaged(whole: bytes, numbers: random.Random) -> bytes:
        data = bytearray(whole)
        kind = numbers.randrange(4)
        if kind == 0:
            data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
        elif kind == 1:
            del data[numbers.randrange(len(data)) :]
        elif kind == 2:
            at = numbers.randrange(len(data) - 1)
            end = min(len(data), at + 1 + numbers.randrange(600))
            data[at:end] = numbers.randbytes(end - at)
        else:
            data += numbers.randbytes(1 + numbers.randrange(64))
        return bytes(data)

    def is_gone(name: str) -> bool:
        return server.request("HEAD", name)[0] == 404

    def lane(lane_number: int) -> int:
        numbers = random.Random(lane_number)
        seen = 0
        url = server.url(secrets.token_hex(8))
        with Remote(url, deadline_s=PATIENCE_S, serde=serde) as remote:
            wanted = numbers.randbytes(3000)
            assert remote.put(chain(1), [wanted]) == 1
            whole = server.request("GET", remote.name(key(1)))[1]
            for _ in range(MUTATIONS // 4):
                data = damaged(whole, numbers)
                if data == whole:
                    continue
                assert server.request("PUT", remote.name(key(1)), data)[0] == 200
                assert remote.got(chain(1)) == [None]
                seen += 1
                wait_until("it is removed", lambda: is_gone(remote.name(key(1))))
            assert sum(remote.faults().values()) == seen
            assert server.request("PUT", remote.name(key(1)), whole)[0] == 200
            assert remote.got(chain(1)) == [wanted]
        return seen

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(lane, range(4))) > MUTATIONS * 0.99


def test_one_store_out_of_reach_leaves_the_others_as_they_are(server: S3Server) -> None:
    dead = s3_server.s3_url(f"http://127.0.0.1:{free_port()}", "p")
    config = LMCacheEngineConfig.from_defaults(
        max_local_cpu_size=0.01,
        remote_url=f"{dead}, {server.url(secrets.token_hex(8))}",
        remote_serde="lossless",
        blocking_timeout_secs=DEADLINE_S,
    )
    stats = serve_beside_a_dead_tier(config)
    # Packed: a header, and hardly more.
    assert stats["sent_bytes"] < 2 * (4096 + 100)


def test_settings_that_cannot_be_kept_are_said(
    server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"max_local_cpu_size": 0.01, "remote_url": server.url("p")}
    store = StorageManager(LMCacheEngineConfig.from_defaults(remote_ttl=60.0, **settings))
    assert list(store.backends) == ["LocalCPUBackend"]
    assert "lifecycle rule" in caplog.text
    assert store.close(PATIENCE_S)
    with pytest.raises(ValueError, match="lifecycle rule"):
        StorageManager(LMCacheEngineConfig.from_defaults(remote_ttl=60.0, strict=True, **settings))
    for url in ("s3://me:hunter2@bucket/p", "s3://bucket/p?secret=hunter2"):
        settings["remote_url"] = url
        with pytest.raises(ValueError, match="environment|option") as raised:
            StorageManager(LMCacheEngineConfig.from_defaults(strict=True, **settings))
        assert "hunter2" not in str(raised.value)


def test_credentials_are_in_no_line(
    proxy: Proxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hunter1")
    with over(proxy) as remote:
        proxy.fault = Fault("status", status=403, code="SignatureDoesNotMatch")
        remote.put(chain(1), [b"x"])
        assert remote.got(chain(1)) == [None]
        shown = f"{remote.tier.health()} {remote.tier!r} {caplog.text}"
        assert "SignatureDoesNotMatch" in shown
        assert "hunter" not in shown
