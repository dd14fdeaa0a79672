"""What the key table promises: refused values, keys of LMCache, switches, and the document."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]

from lmcache_rs import _native, config_keys
from lmcache_rs.config import (
    ConfigError,
    LMCacheEngineConfig,
    disabled_by_environment,
)
from lmcache_rs.config_keys import (
    CACHE_POLICIES,
    HONOURED,
    LEGACY_NAMES,
    LMCACHE_ONLY,
    without_credentials,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"

# LMCache 0.5.6's keys, written down here a second time so that none can fall out of the table.
_LMCACHE_0_5_6_TEXT = """
app_id audit_actual_remote_url blend_check_layers blend_min_tokens blend_recompute_ratios
blend_special_str blend_thresholds blocking_timeout_secs cache_policy
chunk_size chunk_statistics_auto_exit_target_unique_chunks
chunk_statistics_auto_exit_timeout_hours chunk_statistics_auto_start_statistics
chunk_statistics_strategy controller_pull_url controller_reply_url enable_async_loading
enable_blending enable_chunk_statistics enable_controller enable_hidden_state_cache
enable_kv_events enable_lazy_memory_allocator enable_p2p enable_pd enable_scheduler_bypass_lookup
external_lookup_client extra_config gds_backend gds_buffer_size gds_path gds_path_sharding
hidden_state_layers hidden_states_retrieve_mode hit_miss_ratio internal_api_server_enabled
internal_api_server_host internal_api_server_include_index_list internal_api_server_port_start
internal_api_server_socket_path_prefix lazy_memory_expand_trigger_ratio lazy_memory_initial_ratio
lazy_memory_safe_size lazy_memory_step_ratio lmcache_instance_id
lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time lmcache_worker_ids
lmcache_worker_ports local_cpu local_cpu_use_hugepages local_disk local_disk_path_sharding
lookup_server_worker_ids lookup_timeout_ms maru_path maru_pool_size max_hidden_state_cpu_size
max_local_cpu_size max_local_disk_size min_retrieve_tokens mp_host mp_port nixl_backends
nixl_buffer_device nixl_buffer_size numa_mode p2p_host p2p_init_ports p2p_lookup_ports
pd_allocation_timeout_sec pd_backend_mode pd_bidirectional pd_buffer_device pd_buffer_size
pd_condition_poll_interval_sec pd_max_prefill_len pd_peer_alloc_port pd_peer_host
pd_peer_init_port pd_peer_query_port pd_proxy_host pd_proxy_port pd_role pd_shutdown_timeout_sec
pd_skip_proxy_notification pin_check_interval_sec pin_timeout_sec pre_caching_hash_algorithm
priority_limit py_enable_gc remote_config_url remote_serde remote_storage_plugins remote_url
reserve_local_cpu_size retrieve_locations run_script_api_enabled runtime_plugin_locations
save_decode_cache save_unfull_chunk script_allowed_imports storage_plugins store_location
transfer_channel use_gds use_gpu_connector_v3 use_layerwise
enable_xpyd nixl_peer_host nixl_peer_init_port nixl_peer_alloc_port nixl_proxy_host
nixl_proxy_port nixl_role nixl_peer_port controller_url lmcache_worker_port plugin_locations
external_backends
"""
LMCACHE_0_5_6 = _LMCACHE_0_5_6_TEXT.split()

WITHOUT_MEANING = [name for name in LMCACHE_0_5_6 if name not in HONOURED]


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


# Values this version refuses or reads otherwise.


def test_builtin_hash_is_read_as_sha256_cbor_with_one_notice(tmp_path: Path) -> None:
    path = written(tmp_path, {"pre_caching_hash_algorithm": "builtin"})
    config = LMCacheEngineConfig.from_file(path)
    assert config.pre_caching_hash_algorithm == "sha256_cbor"
    (notice,) = config.notices
    assert "builtin" in notice
    assert str(path) in notice
    assert "sha256_cbor" in notice


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor_64bit", "xxhash", "blake3", ""])
def test_other_hashes_stop_and_say_what_to_set(algorithm: str) -> None:
    with pytest.raises(ConfigError, match="set it to sha256_cbor") as error:
        LMCacheEngineConfig.from_defaults(pre_caching_hash_algorithm=algorithm)
    assert repr(algorithm) in only_problem(error)


def test_python_hash_seed_is_not_read() -> None:
    seeded = LMCacheEngineConfig.resolve(environ={"PYTHONHASHSEED": "7"})
    assert seeded == LMCacheEngineConfig.from_defaults()
    assert seeded.none_hash_seed == "vllm-none-hash"
    assert seeded.notices == ()


def test_the_chain_is_ours_or_the_engines() -> None:
    for chain in ("own", "engine"):
        assert LMCacheEngineConfig.from_defaults(chain=chain).chain == chain
    with pytest.raises(ConfigError, match="needs own or engine, found 'Own'"):
        LMCacheEngineConfig.from_defaults(chain="Own")


@pytest.mark.parametrize("policy", CACHE_POLICIES)
def test_every_policy_is_read_in_any_case_and_known_to_the_store(policy: str) -> None:
    for spelling in (policy, policy.lower(), policy.title()):
        config = LMCacheEngineConfig.from_defaults(cache_policy=spelling)
        assert config.cache_policy == policy
        _native.LocalCpu(4096, 1000, spelling).close()


@pytest.mark.parametrize("policy", ["2Q", "", "LRU "])
def test_an_unknown_policy_stops_and_says_what_there_is(policy: str) -> None:
    known = ", ".join(CACHE_POLICIES)
    with pytest.raises(ConfigError, match=rf"cache_policy.*needs one of {known}, found '{policy}'"):
        LMCacheEngineConfig.from_defaults(cache_policy=policy)
    with pytest.raises(ValueError, match=rf'policy "{policy}" is unknown; .* one of {known}'):
        _native.LocalCpu(4096, 1000, policy)


def test_the_policy_of_the_settings_is_the_one_at_work() -> None:
    """Two chunks fit, three are stored, the first is looked up in between: who is gone?"""
    gone = {}
    for policy in ("LRU", "FIFO", "MRU"):
        config = LMCacheEngineConfig.from_defaults(cache_policy=policy)
        pool = _native.LocalCpu(2 * 4096, 1000, config.cache_policy)
        hashes = [bytes([number]) * 32 for number in range(3)]
        for number, chunk_hash in enumerate(hashes):
            memory_objs = pool.allocate([4096])
            assert memory_objs is not None
            pool.put("ns", chunk_hash, memory_objs[0])
            del memory_objs
            pool.longest_prefix("ns", hashes[number])
            if number == 1:
                pool.longest_prefix("ns", hashes[0])
        left = [pool.longest_prefix("ns", chunk_hash) for chunk_hash in hashes]
        gone[policy] = left.index(0)
    assert gone == {"LRU": 1, "FIFO": 0, "MRU": 0}


def test_layerwise_is_off_unless_asked_for() -> None:
    assert LMCacheEngineConfig.from_defaults().use_layerwise is False
    assert LMCacheEngineConfig.from_defaults(use_layerwise=True).use_layerwise is True


def test_synchronous_loading_gets_one_notice_and_reads_true() -> None:
    config = LMCacheEngineConfig.from_defaults(enable_async_loading=False)
    assert config.enable_async_loading is True
    assert ["enable_async_loading" in notice for notice in config.notices] == [True]


def test_no_host_memory_gets_a_notice() -> None:
    (notice,) = LMCacheEngineConfig.from_defaults(local_cpu=False).notices
    assert "nothing is cached" in notice


def test_variable_can_correct_a_value_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, {"cache_policy": "RANDOM", "pre_caching_hash_algorithm": "builtin"})
    with pytest.raises(ConfigError):
        LMCacheEngineConfig.resolve(path=path, environ={})
    config = LMCacheEngineConfig.resolve(
        path=path,
        environ={
            "LMCACHE_CACHE_POLICY": "FIFO",
            "LMCACHE_PRE_CACHING_HASH_ALGORITHM": "sha256_cbor",
        },
    )
    assert config.cache_policy == "FIFO"
    assert config.notices == ()


# LMCache's keys without meaning here.


def test_every_key_of_lmcache_is_known_and_no_other() -> None:
    ours = {"chain", "none_hash_seed", "lease_timeout_ms", "copy_threads", "strict", "log_requests"}
    ours |= {"refuse_slow_loads", "max_sync_load_ms", "storage_backends"}
    ours |= {"remote_ttl", "remote_operations"}
    ours |= {"local_disk_on_exit", "local_disk_direct_io", "local_disk_threads"}
    ours |= {"local_disk_sync"}
    assert set(LMCACHE_0_5_6) == (set(HONOURED) - ours) | set(LMCACHE_ONLY) | set(LEGACY_NAMES)
    assert not set(HONOURED) & set(LMCACHE_ONLY)


@pytest.mark.parametrize("key", WITHOUT_MEANING)
@pytest.mark.parametrize("place", ["file", "env", "extra_config", "argument"])
def test_key_without_meaning_gives_one_notice(key: str, place: str, tmp_path: Path) -> None:
    if place == "file":
        path = written(tmp_path, {key: "s3cret"})
        config, name, source = LMCacheEngineConfig.from_file(path), key, f"file:{path}"
    elif place == "env":
        config = LMCacheEngineConfig.from_env({variable(key): "s3cret"})
        name, source = variable(key), f"env:{variable(key)}"
    elif place == "extra_config":
        name, source = f"lmcache.{key}", "extra_config"
        config = LMCacheEngineConfig.resolve(environ={}, connector_extra_config={name: "s3cret"})
    else:
        config = LMCacheEngineConfig.from_defaults(**{key: "s3cret"})
        name, source = key, "argument"
    (notice,) = config.notices
    assert notice.startswith(f"{name} ({source}): ")
    assert notice.endswith("; ignored")
    # Its value may be a credential.
    assert "s3cret" not in notice
    assert config == LMCacheEngineConfig.from_defaults()


@pytest.mark.parametrize("old", LEGACY_NAMES)
def test_earlier_name_of_a_key_names_todays(old: str) -> None:
    (notice,) = LMCacheEngineConfig.from_defaults(**{old: 1}).notices
    assert f"earlier name of {LEGACY_NAMES[old]}" in notice


@pytest.mark.parametrize("key", ["store_location"])
def test_choices_to_come_say_that_they_are_not_available(key: str) -> None:
    (notice,) = LMCacheEngineConfig.from_defaults(**{key: 1}).notices
    assert "not available in this version; ignored" in notice


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("redis://a", ["redis://a"]),
        ("redis://a:1/0 , rediss://b?x=1,", ["redis://a:1/0", "rediss://b?x=1"]),
        (
            "redis-cluster://a:1,b:2,s3://bucket/x",
            ["redis-cluster://a:1,b:2", "s3://bucket/x"],
        ),
        ("", []),
    ],
)
def test_urls_are_split_and_their_hosts_are_not(text: str, urls: list[str]) -> None:
    assert LMCacheEngineConfig.from_defaults(remote_url=text).remote_urls == urls


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:hunter2@h:1/0",
        "redis://:hunter2@h",
        "redis://me:hunt/er2@hunter2@h",
        "redis://h?user=me&pass=hunter2",
        "redis://a,redis-cluster://:hunter2@b:1,c:2?pass=hunter2",
        "unix:///run/redis.sock?pass=hunter2",
        "redis://:hunt?er2@h:6379",
        "redis://me@hunt:hunt?er2@h:6379",
        "redis://h?pass=a@hunter2",
        "redis://me:hunter2",
        "redis://me:hunter2/0",
        "redis://:hunter2",
        "redis://a:1,me:hunter2",
        "redis://:a,b://hunter2@h",
        "me:hunter2 redis://h",
    ],
)
def test_a_url_is_shown_without_its_credentials(url: str) -> None:
    config = LMCacheEngineConfig.from_defaults(remote_url=url)
    (shown,) = [value for key, value, _ in config.describe() if key == "remote_url"]
    for text in (shown, repr(config), str(config)):
        assert "hunt" not in text
    assert config.remote_urls


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:p@h:6379/0?prefix=a", "redis://h:6379/0"),
        ("redis-cluster://:p@a:1,b:2, s3://bucket/p", "redis-cluster://a:1,b:2, s3://bucket/p"),
        ("rediss://[::1]:7000/3", "rediss://[::1]:7000/3"),
        ("redis-sentinel://:p@[::1],b/mine", "redis-sentinel://[::1],b/mine"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("redis://:pa?ss@h:6379", "redis://..."),
    ],
)
def test_what_is_shown_of_a_url_says_where_it_leads(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


def test_what_is_no_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="needs a URL") as raised:
        LMCacheEngineConfig.from_defaults(remote_url="me:hunter2@host")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("key", ["store_location", "enable_p2p"])
def test_null_for_a_key_without_meaning_says_nothing(key: str, tmp_path: Path) -> None:
    assert LMCacheEngineConfig.from_file(written(tmp_path, {key: None})).notices == ()
    assert LMCacheEngineConfig.from_env({variable(key): ""}).notices == ()


def test_encoder_cache_keys_give_one_notice_and_typos_in_them_stop(tmp_path: Path) -> None:
    path = written(tmp_path, {"ec": {"local_cpu": True}, "ec_chunk_size": 1})
    config = LMCacheEngineConfig.resolve(path=path, environ={"LMCACHE_EC_LOCAL_DISK": "/x"})
    assert len(config.notices) == 3
    assert config.chunk_size == 256
    with pytest.raises(ConfigError, match="ec_chunksize"):
        LMCacheEngineConfig.from_defaults(ec_chunksize=1)


@pytest.mark.parametrize(
    "name",
    [
        *config_keys.PROCESS_VARIABLES,
        *(prefix + "X" for prefix in config_keys.PROCESS_VARIABLE_PREFIXES),
    ],
)
def test_variable_of_lmcaches_processes_gives_one_notice(name: str) -> None:
    (notice,) = LMCacheEngineConfig.from_env({name: "x"}).notices
    assert notice.startswith(f"{name} (env:{name}): ")


@pytest.mark.parametrize("name", [*config_keys.CONNECTOR_ONLY, "lmcache.mp.host", "lmcache.q.x"])
def test_connector_entry_of_lmcache_gives_one_notice(name: str) -> None:
    (notice,) = LMCacheEngineConfig.resolve(environ={}, connector_extra_config={name: 1}).notices
    assert notice.startswith(f"{name} (extra_config): ")


def test_connector_entry_of_others_gives_one_notice() -> None:
    config = LMCacheEngineConfig.resolve(environ={}, connector_extra_config={"cpu_bytes_to_use": 1})
    (notice,) = config.notices
    assert notice.startswith("cpu_bytes_to_use (extra_config): ")


def test_same_key_in_two_places_gives_one_notice(tmp_path: Path) -> None:
    path = written(tmp_path, {"enable_p2p": True})
    config = LMCacheEngineConfig.from_file(path, enable_p2p=False)
    (notice,) = config.notices
    assert "(argument)" in notice


# extra_config.


def test_extra_config_is_read_as_mapping_or_json(tmp_path: Path) -> None:
    entries = {"save_only_first_rank": True, "redis_url": "redis://user:s3cret@host"}
    text = json.dumps(entries)
    configs = [
        LMCacheEngineConfig.from_file(written(tmp_path, {"extra_config": entries})),
        LMCacheEngineConfig.from_file(written(tmp_path, {"extra_config": text})),
        LMCacheEngineConfig.from_env({"LMCACHE_EXTRA_CONFIG": text}),
        LMCacheEngineConfig.from_env({"LMCACHE_EXTRA_CONFIG": f"'{text}'"}),
        LMCacheEngineConfig.from_defaults(extra_config=entries),
    ]
    for config in configs:
        assert config.extra_config == entries
        assert [notice.split(" ")[0] for notice in config.notices] == [
            "extra_config.save_only_first_rank",
            "extra_config.redis_url",
        ]
        shown = f"{config!r} {config.describe()} {config.notices}"
        assert "s3cret" not in shown


def test_later_extra_config_replaces_the_earlier(tmp_path: Path) -> None:
    path = written(tmp_path, {"extra_config": {"first": 1}})
    config = LMCacheEngineConfig.from_file(path, extra_config={"second": 2})
    assert config.extra_config == {"second": 2}
    assert [notice.split(" ")[0] for notice in config.notices] == ["extra_config.second"]


def test_setting_inside_extra_config_stops() -> None:
    with pytest.raises(ConfigError, match=r"extra_config\.chunk_size .* beside extra_config"):
        LMCacheEngineConfig.from_defaults(extra_config={"chunk_size": 512})


def test_broken_json_shows_no_part_of_it() -> None:
    with pytest.raises(ConfigError) as error:
        LMCacheEngineConfig.from_env({"LMCACHE_EXTRA_CONFIG": '{"password": "s3cret"'})
    assert "s3cret" not in str(error.value)


def test_two_engines_share_no_extra_config() -> None:
    first, second = LMCacheEngineConfig.from_defaults(), LMCacheEngineConfig.from_defaults()
    assert first.extra_config is not second.extra_config
    given: dict[str, Any] = {"a": 1}
    assert LMCacheEngineConfig.from_defaults(extra_config=given).extra_config is not given


# Switches of the process, and variables of others.


@pytest.mark.parametrize(("text", "disabled"), [("1", True), ("true", True), ("0", False)])
def test_disable_switch(text: str, disabled: bool) -> None:
    environ = {"LMCACHE_RS_DISABLE": text}
    assert disabled_by_environment(environ) is disabled
    config = LMCacheEngineConfig.from_env(environ)
    assert config == LMCacheEngineConfig.from_defaults()
    assert config.notices == ()


@pytest.mark.parametrize("name", config_keys.PROCESS_SWITCHES)
def test_switch_is_known_and_sets_nothing(name: str) -> None:
    config = LMCacheEngineConfig.from_env({name: "1"})
    assert config == LMCacheEngineConfig.from_defaults()
    assert config.notices == ()


def test_disable_switch_unset_or_empty_is_off() -> None:
    assert disabled_by_environment({}) is False
    assert disabled_by_environment({"LMCACHE_RS_DISABLE": ""}) is False


def test_disable_switch_refuses_other_words() -> None:
    environ = {"LMCACHE_RS_DISABLE": "please"}
    with pytest.raises(ConfigError, match=r"LMCACHE_RS_DISABLE.*needs true or false"):
        disabled_by_environment(environ)
    with pytest.raises(ConfigError, match=r"LMCACHE_RS_DISABLE.*needs true or false"):
        LMCacheEngineConfig.from_env(environ)


def test_switches_are_no_settings(tmp_path: Path) -> None:
    for name in ("disable", "LMCACHE_RS_DISABLE", "rs_disable"):
        with pytest.raises(ConfigError):
            LMCacheEngineConfig.from_file(written(tmp_path, {name: True}))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LMCACHE_SERVICE_HOST", "10.0.0.1"),
        ("LMCACHE_SERVICE_PORT", "80"),
        ("LMCACHE_SERVICE_PORT_HTTP", "80"),
        ("LMCACHE_PORT", "tcp://10.0.0.1:80"),
        ("LMCACHE_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("LMCACHE_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("LMCACHE_SERVER_PORT_80_TCP_PROTO", "tcp"),
        ("LMCACHE_RS_SERVICE_HOST", "10.0.0.1"),
        ("LMCACHE_RS_PORT", "tcp://10.0.0.1:80"),
    ],
)
def test_service_links_are_passed_over(name: str, text: str) -> None:
    config = LMCacheEngineConfig.from_env({name: text})
    assert config.notices == ()


def test_port_that_is_no_service_link_stops() -> None:
    with pytest.raises(ConfigError, match="LMCACHE_PORT"):
        LMCacheEngineConfig.from_env({"LMCACHE_PORT": "80"})


# The document.


def documented(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize(
    ("mark", "table"),
    [
        ("honoured", config_keys.honoured_table()),
        ("switches", config_keys.switch_table()),
        ("lmcache-only", config_keys.lmcache_only_table()),
    ],
)
def test_document_holds_the_table_as_it_is(mark: str, table: str) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    between = text.split(f"<!-- {mark}:begin -->\n")[1].split(f"\n<!-- {mark}:end -->")[0]
    assert between == table, f"put this between the marks in {DOCUMENT}:\n{table}"


@pytest.mark.parametrize("block", documented("yaml"))
def test_documented_yaml_is_accepted(block: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(block, encoding="utf-8")
    config = LMCacheEngineConfig.from_file(path)
    for key, value in yaml.safe_load(block).items():
        if key in HONOURED and value != "builtin":
            assert getattr(config, key) == value
            assert config.sources[key] == f"file:{path}"


def test_documented_lmcache_file_gives_the_notices_it_says() -> None:
    (block,) = [block for block in documented("yaml") if "builtin" in block]
    config = LMCacheEngineConfig.from_defaults(**yaml.safe_load(block))
    assert [notice.split(" ")[0] for notice in config.notices] == [
        "pre_caching_hash_algorithm",
        "extra_config.save_only_first_rank",
    ]


@pytest.mark.parametrize("block", documented("json"))
def test_documented_connector_entry_is_accepted(block: str) -> None:
    entry = json.loads(block)["kv_connector_extra_config"]
    config = LMCacheEngineConfig.resolve(environ={}, connector_extra_config=entry)
    assert {key for key in HONOURED if config.is_set(key)} == {
        name.removeprefix("lmcache.") for name in entry
    }


@pytest.mark.parametrize("block", documented("env"))
def test_documented_variables_are_accepted(block: str) -> None:
    environ = dict(line.split("=", 1) for line in block.splitlines())
    config = LMCacheEngineConfig.from_env(environ)
    assert {variable(key) for key in HONOURED if config.is_set(key)} == set(environ)


def test_document_has_examples_of_each_place() -> None:
    assert len(documented("yaml")) >= 3
    assert documented("json")
    assert documented("env")
