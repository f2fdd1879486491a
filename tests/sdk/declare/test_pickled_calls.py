"""Arguments and results of classes, and those that need a pickle."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from gpufn import Call, Function, gpu_function
from gpufn.testing import run_locally
from gpufn_core.errors import InvalidInput


class Thing:
    """A class without a form of its own: its instances need a pickle."""


@dataclasses.dataclass
class Spot:
    x: int


@gpu_function(pickle=True)
def things(make: Any) -> Any:
    return make()


@gpu_function
def spots(spot: Spot, other: Any = None) -> list[Spot]:
    return [spot, Spot(len(other))]


def test_pickled_results_are_read_by_callers_that_trust_the_function() -> None:
    with run_locally():
        with pytest.raises(InvalidInput, match=r"Thing .*pickle.*trust_results=True"):
            things.remote(Thing)
        trusted = things.options(trust_results=True)
        results = [trusted.remote(Thing), *trusted.map([Thing]), trusted.spawn(Thing).result()]
        assert [type(each) for each in results] == [Thing] * 3
        with pytest.raises(InvalidInput):
            trusted.options(trust_results=False).remote(Thing)
        call = things.spawn(Thing)
        assert type(Call.from_id(call.id, trust_results=True).result()) is Thing
        with pytest.raises(InvalidInput):
            Call.from_id(call.id).result()


def test_an_argument_that_needs_a_pickle_is_refused_at_the_call() -> None:
    with run_locally() as platform:
        with pytest.raises(InvalidInput, match=r"^other: a type .*deploy"):
            spots.remote(Spot(1), other=Thing)
        with pytest.raises(InvalidInput, match=r"@gpu_function\(pickle=True\)"):
            spots.spawn(Spot(1), Thing())
    assert platform.calls == []


def test_instances_are_made_of_the_classes_that_hints_name() -> None:
    with run_locally():
        assert spots.remote(Spot(3), other={"x": Spot(4)}) == [Spot(3), Spot(1)]
        assert things.remote(functools.partial(Spot, 5)) == {"x": 5}
        assert things.options(trust_results=True).remote(functools.partial(Spot, 5)) == Spot(5)


@gpu_function(pickle=True)
def applied(function: Callable[[int], int], x: int) -> int:
    return function(x)


def test_a_function_known_by_name_sends_pickles_if_the_caller_allows_them() -> None:
    """Regression: the handle does not know the option of the function, and refused every argument without a form."""
    with run_locally():
        assert Function.from_name("applied", pickle=True).remote(lambda x: x + 1, 2) == 3
        assert Function.from_name("applied", pickle=True).options(timeout=5).remote(lambda x: x + 1, 2) == 3
        with pytest.raises(InvalidInput, match="pickle"):
            Function.from_name("applied").remote(lambda x: x + 1, 2)
