"""Settings: where they come from, what they are, and what was said about each.

A setting is looked for in four places, later ones winning: default, file, environment, and the
engine's connector entry. `config_keys` says what each key is. Every problem of all places is
collected before anything is raised, so that one start shows all of them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmcache_rs import config_keys
from lmcache_rs.config_intake import ConfigError, Intake, switch
from lmcache_rs.config_keys import CONFIG_FILE_VARIABLE, GB, HONOURED
from lmcache_rs.model_facts import UNSTATED, LMCacheMetadata

__all__ = [
    "UNSTATED",
    "ConfigError",
    "LMCacheEngineConfig",
    "LMCacheMetadata",
    "Setting",
    "disabled_by_environment",
]


WITHOUT_LOWER_TIERS: Mapping[str, Any] = {
    "max_local_disk_size": 0.0,
    "remote_url": "",
    "storage_backends": {},
}
"""Values with which nothing is kept below host memory."""


class Setting(NamedTuple):
    """One honoured setting for people: its key, its value as text, and where that came from."""

    key: str
    value: str
    source: str


@dataclass(frozen=True)
class LMCacheEngineConfig:
    """The settings of one engine, typed and unchangeable.

    Made by `from_defaults`, `from_file`, `from_env` or `resolve`, each of which raises
    `ConfigError` for keys it does not know and values of the wrong type. What each field means,
    its unit and its limits: docs/configuration.md, or `config_keys.HONOURED`.
    """

    chunk_size: int
    local_cpu: bool
    max_local_cpu_size: float
    local_disk: str | None
    max_local_disk_size: float
    local_disk_on_exit: str
    local_disk_direct_io: bool
    local_disk_sync: bool
    local_disk_threads: int
    # May hold credentials.
    remote_url: str | None = dataclasses.field(repr=False)
    remote_ttl: float | None
    remote_operations: int
    remote_serde: str
    blocking_timeout_secs: float
    save_unfull_chunk: bool | None
    pre_caching_hash_algorithm: str
    chain: str
    none_hash_seed: str
    cache_policy: str
    use_layerwise: bool
    save_decode_cache: bool
    enable_async_loading: bool
    min_retrieve_tokens: int
    refuse_slow_loads: bool
    max_sync_load_ms: float
    lookup_timeout_ms: int
    lease_timeout_ms: int
    copy_threads: int
    strict: bool
    lmcache_instance_id: str | None
    log_requests: bool
    storage_backends: Mapping[str, str] = dataclasses.field(hash=False)
    # Entries may hold credentials.
    extra_config: Mapping[str, Any] = dataclasses.field(hash=False, repr=False)
    sources: Mapping[str, str] = dataclasses.field(compare=False, repr=False)
    notices: tuple[str, ...] = dataclasses.field(compare=False, repr=False)

    @classmethod
    def from_defaults(cls, **overrides: Any) -> LMCacheEngineConfig:
        """The defaults, with the keys given here over them. Reads no file and no variable."""
        intake = Intake()
        intake.take_arguments(overrides)
        return cls._from_intake(intake)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **overrides: Any) -> LMCacheEngineConfig:
        """The defaults, then the YAML file, then the keys given here. Reads no variable."""
        intake = Intake()
        intake.take_file(path)
        intake.take_arguments(overrides)
        return cls._from_intake(intake)

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, **overrides: Any
    ) -> LMCacheEngineConfig:
        """The defaults, then `LMCACHE_<KEY>` variables, then the keys given here.

        Reads no file: a set LMCACHE_CONFIG_FILE gives a notice, since only `resolve` follows it.
        """
        environ = os.environ if environ is None else environ
        intake = Intake()
        if environ.get(CONFIG_FILE_VARIABLE):
            source = f"env:{CONFIG_FILE_VARIABLE}"
            intake.know(CONFIG_FILE_VARIABLE, source, "from_env reads no file; resolve does")
        intake.take_environment(environ)
        intake.take_arguments(overrides)
        return cls._from_intake(intake)

    @classmethod
    def resolve(
        cls,
        *,
        path: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        connector_extra_config: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> LMCacheEngineConfig:
        """All places in order: default < file < environment < connector entry < overrides.

        Args:
            path: The YAML file; None takes LMCACHE_CONFIG_FILE, or no file when that is not set.
            environ: Variables to read; None takes the process's.
            connector_extra_config: vLLM's kv_connector_extra_config, with `lmcache.<key>` entries.
            overrides: Keys set by the calling program.

        Raises:
            ConfigError: With every problem of every place.
        """
        environ = os.environ if environ is None else environ
        path = path or environ.get(CONFIG_FILE_VARIABLE) or None
        intake = Intake()
        if path is not None:
            intake.take_file(path)
        intake.take_environment(environ)
        intake.take_connector_entry(connector_extra_config or {})
        intake.take_arguments(overrides or {})
        return cls._from_intake(intake)

    @classmethod
    def _from_intake(cls, intake: Intake) -> LMCacheEngineConfig:
        values, sources, notices = intake.finish()
        return cls(**values, sources=sources, notices=notices)

    def is_set(self, key: str) -> bool:
        """Whether anything but the default set this key."""
        return self.sources[key] != "default"

    def with_values(self, source: str, **values: Any) -> LMCacheEngineConfig:
        """A copy in which `source` (a few words, shown beside the value) set these keys.

        Raises:
            ConfigError: A key is unknown, or a value wrong.
        """
        intake = Intake()
        for key, current in self.sources.items():
            if current != "default":
                intake.take(key, getattr(self, key), current)
        for key, value in values.items():
            intake.take_key(key, value, source)
        fresh = self._from_intake(intake)
        notices = (*self.notices, *(line for line in fresh.notices if line not in self.notices))
        return dataclasses.replace(fresh, notices=notices)

    @property
    def max_local_cpu_bytes(self) -> int:
        """`max_local_cpu_size` in bytes, rounded down."""
        return int(self.max_local_cpu_size * GB)

    @property
    def max_local_disk_bytes(self) -> int:
        """`max_local_disk_size` in bytes, rounded down."""
        return int(self.max_local_disk_size * GB)

    @property
    def wants_local_disk(self) -> bool:
        """Whether there is to be a tier on local disks."""
        return bool(self.local_disk_paths and self.max_local_disk_bytes)

    @property
    def wants_lower_tiers(self) -> bool:
        """Whether there is to be any tier below host memory."""
        return self.wants_local_disk or bool(self.remote_urls or self.storage_backends)

    @property
    def local_disk_paths(self) -> list[str]:
        """The folders of `local_disk`, in order; none if it is not set."""
        paths = [path.strip() for path in (self.local_disk or "").split(",")]
        return [path.removeprefix("file://") for path in paths if path]

    @property
    def remote_urls(self) -> list[str]:
        """The servers of `remote_url`, in order; none if it is not set."""
        return config_keys.split_urls(self.remote_url or "")

    def chunk_size_for(self, block_size: int) -> int:
        """Tokens of a chunk for an engine whose blocks hold `block_size` tokens.

        A set chunk_size must be a multiple of the block; left out, 256 is rounded up to one.

        Raises:
            ConfigError: chunk_size is set and is no multiple of the block.
            ValueError: block_size is below 1.
        """
        if block_size < 1:
            raise ValueError(f"block_size needs to be at least 1 token, found {block_size}")
        rounded_up = -(-self.chunk_size // block_size) * block_size
        if not self.is_set("chunk_size") or rounded_up == self.chunk_size:
            return rounded_up
        rounded_down = rounded_up - block_size
        valid = f"{rounded_down} or {rounded_up}" if rounded_down else f"{rounded_up}"
        raise ConfigError(
            [
                f"chunk_size ({self.sources['chunk_size']}): {self.chunk_size} is no multiple of "
                f"the engine's block of {block_size} tokens; set it to {valid} or another "
                f"multiple of {block_size}, or leave it out"
            ]
        )

    def saves_unfull_chunk(self, *, alone: bool) -> bool:
        """Whether a tail that fills no chunk is kept.

        `alone` is True in a token database used by itself, where the default is to keep it, and
        False in engine and connector, where a tail is rarely reused and costs an entry.
        """
        return alone if self.save_unfull_chunk is None else self.save_unfull_chunk

    def describe(self) -> list[Setting]:
        """Every honoured setting, in the table's order, with its value as text and its source."""
        described = []
        for key in HONOURED:
            value = HONOURED[key].show(getattr(self, key))
            if key == "save_unfull_chunk" and self.save_unfull_chunk is None:
                value = "true in process_tokens alone, false in engine and connector"
            described.append(Setting(key, value, self.sources[key]))
        return described


def disabled_by_environment(environ: Mapping[str, str] | None = None) -> bool:
    """Whether LMCACHE_RS_DISABLE asks the connector to do nothing.

    Raises:
        ConfigError: The variable is neither true nor false.
    """
    environ = os.environ if environ is None else environ
    name = config_keys.DISABLE_SWITCH
    try:
        return switch(name, environ.get(name, ""))
    except ValueError as problem:
        raise ConfigError([f"{name} (env:{name}): {problem}"]) from None
