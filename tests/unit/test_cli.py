"""What the console script promises: every setting with its source, and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_rs import cli
from lmcache_rs.config_keys import HONOURED


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.upper().startswith("LMCACHE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    path = tmp_path / "lmcache.yaml"
    path.write_text(
        "max_local_cpu_size: 20\n"
        "pre_caching_hash_algorithm: builtin\n"
        "remote_url: redis://user:s3cret@host\n"
        "extra_config: {redis_password: s3cret}\n"
    )
    return path


def test_config_show_prints_each_key_value_and_source(
    settings_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LMCACHE_STRICT", "yes")
    assert cli.main(["config", "show", "--file", str(settings_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    settings = [line for line in lines if not line.startswith("notice: ")]
    assert [line.split()[0] for line in settings] == list(HONOURED)
    shown = {line.split()[0]: line.split()[1:] for line in settings}
    assert shown["max_local_cpu_size"][0] == "20.0"
    assert shown["max_local_cpu_size"][-1] == f"file:{settings_file}"
    assert shown["strict"] == ["true", "env:LMCACHE_STRICT"]
    assert shown["chunk_size"] == ["256", "tokens", "default"]
    assert " ".join(shown["save_unfull_chunk"]) == (
        "true in process_tokens alone, false in engine and connector default"
    )
    notices = [line.split()[1] for line in lines if line.startswith("notice: ")]
    assert notices == ["pre_caching_hash_algorithm", "extra_config.redis_password"]
    assert "s3cret" not in "\n".join(lines)


def test_config_show_json_holds_typed_values(
    settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", "show", "--json", "--file", str(settings_file)]) == 0
    out = capsys.readouterr().out
    shown = json.loads(out)
    assert list(shown["settings"]) == list(HONOURED)
    assert shown["settings"]["max_local_cpu_size"] == {
        "value": 20.0,
        "shown": "20.0",
        "unit": "GB of 2^30 bytes",
        "source": f"file:{settings_file}",
    }
    assert shown["settings"]["save_unfull_chunk"]["value"] is None
    assert shown["settings"]["extra_config"]["value"] == ["redis_password"]
    assert shown["settings"]["remote_url"]["value"] == "redis://host"
    assert len(shown["notices"]) == 2
    assert "s3cret" not in out


def test_config_show_follows_the_variable_for_the_file(
    settings_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(settings_file))
    assert cli.main(["config", "show"]) == 0
    assert f"file:{settings_file}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_bad_config_exits_2_with_the_error(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LMCACHE_CHUNKSIZE", "1")
    assert cli.main(["config", "show", "--file", "/nowhere", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "file:/nowhere: cannot be read" in captured.err
    assert "nearest valid key: LMCACHE_CHUNK_SIZE" in captured.err


def test_config_show_says_when_the_connector_is_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LMCACHE_RS_DISABLE", "1")
    assert cli.main(["config", "show"]) == 0
    assert "notice: LMCACHE_RS_DISABLE is on" in capsys.readouterr().out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("lmcache-rs ")
    assert second.startswith("native part: ")


@pytest.mark.parametrize("arguments", [[], ["config"], ["conf"], ["config", "show", "--nope"]])
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "lmcache_rs.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "usage: lmcache-rs" in done.stderr
