import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Self, final

from typing_extensions import Buffer, disjoint_base

__all__ = [
    "Chain",
    "Copier",
    "CudaCache",
    "CudaDevice",
    "CudaError",
    "CudaLayerBuffer",
    "CudaLayerCopy",
    "CudaLayerwiseStep",
    "CudaRopeShift",
    "CudaTransfer",
    "EventSink",
    "LayerBuffer",
    "LayerCopy",
    "LayerwiseStep",
    "LocalCpu",
    "LocalDisk",
    "LookupConnections",
    "LookupServer",
    "MemoryObj",
    "PagedCache",
    "RegionReader",
    "Remote",
    "RopeShift",
    "Transfer",
    "TransferQueue",
    "begin_cuda_load",
    "begin_cuda_store",
    "begin_shared_load",
    "build_info",
    "checksum",
    "chunk_aligned",
    "copy_seconds",
    "decode_lookup_answer",
    "encode_clear_request",
    "encode_extra_keys",
    "encode_key",
    "encode_lookup_request",
    "encode_ping_request",
    "encode_release_request",
    "gather",
    "hashed_bytes",
    "inspect_object",
    "leading_false",
    "load",
    "namespace_begins_with",
    "namespace_with_fields",
    "pack_object",
    "parse_key",
    "scatter",
    "sha256_cbor",
    "store",
]

def begin_cuda_load(
    paged: CudaCache,
    local_cpu: LocalCpu,
    lookup_id: str,
    namespace: str,
    hashes: bytes,
    *,
    stream: int,
    chunk_size: int,
    num_tokens: int,
    blocks: Sequence[int] | None = None,
    slots: Buffer | Sequence[int] | None = None,
    skip: int = 0,
) -> CudaTransfer: ...
def begin_cuda_store(
    paged: CudaCache,
    local_cpu: LocalCpu,
    namespace: str,
    hashes: bytes,
    *,
    stream: int,
    chunk_size: int,
    num_tokens: int,
    blocks: Sequence[int] | None = None,
    slots: Buffer | Sequence[int] | None = None,
    first: int = 0,
) -> CudaTransfer: ...
def begin_shared_load(
    queue: TransferQueue,
    reader: RegionReader,
    paged: PagedCache,
    lookup_id: str,
    namespace: str,
    hashes: bytes,
    *,
    chunk_size: int,
    num_tokens: int,
    blocks: Sequence[int],
    skip: int = 0,
) -> Transfer: ...
def build_info() -> dict[str, str | int]: ...
def checksum(data: bytes) -> int: ...
def chunk_aligned(num_false: int, chunk_size: int) -> int: ...
def copy_seconds() -> tuple[float, float]: ...
def decode_lookup_answer(data: bytes) -> tuple[int, int, int, int]: ...
def encode_clear_request(message_id: int) -> bytes: ...
def encode_extra_keys(value: object) -> bytes: ...
def encode_key(
    model_name: str,
    world_size: int,
    worker_id: int,
    kv_dtype: str,
    facts: Mapping[str, str],
    tags: Mapping[str, object],
    chunk_hash: bytes | None = None,
    layer_id: int | None = None,
) -> str: ...
def encode_lookup_request(
    message_id: int, lookup_id: str, namespace: str, hashes: bytes
) -> bytes: ...
def encode_ping_request(message_id: int) -> bytes: ...
def encode_release_request(message_id: int, lookup_id: str) -> bytes: ...
def gather(
    paged: PagedCache,
    memory_objs: Sequence[MemoryObj],
    starts: Sequence[int],
    ends: Sequence[int],
    slots: Buffer | Sequence[int],
) -> int: ...
def hashed_bytes() -> int: ...
def inspect_object(
    object: bytes,
) -> tuple[str | None, int | None, int | None, str | None]: ...
def pack_object(payload: bytes, dtype: str) -> bytes: ...
def leading_false(mask: bytes, num_tokens: int) -> int: ...
def load(
    local_cpu: LocalCpu,
    paged: PagedCache,
    lookup_id: str,
    namespace: str,
    hashes: bytes,
    *,
    chunk_size: int,
    num_tokens: int,
    blocks: Sequence[int] | None = None,
    slots: Buffer | Sequence[int] | None = None,
    skip: int = 0,
) -> tuple[int, int, int]: ...
def namespace_begins_with(namespace: str, prefix: str) -> bool: ...
def namespace_with_fields(namespace: str, fields: Mapping[str, str]) -> str: ...
def parse_key(
    text: str,
) -> tuple[str, int, int, str, dict[str, str], dict[str, Any], bytes, int | None]: ...
def scatter(
    paged: PagedCache,
    memory_objs: Sequence[MemoryObj],
    starts: Sequence[int],
    ends: Sequence[int],
    slots: Buffer | Sequence[int],
) -> int: ...
def sha256_cbor(value: object) -> bytes: ...
def store(
    local_cpu: LocalCpu,
    paged: PagedCache,
    namespace: str,
    hashes: bytes,
    *,
    chunk_size: int,
    num_tokens: int,
    blocks: Sequence[int] | None = None,
    slots: Buffer | Sequence[int] | None = None,
    first: int = 0,
) -> tuple[int, int, int, int]: ...

@final
class Chain:
    def __new__(cls, chunk_size: int, none_hash: bytes) -> Chain: ...
    def extend(
        self,
        tokens: Buffer | Sequence[int],
        extra_keys: bytes | Sequence[bytes | None] | None = None,
    ) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    def hashes(self, num_chunks: int | None = None) -> bytes: ...
    def spans(
        self, skip: int = 0, with_tail: bool = False, extra_keys: bytes | None = None
    ) -> list[tuple[int, int, bytes]]: ...

_Piece = tuple[MemoryObj | LayerBuffer | Buffer, int, int]

@final
class LayerBuffer:
    def __new__(cls, nbytes: int) -> LayerBuffer: ...
    @property
    def nbytes(self) -> int: ...
    def load(self, pieces: Sequence[_Piece], offsets: Sequence[int]) -> int: ...
    def rotate(self, shift: RopeShift) -> None: ...
    def to_bytes(self) -> bytes: ...
    def unload(self, pieces: Sequence[_Piece], offsets: Sequence[int]) -> int: ...
    def zero(self, ranges: Sequence[tuple[int, int]]) -> None: ...

@final
class LayerCopy:
    def __new__(
        cls,
        paged: PagedCache,
        starts: Sequence[int],
        ends: Sequence[int],
        slots: Buffer | Sequence[int],
    ) -> LayerCopy: ...
    @property
    def layer_bytes(self) -> list[int]: ...
    def gather(self, layer: int, pieces: Sequence[_Piece]) -> int: ...
    def scatter(self, layer: int, pieces: Sequence[_Piece]) -> int: ...

@final
class Copier:
    def __new__(cls, bytes_per_second: int | None = None) -> Copier: ...
    def close(self) -> None: ...

class CudaError(RuntimeError): ...

@final
class CudaDevice:
    def __new__(cls, ordinal: int = 0) -> CudaDevice: ...
    @property
    def capability(self) -> int: ...
    @property
    def driver_version(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def num_under_way(self) -> int: ...
    @property
    def ordinal(self) -> int: ...
    def copies(self) -> dict[str, int]: ...
    def force_path(self, path: str | None = None) -> None: ...
    def lock_pool(self, local_cpu: LocalCpu) -> tuple[int, str | None]: ...
    def path(self, storing: bool, runs: int, nbytes: int) -> str: ...
    def settle(self) -> None: ...
    def take_notices(self) -> list[str]: ...

@final
class CudaCache:
    @staticmethod
    def opaque(
        device: CudaDevice,
        layers: Sequence[tuple[int, int]],
        num_blocks: int,
        *,
        block_tokens: int,
        block_bytes: int,
        block_stride: int,
        keep_alive: object,
    ) -> CudaCache: ...
    @staticmethod
    def tokens(
        device: CudaDevice,
        layers: Sequence[tuple[int, int]],
        num_blocks: int,
        *,
        block_tokens: int,
        block_stride: int,
        token_stride: int,
        planes: int,
        plane_stride: int,
        heads: int,
        head_stride: int,
        run_bytes: int,
        keep_alive: object,
    ) -> CudaCache: ...
    @property
    def device(self) -> CudaDevice: ...
    @property
    def num_layers(self) -> int: ...
    def chunk_bytes(self, num_tokens: int) -> int: ...
    def gather(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        slots: Buffer | Sequence[int],
        stream: int,
    ) -> int: ...
    def load(
        self,
        local_cpu: LocalCpu,
        lookup_id: str,
        namespace: str,
        hashes: bytes,
        *,
        stream: int,
        chunk_size: int,
        num_tokens: int,
        blocks: Sequence[int] | None = None,
        slots: Buffer | Sequence[int] | None = None,
        skip: int = 0,
    ) -> tuple[int, int, int]: ...
    def scatter(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        slots: Buffer | Sequence[int],
        stream: int,
    ) -> int: ...
    def store(
        self,
        local_cpu: LocalCpu,
        namespace: str,
        hashes: bytes,
        *,
        stream: int,
        chunk_size: int,
        num_tokens: int,
        blocks: Sequence[int] | None = None,
        slots: Buffer | Sequence[int] | None = None,
        first: int = 0,
        wait: bool = True,
    ) -> tuple[int, int, int, int]: ...

_CudaPiece = tuple[MemoryObj | CudaLayerBuffer | Buffer, int, int]

@final
class CudaLayerBuffer:
    def __new__(cls, device: CudaDevice, nbytes: int, *, storing: bool) -> CudaLayerBuffer: ...
    @property
    def nbytes(self) -> int: ...
    def load(self, pieces: Sequence[_CudaPiece], offsets: Sequence[int]) -> int: ...
    def rotate(self, shift: CudaRopeShift) -> None: ...
    def to_bytes(self) -> bytes: ...
    def unload(self, pieces: Sequence[_CudaPiece], offsets: Sequence[int]) -> int: ...
    def zero(self, ranges: Sequence[tuple[int, int]]) -> None: ...

@final
class CudaLayerCopy:
    def __new__(
        cls,
        paged: CudaCache,
        starts: Sequence[int],
        ends: Sequence[int],
        slots: Buffer | Sequence[int],
        *,
        stream: int,
        storing: bool,
    ) -> CudaLayerCopy: ...
    @property
    def layer_bytes(self) -> list[int]: ...
    def finish(self) -> None: ...
    def gather(self, layer: int, pieces: Sequence[_CudaPiece]) -> int: ...
    def scatter(self, layer: int, pieces: Sequence[_CudaPiece]) -> int: ...

@final
class CudaRopeShift:
    def __new__(
        cls,
        device: CudaDevice,
        inv_freq: Sequence[float],
        old: Buffer | Sequence[int],
        new: Buffer | Sequence[int],
        *,
        interleaved: bool,
        dtype: str,
        row_elements: int,
        heads: int,
        head_size: int,
        offset: int,
    ) -> CudaRopeShift: ...

@final
class CudaTransfer:
    def is_done(self) -> bool: ...
    def outcome(self) -> list[int]: ...
    def wait(self, timeout_ms: int | None = None) -> bool: ...

@final
class CudaLayerwiseStep:
    def __new__(
        cls,
        local_cpu: LocalCpu,
        paged: CudaCache,
        *,
        chunk_size: int,
        stream: int,
        wait: bool = True,
    ) -> CudaLayerwiseStep: ...
    @property
    def num_layers(self) -> int: ...
    def add_load(
        self,
        lookup_id: str,
        namespace: str,
        hashes: bytes,
        *,
        num_tokens: int,
        blocks: Sequence[int] | None = None,
        slots: Buffer | Sequence[int] | None = None,
        skip: int = 0,
        computed_from: int | None = None,
    ) -> tuple[int, int, int]: ...
    def add_save(
        self,
        namespace: str,
        hashes: bytes,
        *,
        num_tokens: int,
        blocks: Sequence[int] | None = None,
        slots: Buffer | Sequence[int] | None = None,
        first: int = 0,
    ) -> tuple[int, int, int, int]: ...
    def close(self) -> None: ...
    def commit(self) -> list[tuple[int, int, int, int]]: ...
    def finish_loads(self) -> list[tuple[int, int, int]]: ...
    def save(self, layer: int) -> None: ...
    def start_loads(self, copier: Copier | None = None) -> None: ...
    def wait(self, layer: int) -> None: ...

@final
class EventSink:
    def __new__(cls, local_cpu: LocalCpu, capacity: int = 65536) -> EventSink: ...
    @property
    def times_lost(self) -> int: ...
    def cleared(self, tier: str) -> None: ...
    def drain(self) -> tuple[bool, list[tuple[bool, str, str, bytes, int, int]]]: ...
    def removed(self, tier: str, namespace: str, hash: bytes) -> None: ...
    def stored(
        self, tier: str, namespace: str, hash: bytes, nbytes: int, num_tokens: int
    ) -> None: ...

@final
class LayerwiseStep:
    def __new__(
        cls, local_cpu: LocalCpu, paged: PagedCache, *, chunk_size: int
    ) -> LayerwiseStep: ...
    @property
    def num_layers(self) -> int: ...
    def add_load(
        self,
        lookup_id: str,
        namespace: str,
        hashes: bytes,
        *,
        num_tokens: int,
        blocks: Sequence[int] | None = None,
        slots: Buffer | Sequence[int] | None = None,
        skip: int = 0,
        computed_from: int | None = None,
    ) -> tuple[int, int, int]: ...
    def add_save(
        self,
        namespace: str,
        hashes: bytes,
        *,
        num_tokens: int,
        blocks: Sequence[int] | None = None,
        slots: Buffer | Sequence[int] | None = None,
        first: int = 0,
    ) -> tuple[int, int, int, int]: ...
    def close(self) -> None: ...
    def commit(self) -> list[tuple[int, int, int, int]]: ...
    def finish_loads(self) -> list[tuple[int, int, int]]: ...
    def save(self, layer: int) -> None: ...
    def start_loads(self, copier: Copier | None = None) -> None: ...
    def wait(self, layer: int) -> None: ...

@final
class LocalCpu:
    def __new__(
        cls, capacity_bytes: int, lease_ms: int, policy: str = "LRU", num_readers: int = 0
    ) -> LocalCpu: ...
    @property
    def capacity_bytes(self) -> int: ...
    def allocate(self, lens: Sequence[int]) -> list[MemoryObj] | None: ...
    def audit(self) -> dict[str, int]: ...
    def chunks(self) -> list[tuple[str, bytes]]: ...
    def clear(self, prefix: str | None = None) -> int: ...
    def close(self) -> None: ...
    def get(self, namespace: str, hashes: bytes) -> list[MemoryObj]: ...
    def longest_prefix(self, namespace: str, hashes: bytes) -> int: ...
    def lookup(self, lookup_id: str, namespace: str, hashes: bytes) -> tuple[int, int]: ...
    def owns(self, memory_obj: MemoryObj) -> bool: ...
    def put(
        self, namespace: str, hash: bytes, memory_obj: MemoryObj, num_tokens: int = 0
    ) -> bool: ...
    def release(self, lookup_id: str) -> bool: ...
    def require_puttable(self, memory_objs: Sequence[MemoryObj]) -> None: ...
    def remove(self, namespace: str, hash: bytes) -> bool: ...
    def retain(self, prefix: str) -> int: ...
    def usage(self) -> dict[str, int]: ...

@final
class LookupConnections:
    def __new__(cls, peers: Sequence[tuple[str | PathLike[str], str]]) -> LookupConnections: ...
    def ask(
        self,
        message_id: int,
        lookup_id: str,
        namespace: str,
        hashes: bytes,
        ranks: Sequence[int] | None = None,
    ) -> bool: ...
    def clear(self, message_id: int) -> list[int]: ...
    def close(self) -> None: ...
    def connect(self) -> bool: ...
    def receive(self, wait_us: int) -> list[tuple[int, tuple[int, int, int, int] | None]]: ...
    def release(self, message_id: int, lookup_id: str) -> list[int]: ...

@final
class LocalDisk:
    def __new__(
        cls,
        paths: Sequence[str | PathLike[str]],
        limit_bytes: int,
        pool: LocalCpu,
        policy: str = "LRU",
        *,
        threads: int = 8,
        max_queued_bytes: int = ...,
        direct: bool = True,
        sync: bool = False,
        delete_on_close: bool = False,
    ) -> LocalDisk: ...
    def clear(self, prefix: str | None = None) -> int: ...
    def close(self, within_s: float) -> bool: ...
    def flush(self, within_s: float) -> bool: ...
    def get(
        self, namespace: str, hashes: bytes, within_s: float
    ) -> list[tuple[MemoryObj, tuple[str, int, int, str, int] | None, int]]: ...
    def longest_prefix(self, namespace: str, hashes: bytes) -> int: ...
    def path_of(self, namespace: str, hash: bytes) -> Path: ...
    def put(
        self,
        namespace: str,
        hashes: bytes,
        chunks: Sequence[tuple[MemoryObj, tuple[str, int, int, str, int] | None, int]],
    ) -> int: ...
    def remove(self, namespace: str, hash: bytes) -> bool: ...
    def retain(self, prefix: str) -> int: ...
    def stats(self) -> dict[str, int]: ...

@final
class LookupServer:
    def __new__(
        cls,
        path: str | PathLike[str],
        local_cpu: LocalCpu,
        secret: str = "",
        own_fields: Mapping[str, str] = ...,
        reader_secret: str = "",
    ) -> LookupServer: ...
    def close(self) -> None: ...
    def stats(self) -> dict[str, int]: ...

@disjoint_base
class MemoryObj:
    def __new__(cls, of: MemoryObj) -> Self: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def positions(self) -> bytes | None: ...
    @property
    def ref_count(self) -> int: ...
    @property
    def sealed(self) -> bool: ...
    def ref_count_down(self) -> None: ...
    def ref_count_up(self) -> None: ...
    def seal(self) -> None: ...
    def set_positions(self, positions: Sequence[int]) -> None: ...
    def to_bytes(self) -> bytes: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...
        def __release_buffer__(self, buffer: memoryview, /) -> None: ...

@final
class PagedCache:
    @staticmethod
    def opaque(
        layers: Sequence[tuple[int, int]],
        num_blocks: int,
        *,
        block_tokens: int,
        block_bytes: int,
        block_stride: int,
        keep_alive: object,
        copy_threads: int | None = None,
    ) -> PagedCache: ...
    @staticmethod
    def tokens(
        layers: Sequence[tuple[int, int]],
        num_blocks: int,
        *,
        block_tokens: int,
        block_stride: int,
        token_stride: int,
        planes: int,
        plane_stride: int,
        heads: int,
        head_stride: int,
        run_bytes: int,
        keep_alive: object,
        copy_threads: int | None = None,
    ) -> PagedCache: ...
    @property
    def copy_threads(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    def chunk_bytes(self, num_tokens: int) -> int: ...

@final
class RegionReader:
    def __new__(cls, path: str | PathLike[str], secret: str, deadline_ms: int) -> RegionReader: ...
    @property
    def capacity_bytes(self) -> int: ...
    def close(self) -> None: ...

@final
class Remote:
    def __new__(
        cls,
        url: str,
        pool: LocalCpu,
        *,
        credentials: Mapping[str, str] = ...,
        operations: int = 8,
        deadline_s: float = 5.0,
        ttl_s: float | None = None,
        max_queued_bytes: int = ...,
        max_value_bytes: int = ...,
        serde: str = "naive",
    ) -> Remote: ...
    def begin(self, name: str, max_bytes: int, within_s: float = 5.0) -> bytes | None: ...
    def clear(self, prefix: str | None = None) -> int: ...
    def close(self, within_s: float) -> bool: ...
    def flush(self, within_s: float) -> bool: ...
    def get(
        self, namespace: str, hashes: bytes, within_s: float
    ) -> list[tuple[MemoryObj, tuple[str, int, int, str, int] | None, int]]: ...
    def health(self, within_s: float) -> list[tuple[str, bool, str]]: ...
    def list_page(
        self, cursor: str | None = None, within_s: float = 5.0
    ) -> tuple[list[tuple[str, int]], str | None]: ...
    def longest_prefix(self, namespace: str, hashes: bytes) -> int: ...
    def name_of(self, namespace: str, hash: bytes) -> str: ...
    def put(
        self,
        namespace: str,
        hashes: bytes,
        chunks: Sequence[tuple[MemoryObj, tuple[str, int, int, str, int] | None, int]],
    ) -> int: ...
    def remove(self, namespace: str, hash: bytes) -> bool: ...
    def remove_names(self, names: Sequence[str], within_s: float = 5.0) -> int: ...
    def retain(self, prefix: str) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def take_lines(self) -> list[str]: ...

@final
class RopeShift:
    def __new__(
        cls,
        inv_freq: Sequence[float],
        old: Buffer | Sequence[int],
        new: Buffer | Sequence[int],
        *,
        interleaved: bool,
        dtype: str,
        row_elements: int,
        heads: int,
        head_size: int,
        offset: int,
    ) -> RopeShift: ...

@final
class Transfer:
    def is_done(self) -> bool: ...
    def outcome(self) -> list[int]: ...
    def wait(self, timeout_ms: int | None = None) -> bool: ...

@final
class TransferQueue:
    def __new__(cls, bytes_per_second: int | None = None) -> TransferQueue: ...
    def begin_load(
        self,
        local_cpu: LocalCpu,
        paged: PagedCache,
        lookup_id: str,
        namespace: str,
        hashes: bytes,
        *,
        chunk_size: int,
        num_tokens: int,
        blocks: Sequence[int] | None = None,
        slots: Buffer | Sequence[int] | None = None,
        skip: int = 0,
    ) -> Transfer: ...
    def begin_store(
        self,
        local_cpu: LocalCpu,
        paged: PagedCache,
        namespace: str,
        hashes: bytes,
        *,
        chunk_size: int,
        num_tokens: int,
        blocks: Sequence[int] | None = None,
        slots: Buffer | Sequence[int] | None = None,
        first: int = 0,
    ) -> Transfer: ...
    def close(self) -> None: ...
