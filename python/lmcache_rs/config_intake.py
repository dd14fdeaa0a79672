"""How settings are read: what each place says, checked, with every problem kept.

`Intake` takes a file, variables, the connector's entry and arguments in that order, later ones
winning, and ends in values with their sources, or in one `ConfigError` with all problems.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcache_rs import config_keys
from lmcache_rs.config_keys import CONFIG_FILE_VARIABLE, HONOURED, Key, show

_BOOL_TEXT = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(
    ("false", "0", "no", "off"), False
)
# Longer ones fit no setting, and Python refuses to convert very long ones.
_INT_TEXT = re.compile(r"[+-]?[0-9]{1,18}")
_FLOAT_TEXT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")

# Kubernetes puts such variables into every pod beside a service called lmcache or lmcache-....
_SERVICE_LINK = re.compile(
    r"LMCACHE(_[A-Z0-9]+)*?"
    r"(_SERVICE_HOST|_SERVICE_PORT(_[A-Z0-9_]+)?|_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


class ConfigError(ValueError):
    """Settings that stop start-up. `problems` holds one line for each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        many = f"{len(problems)} settings need" if len(problems) > 1 else "a setting needs"
        super().__init__(
            f"{many} a change before start-up:\n" + "\n".join(f"  - {line}" for line in problems)
        )

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        # The engine may carry it from a worker process to its parent.
        return (ConfigError, (list(self.problems),))


def switch(name: str, text: str) -> bool:
    """Whether a process switch is on; not set and empty are off. Raises ValueError."""
    return bool(_parse_text(Key(name, "bool", False, "", ""), text)) if text.strip() else False


class Intake:
    """Collects what every place says; `finish` turns it into values or one error.

    A value of the wrong type is a problem wherever it stands. Whether a well-typed value is one
    this version honours is asked only of the value that wins, so that a variable can correct a
    file.
    """

    def __init__(self) -> None:
        self._problems: list[str] = []
        self._known_only: dict[str, str] = {}
        self._set: dict[str, tuple[Any, str]] = {}

    def take_arguments(self, arguments: Mapping[str, Any]) -> None:
        for name, value in arguments.items():
            self.take_key(name, value, "argument")

    def take_file(self, path: str | os.PathLike[str]) -> None:
        source = f"file:{os.fspath(path)}"
        try:
            entries = _read_yaml(path)
        except ValueError as problem:
            self._problems.append(f"{source}: {problem}")
            return
        for name, value in entries:
            if isinstance(name, str):
                self.take_key(name, value, source)
            else:
                self._problems.append(f"{name!r} ({source}): keys are text; remove it")

    def take_environment(self, environ: Mapping[str, str]) -> None:
        for name in sorted(environ):
            if name == CONFIG_FILE_VARIABLE or _is_service_link(name, environ[name]):
                continue
            if name.startswith(config_keys.SWITCH_PREFIX):
                self._take_switch(name, environ[name])
            elif name.startswith("LMCACHE_") and name == name.upper():
                self._take_variable(name, environ[name])
            elif name.startswith("LMCACHE_") or name.upper() in _VARIABLES:
                # Nothing reads a name in another case: left alone it would have no effect.
                self._problems.append(_unknown(name, f"env:{name}", _nearest_variable(name)))

    def _take_switch(self, name: str, text: str) -> None:
        if name not in config_keys.PROCESS_SWITCHES:
            self._problems.append(_unknown(name, f"env:{name}", config_keys.nearest_switch(name)))
            return
        if name != config_keys.DISABLE_SWITCH:
            return
        try:
            switch(name, text)
        except ValueError as problem:
            self._problems.append(f"{name} (env:{name}): {problem}")

    def _take_variable(self, name: str, text: str) -> None:
        key = name.removeprefix("LMCACHE_").lower()
        source = f"env:{name}"
        if key in HONOURED:
            self.take(key, text, source, is_text=True)
        elif (reason := _variable_reason(name, key)) is not None:
            if text.strip():
                self.know(name, source, reason)
        else:
            self._problems.append(_unknown(name, source, _nearest_variable(name)))

    def take_connector_entry(self, entries: Mapping[str, Any]) -> None:
        source = "extra_config"
        for name, value in entries.items():
            reason = _connector_reason(name)
            if reason is not None:
                self.know(name, source, reason)
            elif name.startswith(config_keys.REQUEST_KEYS):
                self._problems.append(
                    f"{name} ({source}): a request carries this in its kv_transfer_params; "
                    "remove it here"
                )
            elif name.startswith("lmcache."):
                self.take_key(name.removeprefix("lmcache."), value, source, written=name)
            elif name.lower().startswith("lmcache") or name in HONOURED:
                nearest = config_keys.nearest_key(name)
                known = f"lmcache.{nearest}" if nearest else None
                self._problems.append(_unknown(name, source, known))
            else:
                # vLLM hands its own entries and those of wrapped connectors through here.
                self.know(name, source, "settings here are written lmcache.<key>")

    def take_key(self, key: str, value: Any, source: str, written: str | None = None) -> None:
        """Takes `key` if it is honoured, else sorts it into known or unknown."""
        name = key if written is None else written
        if key in HONOURED:
            self.take(key, value, source)
        elif (reason := config_keys.lmcache_only_reason(key)) is not None:
            # null says that nothing is set.
            if value is not None:
                self.know(name, source, reason)
        else:
            nearest = config_keys.nearest_key(key)
            if nearest is not None and written is not None:
                nearest = f"lmcache.{nearest}"
            self._problems.append(_unknown(name, source, nearest))

    def take(self, key: str, value: Any, source: str, *, is_text: bool = False) -> None:
        """Takes an honoured key; null, or an empty variable, leaves it to the places below."""
        if value is None or (is_text and not value.strip()):
            return
        spec = HONOURED[key]
        try:
            typed = _parse_text(spec, value) if is_text else _typed(spec, value)
        except ValueError as problem:
            self._problems.append(f"{key} ({source}): {problem}")
            return
        if key == "extra_config":
            self._take_extra_config(typed, source)
        self._set[key] = (typed, source)

    def _take_extra_config(self, entries: Mapping[str, Any], source: str) -> None:
        for name in [name for name in self._known_only if name.startswith("extra_config.")]:
            # A later place replaces the whole mapping.
            del self._known_only[name]
        for name in entries:
            if name in HONOURED:
                self._problems.append(
                    f"extra_config.{name} ({source}): {name} is a key of its own; write it "
                    "beside extra_config, not in it"
                )
            else:
                self.know(f"extra_config.{name}", source, "no part of this version reads it")

    def know(self, name: str, source: str, reason: str) -> None:
        """Notes a name that is known but has no effect; a later place replaces the note."""
        self._known_only[name] = f"{name} ({source}): {reason}; ignored"

    def finish(self) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
        """Values, their sources, and the notices. Raises ConfigError for all problems at once."""
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        notices: list[str] = []
        for key, spec in HONOURED.items():
            if key not in self._set:
                # A mapping is copied, so that no two engines share one.
                default = spec.default
                values[key] = dict(default) if spec.kind == "mapping" else default
                sources[key] = "default"
                continue
            value, sources[key] = self._set[key]
            try:
                values[key], notice = spec.accept(value)
            except ValueError as problem:
                self._problems.append(f"{key} ({sources[key]}): {problem}")
                continue
            if notice is not None:
                notices.append(f"{key} ({sources[key]}): {notice}")
        if self._problems:
            raise ConfigError(self._problems)
        return values, sources, (*notices, *self._known_only.values())


_VARIABLES = frozenset(f"LMCACHE_{key.upper()}" for key in HONOURED) | {CONFIG_FILE_VARIABLE}


def _nearest_variable(name: str) -> str | None:
    if name.upper() == CONFIG_FILE_VARIABLE:
        return CONFIG_FILE_VARIABLE
    nearest = config_keys.nearest_key(name)
    return f"LMCACHE_{nearest.upper()}" if nearest else None


def _unknown(name: str, source: str, nearest: str | None) -> str:
    hint = (
        f"nearest valid key: {nearest}"
        if nearest
        else "no valid key is close to it; `lmcache-rs config show` lists them"
    )
    return f"{name} ({source}): not a known setting; {hint}"


def _is_service_link(name: str, text: str) -> bool:
    if _SERVICE_LINK.fullmatch(name):
        return True
    return name.endswith("_PORT") and _SERVICE_URL.match(text) is not None


def _variable_reason(name: str, key: str) -> str | None:
    if name in config_keys.PROCESS_VARIABLES:
        return config_keys.PROCESS_VARIABLES[name]
    reason = config_keys.lmcache_only_reason(key)
    if reason is not None:
        return reason
    for prefix, prefix_reason in config_keys.PROCESS_VARIABLE_PREFIXES.items():
        if name.startswith(prefix):
            return prefix_reason
    return None


def _connector_reason(name: str) -> str | None:
    if name in config_keys.CONNECTOR_ONLY:
        return config_keys.CONNECTOR_ONLY[name]
    for prefix, reason in config_keys.CONNECTOR_ONLY_PREFIXES.items():
        if name.startswith(prefix):
            return reason
    return None


_KIND_NAMES: Mapping[type, str] = {
    bool: "true/false",
    int: "whole number",
    float: "number",
    str: "text",
}


def _found(value: Any) -> str:
    kind = _KIND_NAMES.get(type(value))
    if kind is None:
        return f"a {type(value).__name__}"
    text = repr(value) if isinstance(value, str) else show(value)
    return f"{text if len(text) <= 60 else f'{text[:57]}...'} ({kind})"


def _typed(spec: Key, value: Any) -> Any:
    """`value` as the key's type. Raises ValueError saying what was needed and found."""
    wrong = f"needs {spec.needs()}, found "
    if spec.kind == "mapping":
        return _mapping(value, wrong)
    if spec.kind == "float":
        # true is an int to Python, never a size to people.
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(wrong + _found(value) + _quotes_hint(spec, value))
        # Compared first: a very large int has no float.
        if not abs(value) < 1e300:
            raise ValueError(f"{wrong}a number without a usable value")
        return float(value)
    if type(value) is not {"bool": bool, "int": int, "str": str}[spec.kind]:
        raise ValueError(wrong + _found(value) + _quotes_hint(spec, value))
    if isinstance(value, str) and not value.isprintable():
        raise ValueError(f"needs printable text, found {value!a}")
    return value


def _mapping(value: Any, wrong: str) -> dict[str, Any]:
    # Entries may hold credentials: no part of the value goes into an error.
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(wrong + "text that is no JSON") from None
    if not isinstance(value, Mapping):
        raise ValueError(wrong + f"a {type(value).__name__}")
    if not all(isinstance(name, str) for name in value):
        raise ValueError(wrong + "a mapping with names that are no text")
    return dict(value)


def _quotes_hint(spec: Key, value: Any) -> str:
    if spec.kind == "str" and isinstance(value, bool | int | float):
        return "; put it in quotes"
    if not isinstance(value, str):
        return ""
    try:
        _parse_text(spec, value)
    except ValueError:
        return ""
    return "; leave out the quotes"


def _parse_text(spec: Key, text: str) -> Any:
    """A variable's text as the key's type. Raises ValueError saying what was needed."""
    # Files of variables often keep the quotes around a value.
    bare = text.strip()
    if len(bare) >= 2 and bare[0] == bare[-1] and bare[0] in "'\"":
        bare = bare[1:-1]
    value: Any = bare
    if spec.kind == "bool":
        value = _BOOL_TEXT.get(bare.lower(), bare)
    elif spec.kind == "int" and _INT_TEXT.fullmatch(bare):
        value = int(bare)
    elif spec.kind == "float" and _FLOAT_TEXT.fullmatch(bare):
        value = float(bare)
    if isinstance(value, str) and spec.kind in ("bool", "int", "float"):
        raise ValueError(f"needs {spec.needs()}, found {_found(value)}")
    return _typed(spec, value)


def _read_yaml(path: str | os.PathLike[str]) -> list[tuple[Any, Any]]:
    """The top-level entries of a YAML file; none for an empty one.

    Raises:
        ValueError: No such file, no YAML, no mapping, or a key that stands there twice.
    """
    # Only a start with a file pays for the import.
    import yaml  # type: ignore[import-untyped, unused-ignore]

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}; correct the path") from None
    except UnicodeDecodeError:
        raise ValueError("is no YAML: its bytes are no UTF-8 text") from None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        entries = None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ValueError(f"is no YAML: {_yaml_problem(error)}") from None
    except ValueError as error:
        # What a scalar's tag promises and its text does not keep, such as an impossible date.
        raise ValueError(f"is no YAML: {error}") from None
    except RecursionError:
        raise ValueError("is no YAML for settings: it nests too deeply") from None
    if entries is None:
        return []
    if root is None or not isinstance(entries, dict):
        raise ValueError("needs a mapping of keys to values at its top level")
    _refuse_repeated_keys(root.value)
    return list(entries.items())


def _refuse_repeated_keys(entries: list[tuple[Any, Any]]) -> None:
    # YAML's readers let the last one win, and whoever edits the first sees no effect.
    lines: dict[str, int] = {}
    for node, _ in entries:
        line = node.start_mark.line + 1
        name = str(node.value)
        if name in lines:
            raise ValueError(
                f"{name} stands there twice, in lines {lines[name]} and {line}; remove one"
            )
        lines[name] = line


def _yaml_problem(error: Any) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or type(error).__name__
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else str(problem)
