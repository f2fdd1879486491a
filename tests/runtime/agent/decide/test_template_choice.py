"""Choice of templates, as a table."""

from __future__ import annotations

import pytest

from gpufn_core.spec.isolation import Network
from gpufn_runtime.agent.decide import template_choice
from gpufn_runtime.agent.decide.template_choice import (
    EMPTY,
    ModuleSet,
    Preload,
    Use,
    closest,
    is_worth_waiting_for,
    select_preloads,
)
from gpufn_runtime.agent.environments.environment import Environment


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
    """`uses` are ordered from the oldest to the newest."""
    used = [Use(modules, at) for at, modules in enumerate(sets(*uses))]
    assert select_preloads(used, limit, map(Preload, sets(*refused))) == [Preload(modules) for modules in sets(*wanted)]


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


@pytest.mark.parametrize(
    ("importing", "needed", "ready", "waits"),
    [
        ("torch", "torch", "", True),
        ("torch", "numpy torch", "", True),
        ("torch", "torch", None, True),
        ("", "torch", None, True),
        ("", "torch", "", False),
        ("torch", "numpy", "", False),
        ("scipy torch", "torch", "", False),
        ("numpy torch", "numpy torch", "torch", False),
        ("torch", "torch", "numpy torch", False),
    ],
)
def test_a_worker_waits_for_a_template_that_imports_its_modules(
    importing: str, needed: str, ready: str | None, waits: bool
) -> None:
    best = None if ready is None else frozenset(ready.split())
    assert is_worth_waiting_for(frozenset(importing.split()), frozenset(needed.split()), best) is waits


def test_the_empty_set_is_a_set_like_any_other() -> None:
    assert closest(sets(""), frozenset()) == frozenset()


ENV = {"HF_HOME": "/data"}
WITH_ENV = frozenset(ENV.items())
TORCH = frozenset({"torch"})


@pytest.mark.parametrize(
    ("modules", "env", "used_env", "suits"),
    [
        (TORCH, WITH_ENV, ENV, True),
        (TORCH, frozenset(), ENV, False),
        (TORCH, WITH_ENV, {}, False),
        (TORCH, WITH_ENV, {**ENV, "TOKEN": "secret"}, False),
        (TORCH, frozenset({("HF_HOME", "/else")}), ENV, False),
        (frozenset(), frozenset(), ENV, True),
    ],
)
def test_a_worker_forks_from_a_template_whose_modules_have_read_its_own_variables(
    modules: ModuleSet, env: frozenset[tuple[str, str]], used_env: dict[str, str], suits: bool
) -> None:
    assert Preload(modules, env).serves(used_env, has_gpu=False, network=Network.FULL, domain="") == suits


@pytest.mark.parametrize(
    ("modules", "sees_gpus", "has_gpu", "suits"),
    [
        (TORCH, True, True, True),
        (TORCH, False, True, False),  # its modules may have chosen their CPU build
        (TORCH, True, False, False),
        (frozenset(), False, True, True),
    ],
)
def test_a_worker_with_a_gpu_forks_from_a_template_whose_modules_have_seen_gpus(
    modules: ModuleSet, sees_gpus: bool, has_gpu: bool, suits: bool
) -> None:
    assert Preload(modules, sees_gpus=sees_gpus).serves({}, has_gpu=has_gpu, network=Network.FULL, domain="") == suits


def test_imports_with_other_variables_are_another_template() -> None:
    uses = [Use(TORCH, 1, ENV), Use(frozenset({"numpy", "torch"}), 2), Use(frozenset(), 3, ENV)]
    wanted = [EMPTY, Preload(frozenset({"numpy", "torch"})), Preload(TORCH, WITH_ENV)]
    assert select_preloads(uses, 3) == wanted


def test_variables_are_not_written_into_logs() -> None:
    preload = Preload(TORCH, frozenset({("TOKEN", "secret")}))
    assert (str(preload), "secret" in f"{preload!r}{Use(TORCH, 1, {'TOKEN': 'secret'})!r}") == ("torch", False)


@pytest.mark.parametrize(
    ("template", "network", "suits"),
    [
        (Preload(TORCH, network=Network.NONE), Network.NONE, True),
        (Preload(TORCH, network=Network.NONE), Network.FULL, False),
        (Preload(TORCH), Network.NONE, False),
        (Preload(), Network.NONE, True),
        (Preload(TORCH, network=Network.EGRESS), Network.EGRESS, True),
        (Preload(network=Network.EGRESS), Network.EGRESS, True),
        (Preload(), Network.EGRESS, False),
        (Preload(network=Network.EGRESS), Network.FULL, False),
        (Preload(network=Network.EGRESS), Network.NONE, False),
    ],
)
def test_a_worker_forks_from_a_template_with_its_network_or_with_one_that_it_can_leave(
    template: Preload, network: Network, suits: bool
) -> None:
    assert template.serves({}, has_gpu=False, network=network, domain="") == suits


@pytest.mark.parametrize("name", ["PYTHONPATH", "LD_LIBRARY_PATH", "PATH", "BROWSER", "OPENSSL_CONF", "ANOTHER"])
def test_a_template_imports_modules_only_with_variables_that_are_known_to_run_no_code(name: str) -> None:
    """Regression: `import antigravity` starts the program that BROWSER names, which saw the files of all functions."""
    assert Use(TORCH, 1, {**ENV, name: "/bundles/of-an-attacker"}).preload == Preload()
    assert Use(TORCH, 1, ENV).preload == Preload(TORCH, WITH_ENV)


def test_a_strict_node_imports_no_modules_with_a_functions_variables() -> None:
    assert [template_choice.without_env(use).preload.modules for use in (Use(TORCH, 1, ENV), Use(TORCH, 1))] == [
        frozenset(),
        TORCH,
    ]


@pytest.mark.parametrize(
    ("modules", "of", "suits"),
    [(TORCH, "team/a", True), (TORCH, "team/b", False), (TORCH, "", False), (frozenset(), "", True)],
)
def test_functions_of_different_domains_share_no_template(modules: frozenset[str], of: str, suits: bool) -> None:
    use = Use(modules, 1.0, domain="team/a")
    assert use.preload.serves({}, has_gpu=False, network=Network.FULL, domain=of) == suits
    other = Use(modules, 2.0, domain="team/b")
    assert len(select_preloads([use, other], 9)) == (3 if modules else 1)


def test_a_template_serves_workers_of_its_own_environment_only() -> None:
    one, other = Environment("/one", (), "/packages"), Environment("/other", (), "/packages")
    for modules in (frozenset(), frozenset({"numpy"})):
        preload = Use(modules, 1.0, python=one).preload
        served = [
            python
            for python in (None, one, other)
            if preload.serves({}, has_gpu=False, network=Network.FULL, domain="", python=python)
        ]
        assert served == [one]


def test_an_environment_has_a_template_without_modules_too() -> None:
    one = Environment("/one", (), "/packages")
    assert select_preloads([Use(frozenset(), 1.0, python=one)], 4) == [EMPTY, Preload(python=one)]
