"""`lmcache-rs store`: looks into folders of the local disk tier, and into servers, while others use
them."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_rs import cli_remote
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

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

ROOT = "lmcache_rs.v1"


def add_store(commands: Commands) -> None:
    """Adds the command to a parser."""
    store = commands.add_parser(
        "store",
        help="chunks on local disks and on servers",
        description="Looks into a folder of local_disk, or into the server of a remote_url. Exit "
        "codes: 0 done, 1 something is damaged, could not be removed or not be reached, 2 wrong "
        "usage.",
    )
    actions = store.add_subparsers(metavar="ACTION", required=True)
    for name, run, words in (
        ("ls", _ls, "print each chunk: bytes, tokens, age, key"),
        ("verify", _verify, "read each chunk and hold it against its checksum; changes nothing"),
        ("stat", _stat, "print how much is stored, by model"),
        ("rm", _rm, "remove chunks"),
    ):
        action = actions.add_parser(name, help=words, description=words.capitalize() + ".")
        action.add_argument(
            "path", metavar="PATH", help="a folder of local_disk, or a URL of remote_url"
        )
        if name == "rm":
            which = action.add_mutually_exclusive_group(required=True)
            which.add_argument("--all", action="store_true", help="every chunk")
            which.add_argument(
                "--prefix",
                metavar="TEXT",
                help="chunks whose key begins so, up to the end of a field: model=m@world=1",
            )
            which.add_argument("--damaged", action="store_true", help="what verify finds")
        action.set_defaults(run=_where_it_is(name, run))


def _where_it_is(
    name: str, run: Callable[[argparse.Namespace], int]
) -> Callable[[argparse.Namespace], int]:
    """The action on a folder, or on the server that a URL names."""

    def on_either(parsed: argparse.Namespace) -> int:
        if cli_remote.is_url(parsed.path):
            return cli_remote.run(name, parsed)
        parsed.path = Path(parsed.path)
        return run(parsed)

    return on_either


def stored(path: Path, *, whole: bool) -> Iterator[StoredChunk]:
    """The chunks of a folder. One that another process removes meanwhile is left out.

    Args:
        path: The folder that `local_disk` names.
        whole: Read payloads too, and see whether they are what was put.
    """
    native = importlib.import_module("lmcache_rs._native")
    for shard in sorted((path / ROOT).glob("[0-9a-f][0-9a-f]")):
        for file in sorted(shard.iterdir()):
            try:
                with file.open("rb") as opened:
                    data = opened.read(-1 if whole else HEAD_BYTES)
                about = file.stat()
            except FileNotFoundError:
                continue
            key, payload_bytes, num_tokens, defect = native.inspect_object(data)
            if key is not None and not whole:
                defect = None
            elif key is not None and not file.name.startswith(key.rpartition("@hash=")[2] + "."):
                defect = "foreign"
            yield StoredChunk(
                str(file),
                file.name,
                about.st_size,
                about.st_mtime,
                key,
                payload_bytes or 0,
                num_tokens or 0,
                defect,
            )


def _require_folder(path: Path) -> bool:
    if (path / ROOT).is_dir():
        return True
    print(f"lmcache-rs: {path} holds no {ROOT}; name a folder of local_disk", file=sys.stderr)
    return False


def _ls(parsed: argparse.Namespace) -> int:
    if not _require_folder(parsed.path):
        return EXIT_USAGE
    return print_each(stored(parsed.path, whole=False))


def _verify(parsed: argparse.Namespace) -> int:
    if not _require_folder(parsed.path):
        return EXIT_USAGE
    return print_damaged(stored(parsed.path, whole=True))


def _stat(parsed: argparse.Namespace) -> int:
    if not _require_folder(parsed.path):
        return EXIT_USAGE
    return print_by_model(stored(parsed.path, whole=False))


def _rm(parsed: argparse.Namespace) -> int:
    if not _require_folder(parsed.path):
        return EXIT_USAGE
    native: Any = importlib.import_module("lmcache_rs._native")
    # As one more process that uses the folder: accounts stay right, and others see it.
    disk = native.LocalDisk([parsed.path], 1 << 62, native.LocalCpu(1 << 20, 1000), threads=2)
    try:
        if parsed.damaged:
            removed = 0
            left = 0
            for each in stored(parsed.path, whole=True):
                if each.defect is not None:
                    removed += 1
                    left += not _remove_file(Path(each.place))
            # What is gone is found to be gone by whoever looks for it, and by a walk at once.
            disk.clear("model=(none)")
            print(f"{removed - left} removed, {left} left")
            return EXIT_FOUND if left else EXIT_OK
        removed = disk.clear(None if parsed.all else parsed.prefix)
        faults = {name: n for name, n in disk.stats().items() if name.startswith("faults_")}
        print(f"{removed} removed")
        for name, count in faults.items():
            print(f"lmcache-rs: {name}: {count}", file=sys.stderr)
        return EXIT_FOUND if faults else EXIT_OK
    finally:
        disk.close(10.0)


def _remove_file(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        print(f"lmcache-rs: cannot remove {path}: {error}", file=sys.stderr)
        return False
    return True
