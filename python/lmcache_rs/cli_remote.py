"""`lmcache-rs store` on a server: looks into a remote tier by its URL, while others use it."""

from __future__ import annotations

import argparse
import collections
import importlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lmcache_rs.config_keys import without_credentials

EXIT_OK = 0
EXIT_FOUND = 1
EXIT_USAGE = 2
SERDES = ("naive", "lossless")
"""Each has names of its own."""
_HEAD_BYTES = 1 << 16
"""Headers are longer only where positions are kept."""
_WHOLE_BYTES = 512 << 20
_DEADLINE_S = 30.0
_AT_A_TIME = 16
_REMOVED_AT_A_TIME = 500


@dataclass(frozen=True)
class StoredValue:
    """A chunk's value on a server.

    Args:
        name: Its name.
        value_bytes: Its size.
        key: The chunk's key; None if its header does not read right.
        payload_bytes: Bytes of the chunk.
        num_tokens: Tokens of the chunk; 0 if nobody said.
        defect: What is wrong with it, in one word.
    """

    name: str
    value_bytes: int
    key: str | None
    payload_bytes: int
    num_tokens: int
    defect: str | None


def is_url(path: str) -> bool:
    """Whether a store is a server's and no folder."""
    return "://" in path


def run(action: str, parsed: argparse.Namespace) -> int:
    """Does one of `ls`, `verify`, `stat` and `rm` on the server that `parsed.path` names."""
    try:
        with _opened(parsed.path) as remotes:
            return _ACTIONS[action](remotes, parsed)
    except ValueError as error:
        print(f"lmcache-rs: {without_credentials(parsed.path)}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"lmcache-rs: {without_credentials(parsed.path)}: {error}", file=sys.stderr)
        return EXIT_FOUND


@contextmanager
def _opened(url: str) -> Iterator[list[Any]]:
    """The tiers on a server, one for each form of its values."""
    from lmcache_rs.storage.remote import credentials

    native: Any = importlib.import_module("lmcache_rs._native")
    pool = native.LocalCpu(1 << 20, 1000)
    remotes: list[Any] = []
    try:
        for serde in SERDES:
            remotes.append(
                native.Remote(
                    url, pool, credentials=credentials(), deadline_s=_DEADLINE_S, serde=serde
                )
            )
        yield remotes
    finally:
        for remote in remotes:
            remote.close(1.0)


def stored(remotes: list[Any], *, whole: bool) -> Iterator[StoredValue]:
    """The chunks on a server. One that somebody removes meanwhile is left out.

    Args:
        remotes: Its tiers.
        whole: Read payloads too, and see whether they are what was put.

    Raises:
        OSError: The server refuses.
    """
    native: Any = importlib.import_module("lmcache_rs._native")

    def looked_at(remote: Any, name: str, nbytes: int) -> StoredValue | None:
        data = remote.begin(name, _WHOLE_BYTES if whole else _HEAD_BYTES, _DEADLINE_S)
        if data is None:
            return None
        key, payload_bytes, num_tokens, defect = native.inspect_object(data)
        if key is not None:
            namespace, _, chunk_hash = key.rpartition("@hash=")
            is_its = remote.name_of(namespace, bytes.fromhex(chunk_hash)) == name
            defect = (defect if whole else None) if is_its else "foreign"
        return StoredValue(name, nbytes, key, payload_bytes or 0, num_tokens or 0, defect)

    with ThreadPoolExecutor(_AT_A_TIME) as threads:
        for remote in remotes:
            seen: set[str] = set()
            cursor: str | None = None
            while True:
                page, cursor = remote.list_page(cursor, _DEADLINE_S)
                # A server may give a name twice.
                page = [(name, nbytes) for name, nbytes in sorted(page) if name not in seen]
                seen.update(name for name, _ in page)
                of_page = [threads.submit(looked_at, remote, *each) for each in page]
                for each in of_page:
                    found = each.result()
                    if found is not None:
                        yield found
                if cursor is None:
                    break


def _ls(remotes: list[Any], parsed: argparse.Namespace) -> int:
    for each in stored(remotes, whole=False):
        what = each.key or f"({each.defect}: {each.name})"
        # A server does not say of all when they were written.
        print(f"{each.payload_bytes:>12} bytes {each.num_tokens:>6} tokens {'-':>8} s  {what}")
    return EXIT_OK


def _verify(remotes: list[Any], parsed: argparse.Namespace) -> int:
    count, nbytes, damaged = 0, 0, 0
    for each in stored(remotes, whole=True):
        count += 1
        nbytes += each.value_bytes
        if each.defect is not None:
            damaged += 1
            print(f"{each.defect}: {each.name}")
    print(f"{count} chunks, {nbytes} bytes, {damaged} damaged")
    return EXIT_FOUND if damaged else EXIT_OK


def _stat(remotes: list[Any], parsed: argparse.Namespace) -> int:
    chunks: collections.Counter[str] = collections.Counter()
    nbytes: collections.Counter[str] = collections.Counter()
    tokens: collections.Counter[str] = collections.Counter()
    for each in stored(remotes, whole=False):
        model = (each.key or "(unreadable)").split("@")[0]
        chunks[model] += 1
        nbytes[model] += each.value_bytes
        tokens[model] += each.num_tokens
    for model in sorted(chunks):
        print(f"{model}: {chunks[model]} chunks, {nbytes[model]} bytes, {tokens[model]} tokens")
    print(f"total: {chunks.total()} chunks, {nbytes.total()} bytes, {tokens.total()} tokens")
    return EXIT_OK


def _rm(remotes: list[Any], parsed: argparse.Namespace) -> int:
    if parsed.damaged:
        names = [each.name for each in stored(remotes, whole=True) if each.defect is not None]
        removed = 0
        for at in range(0, len(names), _REMOVED_AT_A_TIME):
            part = names[at : at + _REMOVED_AT_A_TIME]
            removed += remotes[0].remove_names(part, _DEADLINE_S)
        left = len(names) - removed
        print(f"{removed} removed, {left} left")
        return EXIT_FOUND if left else EXIT_OK
    removed = 0
    faults: collections.Counter[str] = collections.Counter()
    for remote in remotes:
        removed += remote.clear(None if parsed.all else parsed.prefix)
        stats = remote.stats()
        faults.update({name: n for name, n in stats.items() if name.startswith("faults_")})
    print(f"{removed} removed")
    for name, count in faults.items():
        print(f"lmcache-rs: {name}: {count}", file=sys.stderr)
    return EXIT_FOUND if faults else EXIT_OK


_ACTIONS = {"ls": _ls, "verify": _verify, "stat": _stat, "rm": _rm}
