"""The parameters of a variant from its selector."""

from __future__ import annotations

from typing import Any

import pytest

from gpufn_core.errors import InvalidInput
from gpufn_core.spec.naming.variant_names import MAX_SELECTOR_BYTES, split, with_selector
from gpufn_gateway.arguments.selector import read

SCHEMA = {
    "type": "object",
    "properties": {
        "size": {"type": "string", "default": "base"},
        "scale": {"type": "number", "default": 1},
        "layers": {"type": "integer", "default": 1},
        "tags": {"type": "array", "items": {"type": "string"}},
        "flag": {"type": "boolean", "default": True},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("selector", "parameters"),
    [
        ("", {}),
        ("size=big", {"size": "big"}),
        ("size=base", {}),
        ("scale=1", {}),
        ("scale=2", {"scale": 2.0}),
        ("flag=1", None),
        ("flag=true&layers=2", {"layers": 2}),
        ("tags=a&tags=b", {"tags": ["a", "b"]}),
        ("size=a%28b%29%2Fc", {"size": "a(b)/c"}),
        ("size=3", {"size": "3"}),
        ("layers=big", None),
        ("colour=red", None),
        ("@colour=red", None),
        ("%7B%22size%22%3A%223%22%7D", {"size": "3"}),
        ("%7B%22size%22%3A3%7D", None),
        ("%7Bnot json", None),
        ("%7B%22colour%22%3A3%7D", None),
        ("size=" + "x" * MAX_SELECTOR_BYTES, None),
    ],
)
def test_a_selector_is_read_by_the_types_of_the_constructor(selector: str, parameters: dict[str, Any] | None) -> None:
    if parameters is None:
        with pytest.raises(InvalidInput):
            read(selector, SCHEMA, "clf")
    else:
        assert read(selector, SCHEMA, "clf") == (parameters, {})


@pytest.mark.parametrize(
    ("selector", "options"),
    [
        ("@cpu=2&@memory=1Gi", {"cpu": 2, "memory": "1Gi"}),
        ("@gpu=L4&@gpu=A10", {"gpu": ["L4", "A10"]}),
        ("%7B%22%40gpu%22%3A%22L4%22%7D", {"gpu": "L4"}),
    ],
)
def test_options_have_a_mark(selector: str, options: dict[str, Any]) -> None:
    assert read(selector, {}, "embed") == ({}, options)


@pytest.mark.parametrize("value", [{"size": "a/b.c(d)%e=f&g"}, {"scale": 0.5}, {"tags": ["ü", "1"], "layers": -3}])
def test_the_sdk_sends_values_unchanged(value: dict[str, Any]) -> None:
    selection = split(f"{with_selector('clf', value)}.predict")
    assert (selection.function, selection.method) == ("clf", "predict")
    assert read(selection.selector or "", SCHEMA, "clf").parameters == value


def test_a_function_without_parameters_refuses_a_selector() -> None:
    with pytest.raises(InvalidInput, match="no parameters"):
        read("size=big", {}, "embed")


def test_the_sdk_refuses_values_that_json_cannot_express() -> None:
    with pytest.raises(InvalidInput) as refused:
        with_selector("clf", {"hook": object()})
    assert refused.value.field == "hook"
