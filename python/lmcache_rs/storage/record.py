"""What goes with a chunk's bytes into a tier: enough to know, when they come back, that they are
the right ones and whole.

```text
magic "LMRSC001" (8) | CRC-32 of all that follows (4) | length of the JSON (4) | JSON | positions
```

Numbers are little-endian. The positions are int64, one a token, or absent.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from dataclasses import dataclass
from typing import Any, cast

from lmcache_rs import _native
from lmcache_rs.layouts import MemoryFormat, StoredForm
from lmcache_rs.storage.memory_obj import MemoryObj

MAGIC = b"LMRSC001"
_HEAD = struct.Struct("<8sII")
_MAX_BYTES = 1 << 26
"""Longer metadata are none of ours: 8 bytes a token, for far more tokens than a chunk has."""


@dataclass(frozen=True)
class ChunkRecord:
    """The metadata of a stored chunk.

    Args:
        key: Text form of the chunk's key.
        nbytes: Size of the chunk's bytes.
        checksum: CRC-32 of the chunk's bytes.
        form: The form in which they lie, if it is known.
        num_tokens: Tokens of the chunk; 0 if neither the form nor the positions are known.
        positions: Positions of the tokens, as native int64 end to end, if they are known.
    """

    key: str
    nbytes: int
    checksum: int
    form: StoredForm | None = None
    num_tokens: int = 0
    positions: bytes | None = None

    @classmethod
    def of(cls, key: str, memory_obj: _native.MemoryObj) -> ChunkRecord:
        """The record of an object, whose bytes are read once for it."""
        metadata = memory_obj.metadata if isinstance(memory_obj, MemoryObj) else None
        positions = memory_obj.positions
        return cls(
            key,
            memory_obj.nbytes,
            zlib.crc32(memoryview(cast(Any, memory_obj))),
            None if metadata is None else metadata.form(),
            len(positions or b"") // 8 if metadata is None else metadata.num_tokens,
            positions,
        )

    def to_bytes(self) -> bytes:
        """The record as bytes."""
        said: dict[str, object] = {
            "key": self.key,
            "nbytes": self.nbytes,
            "checksum": self.checksum,
        }
        if self.form is not None:
            form = self.form
            said["form"] = [form.fmt.name, form.num_layers, form.hidden, form.dtype]
            said["block_tokens"] = form.block_tokens
        if self.num_tokens:
            said["num_tokens"] = self.num_tokens
        text = json.dumps(said, separators=(",", ":")).encode()
        rest = text + _little_endian(self.positions or b"")
        return _HEAD.pack(MAGIC, zlib.crc32(rest), len(text)) + rest

    @classmethod
    def from_bytes(cls, data: bytes) -> ChunkRecord:
        """Reads a record.

        Raises:
            ValueError: These are not the bytes of a record, or not all of them.
        """
        if not _HEAD.size <= len(data) <= _MAX_BYTES:
            raise ValueError(f"{len(data)} bytes of metadata are no record")
        magic, checksum, length = _HEAD.unpack_from(data)
        rest = data[_HEAD.size :]
        if magic != MAGIC or zlib.crc32(rest) != checksum:
            raise ValueError("metadata of another kind or version, or damaged")
        try:
            said: dict[str, Any] = json.loads(rest[:length])
            form = None
            if "form" in said:
                fmt, num_layers, hidden, dtype = said["form"]
                block_tokens = said["block_tokens"]
                form = StoredForm(MemoryFormat[fmt], num_layers, hidden, dtype, block_tokens)
            num_tokens = said.get("num_tokens", 0)
            positions = _little_endian(rest[length:]) or None
            record = cls(said["key"], said["nbytes"], said["checksum"], form, num_tokens, positions)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"malformed metadata: {error!r}") from error
        return record


def key_text(metadata: bytes) -> str:
    """Text form of the key whose chunk these metadata belong to, for `StorageBackend.keys`.

    Raises:
        ValueError: These are not the metadata of a chunk, or not all of them.
    """
    return ChunkRecord.from_bytes(bytes(metadata)).key


def _little_endian(int64s: bytes) -> bytes:
    """From or to the machine's own byte order."""
    if sys.byteorder == "little":
        return int64s
    numbers = array("q", int64s)
    numbers.byteswap()
    return numbers.tobytes()
