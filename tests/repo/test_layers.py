from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.conftest import ROOT, missing


def test_the_import_contracts_hold() -> None:
    beside = Path(sys.executable).with_name("lint-imports")
    command = str(beside) if beside.exists() else shutil.which("lint-imports")
    if command is None:
        missing("import-linter is not installed")
    ended = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_folders_that_hold_packages_are_no_packages_themselves() -> None:
    assert [
        str(path) for folder in ("sdk", "gateway", "runtime", "builder") for path in (ROOT / folder).glob("*.py")
    ] == []


def test_a_module_that_calls_itself_pure_imports_nothing_impure() -> None:
    graph = _graph()
    pure = {module for module, text in _modules() if re.search(r"\bPure\b", ast.get_docstring(ast.parse(text)) or "")}
    assert len(pure) > 80
    graph.remove_import(importer="gpufn_core.ids", imported="time")  # pure modules use the types of ids only
    impure = _contract("These folders are pure")["forbidden_modules"]
    assert {module for module in pure if graph.find_upstream_modules(module) & set(impure)} == set()


def test_no_module_imports_itself_through_others() -> None:
    graph = _graph()
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


def _graph() -> Any:
    if importlib.util.find_spec("grimp") is None:
        missing("import-linter is not installed")
    import grimp

    packages = _import_linter()["root_packages"]
    return grimp.build_graph(*packages, include_external_packages=True, cache_dir=None)


def _import_linter() -> dict[str, Any]:
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return settings


def _contract(name: str) -> dict[str, Any]:
    return next(each for each in _import_linter()["contracts"] if each["name"].startswith(name))


def _modules() -> Iterator[tuple[str, str]]:
    for folder in ("sdk", "gateway", "runtime", "builder"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path.read_text()
