"""Every example in a docstring of the SDK's public modules runs."""

from __future__ import annotations

import doctest
import importlib

import pytest

_MODULES = (
    "gpufn",
    "gpufn._deployment",
    "gpufn._decorator",
    "gpufn._function",
    "gpufn._calls",
    "gpufn._map",
    "gpufn._map_ends",
    "gpufn.ids",
    "gpufn._models",
    "gpufn._options",
    "gpufn.cli._render",
    "gpufn._client",
    "gpufn.testing",
    "gpufn.spec",
    "gpufn.turns",
)


@pytest.mark.parametrize("module", _MODULES)
def test_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
