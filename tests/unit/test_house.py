"""The rules that keep the rooms of this house apart, read off the sources themselves."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "lmcache_rs"
# Each crate with the crates it may use.
CRATES = {
    "lmcache-core": set(),
    "lmcache-memory": {"lmcache-core"},
    "lmcache-transfer": {"lmcache-core", "lmcache-memory"},
    "lmcache-storage": {"lmcache-core", "lmcache-memory"},
    "lmcache-python": {"lmcache-core", "lmcache-memory", "lmcache-transfer", "lmcache-storage"},
}
CALLED_LATER = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
MAY_CALL_TORCH = {"gpu_connector", "cache_engine", "storage", "vllm_v1"}
NOT_AT_IMPORT = {"torch", "vllm", "numpy", "yaml", "zmq"}
# What turns bytes from elsewhere into code, by import or by call.
CODE_FROM_BYTES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CODE_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "unsafe_load", "torch.load", "np.load"}
SKIPPED = re.compile(
    r"""//[^\n]* | /\*.*?\*/                                      # comments
        | \bb?r(?P<hash>\#*)".*?"(?P=hash) | "(?:\\.|[^"\\])*"      # strings
        | '(?:\\.[^']*|[^'\\])'                                  # characters, not lifetimes
    """,
    re.DOTALL | re.VERBOSE,
)
UNIT_TESTS = re.compile(r"^#\[cfg\(test\)\]\n(?:pub\(crate\) )?mod \w+ \{", re.MULTILINE)
UNSAFE_ALLOWED = re.compile(
    # region_loom stands in for the region under loom and is in no wheel.
    r"lmcache-memory/src/(region|region_loom|object)\.rs"
    r"|lmcache-transfer/src/(host/.+\.rs|cuda/.+\.rs)"
    r"|lmcache-python/src/(memory|transfer|device(_\w+)?)\.rs"
)


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    """The module, or the subpackage, that a file of the package belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST, *, at_import_only: bool = False) -> Iterator[tuple[int, str]]:
    """Each import's line and dotted name; `at_import_only` leaves out what only calls run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A relative import stays in the package.
            if node.level == 0:
                yield node.lineno, node.module or ""
        elif at_import_only and isinstance(node, CALLED_LATER):
            continue
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            for branch in node.orelse:
                yield from imports(ast.Module([branch], []), at_import_only=at_import_only)
        else:
            yield from imported_by_call(node)
            yield from imports(node, at_import_only=at_import_only)


def imported_by_call(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The module that `importlib.import_module("…")` or `__import__("…")` names."""
    match node:
        case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
            if ast.unparse(func).rpartition(".")[2] in {"import_module", "__import__"}:
                yield node.lineno, name


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test).endswith("TYPE_CHECKING")


def top(name: str) -> str:
    return name.partition(".")[0]


def calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each call's line and its name as written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def without_comments_and_strings(rust: str) -> str:
    """The code alone, line breaks kept, so that a word in a text is not taken for a keyword."""
    return SKIPPED.sub(lambda found: "\n" * found[0].count("\n"), rust)


def unsafe_lines(rust: str) -> list[int]:
    """Lines with `unsafe` in shipped code: the unit tests at a file's end are not."""
    shipped = UNIT_TESTS.split(without_comments_and_strings(rust))[0]
    lines = shipped.splitlines()
    return [number for number, line in enumerate(lines, 1) if re.search(r"\bunsafe\b", line)]


def scan(faults: Iterator[str]) -> None:
    found = list(faults)
    assert not found, "\n" + "\n".join(found)


def at(path: Path, line: int, fault: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {fault}"


def test_crates_depend_only_downwards() -> None:
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1", "--offline"]
    told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    packages = {package["name"]: package for package in json.loads(told)["packages"]}
    assert set(packages) == set(CRATES)
    for name, package in packages.items():
        ours = {used["name"] for used in package["dependencies"]} & set(CRATES)
        assert ours <= CRATES[name], f"{name} may not use {sorted(ours - CRATES[name])}"


def test_only_the_adapter_knows_vllm() -> None:
    def faults() -> Iterator[str]:
        for path in python_files():
            if room(path) != "vllm_v1":
                for line, name in imports(ast.parse(path.read_text())):
                    if top(name) == "vllm":
                        yield at(path, line, f"{name} is imported outside vllm_v1/")

    scan(faults())


def test_only_four_rooms_call_torch() -> None:
    def faults() -> Iterator[str]:
        for path in python_files():
            if room(path) not in MAY_CALL_TORCH:
                for line, name in imports(ast.parse(path.read_text())):
                    if top(name) == "torch":
                        yield at(path, line, f"{name} is imported in {room(path)}")

    scan(faults())


def test_no_module_imports_torch_when_it_is_imported() -> None:
    def faults() -> Iterator[str]:
        for path in python_files():
            for line, name in imports(ast.parse(path.read_text()), at_import_only=True):
                if top(name) == "torch":
                    yield at(path, line, f"{name} is imported at module level")

    scan(faults())


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, lmcache_rs; print(*{name.partition('.')[0] for name in sys.modules})"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not NOT_AT_IMPORT & set(told.stdout.split())


def test_nothing_turns_foreign_bytes_into_code() -> None:
    def faults() -> Iterator[str]:
        for path in python_files():
            tree = ast.parse(path.read_text())
            for line, name in imports(tree):
                if top(name) in CODE_FROM_BYTES:
                    yield at(path, line, f"{name} is imported")
            for line, name in calls(tree):
                if name in CODE_CALLS or name.rpartition(".")[2] in CODE_CALLS:
                    yield at(path, line, f"{name}() is called")

    scan(faults())


def test_unsafe_rust_stays_in_its_files() -> None:
    for crate in ("lmcache-core", "lmcache-storage"):
        text = (ROOT / "rust" / crate / "src" / "lib.rs").read_text()
        assert "#![forbid(unsafe_code)]" in text, f"{crate} does not forbid unsafe code"

    def faults() -> Iterator[str]:
        for path in sorted((ROOT / "rust").glob("*/src/**/*.rs")):
            if not UNSAFE_ALLOWED.fullmatch(str(path.relative_to(ROOT / "rust"))):
                for line in unsafe_lines(path.read_text()):
                    yield at(path, line, "unsafe outside its files")

    scan(faults())


# The scans themselves: each sees the fault it is there for.


@pytest.mark.parametrize(
    ("source", "seen", "seen_at_import"),
    [
        ("import torch", ["torch"], ["torch"]),
        ("from torch.nn import Module", ["torch.nn"], ["torch.nn"]),
        ("def f():\n    import torch", ["torch"], []),
        ("class C:\n    import torch", ["torch"], ["torch"]),
        ("try:\n    import torch\nexcept ImportError:\n    pass", ["torch"], ["torch"]),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import yaml", ["yaml"], ["yaml"]),
        ("from . import torch", [], []),
        ("t = importlib.import_module('torch')", ["torch"], ["torch"]),
    ],
)
def test_the_import_scan_sees(source: str, seen: list[str], seen_at_import: list[str]) -> None:
    tree = ast.parse(source)
    assert [name for _, name in imports(tree)] == seen
    assert [name for _, name in imports(tree, at_import_only=True)] == seen_at_import


def test_the_unsafe_scan_sees_code_and_no_words() -> None:
    source = """// unsafe here
/* unsafe
   there */ fn a<'a>(x: &'a str) { let _ = "unsafe \\" unsafe"; }
fn b() { let q = '"'; unsafe { c() } }
#![forbid(unsafe_code)] r#"unsafe " "#;
unsafe impl Send for D {}
#[cfg(test)]
mod tests { fn t() { unsafe { d() } } }
"""
    assert unsafe_lines(source) == [4, 6]
