"""Differences between a function's arguments and the deployed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpufn.declare.hints.signature_schema import methods_of
from gpufn.deploy.signature_changes import signature_changes
from gpufn_core.spec.function_spec import MethodSpec


def _plain(text: str, times: int = 1) -> str:
    return ""


def _documented(text: str, times: int = 1) -> str:
    """With words."""
    return ""


def _longer(text: str, times: int = 1, mark: str = "!") -> str:
    return ""


def _required(text: str, times: int, mark: str) -> str:
    return ""


def _typed(text: bytes, times: int = 2) -> str:
    return ""


def _listed(text: list[str], times: int | None = None) -> str:
    return ""


def _renamed(words: str, times: int = 1) -> str:
    return ""


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        (_plain, _documented, []),
        (_plain, _longer, ['mark is added, default "!"']),
        (_longer, _plain, ["mark is removed"]),
        (_longer, _required, ["mark is required now", "times is required now"]),
        (_required, _plain, ["mark is removed", "times is no longer required, default 1"]),
        (_plain, _renamed, ["text is removed", "words is added, required"]),
        (_plain, _listed, [
            "text changes its type from string to array of string",
            "times changes its default from 1 to null",
            "times changes its type from integer to integer or null",
        ]),
    ],
)  # fmt: skip
def test_the_arguments_that_changed(before: Callable[..., Any], after: Callable[..., Any], changes: list[str]) -> None:
    assert signature_changes(methods_of(before, None), methods_of(after, None)) == changes


def test_another_type_is_a_change() -> None:
    changes = signature_changes(methods_of(_plain, None), methods_of(_typed, None))
    assert any(each.startswith("text ") and " type " in each for each in changes)


def test_the_methods_of_a_class_are_named() -> None:
    number = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    before = [MethodSpec("add", parameters=number), MethodSpec("gone")]
    after = [MethodSpec("add", parameters={"type": "object", "properties": {}}), MethodSpec("new")]
    assert signature_changes(before, after) == ["add: x is removed", "gone is removed", "new is added"]


def test_a_function_that_became_a_class_has_no_call_without_a_method() -> None:
    changes = signature_changes([MethodSpec()], [MethodSpec(name="add")])
    assert changes == ["add is added", "the call without a method is removed"]
