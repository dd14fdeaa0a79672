"""A storage backend of one's own: chunks as files in a folder, in Python.

    python examples/python_backend.py

docs/storage-backends.md explains it step by step. It is written to be read: a real one would spread
its files over folders and bound their bytes.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lmcache_rs import CacheEngineKey, LMCacheEngineConfig, StorageManager
from lmcache_rs.storage import StorageBackend, key_text


class FolderBackend(StorageBackend):
    """One file a chunk: the length of the metadata in four bytes, the metadata, the data.

    Args:
        folder: Where the files are; made if need be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, key: CacheEngineKey) -> Path:
        """The file of a chunk. Keys may be longer than names of files: the digest is the name."""
        return self.folder / (hashlib.sha256(str(key).encode()).hexdigest() + ".chunk")

    def put(self, key: CacheEngineKey, data: memoryview, metadata: bytes) -> None:
        """Writes beside the place and renames: a chunk is there whole or not at all."""
        path = self.path(key)
        beside = path.with_suffix(".part")
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(len(metadata).to_bytes(4, "little"))
            file.write(metadata)
            file.write(data)
        beside.rename(path)

    def get(self, key: CacheEngineKey) -> tuple[memoryview, bytes] | None:
        """What the file holds. Whether that is whole and right is checked by the caller."""
        try:
            content = memoryview(self.path(key).read_bytes())
        except FileNotFoundError:
            return None
        end = 4 + int.from_bytes(content[:4], "little")
        return content[end:], bytes(content[4:end])

    def contains(self, key: CacheEngineKey) -> bool:
        """Whether the file is there."""
        return self.path(key).exists()

    def remove(self, key: CacheEngineKey) -> bool:
        """Deletes the file; whether it was there."""
        try:
            self.path(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def keys(self) -> Iterator[CacheEngineKey]:
        """The keys of all files, which stand in their metadata; lets `clear` clear this tier."""
        for path in self.folder.glob("*.chunk"):
            with path.open("rb") as file:
                metadata = file.read(int.from_bytes(file.read(4), "little"))
            try:
                yield CacheEngineKey.from_string(key_text(metadata))
            except ValueError:
                path.unlink(missing_ok=True)


def main() -> None:
    """Puts a chunk, forgets it in host memory, and gets it back from the folder."""
    config = LMCacheEngineConfig.from_defaults(max_local_cpu_size=0.01)
    key = CacheEngineKey("my-model", 1, 0, bytes(32), "float32")
    with tempfile.TemporaryDirectory() as folder:
        storage = StorageManager(config)
        storage.add_backend("folder", FolderBackend(Path(folder)))
        (chunk,) = storage.batched_allocate([1024]) or []
        with memoryview(chunk) as data:  # type: ignore[arg-type]
            data[:] = bytes(range(256)) * 4
        storage.batched_put([key], [chunk])
        storage.close()  # pending puts are done first

        again = StorageManager(config)  # a new process would do the same
        again.add_backend("folder", FolderBackend(Path(folder)))
        print("held by:", again.contains(key))
        (found,) = again.batched_get([key])
        assert found is not None
        print("the same bytes:", found.to_bytes() == bytes(range(256)) * 4)
        print("held by:", again.contains(key))
        print("counters:", again.stats()["folder"])
        again.close()


if __name__ == "__main__":
    main()
