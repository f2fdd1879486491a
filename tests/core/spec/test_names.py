"""Names of functions: full names, short names, and which function a caller means."""

from __future__ import annotations

import pytest

from gpufn_core.errors import AmbiguousFunction, FunctionNotFound, InvalidSpec
from gpufn_core.spec.naming.names import IN_PATH, Home, Names, canonical, check_group, is_function_name

KNOWN = ("predict", "embed", "prod/search/predict", "prod/ads/predict", "dev/search/rank", "prod/search/rank")


@pytest.mark.parametrize(
    ("name", "is_full"),
    [
        ("predict", True),
        ("prod/search/predict", True),
        ("prod/default/predict", True),
        ("0day", True),
        ("search/predict", False),
        ("default/default/predict", False),  # its full name is `predict`
        ("prod/revisions/predict", False),  # /v1/functions/prod/revisions/3 is a path
        ("prod/-/predict", False),
        ("1prod/search/predict", False),
        ("prod/search/predict/x", False),
        ("prod//predict", False),
        ("prod/search/Predict", False),
    ],
)
def test_full_names(name: str, is_full: bool) -> None:
    assert is_function_name(name) is is_full


@pytest.mark.parametrize(
    ("name", "home", "meant"),
    [
        ("predict", Home(), "predict"),
        ("predict", Home("prod", "search"), "prod/search/predict"),
        ("predict", Home("dev", "search"), None),  # neither at home nor unique
        ("embed", Home("prod", "search"), "embed"),
        ("default/default/embed", Home("prod", "search"), "embed"),
        ("rank", Home("dev", "search"), "dev/search/rank"),
        ("rank", Home(), None),
        ("search/rank", Home("dev", "ads"), "dev/search/rank"),
        ("-/search/rank", Home("dev", "ads"), "dev/search/rank"),
        ("ads/predict", Home(), "prod/ads/predict"),
        ("prod/-/rank", Home(), "prod/search/rank"),
        ("prod/-/predict", Home("dev", "ads"), "prod/ads/predict"),  # the own app in the other environment
        ("prod/search/RANK", Home(), "prod/search/rank"),
    ],
)
def test_the_home_is_preferred_and_then_the_only_match(name: str, home: Home, meant: str | None) -> None:
    names = Names(KNOWN)
    if meant is None:
        with pytest.raises(AmbiguousFunction):
            names.find(name, home)
    else:
        assert names.find(name, home) == meant


def test_functions_that_the_caller_may_not_see_do_not_exist() -> None:
    names = Names(KNOWN)
    assert names.find("predict", may_see=lambda full: full.startswith("prod/ads/")) == "prod/ads/predict"
    assert names.find("rank", may_see=lambda full: full.startswith("dev/")) == "dev/search/rank"
    with pytest.raises(FunctionNotFound):
        names.find("embed", may_see=lambda full: False)


def test_an_ambiguous_name_lists_the_candidates_that_the_caller_may_see() -> None:
    names = Names(KNOWN)
    with pytest.raises(AmbiguousFunction) as caught:
        names.find("predict", may_see=lambda full: "/" in full)
    assert "prod/ads/predict, prod/search/predict" in caught.value.message


def test_a_temporary_function_does_not_make_the_name_of_a_permanent_one_ambiguous() -> None:
    names = Names(["prod/shop/f"])
    names.add("dev-ada/shop/f", is_temporary=True)
    assert names.find("f") == names.find("shop/f") == "prod/shop/f"
    assert names.find("dev-ada/-/f") == "dev-ada/shop/f"
    names.add("dev-ada/shop/f")  # deployed for good
    with pytest.raises(AmbiguousFunction):
        names.find("f")
    names.add("dev-ada/shop/f", is_temporary=True)
    names.discard("prod/shop/f")
    assert names.find("f") == "dev-ada/shop/f"


def test_a_removed_function_is_not_found() -> None:
    names = Names(KNOWN)
    for name in KNOWN:
        names.discard(name)
        names.discard(name)
    assert list(names) == []
    with pytest.raises(FunctionNotFound):
        names.find("predict")


@pytest.mark.parametrize("full", KNOWN)
def test_a_full_name_means_itself_everywhere(full: str) -> None:
    assert canonical(full) == full
    explicit = full if "/" in full else f"default/default/{full}"
    assert Names(KNOWN).find(explicit, Home("dev", "search")) == full


@pytest.mark.parametrize("path", ["f/revisions/3", "f/maps/01abc", "prod/search", "a/b/c/d", "", "f/invocations/x"])
def test_other_paths_are_no_names(path: str) -> None:
    assert IN_PATH.fullmatch(path) is None


@pytest.mark.parametrize("name", ["", "Prod", "-", "1st", "a_b", "x" * 41, "a/b", 3])
def test_environments_and_apps_are_checked(name: str) -> None:
    with pytest.raises(InvalidSpec):
        check_group("environment", name)
