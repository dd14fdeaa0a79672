"""Cache keys: what names a chunk, and the text form in which it does.

`CacheEngineKey` names a chunk of the KV of all layers; `LayerCacheEngineKey` is an address into
it, not an entry of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

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


class _Space:
    """What all keys of a namespace share: every part but the hash, and its text form."""

    __slots__ = (
        "facts",
        "kv_dtype",
        "model_name",
        "request_configs",
        "tags",
        "text",
        "worker_id",
        "world_size",
    )

    def __init__(
        self,
        model_name: str,
        world_size: int,
        worker_id: int,
        kv_dtype: str,
        request_configs: Mapping[str, Any] | None,
        facts: Mapping[str, str],
    ) -> None:
        self.model_name = model_name
        self.world_size = world_size
        self.worker_id = worker_id
        self.kv_dtype = kv_dtype
        self.request_configs = request_configs
        self.facts = facts
        self.tags = tags_of(request_configs)
        self.text = self.encode()

    def encode(self, chunk_hash: bytes | None = None, layer_id: int | None = None) -> str:
        """The text form, of a key if a hash is given."""
        return _native.encode_key(
            self.model_name,
            self.world_size,
            self.worker_id,
            self.kv_dtype,
            dict(self.facts),
            self.tags,
            chunk_hash,
            layer_id,
        )


class CacheEngineKey:
    """The whole key of a chunk. Keys are equal if their text forms are. They do not change.

    Args:
        model_name: The model's name as the engine serves it.
        world_size: Ranks among which the KV is split.
        worker_id: The rank that holds this part.
        chunk_hash: 32-byte chain hash of the chunk.
        kv_dtype: Resolved element type of the KV.
        request_configs: The request's configs; of them only `lmcache.tag.*` enter the key.
        facts: Further facts about model, engine and stored form, by name.

    Raises:
        TypeError, ValueError: A part, or a tag's value, that cannot be part of a key.
    """

    __slots__ = ("_space", "chunk_hash")

    _space: _Space
    chunk_hash: bytes

    def __init__(
        self,
        model_name: str,
        world_size: int,
        worker_id: int,
        chunk_hash: bytes,
        kv_dtype: str,
        request_configs: Mapping[str, Any] | None = None,
        facts: Mapping[str, str] = _NO_FACTS,
    ) -> None:
        space = _Space(model_name, world_size, worker_id, kv_dtype, request_configs, facts)
        space.encode(chunk_hash)  # refuses what is no hash
        object.__setattr__(self, "_space", space)
        object.__setattr__(self, "chunk_hash", chunk_hash)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a key does not change: cannot set {name!r}; make another key")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a key does not change: cannot delete {name!r}; make another key")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CacheEngineKey) or type(other) is not type(self):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[object, ...]:
        return self.chunk_hash, self._space.text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_string()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheEngineKey.from_string, (self.to_string(),)

    @property
    def model_name(self) -> str:
        """The model's name."""
        return self._space.model_name

    @property
    def world_size(self) -> int:
        """Ranks among which the KV is split."""
        return self._space.world_size

    @property
    def worker_id(self) -> int:
        """The rank that holds this part."""
        return self._space.worker_id

    @property
    def kv_dtype(self) -> str:
        """Element type of the KV."""
        return self._space.kv_dtype

    @property
    def request_configs(self) -> Mapping[str, Any] | None:
        """The configs that the key was made with."""
        return self._space.request_configs

    @property
    def facts(self) -> Mapping[str, str]:
        """Further facts, by name."""
        return self._space.facts

    @property
    def tags(self) -> dict[str, Any]:
        """The tags that enter the key."""
        return dict(self._space.tags)

    @property
    def namespace(self) -> str:
        """The text form of everything but the hash."""
        return self._space.text

    def to_string(self) -> str:
        """The text form: injective, and `from_string` reads it back."""
        return self._space.encode(self.chunk_hash)

    def __str__(self) -> str:
        return self.to_string()

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
        return [_layer_key(self._space, self.chunk_hash, layer) for layer in range(num_layers)]

    def get_first_layer(self) -> LayerCacheEngineKey:
        """The address of the chunk's first layer."""
        return self.split_layers(1)[0]


class LayerCacheEngineKey(CacheEngineKey):
    """The address of one layer of a chunk.

    Args:
        layer_id: The layer, from 0. The others are those of `CacheEngineKey`.
    """

    __slots__ = ("layer_id",)

    layer_id: int

    def __init__(
        self,
        model_name: str,
        world_size: int,
        worker_id: int,
        chunk_hash: bytes,
        kv_dtype: str,
        request_configs: Mapping[str, Any] | None = None,
        facts: Mapping[str, str] = _NO_FACTS,
        *,
        layer_id: int,
    ) -> None:
        super().__init__(
            model_name, world_size, worker_id, chunk_hash, kv_dtype, request_configs, facts
        )
        self._space.encode(chunk_hash, layer_id)  # refuses what is no layer
        object.__setattr__(self, "layer_id", layer_id)

    def _identity(self) -> tuple[object, ...]:
        return self.chunk_hash, self._space.text, self.layer_id

    def to_string(self) -> str:
        """The text form: injective, and `from_string` reads it back."""
        return self._space.encode(self.chunk_hash, self.layer_id)

    def to_chunk_key(self) -> CacheEngineKey:
        """The key of the chunk that the layer is part of."""
        ((_, _, key),) = _chunk_keys(self._space, [(0, 0, self.chunk_hash)])
        return key


# A call makes thousands of keys at a time: the slots are set past `__init__`, which checks what was
# checked when the space was made.
_set_space: Callable[[CacheEngineKey, _Space], None] = vars(CacheEngineKey)["_space"].__set__
_set_hash: Callable[[CacheEngineKey, bytes], None] = vars(CacheEngineKey)["chunk_hash"].__set__


def _chunk_keys(
    space: _Space, spans: Iterable[tuple[int, int, bytes]]
) -> Iterator[tuple[int, int, CacheEngineKey]]:
    new, set_space, set_hash = object.__new__, _set_space, _set_hash
    for start, end, chunk_hash in spans:
        key = new(CacheEngineKey)
        set_space(key, space)
        set_hash(key, chunk_hash)
        yield start, end, key


def _layer_key(space: _Space, chunk_hash: bytes, layer_id: int) -> LayerCacheEngineKey:
    key = object.__new__(LayerCacheEngineKey)
    _set_space(key, space)
    _set_hash(key, chunk_hash)
    object.__setattr__(key, "layer_id", layer_id)
    return key


def keys_of(namespace: str, hashes: bytes) -> list[CacheEngineKey]:
    """The keys of packed 32-byte chunk hashes in a namespace, given by its text.

    Raises:
        ValueError: The text is no namespace, or the hashes are not whole.
    """
    if len(hashes) % HASH_BYTES:
        raise ValueError(f"hashes has {len(hashes)} bytes, no multiple of {HASH_BYTES}")
    space = CacheEngineKey.from_string(f"{namespace}@hash={'00' * HASH_BYTES}")._space
    spans = ((0, 0, hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES))
    return [key for _, _, key in _chunk_keys(space, spans)]


class Namespaces:
    """The namespaces of one engine: its own facts once, each request's tags on top."""

    def __init__(self, identity: Identity) -> None:
        apart = {"model_name", "world_size", "worker_id", "kv_dtype"}
        facts = {name: value for name, value in identity.facts().items() if name not in apart}
        self._metadata = identity.metadata
        self.facts: Mapping[str, str] = MappingProxyType(facts)
        self._untagged = self._make_space(None)

    def _make_space(self, request_configs: Mapping[str, Any] | None) -> _Space:
        of = self._metadata
        return _Space(
            of.model_name, of.world_size, of.worker_id, of.kv_dtype, request_configs, self.facts
        )

    def _space(self, request_configs: Mapping[str, Any] | None) -> _Space:
        return self._make_space(request_configs) if request_configs else self._untagged

    def text(self, request_configs: Mapping[str, Any] | None = None) -> str:
        """The namespace of a request with these configs.

        Raises:
            TypeError, ValueError: A tag has a value that cannot be part of a key.
        """
        return self._space(request_configs).text

    def keys(
        self,
        spans: Iterable[tuple[int, int, bytes]],
        request_configs: Mapping[str, Any] | None = None,
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        """The chunks of such a request, each with its whole key in place of its hash.

        Raises:
            TypeError, ValueError: A tag has a value that cannot be part of a key; at once.
        """
        return _chunk_keys(self._space(request_configs), spans)
