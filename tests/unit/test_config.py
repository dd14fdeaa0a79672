"""What settings promise: one test per key and place, and one per way to get them wrong."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]

from lmcache_rs import config_keys
from lmcache_rs.config import (
    ConfigError,
    LMCacheEngineConfig,
)
from lmcache_rs.config_keys import HONOURED

# Each key with a value to set, and how a variable spells it. Where this version honours only one
# value it is the default, and the source alone tells that it was read.
SAMPLES: dict[str, tuple[Any, str]] = {
    "chunk_size": (512, "512"),
    "local_cpu": (False, "no"),
    "max_local_cpu_size": (1.5, "1.5"),
    "local_disk": ("/var/a,/var/b", "/var/a,/var/b"),
    "max_local_disk_size": (2.5, "2.5"),
    "local_disk_on_exit": ("delete", "delete"),
    "local_disk_direct_io": (False, "0"),
    "local_disk_sync": (True, "yes"),
    "local_disk_threads": (4, "4"),
    "remote_url": ("redis://a:1/", "redis://a:1/"),
    "remote_ttl": (60.0, "60.0"),
    "remote_operations": (4, "4"),
    "remote_serde": ("lossless", "lossless"),
    "blocking_timeout_secs": (2.5, "2.5"),
    "save_unfull_chunk": (True, "on"),
    "pre_caching_hash_algorithm": ("sha256_cbor", "sha256_cbor"),
    "chain": ("own", "own"),
    "none_hash_seed": ("another seed", "another seed"),
    "cache_policy": ("LRU", "LRU"),
    "use_layerwise": (True, "true"),
    "save_decode_cache": (True, "YES"),
    "enable_async_loading": (True, "True"),
    "min_retrieve_tokens": (300, "300"),
    "refuse_slow_loads": (False, "off"),
    "max_sync_load_ms": (2.5, "2.5"),
    "lookup_timeout_ms": (50, "50"),
    "lease_timeout_ms": (1000, "1000"),
    "copy_threads": (2, "2"),
    "strict": (True, "1"),
    "lmcache_instance_id": ("node-7", "node-7"),
    "log_requests": (False, "off"),
    "storage_backends": ({"shelf": "shelves:Shelf"}, '{"shelf": "shelves:Shelf"}'),
    "extra_config": ({"use_odirect": True}, '{"use_odirect": true}'),
}

WRONG_TYPE: dict[str, Any] = {"bool": 1, "int": "5GB", "float": "5GB", "str": 7, "mapping": [1]}


def written(folder: Path, settings: dict[str, Any]) -> Path:
    path = folder / "lmcache.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return path


def variable(key: str) -> str:
    return f"LMCACHE_{key.upper()}"


def only_problem(error: pytest.ExceptionInfo[ConfigError]) -> str:
    (problem,) = error.value.problems
    assert problem in str(error.value)
    return problem


# Each key, each place.


def test_samples_cover_every_key() -> None:
    assert list(SAMPLES) == list(HONOURED)


def test_fields_and_table_name_the_same_keys() -> None:
    fields = [field.name for field in dataclasses.fields(LMCacheEngineConfig)]
    assert fields == [*HONOURED, "sources", "notices"]


@pytest.mark.parametrize("key", HONOURED)
def test_default_is_the_tables_and_says_so(key: str) -> None:
    config = LMCacheEngineConfig.from_defaults()
    assert getattr(config, key) == HONOURED[key].default
    assert config.sources[key] == "default"
    assert not config.is_set(key)
    assert config.notices == ()


@pytest.mark.parametrize("key", HONOURED)
@pytest.mark.parametrize("place", ["argument", "file", "env", "extra_config"])
def test_key_is_read_from_place(key: str, place: str, tmp_path: Path) -> None:
    value, text = SAMPLES[key]
    if place == "argument":
        config, source = LMCacheEngineConfig.from_defaults(**{key: value}), "argument"
    elif place == "file":
        path = written(tmp_path, {key: value})
        config, source = LMCacheEngineConfig.from_file(path), f"file:{path}"
    elif place == "env":
        config = LMCacheEngineConfig.from_env({variable(key): text})
        source = f"env:{variable(key)}"
    else:
        config = LMCacheEngineConfig.resolve(
            environ={}, connector_extra_config={f"lmcache.{key}": value}
        )
        source = "extra_config"
    assert getattr(config, key) == value
    assert type(getattr(config, key)) is type(value)
    assert config.sources[key] == source
    assert config.is_set(key)
    (described,) = [setting for setting in config.describe() if setting.key == key]
    assert described.source == source
    assert described.value == config_keys.show(value)
    others = [setting.source for setting in config.describe() if setting.key != key]
    assert set(others) == {"default"}


def test_places_win_in_order(tmp_path: Path) -> None:
    path = written(tmp_path, {"chunk_size": 1, "lookup_timeout_ms": 1, "min_retrieve_tokens": 1})
    environ = {
        "LMCACHE_CONFIG_FILE": str(path),
        "LMCACHE_CHUNK_SIZE": "2",
        "LMCACHE_LOOKUP_TIMEOUT_MS": "2",
    }
    entry = {"lmcache.chunk_size": 3}
    config = LMCacheEngineConfig.resolve(environ=environ, connector_extra_config=entry)
    got = {
        key: (getattr(config, key), config.sources[key])
        for key in ("chunk_size", "lookup_timeout_ms", "min_retrieve_tokens", "lease_timeout_ms")
    }
    assert got == {
        "chunk_size": (3, "extra_config"),
        "lookup_timeout_ms": (2, "env:LMCACHE_LOOKUP_TIMEOUT_MS"),
        "min_retrieve_tokens": (1, f"file:{path}"),
        "lease_timeout_ms": (30000, "default"),
    }
    config = LMCacheEngineConfig.resolve(
        environ=environ, connector_extra_config=entry, overrides={"chunk_size": 4}
    )
    assert (config.chunk_size, config.sources["chunk_size"]) == (4, "argument")


def test_path_given_wins_over_the_variable(tmp_path: Path) -> None:
    path = written(tmp_path, {"chunk_size": 64})
    config = LMCacheEngineConfig.resolve(path=path, environ={"LMCACHE_CONFIG_FILE": "/nowhere"})
    assert config.chunk_size == 64


def test_process_environment_is_read_when_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(written(tmp_path, {"chunk_size": 64})))
    monkeypatch.setenv("LMCACHE_STRICT", "true")
    config = LMCacheEngineConfig.resolve()
    assert (config.chunk_size, config.strict) == (64, True)
    assert LMCacheEngineConfig.from_env().strict is True


def test_from_defaults_and_from_file_read_no_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "64")
    path = written(tmp_path, {"strict": True})
    assert LMCacheEngineConfig.from_defaults().chunk_size == 256
    assert LMCacheEngineConfig.from_file(path, log_requests=False).chunk_size == 256


def test_from_env_says_that_it_reads_no_file(tmp_path: Path) -> None:
    path = written(tmp_path, {"chunk_size": 64})
    config = LMCacheEngineConfig.from_env({"LMCACHE_CONFIG_FILE": str(path)})
    assert config.chunk_size == 256
    assert "LMCACHE_CONFIG_FILE" in config.notices[0]
    assert "resolve" in config.notices[0]


@pytest.mark.parametrize("key", HONOURED)
def test_null_and_empty_leave_the_place_below(key: str, tmp_path: Path) -> None:
    value, _ = SAMPLES[key]
    path = written(tmp_path, {key: value})
    config = LMCacheEngineConfig.resolve(
        path=path,
        environ={variable(key): " "},
        connector_extra_config={f"lmcache.{key}": None},
        overrides={key: None},
    )
    assert getattr(config, key) == value
    assert config.sources[key] == f"file:{path}"


# Types.


@pytest.mark.parametrize("key", HONOURED)
@pytest.mark.parametrize("place", ["argument", "file", "extra_config"])
def test_wrong_type_stops_with_key_and_source(key: str, place: str, tmp_path: Path) -> None:
    value = WRONG_TYPE[HONOURED[key].kind]
    path = written(tmp_path, {key: value})
    places: dict[str, dict[str, Any]] = {
        "argument": {"overrides": {key: value}},
        "file": {"path": path},
        "extra_config": {"connector_extra_config": {f"lmcache.{key}": value}},
    }
    with pytest.raises(ConfigError) as error:
        LMCacheEngineConfig.resolve(environ={}, **places[place])
    source = f"file:{path}" if place == "file" else place
    assert only_problem(error).startswith(f"{key} ({source}): needs ")


@pytest.mark.parametrize("key", [key for key in HONOURED if HONOURED[key].kind != "str"])
def test_wrong_text_in_a_variable_stops(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        LMCacheEngineConfig.from_env({variable(key): "5GB"})
    assert only_problem(error).startswith(f"{key} (env:{variable(key)}): needs ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chunk_size", True),
        ("chunk_size", 256.0),
        ("chunk_size", "256"),
        ("chunk_size", 0),
        ("chunk_size", -256),
        ("chunk_size", 2**20 + 1),
        ("max_local_cpu_size", True),
        ("max_local_cpu_size", "5.0"),
        ("max_local_cpu_size", -0.5),
        ("max_local_cpu_size", float("nan")),
        ("max_local_cpu_size", float("inf")),
        ("max_local_cpu_size", 10**400),
        ("lookup_timeout_ms", 0),
        ("lease_timeout_ms", 2**31),
        ("min_retrieve_tokens", -1),
        ("strict", "true"),
        ("strict", 0),
        ("lmcache_instance_id", "  "),
        ("none_hash_seed", "a\nb"),
        ("none_hash_seed", "\udc80"),
        ("extra_config", "{"),
        ("extra_config", "[1]"),
        ("extra_config", {1: 2}),
    ],
)
def test_value_out_of_its_type_or_range_stops(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        LMCacheEngineConfig.from_defaults(**{key: value})
    assert only_problem(error).startswith(f"{key} (argument): needs ")
    str(error.value).encode()


def test_quotes_to_remove_or_add_are_named() -> None:
    with pytest.raises(ConfigError, match="leave out the quotes"):
        LMCacheEngineConfig.from_defaults(chunk_size="256")
    with pytest.raises(ConfigError, match="leave out the quotes"):
        LMCacheEngineConfig.from_defaults(strict="true")
    with pytest.raises(ConfigError, match="put it in quotes"):
        LMCacheEngineConfig.from_defaults(none_hash_seed=0)


@pytest.mark.parametrize("text", ["true", "True", "1", "yes", "YES", "on", " on ", '"true"'])
def test_variable_reads_true(text: str) -> None:
    assert LMCacheEngineConfig.from_env({"LMCACHE_STRICT": text}).strict is True


@pytest.mark.parametrize("text", ["false", "False", "0", "no", "NO", "off", "'off'"])
def test_variable_reads_false(text: str) -> None:
    assert LMCacheEngineConfig.from_env({"LMCACHE_LOG_REQUESTS": text}).log_requests is False


@pytest.mark.parametrize("text", ["2", "y", "t", "enabled", "truee"])
def test_variable_refuses_other_words_for_bool(text: str) -> None:
    with pytest.raises(ConfigError, match="needs true or false"):
        LMCacheEngineConfig.from_env({"LMCACHE_STRICT": text})


@pytest.mark.parametrize("text", ["1_000", "0x10", "5.0", "1e3", "٣", "--5", "9" * 5000])
def test_variable_refuses_other_spellings_of_whole_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="needs a whole number from 1"):
        LMCacheEngineConfig.from_env({"LMCACHE_CHUNK_SIZE": text})


@pytest.mark.parametrize("text", ["nan", "inf", "5 GB", "5,0", "1e999", "."])
def test_variable_refuses_other_spellings_of_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="needs a number from 0"):
        LMCacheEngineConfig.from_env({"LMCACHE_MAX_LOCAL_CPU_SIZE": text})


@pytest.mark.parametrize(("text", "size"), [("8", 8.0), ("0.5", 0.5), (".5", 0.5), ("2e1", 20.0)])
def test_variable_reads_numbers(text: str, size: float) -> None:
    config = LMCacheEngineConfig.from_env({"LMCACHE_MAX_LOCAL_CPU_SIZE": text})
    assert config.max_local_cpu_size == size


def test_whole_number_is_a_size(tmp_path: Path) -> None:
    config = LMCacheEngineConfig.from_file(written(tmp_path, {"max_local_cpu_size": 8}))
    assert config.max_local_cpu_size == 8.0
    assert isinstance(config.max_local_cpu_size, float)


@pytest.mark.parametrize(("size", "num_bytes"), [(1.0, 2**30), (0.5, 2**29), (0, 0), (5, 5 << 30)])
def test_one_gb_is_2_to_the_30_bytes(size: float, num_bytes: int) -> None:
    config = LMCacheEngineConfig.from_defaults(max_local_cpu_size=size)
    assert config.max_local_cpu_bytes == num_bytes


# Unknown keys.


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("chunk_sizes", "chunk_size"),
        ("chunksize", "chunk_size"),
        ("CHUNK_SIZE", "chunk_size"),
        ("lmcache.chunk_size", "chunk_size"),
        ("LMCACHE_CHUNK_SIZE", "chunk_size"),
        ("chunk-size", "chunk_size"),
        ("instance_id", "lmcache_instance_id"),
        ("max_local_cpu", "max_local_cpu_size"),
        ("lease_timeout", "lease_timeout_ms"),
        ("enable_p2pp", "enable_p2p"),
    ],
)
def test_unknown_key_names_source_and_nearest(name: str, nearest: str, tmp_path: Path) -> None:
    path = written(tmp_path, {name: 1})
    with pytest.raises(ConfigError) as error:
        LMCacheEngineConfig.from_file(path)
    assert only_problem(error) == (
        f"{name} (file:{path}): not a known setting; nearest valid key: {nearest}"
    )


def test_unknown_key_with_nothing_close_says_so() -> None:
    with pytest.raises(ConfigError, match=r"qqqq \(argument\): .* no valid key is close"):
        LMCacheEngineConfig.from_defaults(qqqq=1)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("LMCACHE_CHUNKSIZE", "LMCACHE_CHUNK_SIZE"),
        ("LMCACHE_chunk_size", "LMCACHE_CHUNK_SIZE"),
        ("lmcache_chunk_size", "LMCACHE_CHUNK_SIZE"),
        ("LMCACHE_INSTANCE_ID", "LMCACHE_LMCACHE_INSTANCE_ID"),
        ("lmcache_config_file", "LMCACHE_CONFIG_FILE"),
        ("LMCACHE_RS_DISABLED", "LMCACHE_RS_DISABLE"),
        ("LMCACHE_RS_LEASE_TIMEOUT_MS", "LMCACHE_LEASE_TIMEOUT_MS"),
    ],
)
def test_unknown_variable_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as error:
        LMCacheEngineConfig.from_env({name: "1"})
    assert only_problem(error) == (
        f"{name} (env:{name}): not a known setting; nearest valid key: {nearest}"
    )


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("lmcache.chunksize", "lmcache.chunk_size"),
        ("chunk_size", "lmcache.chunk_size"),
        ("lmcache_chunk_size", "lmcache.chunk_size"),
        ("LMCache.chunk_size", "lmcache.chunk_size"),
    ],
)
def test_unknown_connector_entry_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as error:
        LMCacheEngineConfig.resolve(environ={}, connector_extra_config={name: 512})
    assert only_problem(error) == (
        f"{name} (extra_config): not a known setting; nearest valid key: {nearest}"
    )


@pytest.mark.parametrize("name", ["lmcache.skip_save", "lmcache.tag.user"])
def test_request_keys_in_the_connector_entry_stop(name: str) -> None:
    with pytest.raises(ConfigError, match="kv_transfer_params"):
        LMCacheEngineConfig.resolve(environ={}, connector_extra_config={name: True})


def test_all_problems_come_in_one_message(tmp_path: Path) -> None:
    path = written(tmp_path, {"chunk_sizes": 1, "strict": "maybe"})
    with pytest.raises(ConfigError) as error:
        LMCacheEngineConfig.resolve(
            path=path,
            environ={"LMCACHE_CHUNK_SIZE": "5GB"},
            connector_extra_config={"lmcache.chain": "theirs"},
            overrides={"qqqq": 1},
        )
    assert [problem.split(" ")[0] for problem in error.value.problems] == [
        "chunk_sizes",
        "strict",
        "chunk_size",
        "qqqq",
        "chain",
    ]
    assert all(problem in str(error.value) for problem in error.value.problems)


def test_problems_survive_the_way_between_processes() -> None:
    with pytest.raises(ConfigError) as error:
        LMCacheEngineConfig.from_defaults(qqqq=1)
    copy = pickle.loads(pickle.dumps(error.value))
    assert (copy.problems, str(copy)) == (error.value.problems, str(error.value))


# Files that cannot be used.


def test_missing_file_stops_and_other_places_are_still_checked() -> None:
    with pytest.raises(ConfigError) as error:
        LMCacheEngineConfig.resolve(
            environ={"LMCACHE_CONFIG_FILE": "/nowhere/x.yaml", "LMCACHE_CHUNK_SIZE": "5GB"}
        )
    first, second = error.value.problems
    assert first.startswith("file:/nowhere/x.yaml: cannot be read: No such file")
    assert second.startswith("chunk_size (env:LMCACHE_CHUNK_SIZE)")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"chunk_size: [1", "is no YAML: line 1"),
        (b"a: b: c", "is no YAML: line 1, column 5"),
        (b"\tchunk_size: 1", "is no YAML: line 1"),
        (b"chunk_size: !!python/object/apply:os.getcwd []", "is no YAML"),
        (b"a: 1\n---\nb: 2", "is no YAML"),
        (b"\xff\xfe\x00", "is no YAML"),
        (b"[" * 5000, "is no YAML"),
        (b"- chunk_size", "needs a mapping"),
        (b"chunk_size", "needs a mapping"),
        (b"256: 1", "keys are text"),
        (b"? [a, b]\n: 1", "is no YAML"),
        (b"remote_url: 2024-99-99", "is no YAML"),
        (
            b"chunk_size: 1\nstrict: true\nchunk_size: 2",
            "chunk_size stands there twice, in lines 1",
        ),
    ],
)
def test_unusable_file_stops(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        LMCacheEngineConfig.from_file(path)
    assert f"file:{path}" in only_problem(error)
    assert problem in only_problem(error)


def test_folder_in_place_of_a_file_stops(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        LMCacheEngineConfig.from_file(tmp_path)


@pytest.mark.parametrize("content", ["", "# chunk_size: 1\n", "---\n", "{}"])
def test_file_without_settings_sets_nothing(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(content)
    assert LMCacheEngineConfig.from_file(path) == LMCacheEngineConfig.from_defaults()


# What the rest of the package asks of it.


@pytest.mark.parametrize(
    ("block_size", "chunk_size"),
    [(16, 256), (128, 256), (256, 256), (257, 257), (400, 400), (96, 288), (1, 256)],
)
def test_unset_chunk_is_rounded_up_to_a_block(block_size: int, chunk_size: int) -> None:
    assert LMCacheEngineConfig.from_defaults().chunk_size_for(block_size) == chunk_size
    unset = LMCacheEngineConfig.from_defaults(chunk_size=None)
    assert not unset.is_set("chunk_size")
    assert unset.chunk_size_for(block_size) == chunk_size


def test_set_chunk_that_is_no_multiple_of_the_block_stops_naming_valid_sizes() -> None:
    config = LMCacheEngineConfig.from_env({"LMCACHE_CHUNK_SIZE": "256"})
    assert config.chunk_size_for(128) == 256
    with pytest.raises(ConfigError, match=r"env:LMCACHE_CHUNK_SIZE.* set it to 192 or 288 or"):
        config.chunk_size_for(96)
    with pytest.raises(ConfigError, match="set it to 544 or another multiple of 544"):
        config.chunk_size_for(544)
    with pytest.raises(ValueError, match="at least 1 token"):
        config.chunk_size_for(0)


def test_tail_rule_is_resolved_by_room_and_shown() -> None:
    unset = LMCacheEngineConfig.from_defaults()
    assert unset.saves_unfull_chunk(alone=True) is True
    assert unset.saves_unfull_chunk(alone=False) is False
    shown = {setting.key: setting.value for setting in unset.describe()}
    assert shown["save_unfull_chunk"] == (
        "true in process_tokens alone, false in engine and connector"
    )
    for value in (True, False):
        config = LMCacheEngineConfig.from_defaults(save_unfull_chunk=value)
        assert config.saves_unfull_chunk(alone=True) is value
        assert config.saves_unfull_chunk(alone=False) is value


def test_with_values_keeps_the_rest_and_its_sources() -> None:
    config = LMCacheEngineConfig.from_env(
        {
            "LMCACHE_STRICT": "1",
            "LMCACHE_ENABLE_P2P": "1",
            "LMCACHE_PRE_CACHING_HASH_ALGORITHM": "builtin",
            "LMCACHE_EXTRA_CONFIG": '{"a": 1}',
        }
    )
    derived = config.with_values("the engine's block of 400 tokens", chunk_size=400)
    assert derived.chunk_size == 400
    assert derived.sources["chunk_size"] == "the engine's block of 400 tokens"
    assert derived.sources["strict"] == "env:LMCACHE_STRICT"
    assert derived.strict is True
    assert derived.notices == config.notices
    assert config.chunk_size == 256
    with pytest.raises(ConfigError):
        config.with_values("test", chunk_size=0)
    with pytest.raises(ConfigError):
        config.with_values("test", chunk_sizes=1)


def test_config_cannot_be_changed_and_travels_between_processes() -> None:
    config = LMCacheEngineConfig.from_defaults(extra_config={"a": 1}, chunk_size=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.chunk_size = 1  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.sources == config.sources
    assert hash(copy) == hash(config)


def test_yaml_is_imported_only_for_a_file() -> None:
    program = (
        "import sys; from lmcache_rs.config import LMCacheEngineConfig as C; C.resolve(environ={});"
        "assert not {'yaml', 'torch', 'vllm', 'numpy', 'zmq'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
