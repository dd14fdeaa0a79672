"""What tells one set of weights from another: digests of configuration and files, made in no time.

No path and no time of change enters a digest, so that two hosts with copies of the same files
agree.

What is promised of files that are too large to be read whole (`WHOLE_BYTES`): names, sizes and
every safetensors header enter as they are, and of **every tensor** at least `MIN_WINDOWS` windows
of `WINDOW_BYTES`, more of larger ones; JSON and program files beside the weights are read whole.
Training, merging, pruning and quantising change nearly
every number of the tensors they touch, or their types and shapes, so they are seen. An edit of
single numbers that lie between the windows of a large tensor is not. Files up to `WHOLE_BYTES` in
all are read whole: there one changed byte is another digest.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

WINDOW_BYTES: Final = 4096
WINDOWS: Final = 32_768
"""Windows over all files of a model, shared out by size."""
MIN_WINDOWS: Final = 2
WHOLE_BYTES: Final = 256 << 20
ADAPTER_WHOLE_BYTES: Final = 64 << 20
"""As `WHOLE_BYTES`, for an adapter, which is read while requests wait."""
MAX_HEADER_BYTES: Final = 100_000_000
"""Longest safetensors header that readers of the format accept."""
WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"})

_THREADS: Final = 8
_PIECE_BYTES: Final = 1 << 20
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_ADAPTER_FILES: Final = re.compile(r"(adapter_config\.json|(adapter_model|new_embeddings)\..+)")
# What is read beside the weights and not told by the configuration: which of the files hold the
# weights, how they are quantised, how images become inputs, and the code of models that bring it.
_SIDE_FILES: Final = re.compile(
    r".*quant.*\.json|.*\.index\.json|(.*pre)?processor_config\.json|.*\.py"
)
_READ_WHOLE: Final = frozenset({".json", ".py"})
# Of a model's configuration: where it came from, and which library read it.
_NO_IDENTITY: Final = frozenset({"name_or_path", "transformers_version"})

Stamp = tuple[tuple[str, int, int, int, int], ...]


class Digest:
    """SHA-256 over named parts, each preceded by its length: no two lists of parts are one text."""

    def __init__(self, purpose: str) -> None:
        self._state = hashlib.sha256()
        self.add("purpose", purpose.encode())

    def add(self, name: str, value: bytes) -> Self:
        """Takes in one part."""
        for part in (name.encode(), value):
            self._state.update(struct.pack("<Q", len(part)))
            self._state.update(part)
        return self

    def hex(self) -> str:
        """64 hex digits."""
        return self._state.hexdigest()


def model_fingerprint(settings: Mapping[str, Any], weights: str) -> str:
    """Digest of a model: its configuration as `plain` writes it, and what its weights are."""
    text = json.dumps(plain(settings), sort_keys=True, separators=(",", ":"))
    return Digest("model").add("settings", text.encode()).add("weights", weights.encode()).hex()


def plain(value: Any) -> Any:
    """A configuration as JSON can write it, without what names a place or a library's release.

    Keys that begin with an underscore are such names too. Of objects the fields are written, where
    they tell them: configurations within a configuration, dataclasses, arrays. Others are written
    as their type's name: an address would differ by process.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, Mapping):
        kept = {str(key): item for key, item in value.items()}
        return {
            key: plain(item)
            for key, item in kept.items()
            if not key.startswith("_") and key not in _NO_IDENTITY
        }
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(plain(item), sort_keys=True) for item in value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    if not isinstance(value, type):
        for tell in ("to_dict", "tolist"):
            if callable(getattr(value, tell, None)):
                return plain(getattr(value, tell)())
        if dataclasses.is_dataclass(value):
            return plain(
                {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            )
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def weights_of(place: Path, commit: str | None = None) -> str:
    """What the weights in a folder or file are: `commit:<id>`, or `files:<digest>`.

    A commit of a model hub names its files' contents. It is taken if the place is a snapshot in the
    hub's local cache whose files, as far as they count, all are links into the cache's store of
    blobs; a file that was put there by hand is none, and then the files themselves are looked at.

    Args:
        place: The folder, or the one file.
        commit: The commit that the loader knows it loaded; None takes the snapshot folder's name.

    Raises:
        OSError: A file cannot be read, or there is none.
    """
    files = _weight_files(place)
    if not files:
        raise FileNotFoundError(
            f"{place} has no weight files; {', '.join(sorted(WEIGHT_SUFFIXES))} were looked for"
        )
    if place.is_dir():
        files = sorted([*files, *_matching(place, _SIDE_FILES)])
        folder = place.absolute()
        is_snapshot = folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name)
        named = folder.name if is_snapshot else None
        if named and commit in (None, named) and all(_is_blob(file, folder) for file in files):
            return f"commit:{named}"
    return f"files:{files_digest(files, whole_bytes=WHOLE_BYTES)}"


def _weight_files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return sorted(file for file in place.iterdir() if file.suffix in WEIGHT_SUFFIXES)


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    return sorted(file for file in folder.iterdir() if pattern.fullmatch(file.name))


def _is_blob(file: Path, snapshot: Path) -> bool:
    return (
        file.is_symlink() and file.resolve().parent == (snapshot.parent.parent / "blobs").resolve()
    )


def adapter_stamp(folder: Path) -> Stamp:
    """Tells, cheaply and within this process only, whether an adapter's files were touched.

    Raises:
        OSError: The folder cannot be read, or holds no adapter.
    """
    files = _matching(folder, _ADAPTER_FILES)
    if not any(file.suffix != ".json" for file in files):
        raise FileNotFoundError(f"{folder} holds no adapter_model file")
    stats = [(file.name, file.stat()) for file in files]
    return tuple(
        (name, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
        for name, stat in stats
    )


def adapter_digest(folder: Path) -> str:
    """Digest of an adapter's configuration and weights.

    Raises:
        OSError: A file cannot be read.
    """
    return files_digest(_matching(folder, _ADAPTER_FILES), whole_bytes=ADAPTER_WHOLE_BYTES)


def files_digest(files: Iterable[Path], *, whole_bytes: int) -> str:
    """Digest of files by name, size and content; weights beyond `whole_bytes` in windows.

    Text beside the weights is always read whole: in it each byte counts.

    Raises:
        OSError: A file cannot be read, or ended before its size.
    """
    sized = [(file, file.stat().st_size) for file in sorted(files, key=lambda file: file.name)]
    total = sum(size for _, size in sized)
    digest = Digest("files")
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="lmcache-digest") as pool:
        for file, size in sized:
            # Of a single file the name says nothing.
            name = file.name if len(sized) > 1 else ""
            digest.add("name", name.encode()).add("size", struct.pack("<Q", size))
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if total <= whole_bytes or file.suffix in _READ_WHOLE:
                    pieces = range(0, size, _PIECE_BYTES)
                    windows = [Window(at, min(_PIECE_BYTES, size - at)) for at in pieces]
                    batch = 8
                else:
                    # Or each window would drag the file's next pages in.
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                    windows = list(_windows_of(descriptor, file, size, total))
                    batch = 256
                batches = [windows[at : at + batch] for at in range(0, len(windows), batch)]
                read = pool.map(_read, itertools.repeat(descriptor), batches)
                digest.add("content", b"".join(read))
            finally:
                os.close(descriptor)
    return digest.hex()


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes of a file, from `start` on."""

    start: int
    length: int


def windows_in(start: int, end: int, count: int) -> Iterator[Window]:
    """`count` windows spread evenly over the bytes from `start` to `end`; all of them if they fit.

    Each lies within one page of the file, which is what a read costs.
    """
    length = end - start
    if length <= count * WINDOW_BYTES:
        if length:
            yield Window(start, length)
        return
    for number in range(count):
        middle = start + length * (2 * number + 1) // (2 * count)
        page = middle // WINDOW_BYTES * WINDOW_BYTES
        first, last = max(start, page), min(end, page + WINDOW_BYTES)
        yield Window(first, last - first)


def _windows_of(descriptor: int, file: Path, size: int, total: int) -> Iterator[Window]:
    parts = _tensors(descriptor, size) if file.suffix == ".safetensors" else None
    if parts is None:
        parts = [(0, size)]
    else:
        header_end = parts[0][0] if parts else size
        yield Window(0, header_end)
    for start, end in parts:
        yield from windows_in(start, end, max(MIN_WINDOWS, WINDOWS * (end - start) // total))


def _tensors(descriptor: int, size: int) -> list[tuple[int, int]] | None:
    """Where the tensors of a safetensors file lie, in order; None if it is none."""
    prefix = os.pread(descriptor, 8, 0)
    if len(prefix) < 8:
        return None
    (length,) = struct.unpack("<Q", prefix)
    data = 8 + length
    if length > MAX_HEADER_BYTES or data > size:
        return None
    try:
        header = json.loads(_pread(descriptor, Window(8, length)))
        spans = sorted(
            (data + int(tensor["data_offsets"][0]), data + int(tensor["data_offsets"][1]))
            for name, tensor in header.items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
    ends = [data, *(end for _, end in spans)]
    # Anything between the tensors would go unseen.
    if any(start != end for (start, _), end in zip(spans, ends, strict=False)) or ends[-1] != size:
        return None
    return spans


def _read(descriptor: int, windows: Iterable[Window]) -> bytes:
    state = hashlib.sha256()
    for window in windows:
        state.update(_pread(descriptor, window))
    return state.digest()


def _pread(descriptor: int, window: Window) -> bytes:
    read = b""
    while len(read) < window.length:
        piece = os.pread(descriptor, window.length - len(read), window.start + len(read))
        if not piece:
            raise OSError(f"a file ended at byte {window.start + len(read)}, inside a window")
        read = read + piece if read else piece
    return read
