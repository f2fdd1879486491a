"""`import gpufn` shows what `gpufn.__all__` promises, and nothing else, at run time and to type checkers."""

from __future__ import annotations

import ast
import inspect
import types
from pathlib import Path

import gpufn

_TREE = ast.parse(Path(inspect.getfile(gpufn)).read_bytes())


def _loaded() -> dict[str, object]:
    """Names are loaded on first use."""
    return {name: getattr(gpufn, name) for name in gpufn.__all__}


def _for_itself() -> set[str]:
    """Return the names that the module imports for itself, without `as`: `Any`, `annotations`."""
    imports = (node for node in ast.walk(_TREE) if isinstance(node, ast.ImportFrom))
    return {alias.name for node in imports for alias in node.names if alias.asname is None}


def test_the_public_names_of_gpufn_match_its_documented_surface() -> None:
    _loaded()
    shown = {
        name
        for name, value in vars(gpufn).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert shown - _for_itself() == set(gpufn.__all__)


def test_a_type_checker_sees_the_same_names() -> None:
    seen = [alias.asname for node in ast.walk(_TREE) if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert {name for name in seen if name} == set(gpufn.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(gpufn, "gpu_functions")


def test_every_public_name_is_documented() -> None:
    lacking = [name for name, value in _loaded().items() if not inspect.getdoc(value)]
    assert lacking == []


def test_every_public_name_that_is_no_error_has_an_example() -> None:
    lacking = [
        name
        for name, value in _loaded().items()
        if not (isinstance(value, type) and issubclass(value, Exception)) and ">>>" not in (inspect.getdoc(value) or "")
    ]
    assert lacking == []
