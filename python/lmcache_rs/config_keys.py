"""The table of settings: what each key is, and what happens to keys that mean nothing here.

Three classes. `HONOURED` keys are read. Keys of LMCache 0.5.6 that have no meaning here
(`LMCACHE_ONLY`, `LEGACY_NAMES`, `CONNECTOR_ONLY`, `PROCESS_VARIABLES`) give one notice each. Any
other key is an error. The table also prints itself as the documentation's tables, so that they
cannot say something else.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["bool", "int", "float", "str", "mapping"]

CHUNK_SIZE_DEFAULT = 256
"""Tokens of a chunk where nothing else is asked."""

GB = 2**30
"""Bytes of one GB in every setting, as in LMCache."""

CACHE_POLICIES = ("LRU", "LFU", "FIFO", "MRU", "S3FIFO", "ARC")
"""Names of the policies that say which chunk leaves when memory is full, in any case."""

# A wait of more than this many milliseconds does not fit the 32-bit field poll(2) takes.
_MAX_MS = 2**31 - 1


@dataclass(frozen=True)
class Key:
    """One honoured setting.

    `check` gets a value of the right type and returns the value to honour with an optional
    notice; it raises ValueError, saying what to set instead, for a value this version refuses.
    """

    name: str
    kind: Kind
    default: Any
    unit: str
    doc: str
    minimum: float | None = None
    maximum: float | None = None
    check: Callable[[Any], tuple[Any, str | None]] | None = None
    without_secrets: Callable[[Any], Any] | None = None

    def public(self, value: Any) -> Any:
        """The value without secrets: of a mapping, whose entries may hold some, the names."""
        if self.kind == "mapping":
            return sorted(value)
        if value is None or self.without_secrets is None:
            return value
        return self.without_secrets(value)

    def show(self, value: Any) -> str:
        """The value for people, without secrets."""
        return show(value if self.kind == "mapping" else self.public(value))

    def needs(self) -> str:
        """What a value must be, in words for an error."""
        words = {
            "bool": "true or false",
            "int": "a whole number",
            "float": "a number",
            "str": "text",
            "mapping": "a mapping, or a JSON object as text",
        }[self.kind]
        if self.minimum is not None and self.maximum is not None:
            words += f" from {self.minimum:.0f} to {self.maximum:.0f}"
        return f"{words}, in {self.unit}" if self.unit else words

    def accept(self, value: Any) -> tuple[Any, str | None]:
        """The value to honour and its notice. Raises ValueError when this version refuses it."""
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"needs {self.needs()}, found {value}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"needs {self.needs()}, found {value}")
        return (value, None) if self.check is None else self.check(value)


def _hash_algorithm(value: str) -> tuple[str, str | None]:
    if value == "sha256_cbor":
        return value, None
    if value == "builtin":
        return "sha256_cbor", (
            "'builtin' is read as sha256_cbor: a hash that differs by process would make stored "
            "chunks unreachable"
        )
    raise ValueError(f"hash algorithm {value!r} is not available; set it to sha256_cbor")


def _chain(value: str) -> tuple[str, str | None]:
    if value in ("own", "engine"):
        return value, None
    raise ValueError(f"needs own or engine, found {value!r}")


def _cache_policy(value: str) -> tuple[str, str | None]:
    policy = value.upper()
    if policy in CACHE_POLICIES:
        return policy, None
    raise ValueError(f"needs one of {', '.join(CACHE_POLICIES)}, found {value!r}")


def _local_cpu(value: bool) -> tuple[bool, str | None]:
    if value:
        return value, None
    return value, (
        "host memory then only stages chunks for the tiers below it, in max_local_cpu_size; "
        "without such a tier nothing is cached"
    )


def _local_disk(value: str) -> tuple[str, str | None]:
    if any(path.strip() for path in value.split(",")):
        return value, None
    raise ValueError("needs the path of a folder, or several with commas; leave it out for no disk")


def _on_exit(value: str) -> tuple[str, str | None]:
    if value in ("keep", "delete"):
        return value, None
    raise ValueError(f"needs keep or delete, found {value!r}")


# Several URLs are separated by commas, and so are the hosts of one.
_NEXT_URL = re.compile(r",(?=\s*[A-Za-z][A-Za-z0-9+.-]*://)")


def split_urls(text: str) -> list[str]:
    """The URLs in a setting that may hold several, separated by commas."""
    urls = [url.strip().rstrip(",") for url in _NEXT_URL.split(text)]
    return [url for url in urls if url]


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
# A host without a port, or with one; what else holds a colon may be a user and a password.
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*[^:\[\]])?(:[0-9]{1,5})?")


def without_credentials(text: str) -> str:
    """The URLs without what stands before an `@` and behind a `?`, which nobody need see.

    One whose credentials may be elsewhere, since their `?` or `@` is not escaped or the host was
    forgotten, is shown as its scheme alone.
    """
    return ", ".join(_without_credentials(url) for url in split_urls(text))


def _without_credentials(url: str) -> str:
    scheme, found, rest = url.partition("://")
    if not found or not _SCHEME.fullmatch(scheme):
        return "a text without ://"
    where, _, query = rest.partition("?")
    where = where.rpartition("@")[2]
    hosts = where.partition("/")[0].split(",")
    if "@" in query or not all(_HOST.fullmatch(host) for host in hosts):
        return f"{scheme}://..."
    return f"{scheme}://{where}"


def _remote_url(value: str) -> tuple[str, str | None]:
    for url in split_urls(value):
        scheme, found, rest = url.partition("://")
        if not found or not scheme or not rest:
            raise ValueError(
                "needs a URL such as redis://host:6379, or several with commas; leave it out for "
                "no remote tier"
            )
    return value, None


SERDES = ("naive", "lossless")
"""How chunks may lie on servers; each has names of its own there."""


def _remote_serde(value: str) -> tuple[str, str | None]:
    if value in SERDES:
        return value, None
    if value in ("cachegen", "kivi"):
        raise ValueError(
            f"needs naive or lossless, found {value!r}, which changes the numbers: what comes back "
            "here is what was put"
        )
    raise ValueError(f"needs naive or lossless, found {value!r}")


def _async_loading(value: bool) -> tuple[bool, str | None]:
    if value:
        return True, None
    return True, "loads from tiers below host memory are always asynchronous; read as true"


def _storage_backends(value: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    for name, made_by in value.items():
        parts = made_by.split(":") if isinstance(made_by, str) else []
        if len(parts) != 2 or not all(parts):
            raise ValueError(f"needs module:name for tier {name!r}, found {made_by!r}")
    return value, None


def _instance_id(value: str) -> tuple[str, str | None]:
    if not value.strip():
        raise ValueError("needs a name that is not blank; leave it out to take the engine's id")
    return value, None


HONOURED: Mapping[str, Key] = {
    key.name: key
    for key in (
        Key(
            "chunk_size",
            "int",
            CHUNK_SIZE_DEFAULT,
            "tokens",
            "Tokens of one chunk. Must be a multiple of the engine's block; left out, 256 is "
            "rounded up to one.",
            minimum=1,
            maximum=2**20,
        ),
        Key(
            "local_cpu",
            "bool",
            True,
            "",
            "Keep chunks in host memory (tier L1), from which the connector serves. False: it is "
            "used on the way to and from the tiers below alone; without such a tier nothing is "
            "cached.",
            check=_local_cpu,
        ),
        Key(
            "max_local_cpu_size",
            "float",
            5.0,
            "GB of 2^30 bytes",
            "Host memory for chunks, for each worker process that keeps KV.",
            minimum=0,
            maximum=2**20,
        ),
        Key(
            "local_disk",
            "str",
            None,
            "",
            "Folders on local disks for tier L2, separated by commas; chunks are spread over them. "
            "Several processes may share them. Needs `max_local_disk_size`; see "
            "[local-disk.md](local-disk.md).",
            check=_local_disk,
        ),
        Key(
            "max_local_disk_size",
            "float",
            0.0,
            "GB of 2^30 bytes",
            "What all folders of `local_disk` together may take. Unlike LMCache's, a limit of the "
            "folders, not of each worker process. 0: no disk tier.",
            minimum=0,
            maximum=2**30,
        ),
        Key(
            "local_disk_on_exit",
            "str",
            "keep",
            "",
            "`keep` the chunks on disk when the store is closed, for the next start, or `delete` "
            "them if no other process uses them.",
            check=_on_exit,
        ),
        Key(
            "local_disk_direct_io",
            "bool",
            True,
            "",
            "Read and write past the page cache. Where a file system cannot, one warning says so "
            "and the page cache is used.",
        ),
        Key(
            "local_disk_sync",
            "bool",
            False,
            "",
            "Wait with each write until its bytes are on the device. Without it what was written "
            "last may be lost with the power; it is never wrong.",
        ),
        Key(
            "local_disk_threads",
            "int",
            8,
            "threads",
            "Reads and writes under way at the disks at a time.",
            minimum=2,
            maximum=256,
        ),
        Key(
            "remote_url",
            "str",
            None,
            "",
            "Servers for tier L3, separated by commas and asked in this order, each with a tier of "
            "its own: Redis or Valkey (`redis://`, `rediss://`, `unix://`, `redis-cluster://`, "
            "`redis-sentinel://`; a password is better in `REDIS_PASSWORD`), or an object store "
            "(`s3://`); see [remote.md](remote.md) and [remote-s3.md](remote-s3.md).",
            check=_remote_url,
            without_secrets=without_credentials,
        ),
        Key(
            "remote_ttl",
            "float",
            None,
            "seconds",
            "How long a server keeps a chunk, counted from its write. Left out: as long as it has "
            "room.",
            minimum=1,
            maximum=10 * 365 * 86400,
        ),
        Key(
            "remote_operations",
            "int",
            8,
            "operations",
            "Reads under way at a server at a time; puts have half as many beside them.",
            minimum=1,
            maximum=256,
        ),
        Key(
            "remote_serde",
            "str",
            "naive",
            "",
            "How chunks lie on servers: `naive`, as in memory, or `lossless`, packed without loss "
            "(a third less for bfloat16, for some of a core's time). Engines with one and with the "
            "other share nothing; see [remote-s3.md](remote-s3.md#packing).",
            check=_remote_serde,
        ),
        Key(
            "blocking_timeout_secs",
            "float",
            10.0,
            "seconds",
            "Deadline of a remote tier: what a server has not given by then is a miss.",
            minimum=0.001,
            maximum=3600,
        ),
        Key(
            "save_unfull_chunk",
            "bool",
            None,
            "",
            "Store the tail of a prompt that fills no chunk. Left out: true in `process_tokens` "
            "used alone, false in the engine. No effect under vLLM: full chunks alone are kept.",
        ),
        Key(
            "pre_caching_hash_algorithm",
            "str",
            "sha256_cbor",
            "",
            "Hash of the prefix chain: `sha256_cbor`. `builtin`, LMCache's default, is read as "
            "`sha256_cbor` with one notice.",
            check=_hash_algorithm,
        ),
        Key(
            "chain",
            "str",
            "own",
            "",
            "Whose prefix hashes are keys: ours (`own`), the same in every process, or those that "
            "the engine has made anyway (`engine`); [identity.md](identity.md) weighs them.",
            check=_chain,
        ),
        Key(
            "none_hash_seed",
            "str",
            "vllm-none-hash",
            "",
            "Text whose hash starts every chain. Processes that share chunks need the same one.",
        ),
        Key(
            "cache_policy",
            "str",
            "LRU",
            "",
            "Which chunk leaves when memory is full: the one used least recently (`LRU`), least "
            "often (`LFU`) or last (`MRU`), the one stored first (`FIFO`), or one that was never "
            "used again (`S3FIFO`, `ARC`: both let a single pass over new prompts displace little "
            "of what is used again). A chunk leaves before those in front of it in its prompt.",
            check=_cache_policy,
        ),
        Key(
            "use_layerwise",
            "bool",
            False,
            "",
            "Copy layer by layer during the forward pass: each layer is loaded while those before "
            "it are computed, and saved as soon as it is. Chunks are the same either way.",
        ),
        Key("save_decode_cache", "bool", False, "", "Store chunks with generated tokens too."),
        Key(
            "enable_async_loading",
            "bool",
            True,
            "",
            "Loads from tiers below host memory are always asynchronous; `false` gives one notice.",
            check=_async_loading,
        ),
        Key(
            "min_retrieve_tokens",
            "int",
            0,
            "tokens",
            "Hits shorter than this are not loaded.",
            minimum=0,
            maximum=2**31 - 1,
        ),
        Key(
            "refuse_slow_loads",
            "bool",
            True,
            "",
            "Compute what would take longer to load from a tier below host memory, by measured "
            "speeds of both; see [local-disk.md](local-disk.md#load-or-recompute). False: whatever "
            "is stored is loaded.",
        ),
        Key(
            "max_sync_load_ms",
            "float",
            10.0,
            "ms",
            "How long loads may hold up an engine step that others compute in, by their measured "
            "speed. Loads beyond it run beside the steps, and cost their request at least one step "
            "more; 0: all do.",
            minimum=0,
            maximum=_MAX_MS,
        ),
        Key(
            "lookup_timeout_ms",
            "int",
            3000,
            "ms",
            "Deadline of a lookup; a lookup not answered by then counts as a miss.",
            minimum=1,
            maximum=_MAX_MS,
        ),
        Key(
            "lease_timeout_ms",
            "int",
            30000,
            "ms",
            "How long the chunks of a lookup's answer are held for a request that has no blocks "
            "yet.",
            minimum=1,
            maximum=_MAX_MS,
        ),
        Key(
            "copy_threads",
            "int",
            4,
            "threads",
            "Threads that one large copy in host memory may use, the engine's own included; never "
            "more than the processors it may run on. 1 where the engine's threads need them all.",
            minimum=1,
            maximum=256,
        ),
        Key(
            "strict",
            "bool",
            False,
            "",
            "Faults of the environment (too little memory, a tier out of reach) stop start-up "
            "instead of serving without the tier.",
        ),
        Key(
            "lmcache_instance_id",
            "str",
            None,
            "",
            "Name of this instance in logs and metrics. Left out: the engine's id.",
            check=_instance_id,
        ),
        Key("log_requests", "bool", True, "", "One INFO line for each request, rate-limited."),
        Key(
            "storage_backends",
            "mapping",
            {},
            "",
            "Tiers below host memory, by name and in the order they are asked: what makes each, as "
            "`module:name`; [storage-backends.md](storage-backends.md) shows how to write one.",
            check=_storage_backends,
        ),
        Key(
            "extra_config",
            "mapping",
            {},
            "",
            "LMCache's free-form settings of its backends. No entry has a meaning in this "
            "version; each gives one notice.",
        ),
    )
}
"""Every setting that is read, by name, in the order it is printed."""

# Reason, then the keys it holds for.
_LMCACHE_ONLY_GROUPS: tuple[tuple[str, str], ...] = (
    (
        "chunks are spread over the paths of local_disk by their hash",
        "local_disk_path_sharding",
    ),
    (
        "tiers of your own are named in storage_backends",
        "remote_storage_plugins storage_plugins audit_actual_remote_url",
    ),
    (
        "choosing tiers for stores and loads is not available in this version",
        "retrieve_locations store_location",
    ),
    (
        "GPUDirect Storage and CXL tiers are not part of this release",
        "gds_path gds_path_sharding gds_buffer_size gds_backend use_gds maru_path maru_pool_size",
    ),
    (
        "blending inside the engine is not part of this release",
        "enable_blending blend_recompute_ratios blend_thresholds blend_check_layers "
        "blend_min_tokens blend_special_str",
    ),
    (
        "peer-to-peer sharing is not part of this release",
        "enable_p2p p2p_host p2p_init_ports p2p_lookup_ports",
    ),
    (
        "prefill/decode transfer is not part of this release",
        "enable_pd pd_role pd_buffer_size pd_buffer_device pd_peer_host pd_peer_init_port "
        "pd_peer_alloc_port pd_peer_query_port pd_proxy_host pd_proxy_port "
        "pd_allocation_timeout_sec pd_shutdown_timeout_sec pd_condition_poll_interval_sec "
        "pd_max_prefill_len pd_backend_mode pd_skip_proxy_notification pd_bidirectional "
        "transfer_channel",
    ),
    (
        "NIXL is not part of this release",
        "nixl_backends nixl_buffer_size nixl_buffer_device nixl_peer_port",
    ),
    (
        "a controller is not part of this release",
        "enable_controller controller_pull_url controller_reply_url lmcache_worker_ports "
        "lmcache_worker_ids lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time",
    ),
    (
        "a cache server shared by engines is not part of this release",
        "mp_host mp_port",
    ),
    (
        "there is no HTTP server inside the engine",
        "internal_api_server_enabled internal_api_server_host internal_api_server_port_start "
        "internal_api_server_include_index_list internal_api_server_socket_path_prefix "
        "script_allowed_imports run_script_api_enabled",
    ),
    ("plug-in programs are not part of this release", "runtime_plugin_locations"),
    ("no setting is fetched over the network", "remote_config_url app_id"),
    (
        "chunk statistics are not part of this release",
        "enable_chunk_statistics chunk_statistics_auto_start_statistics "
        "chunk_statistics_auto_exit_timeout_hours "
        "chunk_statistics_auto_exit_target_unique_chunks chunk_statistics_strategy",
    ),
    (
        "lookups go to the one index of host memory",
        "external_lookup_client lookup_server_worker_ids enable_scheduler_bypass_lookup "
        "hit_miss_ratio",
    ),
    (
        "host memory is one region of max_local_cpu_size; how it is mapped is not a setting",
        "local_cpu_use_hugepages reserve_local_cpu_size numa_mode enable_lazy_memory_allocator "
        "lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio lazy_memory_step_ratio "
        "lazy_memory_safe_size",
    ),
    (
        "leases end by themselves; see lease_timeout_ms",
        "pin_timeout_sec pin_check_interval_sec",
    ),
    ("KV events are not available in this version", "enable_kv_events"),
    ("refusing saves by request priority is not available in this version", "priority_limit"),
    ("how bytes are copied follows from the engine's layout", "use_gpu_connector_v3"),
    ("Python's garbage collector is left alone", "py_enable_gc"),
    (
        "hidden states are not cached",
        "enable_hidden_state_cache max_hidden_state_cpu_size hidden_state_layers "
        "hidden_states_retrieve_mode",
    ),
)

LMCACHE_ONLY: Mapping[str, str] = {
    name: reason for reason, names in _LMCACHE_ONLY_GROUPS for name in names.split()
}
"""Keys of LMCache 0.5.6 without meaning here, and why."""

LEGACY_NAMES: Mapping[str, str] = {
    "enable_xpyd": "enable_pd",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
    "nixl_role": "pd_role",
    "controller_url": "controller_pull_url",
    "lmcache_worker_port": "lmcache_worker_ports",
    "plugin_locations": "runtime_plugin_locations",
    "external_backends": "storage_plugins",
}
"""LMCache's earlier names of its keys. (`nixl_buffer_size` is a key of its own today.)"""

CONNECTOR_ONLY: Mapping[str, str] = {
    "discard_partial_chunks": "see save_unfull_chunk",
    "skip_last_n_tokens": "leaving out a prompt's last tokens is not available in this version",
    "lmcache_rpc_port": "lookups need no port",
    "use_native": "there is one adapter for vLLM",
    "lmcache.max_tokens_per_load": "loads have no limit in this version",
    "lmcache.max_offload_tokens": "stores have no limit in this version",
}
"""LMCache's entries of vLLM's kv_connector_extra_config that are no keys of its file."""

CONNECTOR_ONLY_PREFIXES: Mapping[str, str] = {
    "lmcache.mp.": "a cache server shared by engines is not part of this release",
    "lmcache.q.": "a cache server shared by engines is not part of this release",
}

REQUEST_KEYS = ("lmcache.skip_save", "lmcache.tag.")
"""What a request carries in its kv_transfer_params; no settings of the engine."""

ENCODER_CACHE = "an encoder cache is not part of this release"

_LMCACHE_SERVER = "a cache server shared by engines is not part of this release"
_NO_TELEMETRY = "no usage data is sent"

PROCESS_VARIABLES: Mapping[str, str] = {
    "LMCACHE_LOG_LEVEL": "set the level of Python's logger lmcache_rs, or VLLM_LOGGING_LEVEL",
    "LMCACHE_DISABLE_BANNER": "the start-up lines are part of the log",
    "LMCACHE_TRACK_USAGE": _NO_TELEMETRY,
    "LMCACHE_USAGE_TRACK_URL": _NO_TELEMETRY,
    "LMCACHE_USAGE_TRACK_INTERVAL": _NO_TELEMETRY,
    "LMCACHE_FORCE_SKIP_SAVE": "set kv_role to kv_consumer for an engine that only loads",
    "LMCACHE_USE_EXPERIMENTAL": "there is one engine",
    "LMCACHE_REQUEST_TELEMETRY_TYPE": _NO_TELEMETRY,
    "LMCACHE_REQUEST_TELEMETRY_ENDPOINT": _NO_TELEMETRY,
    "LMCACHE_MQ_TIMEOUT": _LMCACHE_SERVER,
    "LMCACHE_MP_TRANSFER_MODE": _LMCACHE_SERVER,
    "LMCACHE_OFFLOAD_RPC_PORT": _LMCACHE_SERVER,
    "LMCACHE_SERVER_URL": _LMCACHE_SERVER,
    "LMCACHE_DEVICE_BACKEND": "the device is the engine's",
    "LMCACHE_GPU_STAGING_BUFFER_BYTES": "staging is not a setting",
    "LMCACHE_ROCM_ENABLE_BATCH_MEMCPY": "ROCm is not part of this release",
}
"""LMCache 0.5.6's variables that are no keys of its file."""

PROCESS_VARIABLE_PREFIXES: Mapping[str, str] = {
    "LMCACHE_COORDINATOR_": _LMCACHE_SERVER,
    "LMCACHE_CONTROLLER_": "a controller is not part of this release",
    "LMCACHE_AEROSPIKE_": "there is no tier on Aerospike",
    "LMCACHE_RESP_": "see remote_url and remote_operations",
    "LMCACHE_RUNTIME_PLUGIN_": "plug-in programs are not part of this release",
    "LMCACHE_PLUGIN_": "plug-in programs are not part of this release",
    "LMCACHE_MUSA_": "MUSA devices are not part of this release",
}

CONFIG_FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
SWITCH_PREFIX = "LMCACHE_RS_"
DISABLE_SWITCH = "LMCACHE_RS_DISABLE"

PROCESS_SWITCHES: Mapping[str, str] = {
    DISABLE_SWITCH: "1: the connector does nothing; the engine serves as if it were not there.",
    "LMCACHE_RS_CACHE": "Folder in which the demonstration keeps its model between runs.",
    "LMCACHE_RS_REQUIRE_CUDA": "At build time, 1: a build without CUDA kernels fails.",
    "LMCACHE_RS_WITHOUT_CUDA": (
        "At build time, 1: no CUDA kernels are built, even where an nvcc is there."
    ),
    "LMCACHE_RS_LIBCUDA": "The CUDA driver to open in place of `libcuda.so.1`.",
}
"""Switches of the process. They are no settings: no file or connector entry can set them."""


def lmcache_only_reason(name: str) -> str | None:
    """Why this key of LMCache has no meaning here; None for a name that is no such key."""
    if name in LMCACHE_ONLY:
        return LMCACHE_ONLY[name]
    if name in LEGACY_NAMES:
        current = LEGACY_NAMES[name]
        return f"earlier name of {current}; {LMCACHE_ONLY[current]}"
    if name == "ec" or (name.startswith("ec_") and _is_key(name.removeprefix("ec_"))):
        return ENCODER_CACHE
    return None


def _is_key(name: str) -> bool:
    return name in HONOURED or name in LMCACHE_ONLY or name in LEGACY_NAMES


def nearest_key(name: str) -> str | None:
    """The known key a mistyped name most likely meant; None when none is close."""
    bare = name.lower().replace("-", "_")
    bare = bare.removeprefix("lmcache.").removeprefix("lmcache_")
    known = [*HONOURED, *LMCACHE_ONLY]
    close = difflib.get_close_matches(bare, known, n=1, cutoff=0.5)
    return close[0] if close else None


def nearest_switch(name: str) -> str:
    """The variable that an unknown LMCACHE_RS_ one most likely meant."""
    bare = name.removeprefix(SWITCH_PREFIX)
    # Our own settings are written like LMCache's; only switches carry the longer prefix.
    if bare.lower() in HONOURED:
        return f"LMCACHE_{bare}"
    switches = [switch.removeprefix(SWITCH_PREFIX) for switch in PROCESS_SWITCHES]
    return SWITCH_PREFIX + difflib.get_close_matches(bare, switches, n=1, cutoff=0.0)[0]


def show(value: Any) -> str:
    """A value as the file would write it; None is `unset`, a mapping only names its entries."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        # Entries may hold credentials, so values are not shown.
        return ", ".join(sorted(str(name) for name in value)) if value else "none"
    return str(value)


def honoured_table() -> str:
    """The documentation's table of honoured keys, in Markdown."""
    lines = ["| key | type | default | unit | what it does |", "|-|-|-|-|-|"]
    for key in HONOURED.values():
        kind: str = key.kind
        if key.minimum is not None and key.maximum is not None:
            kind += f", {key.minimum:.0f} to {key.maximum:.0f}"
        lines.append(f"| `{key.name}` | {kind} | {show(key.default)} | {key.unit} | {key.doc} |")
    return "\n".join(lines)


def lmcache_only_table() -> str:
    """The documentation's table of LMCache keys without meaning here, in Markdown."""
    lines = ["| why | keys |", "|-|-|"]
    for reason, names in _LMCACHE_ONLY_GROUPS:
        lines.append(f"| {reason} | {', '.join(f'`{name}`' for name in names.split())} |")
    legacy = ", ".join(f"`{old}` ({new})" for old, new in LEGACY_NAMES.items())
    lines.append(f"| earlier names of the keys above | {legacy} |")
    lines.append(f"| {ENCODER_CACHE} | `ec` and any key with `ec_` before it |")
    return "\n".join(lines)


def switch_table() -> str:
    """The documentation's table of process switches, in Markdown."""
    lines = ["| variable | what it does |", "|-|-|"]
    lines += [f"| `{name}` | {doc} |" for name, doc in PROCESS_SWITCHES.items()]
    return "\n".join(lines)
