"""Which templates are worth having, as a table."""

from __future__ import annotations

import pytest

from gpufn_runtime.agent.standbys import EMPTY, ModuleSet, Use, closest, worth_having


def sets(*texts: str) -> list[ModuleSet]:
    return [frozenset(text.split()) for text in texts]


@pytest.mark.parametrize(
    ("uses", "limit", "refused", "wanted"),
    [
        ([], 4, [], []),
        (["numpy"], 4, [], ["", "numpy"]),
        ([""], 4, [], [""]),
        (["numpy"], 0, [], []),
        (["a", "b", "c", "d"], 3, [], ["", "d", "c"]),
        (["numpy", "numpy torch"], 4, [], ["", "numpy torch", "numpy"]),
        (["numpy torch", "numpy"], 4, [], ["", "numpy", "numpy torch"]),
        (["numpy torch", "numpy"], 2, [], ["", "numpy torch"]),
        (["a", "b"], 4, ["b"], ["", "a"]),
        (["a"], 4, [""], ["a"]),
    ],
)
def test_the_sets_used_last_get_templates(uses: list[str], limit: int, refused: list[str], wanted: list[str]) -> None:
    """`uses` from the oldest to the newest."""
    found = worth_having([Use(modules, at) for at, modules in enumerate(sets(*uses))], limit, sets(*refused))
    assert found == sets(*wanted)


@pytest.mark.parametrize(
    ("templates", "modules", "chosen"),
    [
        (["", "numpy", "numpy torch"], "", ""),
        (["", "numpy", "numpy torch"], "numpy", "numpy"),
        (["", "numpy torch"], "numpy", "numpy torch"),
        (["", "numpy"], "torch", ""),
        (["", "numpy", "numpy pandas"], "numpy torch", "numpy"),
        (["numpy"], "torch", None),
        ([], "", None),
    ],
)
def test_a_worker_forks_from_the_template_that_leaves_least_to_import(
    templates: list[str], modules: str, chosen: str | None
) -> None:
    expected = None if chosen is None else frozenset(chosen.split())
    assert closest(sets(*templates), frozenset(modules.split())) == expected


def test_the_empty_set_is_a_set_like_any_other() -> None:
    assert closest([EMPTY], EMPTY) == EMPTY
