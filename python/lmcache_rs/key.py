"""Cache keys: what names a chunk, and the text form in which it does.

`CacheEngineKey` names a chunk of the KV of all layers; `LayerCacheEngineKey` is an address into
it, not an entry of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcache_rs import _native

if TYPE_CHECKING:
    from lmcache_rs.identity import Identity

HASH_BYTES = 32
"""Bytes of a chain hash; packed hashes stand end to end."""
TAG_PREFIX = "lmcache.tag."
"""Request configs under this prefix keep requests apart; all others leave the key alone."""

_NO_FACTS: Mapping[str, str] = MappingProxyType({})


def tags_of(request_configs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The tags among a request's configs, by their names without the prefix."""
    configs = request_configs or {}
    return {
        name.removeprefix(TAG_PREFIX): value
        for name, value in configs.items()
        if name.startswith(TAG_PREFIX)
    }


@dataclass(frozen=True, slots=True)
class CacheEngineKey:
    """The whole key of a chunk. Keys are equal if their text forms are.

    Args:
        model_name: The model's name as the engine serves it.
        world_size: Ranks among which the KV is split.
        worker_id: The rank that holds this part.
        chunk_hash: 32-byte chain hash of the chunk.
        kv_dtype: Resolved element type of the KV.
        request_configs: The request's configs; of them only `lmcache.tag.*` enter the key.
        facts: Further facts about model, engine and stored form, by name.
    """

    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: bytes
    kv_dtype: str
    request_configs: Mapping[str, Any] | None = field(default=None, hash=False, compare=False)
    facts: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    _text: str = field(init=False, default="", repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_text", self._encode())

    def _encode(self, layer_id: int | None = None) -> str:
        return _native.encode_key(
            self.model_name,
            self.world_size,
            self.worker_id,
            self.kv_dtype,
            dict(self.facts),
            tags_of(self.request_configs),
            self.chunk_hash,
            layer_id,
        )

    @property
    def tags(self) -> dict[str, Any]:
        """The tags that enter the key."""
        return tags_of(self.request_configs)

    @property
    def namespace(self) -> str:
        """The text form of everything but the hash."""
        return namespace_text(
            self.model_name,
            self.world_size,
            self.worker_id,
            self.kv_dtype,
            self.facts,
            self.request_configs,
        )

    def to_string(self) -> str:
        """The text form: injective, and `from_string` reads it back."""
        return self._text

    __str__ = to_string

    @staticmethod
    def from_string(text: str) -> CacheEngineKey:
        """Reads a text form, a layer's as a `LayerCacheEngineKey`.

        Raises:
            ValueError: The text is none that `to_string` would write.
        """
        model_name, world_size, worker_id, kv_dtype, facts, tags, chunk_hash, layer_id = (
            _native.parse_key(text)
        )
        configs = {TAG_PREFIX + name: value for name, value in tags.items()} or None
        parts = (model_name, world_size, worker_id, chunk_hash, kv_dtype, configs, facts)
        if layer_id is None:
            return CacheEngineKey(*parts)
        return LayerCacheEngineKey(*parts, layer_id=layer_id)

    def split_layers(self, num_layers: int) -> list[LayerCacheEngineKey]:
        """The addresses of the chunk's layers, first to last."""
        parts = {
            part.name: getattr(self, part.name) for part in fields(CacheEngineKey) if part.init
        }
        return [LayerCacheEngineKey(**parts, layer_id=layer) for layer in range(num_layers)]

    def get_first_layer(self) -> LayerCacheEngineKey:
        """The address of the chunk's first layer."""
        return self.split_layers(1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCacheEngineKey(CacheEngineKey):
    """The address of one layer of a chunk.

    Args:
        layer_id: The layer, from 0.
    """

    layer_id: int

    def _encode(self, layer_id: int | None = None) -> str:
        return CacheEngineKey._encode(self, self.layer_id)

    __str__ = CacheEngineKey.to_string

    def to_chunk_key(self) -> CacheEngineKey:
        """The key of the chunk that the layer is part of."""
        parts = {
            part.name: getattr(self, part.name) for part in fields(CacheEngineKey) if part.init
        }
        return CacheEngineKey(**parts)


def namespace_text(
    model_name: str,
    world_size: int,
    worker_id: int,
    kv_dtype: str,
    facts: Mapping[str, str],
    request_configs: Mapping[str, Any] | None,
) -> str:
    """The text form of everything but the tokens that decides a chunk's bytes.

    Raises:
        TypeError, ValueError: A tag has a value that cannot be part of a key.
    """
    tags = tags_of(request_configs)
    return _native.encode_key(model_name, world_size, worker_id, kv_dtype, dict(facts), tags)


class Namespaces:
    """The namespaces of one engine: its own facts once, each request's tags on top."""

    def __init__(self, identity: Identity) -> None:
        apart = {"model_name", "world_size", "worker_id", "kv_dtype"}
        facts = {name: value for name, value in identity.facts().items() if name not in apart}
        self._metadata = identity.metadata
        self.facts: Mapping[str, str] = MappingProxyType(facts)
        self._untagged = self._text(None)

    def _text(self, request_configs: Mapping[str, Any] | None) -> str:
        of = self._metadata
        return namespace_text(
            of.model_name, of.world_size, of.worker_id, of.kv_dtype, self.facts, request_configs
        )

    def text(self, request_configs: Mapping[str, Any] | None = None) -> str:
        """The namespace of a request with these configs."""
        return self._text(request_configs) if request_configs else self._untagged

    def key(
        self, chunk_hash: bytes, request_configs: Mapping[str, Any] | None = None
    ) -> CacheEngineKey:
        """The whole key of a chunk of such a request."""
        of = self._metadata
        return CacheEngineKey(
            of.model_name,
            of.world_size,
            of.worker_id,
            chunk_hash,
            of.kv_dtype,
            request_configs,
            self.facts,
        )
