"""Every example in a docstring of ours runs."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_MODULES = [
    ".".join(path.relative_to(_ROOT / folder).with_suffix("").parts).removesuffix(".__init__")
    for folder in ("sdk", "gateway", "runtime", "builder")
    for path in sorted((_ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("module", _MODULES)
def test_the_examples_of_a_module_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
