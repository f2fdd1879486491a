"""Text and code that the repository must not contain, or may contain in one place only."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, missing

_TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".lua", ".txt", ".sh", ""}
# A home or work directory of the author's machine. Use `~` and GPUFN_HOME instead.
_MACHINE_PATH = re.compile(r"(?<![\w.~$}])/(?:home|root|Users|work|workspace|mnt|opt/(?:wheels|pypi))/[\w.-]+")
_UNPICKLES = {  # a pickle runs code where it is read (docs/decisions/0030-pickle-is-opt-in.md)
    "cloudpickle.loads": {"sdk/gpufn_core/encoding/native.py"},  # values of callers who allow pickles
    "joblib.load": {"sdk/gpufn/deploy/convert/sklearn_files.py"},  # on the machine of the deployer, with --trust-model
    "cloudpickle.load": {"runtime/gpufn_runtime/worker/arguments/loader.py"},  # a function that was deployed by value
}
# Packages that read pickles or other formats that run code, and the files that may import them.
_PICKLES = {"_pickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
_IMPORT_PICKLES = {
    "cloudpickle": {
        "sdk/gpufn_core/encoding/native.py",
        "sdk/gpufn/deploy/by_value/pickler.py",
        "runtime/gpufn_runtime/worker/arguments/loader.py",
    },
    "marshal": {"runtime/gpufn_runtime/agent/bytecode/program.py"},  # writes byte code, and reads none
}
# Code that may allow pickles: the worker if the function's option allows them, the caller if it trusts the results.
_ALLOW_PICKLES = {
    "sdk/gpufn/call/context.py",
    "sdk/gpufn/call/result_decoding.py",
    "sdk/gpufn/testing.py",
    "sdk/gpufn_core/encoding/native.py",
    "sdk/gpufn_core/encoding/values.py",
    "runtime/gpufn_runtime/worker/arguments/parameters.py",
}
_LOADS = re.compile(
    r"(?:.*\.)?(?:(?:c|cloud|_)?pickle|dill|joblib|marshal|shelve|torch|pandas|pd)\.(?:load|loads|open|read_pickle|Unpickler)"
)
_NUMPY_LOADS = re.compile(r"(?:np|numpy)\.(?:load|lib\.format\.read_array)")
_NEVER = {"eval", "exec", "os.system", "os.popen", "yaml.load"}


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        missing(f"git cannot list the files: {listed.stderr.strip()}")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@functools.cache
def _calls(path: Path) -> list[tuple[int, str, ast.Call]]:
    tree = ast.parse(path.read_bytes())
    return [(node.lineno, ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _imports(path: Path) -> list[str]:
    """The packages that it imports, anywhere in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module.partition(".")[0])
    return found


def _python() -> list[Path]:
    return [
        path for folder in ("sdk", "gateway", "runtime", "builder") for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in _tracked()
        if path.suffix in _TEXT and path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        for match in _MACHINE_PATH.finditer(line)
    ]
    assert found == []


def test_pickles_are_read_in_named_modules_only() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _python()
        for line, name, _ in _calls(path)
        if _LOADS.fullmatch(name) and str(path.relative_to(ROOT)) not in _UNPICKLES.get(name, ())
    ]
    assert found == []


def test_code_that_reads_pickles_is_imported_in_named_modules_only() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in _python()
        for name in _imports(path)
        if name in _PICKLES and str(path.relative_to(ROOT)) not in _IMPORT_PICKLES.get(name, ())
    ]
    assert found == []


def test_pickles_are_allowed_in_named_modules_only() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in _python()
        for _, _, call in _calls(path)
        for word in call.keywords
        if word.arg == "allow_pickle" and ast.unparse(word.value) != "False"
    }
    assert found <= _ALLOW_PICKLES


def test_arrays_are_read_from_files_without_their_pickles() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _python()
        for line, name, call in _calls(path)
        if _NUMPY_LOADS.fullmatch(name) and "allow_pickle=False" not in ast.unparse(call)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text", ["pickle.loads(x)", "torch.load(p)", "joblib.load(p)", "marshal.loads(b)", "shelve.open(p)"]
)
def test_a_call_that_reads_pickles_is_found(text: str) -> None:
    assert _LOADS.fullmatch(text.partition("(")[0])


def test_no_call_runs_text_as_code_or_through_a_shell() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _python()
        for line, name, call in _calls(path)
        if name in _NEVER or any(word.arg == "shell" and ast.unparse(word.value) != "False" for word in call.keywords)
    ]
    assert found == []


@pytest.mark.parametrize("name", ["utils", "helpers", "common", "misc", "manager", "base_classes"])
def test_no_module_is_a_dumping_ground(name: str) -> None:
    assert [str(path.relative_to(ROOT)) for path in _python() if path.stem == name] == []
