"""What must not be in the repository, and what may be in one place only."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, missing

_TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".lua", ".txt", ".sh", ""}
# A home directory or a work directory of whoever wrote it. `~` and GPUFN_HOME are how to say it.
_MACHINE_PATH = re.compile(r"(?<![\w.~$}])/(?:home|root|Users|work|workspace|mnt|opt/(?:wheels|pypi))/[\w.-]+")
_ALLOWED_CALLS = {
    "cloudpickle.loads": {"sdk/gpufn/native.py"},
    "cloudpickle.load": {"runtime/gpufn_runtime/worker/loader.py"},
}
_NEVER = {"eval", "exec", "os.system", "os.popen", "yaml.load", "marshal.loads", "pickle.load", "pickle.loads"}


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


def test_pickles_are_read_where_user_code_runs_only() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _python()
        for line, name, _ in _calls(path)
        if name in _ALLOWED_CALLS and str(path.relative_to(ROOT)) not in _ALLOWED_CALLS[name]
    ]
    assert found == []


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
