"""The form of stored objects, read and written by another program than the one that ships.

Python has no zstd of its own, so of packed objects this program writes the frames that it can
without: runs of one byte. `v2-packed.bin` is one that the shipped program wrote.

The golden files in tests/vectors/object_form/ are kept: each later version must read those of the
versions that it says it reads, and take all others for a miss. This file, run as a program, writes
them.
"""

from __future__ import annotations

import random
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmcache_rs import CacheEngineKey, MemoryObj, _native
from lmcache_rs.layouts import MemoryFormat
from lmcache_rs.storage import LocalDiskBackend, MemoryObjMetadata

GOLDEN = Path(__file__).parents[1] / "vectors" / "object_form"
HEAD = struct.Struct("<8sIIQQIIIBBHIQI")
PACKED = struct.Struct("<BBHIQQ")
FORMATS = {"KV_T2D": 1, "KV_MLA_FMT": 2, "OPAQUE": 3}


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x9A6C9329AC4BC9B5 if byte & 1 else 0)
        table.append(byte)
    return table


TABLE = _table()


def crc64(data: bytes) -> int:
    """CRC-64/NVME: reflected polynomial AD93D23594C93659, all ones in and out."""
    crc = 0xFFFFFFFFFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFFFFFFFFFF


@dataclass
class Object:
    """What an object says, and its payload."""

    key: str
    payload: bytes
    num_tokens: int = 0
    form: tuple[str, int, int, str, int] | None = None
    positions: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        fmt, num_layers, hidden, dtype, block_tokens = self.form or ("", 0, 0, "", 0)
        key, kind = self.key.encode(), dtype.encode()
        body = key + kind
        body += b"\0" * (-(HEAD.size + len(body)) % 8)
        body += struct.pack(f"<{len(self.positions)}q", *self.positions)
        header_bytes = -(-(HEAD.size + len(body)) // 4096) * 4096

        def header(checksum: int) -> bytes:
            head = HEAD.pack(
                b"LMCRSOBJ", 1, header_bytes, len(self.payload), checksum, len(key),
                self.num_tokens, len(self.positions), FORMATS.get(fmt, 0), len(kind), 0,
                num_layers, hidden, block_tokens,
            )  # fmt: skip
            return (head + body).ljust(header_bytes, b"\0")

        return header(crc64(header(0) + self.payload)) + self.payload

    def to_packed_bytes(self, planes: int, stored: bytes) -> bytes:
        """As an object of version 2: `stored` is what the payload was packed to."""
        fmt, num_layers, hidden, dtype, block_tokens = self.form or ("", 0, 0, "", 0)
        key, kind = self.key.encode(), dtype.encode()
        packed = PACKED.pack(1, planes, 0, 0, len(stored), crc64(self.payload))
        body = packed + key + kind
        body += b"\0" * (-(HEAD.size + len(body)) % 8)
        body += struct.pack(f"<{len(self.positions)}q", *self.positions)
        header_bytes = -(-(HEAD.size + len(body)) // 4096) * 4096

        def header(checksum: int) -> bytes:
            head = HEAD.pack(
                b"LMCRSOBJ", 2, header_bytes, len(self.payload), checksum, len(key),
                self.num_tokens, len(self.positions), FORMATS.get(fmt, 0), len(kind), 0,
                num_layers, hidden, block_tokens,
            )  # fmt: skip
            return (head + body).ljust(header_bytes, b"\0")

        return header(crc64(header(0) + stored)) + stored

    @classmethod
    def from_bytes(cls, data: bytes) -> Object:
        (
            magic, version, header_bytes, payload_bytes, checksum, key_bytes, num_tokens,
            num_positions, fmt, dtype_bytes, zero, num_layers, hidden, block_tokens,
        ) = HEAD.unpack_from(data)  # fmt: skip
        assert (magic, version, zero) == (b"LMCRSOBJ", 1, 0)
        payload = data[header_bytes : header_bytes + payload_bytes]
        assert len(payload) == payload_bytes
        zeroed = data[:24] + bytes(8) + data[32:header_bytes]
        assert crc64(zeroed + payload) == checksum
        key = data[HEAD.size : HEAD.size + key_bytes].decode()
        dtype = data[HEAD.size + key_bytes :][:dtype_bytes].decode()
        at = -(-(HEAD.size + key_bytes + dtype_bytes) // 8) * 8
        positions = struct.unpack_from(f"<{num_positions}q", data, at)
        names = {code: name for name, code in FORMATS.items()}
        form = (names[fmt], num_layers, hidden, dtype, block_tokens) if fmt else None
        return cls(key, payload, num_tokens, form, positions)


def golden() -> dict[str, Object]:
    """The objects of the golden files, by name."""
    key = CacheEngineKey("org/model é", 2, 1, bytes(range(32)), "bfloat16", facts={"chunk": "3"})
    numbers = random.Random(64)
    split = ("KV_T2D", 2, 5, "bfloat16", 1)
    return {
        "v1-bare": Object(str(key), b"x"),
        "v1-empty": Object(str(key), b""),
        "v1-split": Object(str(key), numbers.randbytes(2 * 3 * 2 * 5 * 2), 3, split, (0, 1, 700)),
        "v1-mla": Object(str(key), numbers.randbytes(4 * 7), 1, ("KV_MLA_FMT", 1, 7, "float32", 1)),
        "v1-opaque": Object(str(key), numbers.randbytes(5000), 32, ("OPAQUE", 5, 500, "uint8", 16)),
        "v1-long-header": Object(str(key), b"abc", 900, None, tuple(range(-450, 450))),
    }


def packed() -> Object:
    """The object of the packed golden files: exponents much alike, mantissas that are noise."""
    key = CacheEngineKey("org/model é", 2, 1, bytes(range(32)), "bfloat16", facts={"chunk": "3"})
    numbers = random.Random(65)
    form = ("KV_T2D", 2, 250, "bfloat16", 1)
    payload = bytes(
        numbers.randrange(256) if at % 2 == 0 else numbers.choice((0x3E, 0x3F, 0xBE))
        for at in range(2 * 3 * 2 * 250 * 2)
    )
    return Object(str(key), payload, 3, form, (0, 1, 700))


def run_of(byte: int, count: int) -> bytes:
    """A frame of zstd: a single segment of one block, which repeats a byte."""
    assert 256 <= count < 1 << 17
    header = b"\x28\xb5\x2f\xfd" + bytes([0b0110_0000]) + struct.pack("<H", count - 256)
    return header + struct.pack("<I", 1 | 1 << 1 | count << 3)[:3] + bytes([byte])


def of_runs() -> tuple[Object, bytes]:
    """An object whose second plane is a run, with what it is packed to."""
    noise = random.Random(66).randbytes(3000)
    payload = b"".join(bytes([byte, 0x3F]) for byte in noise)
    run = run_of(0x3F, len(noise))
    stored = struct.pack("<QQ", len(noise), len(run)) + noise + run
    return Object(packed().key, payload, 6, ("KV_MLA_FMT", 1, 500, "float16", 1)), stored


def test_a_packed_golden_file_says_what_it_should_and_is_read() -> None:
    object_ = packed()
    data = (GOLDEN / "v2-packed.bin").read_bytes()
    stored = data[4096:]
    assert data == object_.to_packed_bytes(2, stored)
    assert len(stored) < 0.7 * len(object_.payload)
    said = (object_.key, len(object_.payload), object_.num_tokens, None)
    assert _native.inspect_object(data) == said
    # Its own sum is of another payload.
    other = Object(object_.key, object_.payload[:-1] + b"x", 3, object_.form, object_.positions)
    data = other.to_packed_bytes(2, stored)
    assert _native.inspect_object(data) == (*said[:3], "checksum")


def test_a_packed_object_of_another_writer_is_read() -> None:
    object_, stored = of_runs()
    data = (GOLDEN / "v2-runs.bin").read_bytes()
    assert data == object_.to_packed_bytes(2, stored)
    said = (object_.key, len(object_.payload), object_.num_tokens, None)
    assert _native.inspect_object(data) == said
    data = object_.to_packed_bytes(2, stored[:-1] + b"\x3e")
    assert _native.inspect_object(data) == (*said[:3], "checksum")
    data = object_.to_packed_bytes(2, stored[:-1])
    assert _native.inspect_object(data) == (*said[:3], "malformed")


def test_the_sum_is_the_published_one() -> None:
    assert crc64(b"123456789") == 0xAE8B14860A799888
    data = random.Random(1).randbytes(10_000)
    assert _native.checksum(data) == crc64(data)


@pytest.mark.parametrize("name", golden())
def test_golden_files_are_what_they_were_and_are_read(name: str) -> None:
    object_ = golden()[name]
    data = (GOLDEN / f"{name}.bin").read_bytes()
    assert data == object_.to_bytes()
    assert Object.from_bytes(data) == object_
    said = (object_.key, len(object_.payload), object_.num_tokens, None)
    assert _native.inspect_object(data) == said
    # As a file, filled up to a whole page.
    assert _native.inspect_object(data + bytes(-len(data) % 4096)) == said


def test_a_golden_file_of_another_version_is_a_miss() -> None:
    data = bytearray((GOLDEN / "v1-split.bin").read_bytes())
    data[8] = 3
    assert _native.inspect_object(bytes(data)) == (None, None, None, "version")


def test_what_the_tier_writes_is_read_by_another_program(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pool = _native.LocalCpu(1 << 20, 1000)
    tier = LocalDiskBackend([tmp_path], 1 << 24, pool)
    key = CacheEngineKey("m", 1, 0, bytes(range(32)), "float32")
    positions = torch.tensor([4, 5, 9])
    metadata = MemoryObjMetadata(
        (2, 3, 2, 5), torch.float32, MemoryFormat.KV_T2D, cached_positions=positions
    )
    allocated = pool.allocate([metadata.nbytes])
    assert allocated is not None
    memory_obj = MemoryObj(allocated[0], metadata)
    payload = random.Random(3).randbytes(metadata.nbytes)
    memoryview(memory_obj)[:] = payload  # type: ignore[arg-type]
    memory_obj.seal()
    assert tier.submit_put_task(key, memory_obj)
    assert tier.flush(20.0)
    data = Path(tier.local_disk.path_of(key.namespace, key.chunk_hash)).read_bytes()
    form = ("KV_T2D", 2, 5, "float32", 1)
    assert Object.from_bytes(data) == Object(str(key), payload, 3, form, (4, 5, 9))
    assert data == Object.from_bytes(data).to_bytes().ljust(len(data), b"\0")
    (got,) = tier.batched_get_blocking([key])
    assert got is not None
    assert got.metadata is not None
    assert (got.metadata.shape, got.metadata.dtype) == (metadata.shape, torch.float32)
    assert got.metadata.cached_positions is not None
    assert got.metadata.cached_positions.tolist() == [4, 5, 9]
    assert got.tensor.tolist() == memory_obj.tensor.tolist()
    assert tier.close(20.0)


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for each, what in golden().items():
        (GOLDEN / f"{each}.bin").write_bytes(what.to_bytes())
    (GOLDEN / "v2-runs.bin").write_bytes(of_runs()[0].to_packed_bytes(2, of_runs()[1]))
    sys.exit()
