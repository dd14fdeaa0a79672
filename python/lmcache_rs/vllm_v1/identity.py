"""Who a request's chunks belong to: everything but the tokens that decides their bytes.

The scheduler half asks here once a request. Extra parts of the prefix hash (adapter name and path,
salt, multimodal items, embeddings) are as vLLM forms them; all else is the namespace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lmcache_rs import _native
from lmcache_rs.config_intake import ConfigError, switch
from lmcache_rs.fingerprint import Digest, Stamp, adapter_digest, adapter_stamp
from lmcache_rs.identity import NONE, Identity, identity_of
from lmcache_rs.key import HASH_BYTES, TAG_PREFIX, Namespaces
from lmcache_rs.token_database import resolve_none_hash
from lmcache_rs.vllm_v1 import compat
from lmcache_rs.vllm_v1.model_identity import adapter_settings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from lmcache_rs.config import LMCacheEngineConfig, LMCacheMetadata

SKIP_SAVE = "lmcache.skip_save"
MAX_NAMES_REPORTED = 100
MAX_ADAPTERS = 65_536
"""Adapters that a start of the engine may load; the requests of later ones bypass the cache."""
MAX_KEPT = 4096
CRYPTOGRAPHIC = frozenset({"sha256", "sha256_cbor"})
"""vLLM's algorithms that nobody can make collide on purpose."""


class Chain(Protocol):
    """The hashes of one request's full chunks, as far as its tokens were taken in."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    def extend(self, tokens: Sequence[int], extra_keys: Any = None) -> int: ...
    def hashes(self, num_chunks: int | None = None) -> bytes: ...


class EngineChain:
    """Hashes that vLLM has made for a request anyway, at the ends of our chunks.

    Each names all tokens before it, with what vLLM hashes beside them; nothing is hashed here.
    """

    def __init__(self, request: Request, chunk_size: int, hash_block: int) -> None:
        self._request = request
        self._chunk_size = chunk_size
        self._links = chunk_size // hash_block
        self.num_tokens = 0

    @property
    def num_chunks(self) -> int:
        """Full chunks so far."""
        made = len(self._request.block_hashes) // self._links
        return min(self.num_tokens // self._chunk_size, made)

    def extend(self, tokens: Sequence[int], extra_keys: Any = None) -> int:
        """Takes in tokens that vLLM has hashed."""
        self.num_tokens += len(tokens)
        return self.num_chunks

    def hashes(self, num_chunks: int | None = None) -> bytes:
        """Packed 32-byte hashes of the first `num_chunks` full chunks; shorter ones are padded."""
        count = self.num_chunks if num_chunks is None else min(num_chunks, self.num_chunks)
        ends = self._request.block_hashes[self._links - 1 : count * self._links : self._links]
        return b"".join(bytes(link).ljust(HASH_BYTES, b"\0") for link in ends)


class NoExtraKeys:
    """In the engine's hashes, what is beside the tokens is in already."""

    next_mm_item = 0

    def of_chunks(self, start: int, num_chunks: int, chunk_size: int) -> tuple[None, int]:
        """Nothing; see `compat.ExtraKeys.of_chunks`."""
        return None, 0


class UnknownAdapterError(ValueError):
    """An adapter's weights cannot be told from others: its requests must not use the cache."""


@dataclass(slots=True)
class LoadedAdapter:
    """What the engine holds under one of its adapter ids, from one loading to the next.

    Args:
        number: vLLM's id.
        folder: Where its files were read from.
        files: Digest of these files.
        is_certain: Whether they have been so ever since.
    """

    number: int
    folder: Path
    files: str
    is_certain: bool = True


class Adapters:
    """Digests of the adapters' files, each computed once for each state of them.

    vLLM reads an adapter's files when it first needs an id, keeps them as long as it has room, and
    may read them anew at any time after that. So when files change under an id, nobody can tell any
    more which weights the engine computes with. A request that says `load_inplace` makes it read
    them now.

    Args:
        settings: What the engine makes of any adapter's files, as a digest.
    """

    def __init__(self, settings: str = NONE) -> None:
        self._settings = settings
        # By vLLM's id alone, as vLLM keeps them: it asks neither name nor path of an id that it
        # has loaded. None is ever forgotten: it would be taken for a new one.
        self._loaded: dict[int, LoadedAdapter] = {}
        self._digests: OrderedDict[tuple[str, Stamp], str] = OrderedDict()

    def loaded(self, adapter: LoRARequest) -> LoadedAdapter:
        """What the engine has loaded, or will load, for this adapter.

        Raises:
            UnknownAdapterError: Its files cannot be read here, or are others than those that were
                loaded under its id.
        """
        number = adapter.lora_int_id
        try:
            folder = _adapter_folder(adapter.lora_path)
            files = self._digest_of(folder, adapter_stamp(folder))
        except OSError as error:
            raise UnknownAdapterError(
                f"the files of adapter {adapter.lora_name!r} cannot be read ({error})"
            ) from error
        loaded = self._loaded.get(number)
        if loaded is None or (adapter.load_inplace and not self._is(loaded, files)):
            if loaded is None and len(self._loaded) >= MAX_ADAPTERS:
                raise UnknownAdapterError(f"more than {MAX_ADAPTERS} adapters have been loaded")
            loaded = self._loaded[number] = LoadedAdapter(number, folder, files)
        if not self._is(loaded, files):
            # For good: what was read in the meantime stays in the engine when the files come back.
            loaded.is_certain = False
            raise UnknownAdapterError(
                f"the files of adapter {adapter.lora_name!r} have changed since vLLM was first "
                f"asked for its id, {number}; load it again under another id"
            )
        return loaded

    def digest(self, adapter: LoRARequest, loaded: LoadedAdapter) -> str:
        """Digest of an adapter's files and of what the engine makes of them."""
        shape = "3d" if adapter.is_3d_lora_weight else "2d"
        digest = Digest("adapter").add("files", loaded.files.encode()).add("shape", shape.encode())
        return digest.add("settings", self._settings.encode()).hex()

    def is_current(self, loaded: LoadedAdapter) -> bool:
        """Whether the engine still computes with it, as far as anybody can tell."""
        if self._loaded.get(loaded.number) is not loaded:
            return False
        try:
            files = self._digest_of(loaded.folder, adapter_stamp(loaded.folder))
        except OSError:
            return False
        loaded.is_certain = self._is(loaded, files)
        return loaded.is_certain

    @staticmethod
    def _is(loaded: LoadedAdapter, files: str) -> bool:
        return loaded.is_certain and loaded.files == files

    def _digest_of(self, folder: Path, stamp: Stamp) -> str:
        place = (str(folder), stamp)
        digest = self._digests.get(place)
        if digest is None:
            digest = adapter_digest(folder)
            if adapter_stamp(folder) != stamp:
                raise OSError("they change while they are read")
            _keep(self._digests, place, digest)
        return digest


def _keep(known: OrderedDict[Any, Any], key: object, value: object) -> None:
    known[key] = value
    if len(known) > MAX_KEPT:
        known.popitem(last=False)


def _adapter_folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    import huggingface_hub

    # As vLLM does for a name on the hub; but the scheduler waits for no download.
    found: object = None
    with contextlib.suppress(ValueError):  # no name that a hub could have
        found = huggingface_hub.try_to_load_from_cache(path, "adapter_config.json")
    if not isinstance(found, str):
        raise FileNotFoundError(f"{path} is neither a folder nor in the hub's local cache")
    return Path(found).parent


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What a request's chunks are called and whether it may use them.

    Args:
        namespace: Where its chunks live; None when it does not use the cache.
        can_save: Whether its KV may be stored.
        epoch: The epoch it belongs to: after a reset it is another one.
        adapter: The adapter it is computed with.
    """

    namespace: str | None
    can_save: bool
    epoch: str
    adapter: LoadedAdapter | None


class Identities:
    """See the module's description.

    Args:
        config: Settings, with the chunk size that suits the engine.
        metadata: Facts of the model.
        engine: What the engine's own hashes are, where they are to be keys.
        bypass_items: Why requests with multimodal items must not use the cache, if they must not.
        adapter_settings: What the engine makes of any adapter's files, as a digest.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        engine: EngineHashes | None = None,
        bypass_items: str | None = None,
        adapter_settings: str = NONE,
    ) -> None:
        if (config.chain == "engine") != (engine is not None):
            raise ValueError(f"chain is {config.chain!r}; the engine's hashes belong to 'engine'")
        self._config = config
        self._engine = engine
        self._bypass_items = bypass_items
        self._none_hash = resolve_none_hash(config)
        base = identity_of(config, metadata, chain="own", none_hash=self._none_hash, registered={})
        self._base = dataclasses.replace(base, adapter=NONE)
        self._is_resolved = engine is None
        self._adapters = Adapters(adapter_settings)
        self._namespaces: OrderedDict[str, Namespaces] = OrderedDict()
        self._reported: set[str] = set()
        self.epoch = NONE
        # A name that is too long for a key is refused here, not at the first request.
        Namespaces(self._base)

    def of(self, request: Request) -> RequestIdentity:
        """The identity of a request.

        Raises:
            ValueError, TypeError: Why it bypasses the cache: it cannot be named.
        """
        configs = compat.request_configs_of(request)
        reason = compat.bypass_reason(request)
        if reason is None and request.mm_features:
            reason = self._bypass_items
        if reason is not None:
            raise ValueError(reason)
        compat.require_hashable(request)
        adapter, loaded = NONE, None
        if request.lora_request is not None:
            loaded = self._adapters.loaded(request.lora_request)
            adapter = self._adapters.digest(request.lora_request, loaded)
        namespace = self._namespace(adapter).text(configs)
        self._report_unknown(configs)
        return RequestIdentity(namespace, not self._skips_save(configs), self.epoch, loaded)

    def is_current(self, epoch: str, adapter: LoadedAdapter | None) -> bool:
        """Whether what is computed now belongs under the name a request was given before.

        Weights may be replaced while it runs: ahead of a reset, or an adapter's by new files and a
        load in place, which reaches the engine before any request of theirs reaches this half.
        """
        if epoch != self.epoch:
            return False
        return adapter is None or self._adapters.is_current(adapter)

    def chain(self, request: Request) -> tuple[Chain, compat.ExtraKeys | NoExtraKeys]:
        """An empty chain of the request, and what enters it beside the tokens."""
        if self._engine is not None:
            return EngineChain(
                request, self._config.chunk_size, self._engine.hash_block
            ), NoExtraKeys()
        chain = _native.Chain(self._config.chunk_size, self._none_hash)
        return chain, compat.ExtraKeys(request)

    def namespace(self, request_configs: Mapping[str, Any] | None = None) -> str:
        """The namespace of a request without an adapter."""
        return self._namespace(NONE).text(request_configs)

    def new_epoch(self) -> None:
        """From here on no key is one that was used before.

        Random, never counted: two servers that were reset as often, with different weights, would
        meet in a tier that they share.
        """
        self.epoch = secrets.token_hex(16)
        self._namespaces.clear()

    def _namespace(self, adapter: str) -> Namespaces:
        namespaces = self._namespaces.get(adapter)
        if namespaces is None:
            if not self._is_resolved and self._engine is not None:
                # vLLM makes its NONE_HASH after its connectors.
                self._base = self._engine.resolved(self._base)
                self._is_resolved = True
            identity = dataclasses.replace(self._base, adapter=adapter, epoch=self.epoch)
            namespaces = Namespaces(identity)
            _keep(self._namespaces, adapter, namespaces)
        return namespaces

    def _skips_save(self, configs: Mapping[str, Any]) -> bool:
        value = configs.get(SKIP_SAVE, False)
        if isinstance(value, bool):
            return value
        try:
            return switch(SKIP_SAVE, str(value))
        except ValueError:
            self._report(SKIP_SAVE, f"needs true or false, found {type(value).__name__}; not saved")
            return True

    def _report_unknown(self, configs: Mapping[str, Any]) -> None:
        for name in configs:
            if not name.startswith(TAG_PREFIX) and name != SKIP_SAVE:
                self._report(name, f"is unknown, and ignored; known are {TAG_PREFIX}*, {SKIP_SAVE}")

    def _report(self, name: str, problem: str) -> None:
        if name in self._reported or len(self._reported) >= MAX_NAMES_REPORTED:
            return
        self._reported.add(name)
        compat.logger.warning("lmcache_rs: request setting %r %s", name[:80], problem)


@dataclass(frozen=True, slots=True)
class EngineHashes:
    """The engine's own prefix hashes.

    Args:
        algorithm: vLLM's name of the hash.
        hash_block: Tokens from one hash to the next.
    """

    algorithm: str
    hash_block: int

    def resolved(self, identity: Identity) -> Identity:
        """The identity with what these hashes hang from."""
        from vllm.v1.core import kv_cache_utils

        return dataclasses.replace(
            identity,
            chain="engine",
            hash_algorithm=self.algorithm,
            hash_block=self.hash_block,
            none_hash=bytes(kv_cache_utils.NONE_HASH).hex(),
        )


def identities_of(
    config: LMCacheEngineConfig,
    metadata: LMCacheMetadata,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
) -> Identities:
    """The identities of an engine's requests.

    Raises:
        ConfigError: `chain: engine` does not fit the chunk size.
        UnsupportedEngineError: The model's name is too long for a key.
    """
    engine = None
    if config.chain == "engine":
        engine = engine_hashes_of(config, vllm_config, kv_cache_config)
    try:
        return Identities(
            config,
            metadata,
            engine,
            items_bypass_reason(vllm_config),
            adapter_settings_of(vllm_config),
        )
    except ValueError as error:
        raise compat.UnsupportedEngineError(
            f"lmcache_rs cannot name this model's chunks: {error}; give it a shorter name with "
            "--served-model-name"
        ) from error


def engine_hashes_of(
    config: LMCacheEngineConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> EngineHashes:
    """What the engine's own hashes are.

    Raises:
        ConfigError: Our chunks do not end where they do.
    """
    hash_block = compat.hash_block_size_of(kv_cache_config)
    if config.chunk_size % hash_block:
        below = config.chunk_size // hash_block * hash_block
        raise ConfigError(
            [
                f"chain ({config.sources['chain']}): the engine hashes every {hash_block} tokens, "
                f"and chunk_size {config.chunk_size} is no multiple of that; set chunk_size to "
                f"{below or hash_block} or {below + hash_block}, or chain to own"
            ]
        )
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    return EngineHashes(algorithm, hash_block)


def stays_in_memory(config: LMCacheEngineConfig, vllm_config: VllmConfig) -> bool:
    """Whether the keys can be made to collide, and so may name nothing outside this process."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    return config.chain == "engine" and algorithm not in CRYPTOGRAPHIC


def chain_notice(config: LMCacheEngineConfig, vllm_config: VllmConfig) -> str:
    """The choice of chain and what follows from it, in a line."""
    if config.chain == "own":
        return (
            "chain own: keys are sha256_cbor hashes from none_hash_seed, the same in every process "
            "and whatever PYTHONHASHSEED says"
        )
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if not stays_in_memory(config, vllm_config):
        return (
            f"chain engine: keys are vLLM's {algorithm} hashes; engines with another "
            "--prefix-caching-hash-algo or PYTHONHASHSEED find other keys"
        )
    return (
        f"chain engine: {algorithm} can be made to collide, so its keys are used in host memory "
        "alone and are this process's own; set --prefix-caching-hash-algo to sha256_cbor to share"
    )


def items_bypass_reason(vllm_config: VllmConfig) -> str | None:
    """Why requests with multimodal items must not use the cache, if they must not."""
    settings = getattr(vllm_config.model_config, "multimodal_config", None)
    if settings is None or vllm_config.cache_config.enable_prefix_caching:
        return None
    if settings.mm_processor_cache_gb:
        return None
    return (
        "vLLM names multimodal items by request, not by content, while both "
        "--enable-prefix-caching and --mm-processor-cache-gb are off"
    )
