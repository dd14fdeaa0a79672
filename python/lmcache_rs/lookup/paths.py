"""Where a worker's server listens, and what it asks of its clients."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import stat
import tempfile
from typing import Final, NamedTuple

MAX_SOCKET_PATH_BYTES: Final = 107


class Rank(NamedTuple):
    """One worker of an engine, by its data, pipeline and tensor parallel rank."""

    dp: int
    pp: int
    tp: int

    def __str__(self) -> str:
        return f"dp{self.dp}-pp{self.pp}-tp{self.tp}"


def lookup_socket_path(engine_id: str, rank: int | Rank) -> pathlib.Path:
    """The socket of one worker, the same in every process of one user and environment.

    Its folder is made if need be: mode 0700, under XDG_RUNTIME_DIR if that is a writable folder,
    else under the temporary folder. Raises PermissionError if the folder belongs to somebody else
    or is open to others, ValueError if every candidate is too long for a socket.
    """
    digest = hashlib.sha256(_encoded(engine_id)).hexdigest()
    name = f"{digest[:32]}-{rank}.sock"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    bases = [runtime] if os.access(runtime, os.W_OK | os.X_OK) else []
    for base in (*bases, tempfile.gettempdir(), "/tmp"):
        path = pathlib.Path(base) / f"lmcache-rs-{os.geteuid()}" / name
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            _make_private(path.parent)
            return path
    raise ValueError(
        f"no folder is short enough for a socket of at most {MAX_SOCKET_PATH_BYTES} bytes; "
        "set TMPDIR to a short path"
    )


def lookup_secret(engine_id: str) -> str:
    """What a worker asks of its clients: known to whoever knows the engine id.

    The socket's name does not give it away.
    """
    return hashlib.sha256(b"lmcache_rs lookup client\0" + _encoded(engine_id)).hexdigest()


def reader_secret(engine_id: str) -> str:
    """As `lookup_secret`, of other ranks that read the worker's memory."""
    return hashlib.sha256(b"lmcache_rs region reader\0" + _encoded(engine_id)).hexdigest()


def _encoded(engine_id: str) -> bytes:
    return engine_id.encode("utf-8", "surrogatepass")


def _make_private(folder: pathlib.Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is a link or a file; remove it")
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"{folder} belongs to uid {found.st_uid}, this process runs as {os.geteuid()}; "
            "set XDG_RUNTIME_DIR or TMPDIR to a folder of this user"
        )
    if found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} has mode {stat.S_IMODE(found.st_mode):04o}; others may not enter it: "
            f"chmod 700 {folder}"
        )
