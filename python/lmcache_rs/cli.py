"""The console script `lmcache-rs`.

Each command is a function that adds its parser and names what runs; `main` knows none of them.
Exit codes: 0 done, 1 something was found, 2 wrong usage or settings.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_rs.cli_store import add_store
from lmcache_rs.config import ConfigError, LMCacheEngineConfig, disabled_by_environment
from lmcache_rs.config_keys import DISABLE_SWITCH, HONOURED
from lmcache_rs.doctor import add_doctor

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_OK = 0
EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. None takes the process's arguments."""
    parser = argparse.ArgumentParser(
        prog="lmcache-rs", description="Looks at the settings and stores of lmcache_rs."
    )
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    commands = parser.add_subparsers(metavar="COMMAND")
    for add_command in _COMMANDS:
        add_command(commands)
    parsed = parser.parse_args(arguments)
    if parsed.version:
        print("\n".join(version_lines()))
        return EXIT_OK
    if not hasattr(parsed, "run"):
        parser.print_usage(sys.stderr)
        print("lmcache-rs: say which command to run; see --help", file=sys.stderr)
        return EXIT_USAGE
    code: int = parsed.run(parsed)
    return code


def version_lines() -> list[str]:
    """The version, and how the native part was built where it can be imported."""
    try:
        version = importlib.metadata.version("lmcache-rs")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    lines = [f"lmcache-rs {version}"]
    try:
        native = importlib.import_module("lmcache_rs._native")
    except ImportError as problem:
        lines.append(f"native part: cannot be imported: {problem}")
    else:
        build_info = getattr(native, "build_info", None)
        if callable(build_info):
            lines.append(f"native part: {_one_line(build_info())}")
    return lines


def _one_line(build_info: Any) -> str:
    if isinstance(build_info, dict):
        return ", ".join(f"{name} {value}" for name, value in build_info.items())
    return str(build_info)


def _add_config(commands: _Commands) -> None:
    config = commands.add_parser("config", help="settings and where they come from")
    actions = config.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="print every setting with its value and source",
        description=(
            "Prints every setting as the engine would resolve it from the file and the "
            "environment. What the engine's connector entry adds is not known here."
        ),
    )
    show.add_argument(
        "--file", metavar="F", help="YAML file (without it: LMCACHE_CONFIG_FILE, if set)"
    )
    show.add_argument("--json", action="store_true", help="print one JSON object")
    show.set_defaults(run=_config_show)


def _config_show(parsed: argparse.Namespace) -> int:
    try:
        config = LMCacheEngineConfig.resolve(path=parsed.file)
        disabled = disabled_by_environment()
    except ConfigError as problem:
        print(f"lmcache-rs: {problem}", file=sys.stderr)
        return EXIT_USAGE
    notices = list(config.notices)
    if disabled:
        notices.append(f"{DISABLE_SWITCH} is on: the connector does nothing")
    print(_settings_json(config, notices) if parsed.json else _settings_text(config, notices))
    return EXIT_OK


def _settings_text(config: LMCacheEngineConfig, notices: list[str]) -> str:
    rows = []
    for setting in config.describe():
        unit = HONOURED[setting.key].unit
        rows.append((setting.key, f"{setting.value} {unit}".rstrip(), setting.source))
    key_width = max(len(key) for key, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    lines = [f"{key:{key_width}}  {value:{value_width}}  {source}" for key, value, source in rows]
    lines += [f"notice: {notice}" for notice in notices]
    return "\n".join(lines)


def _settings_json(config: LMCacheEngineConfig, notices: list[str]) -> str:
    settings = {}
    for setting in config.describe():
        settings[setting.key] = {
            "value": HONOURED[setting.key].public(getattr(config, setting.key)),
            "shown": setting.value,
            "unit": HONOURED[setting.key].unit,
            "source": setting.source,
        }
    return json.dumps({"settings": settings, "notices": notices}, indent=2)


_COMMANDS: tuple[Callable[[_Commands], None], ...] = (_add_config, add_store, add_doctor)


if __name__ == "__main__":
    sys.exit(main())
