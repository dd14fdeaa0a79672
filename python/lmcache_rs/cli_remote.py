"""`lmcache-rs store` on a server: looks into a remote tier by its URL, while others use it."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from lmcache_rs.config_keys import SERDES, without_credentials
from lmcache_rs.stored_chunks import (
    EXIT_FOUND,
    EXIT_OK,
    EXIT_USAGE,
    HEAD_BYTES,
    StoredChunk,
    print_by_model,
    print_damaged,
    print_each,
)

_WHOLE_BYTES = 512 << 20
_LONGEST_HEAD_BYTES = 16 << 20
"""Of a header with as many positions as there may be."""
_DEADLINE_S = 30.0
_AT_A_TIME = 16
_WHOLE_AT_A_TIME = 2
"""Each may take `_WHOLE_BYTES` of memory."""
_REMOVED_AT_A_TIME = 500


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


def _is_under(remote: Any, name: str, key: str) -> bool:
    """Whether a chunk of this key belongs under this name. A key may be any text."""
    namespace, _, chunk_hash = key.rpartition("@hash=")
    try:
        return bool(remote.name_of(namespace, bytes.fromhex(chunk_hash)) == name)
    except ValueError:
        return False


def _named(remote: Any) -> Iterator[list[str]]:
    """The names of a tier's chunks, page by page, and of nothing else that lies there."""
    root = remote.name_of("", bytes(32)).removesuffix("0" * 64)[: -len("/") - 32]
    is_chunk = re.compile(re.escape(root) + "[0-9a-fA-F]{32}/[0-9a-fA-F]{64}")
    cursor: str | None = None
    while True:
        page, cursor = remote.list_page(cursor, _DEADLINE_S)
        yield sorted({name for name, _ in page if is_chunk.fullmatch(name)})
        if cursor is None:
            return


def _begins(remote: Any, name: str, prefix: str, verdicts: dict[str, bool]) -> bool:
    """Whether a chunk's namespace begins with a prefix; true where it cannot be told.

    Nobody could use such a chunk anyway.

    Args:
        remote: Its tier.
        name: Its name.
        prefix: The prefix.
        verdicts: By what names of one namespace begin with; what is found is added.
    """
    native: Any = importlib.import_module("lmcache_rs._native")
    of_namespace, _, _ = name.rpartition("/")
    if of_namespace not in verdicts:
        data = remote.begin(name, _LONGEST_HEAD_BYTES, _DEADLINE_S)
        key = None if data is None else native.inspect_object(data)[0]
        namespace, has_hash, _ = (key or "").rpartition("@hash=")
        if not has_hash:
            return True
        if remote.name_of(namespace, bytes(32)).rpartition("/")[0] != of_namespace:
            return True
        verdicts[of_namespace] = native.namespace_begins_with(namespace, prefix)
    return verdicts[of_namespace]


def stored(remotes: list[Any], *, whole: bool) -> Iterator[StoredChunk]:
    """The chunks on a server. One that somebody removes meanwhile is left out.

    Args:
        remotes: Its tiers.
        whole: Read payloads too, and see whether they are what was put.

    Raises:
        OSError: The server refuses.
    """
    native: Any = importlib.import_module("lmcache_rs._native")

    def looked_at(remote: Any, name: str, nbytes: int) -> StoredChunk | None:
        data = remote.begin(name, _WHOLE_BYTES if whole else HEAD_BYTES, _DEADLINE_S)
        if data is None:
            return None
        key, payload_bytes, num_tokens, defect = native.inspect_object(data)
        if key is not None:
            defect = (defect if whole else None) if _is_under(remote, name, key) else "foreign"
        return StoredChunk(
            # A server does not say of all when they were written.
            name,
            name,
            nbytes,
            None,
            key,
            payload_bytes or 0,
            num_tokens or 0,
            defect,
        )

    with ThreadPoolExecutor(_WHOLE_AT_A_TIME if whole else _AT_A_TIME) as threads:
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
    return print_each(stored(remotes, whole=False))


def _verify(remotes: list[Any], parsed: argparse.Namespace) -> int:
    return print_damaged(stored(remotes, whole=True))


def _stat(remotes: list[Any], parsed: argparse.Namespace) -> int:
    return print_by_model(stored(remotes, whole=False))


def _rm(remotes: list[Any], parsed: argparse.Namespace) -> int:
    if parsed.damaged:
        names = [each.place for each in stored(remotes, whole=True) if each.defect is not None]
        removed = 0
        for at in range(0, len(names), _REMOVED_AT_A_TIME):
            part = names[at : at + _REMOVED_AT_A_TIME]
            removed += remotes[0].remove_names(part, _DEADLINE_S)
        left = len(names) - removed
        print(f"{removed} removed, {left} left")
        return EXIT_FOUND if left else EXIT_OK
    removed = 0
    verdicts: dict[str, bool] = {}
    try:
        for remote in remotes:
            # Each page in a time of its own: the tier's own clear has one for all of them.
            for names in _named(remote):
                if not parsed.all:
                    names = [
                        each for each in names if _begins(remote, each, parsed.prefix, verdicts)
                    ]
                for at in range(0, len(names), _REMOVED_AT_A_TIME):
                    part = names[at : at + _REMOVED_AT_A_TIME]
                    removed += remote.remove_names(part, _DEADLINE_S)
    finally:
        print(f"{removed} removed")
    return EXIT_OK


_ACTIONS = {"ls": _ls, "verify": _verify, "stat": _stat, "rm": _rm}
