"""Hints that are not strings, which Python 3.14 evaluates lazily: they may use names that do not exist."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from gpufn import gpu_function
from gpufn.declare.hints import type_hints
from gpufn_runtime.worker.arguments.parameters import Parameters

pytestmark = pytest.mark.skipif(sys.version_info < (3, 14), reason="this Python reads hints where they are written")

JSON = "application/json"
SOURCE = """
import dataclasses

def f(array: np.ndarray, many: list[np.ndarray], later: Later, number: int) -> np.ndarray: ...

@dataclasses.dataclass
class Later:
    x: int
"""


@pytest.fixture
def names() -> dict[str, Any]:
    """Return the namespace of a module with SOURCE."""
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(SOURCE, "app.py", "exec", dont_inherit=True), names)
    return names


def test_a_hint_that_cannot_be_resolved_is_any_and_does_not_break_others(names: dict[str, Any]) -> None:
    (method,) = gpu_function(names["f"]).spec().methods
    properties = method.parameters["properties"]
    assert properties["array"] == {}
    assert properties["number"] == {"type": "integer"}
    arguments = b'{"array": [1], "many": [[2]], "later": {"x": 3}, "number": 4}'
    assert Parameters(names["f"]).by_name(JSON, arguments) == {
        "array": [1], "many": [[2]], "later": names["Later"](3), "number": 4,
    }  # fmt: skip


def test_hints_are_replaced_in_place_where_they_can_be_resolved(names: dict[str, Any]) -> None:
    type_hints.resolve_in_place(names["f"])
    assert names["f"].__annotations__ == {
        "array": "np.ndarray", "many": "list[np.ndarray]", "later": names["Later"], "number": int,
        "return": "np.ndarray",
    }  # fmt: skip
    type_hints.resolve_in_place(names["Later"])
    assert names["Later"].__annotations__ == {"x": int}
