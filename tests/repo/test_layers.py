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


def test_a_module_that_calls_itself_pure_is_held_to_it() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    held = next(each["source_modules"] for each in contracts if each["name"] == "Modules that decide are pure")
    pure = {module for module, text in _modules() if re.search(r"\bPure\b", ast.get_docstring(ast.parse(text)) or "")}
    assert len(pure) > 30
    assert {each for each in pure if not any(f"{each}.".startswith(f"{name}.") for name in held)} == set()


def test_no_module_is_imported_by_what_it_imports() -> None:
    """But for the SDK's front, whose modules import each other when they are used, so that `import gpufn` is quick."""
    if importlib.util.find_spec("grimp") is None:
        missing("import-linter is not installed")
    import grimp

    packages = ("gpufn", "gpufn_gateway", "gpufn_runtime", "gpufn_builder")
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=True, cache_dir=None)
    modules = {module for module in graph.modules if not module.startswith("gpufn._")}
    imports = {module: graph.find_modules_directly_imported_by(module) & modules for module in modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


def _modules() -> Iterator[tuple[str, str]]:
    for folder in ("sdk", "gateway", "runtime", "builder"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path.read_text()
