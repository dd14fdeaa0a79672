"""From tokens to chunks and their keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_rs import _native
from lmcache_rs.config import LMCacheEngineConfig, LMCacheMetadata
from lmcache_rs.identity import Identity, identity_of
from lmcache_rs.key import HASH_BYTES, CacheEngineKey, Namespaces

if TYPE_CHECKING:
    import numpy
    import torch

    Tokens = Sequence[int] | numpy.ndarray | torch.Tensor
    Mask = Sequence[bool] | numpy.ndarray | torch.Tensor


def resolve_none_hash(config: LMCacheEngineConfig, none_hash: bytes | None = None) -> bytes:
    """The parent of a first chunk: given, or derived from the configured seed; 32 bytes.

    The environment is not read, so that it is the same in every process.
    """
    if none_hash is not None:
        return none_hash
    return _native.sha256_cbor(config.none_hash_seed)


def token_buffer(tokens: Tokens) -> Any:
    """Tokens as something the native half reads without a Python loop: a list or a host array."""
    if hasattr(tokens, "detach"):  # a torch tensor, wherever it lives
        return tokens.detach().cpu().numpy()
    return tokens


def mask_bytes(mask: Mask) -> bytes:
    """One byte a token, 0 for False.

    Raises:
        TypeError: The mask does not hold bools.
    """
    array: Any = mask.detach().cpu().numpy() if hasattr(mask, "detach") else mask
    if hasattr(array, "tobytes"):
        if str(array.dtype) != "bool":
            raise TypeError(f"mask has dtype {array.dtype}; it must be bool, one a token")
        return bytes(array.tobytes())
    if not all(isinstance(item, bool) for item in array):
        raise TypeError("mask must hold bools, one a token")
    return bytes(array)


class TokenDatabase(ABC):
    """Splits a token sequence into chunks and names them."""

    chain = "own"
    """What its hashes hang from: part of every key."""

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        none_hash: bytes | None = None,
    ) -> None:
        self.config = config
        self.metadata = metadata
        self.none_hash = resolve_none_hash(config, none_hash)
        self.namespaces = Namespaces(self.identity({}))

    def identity(self, registered: Mapping[str, str]) -> Identity:
        """What its keys are made of, beside tokens and tags."""
        return identity_of(
            self.config,
            self.metadata,
            chain=self.chain,
            none_hash=self.none_hash,
            registered=registered,
        )

    @abstractmethod
    def process_tokens(
        self,
        tokens: Tokens | None = None,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        mask: Mask | None = None,
        make_key: bool = True,
        request_configs: Mapping[str, Any] | None = None,
        *,
        extra_keys: object = None,
    ) -> Iterator[tuple[int, int, CacheEngineKey | bytes]]:
        """Yields `(start, end, key or 32-byte hash)` of the chunks, in order."""


class ChunkedTokenDatabase(TokenDatabase):
    """Chunks of a fixed size, each named by its tokens and all tokens before it.

    Args:
        config: `chunk_size` and `save_unfull_chunk` decide the split, `none_hash_seed` the chain.
        metadata: Facts that enter every key.
        none_hash: 32-byte parent of the first chunk; None derives it from the configured seed.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        none_hash: bytes | None = None,
    ) -> None:
        super().__init__(config, metadata, none_hash)
        self.chunk_size = config.chunk_size
        self.save_unfull_chunk = config.saves_unfull_chunk(alone=True)

    def new_chain(self) -> _native.Chain:
        """An empty chain, for a sequence that comes in pieces.

        Raises:
            ValueError: The keys bear an engine's own hashes: tokens are not hashed here.
        """
        if self.config.chain == "engine":
            raise ValueError(
                "chain is 'engine': keys bear the engine's own hashes; give these, not tokens, "
                "or set chain to own"
            )
        return _native.Chain(self.chunk_size, self.none_hash)

    def process_tokens(
        self,
        tokens: Tokens | None = None,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        mask: Mask | None = None,
        make_key: bool = True,
        request_configs: Mapping[str, Any] | None = None,
        *,
        extra_keys: object = None,
    ) -> Iterator[tuple[int, int, CacheEngineKey | bytes]]:
        """Yields `(start, end, key)` of the chunks in order; the hash with `make_key=False`.

        Either `tokens` are split and hashed, or `hashes` come with the number of tokens of each
        chunk in `offsets`. Chunks that lie in the mask's leading run of False are not yielded.

        Args:
            tokens: Token ids: a list, or a one-dimensional array or tensor of int32 or int64.
            hashes: 32-byte hashes of the chunks, in order.
            offsets: Tokens of each of these chunks.
            mask: One bool a token, False then True; the count of False a multiple of `chunk_size`.
            make_key: Whether to yield whole keys.
            request_configs: The request's configs, whose `lmcache.tag.*` enter the keys.
            extra_keys: What besides the tokens decides the KV, any plain value.

        Raises:
            ValueError: Both or neither of tokens and hashes, a mask of another form or length, an
                id out of range, hashes that do not fit their offsets.
            TypeError: A value of a type that cannot be hashed.
        """
        if (tokens is None) == (hashes is None):
            found = "neither" if tokens is None else "both"
            raise ValueError(f"process_tokens needs either tokens or hashes, got {found}")
        if tokens is not None:
            spans = self._spans_of_tokens(tokens, mask, extra_keys)
        else:
            spans = self._spans_of_hashes(hashes or (), offsets, mask)
        if not make_key:
            return iter(spans)
        return self.namespaces.keys(spans, request_configs)

    def _spans_of_tokens(
        self, tokens: Tokens, mask: Mask | None, extra_keys: object
    ) -> list[tuple[int, int, bytes]]:
        skip = self._aligned_skip(mask, len(tokens))
        extra = None if extra_keys is None else _native.encode_extra_keys(extra_keys)
        chain = self.new_chain()
        chain.extend(token_buffer(tokens), extra)
        return chain.spans(skip, self.save_unfull_chunk, extra)

    def _spans_of_hashes(
        self, hashes: Sequence[bytes], offsets: Sequence[int] | None, mask: Mask | None
    ) -> list[tuple[int, int, bytes]]:
        if offsets is None or len(offsets) != len(hashes):
            given = "none" if offsets is None else str(len(offsets))
            raise ValueError(f"{len(hashes)} hashes need as many offsets, got {given}")
        skip = self._aligned_skip(mask, sum(offsets))
        spans, start = [], 0
        for chunk_hash, num_tokens in zip(hashes, offsets, strict=True):
            if not isinstance(chunk_hash, bytes) or len(chunk_hash) != HASH_BYTES:
                raise ValueError(f"a hash must be {HASH_BYTES} bytes, got {chunk_hash!r}")
            if num_tokens <= 0:
                raise ValueError(f"an offset is the number of tokens of a chunk, got {num_tokens}")
            if start >= skip:
                spans.append((start, start + num_tokens, chunk_hash))
            start += num_tokens
        return spans

    def _aligned_skip(self, mask: Mask | None, num_tokens: int) -> int:
        if mask is None:
            return 0
        num_false = _native.leading_false(mask_bytes(mask), num_tokens)
        return _native.chunk_aligned(num_false, self.chunk_size)


class SegmentTokenDatabase(TokenDatabase):
    """Segments between separators, each named by its own tokens alone.

    A segment's hash does not depend on what stands before it, so a document is found again at any
    position. Separator tokens belong to no segment, and empty segments are not yielded.

    Args:
        config: `none_hash_seed` decides the chain.
        metadata: Facts that enter every key.
        none_hash: 32-byte parent of every segment; None derives it from the configured seed.
        separator: Token ids of the separator.
        blend_special_str: The separator as text, in place of `separator`; needs `encode`.
        encode: Turns text into token ids, without adding any of its own.

    Raises:
        ValueError: There is no separator, or it is given twice.
    """

    # A segment's KV may come from any position: it is not a first chunk of the same tokens.
    chain = "segments"

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        none_hash: bytes | None = None,
        *,
        separator: Sequence[int] | None = None,
        blend_special_str: str | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        super().__init__(config, metadata, none_hash)
        if (separator is None) == (blend_special_str is None):
            raise ValueError("give the separator either as token ids or as blend_special_str")
        if separator is None:
            if encode is None:
                raise ValueError("blend_special_str needs encode, which turns it into token ids")
            separator = encode(blend_special_str or "")
        self.separator = list(separator)
        if not self.separator:
            raise ValueError("the separator has no token; segments need at least one between them")

    def process_tokens(
        self,
        tokens: Tokens | None = None,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        mask: Mask | None = None,
        make_key: bool = True,
        request_configs: Mapping[str, Any] | None = None,
        *,
        extra_keys: object = None,
    ) -> Iterator[tuple[int, int, CacheEngineKey | bytes]]:
        """Yields `(start, end, key)` of the segments in order; the hash with `make_key=False`.

        Segments that begin in the mask's leading run of False are not yielded. Otherwise as in
        `ChunkedTokenDatabase.process_tokens`.

        Raises:
            ValueError: No tokens, hashes (segments are hashed here), or a mask of another form.
        """
        if tokens is None or hashes is not None or offsets is not None:
            raise ValueError(
                "SegmentTokenDatabase splits tokens; hashes and offsets cannot be given"
            )
        skip = 0
        if mask is not None:
            skip = _native.leading_false(mask_bytes(mask), len(tokens))
        extra = None if extra_keys is None else _native.encode_extra_keys(extra_keys)
        buffer = token_buffer(tokens)
        spans = []
        for start, end in self._segments(buffer):
            if start >= skip:
                chain = _native.Chain(end - start, self.none_hash)
                chain.extend(buffer[start:end], extra)
                spans.append((start, end, chain.hashes()))
        if not make_key:
            return iter(spans)
        return self.namespaces.keys(spans, request_configs)

    def _segments(self, tokens: Any) -> Iterator[tuple[int, int]]:
        width = 8
        haystack = array("q", tokens).tobytes()
        needle = array("q", self.separator).tobytes()
        start = search = 0
        while (found := haystack.find(needle, search)) >= 0:
            if found % width:
                search = found + 1
                continue
            if found // width > start:
                yield start, found // width
            start = found // width + len(self.separator)
            search = start * width
        if start < len(tokens):
            yield start, len(tokens)
