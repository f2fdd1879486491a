"""Version, changelog and the figures that the README quotes belong together."""

from __future__ import annotations

import re
import tomllib

import gpufn
from gpufn.deploy.imports.import_guard import is_reserved
from tests.conftest import ROOT


def test_the_changelogs_top_version_is_the_packages() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    top = re.search(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert top is not None
    assert {top[1], gpufn.__version__} == {packaged}


def test_both_distributions_have_one_version_and_share_no_package() -> None:
    laptop, platform = (
        tomllib.loads((ROOT / file).read_text()) for file in ("pyproject.toml", "runtime/pyproject.toml")
    )
    assert "version" in platform["project"]["dynamic"]
    wheel = platform["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {path.rpartition("/")[2] for path in laptop["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    assert packages == {"gpufn", "gpufn_core"}
    assert {*wheel["packages"], *wheel["force-include"].values()} | packages == {
        path.parent.name
        for folder in ("sdk", "gateway", "runtime", "builder")
        for path in ROOT.glob(f"{folder}/*/py.typed")
    }


def test_a_machine_of_the_platform_has_rich() -> None:
    """Bug: a merge dropped it, so that `gpufn top` failed after the README's installation."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "rich" in {re.split(r"[<>=\[]", requirement)[0] for requirement in extras["local"]}


def test_a_file_of_a_user_cannot_shadow_a_dependency_of_the_sdk() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=]", dependency)[0] for dependency in dependencies} | {"rich"}
    assert "click" in names
    assert sorted(name for name in names if not is_reserved(name)) == []


def test_the_readme_has_at_most_900_words() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_the_readme_quotes_measured_figures() -> None:
    waiting = re.findall(r".*\bTO MEASURE\b.*", (ROOT / "README.md").read_text())
    assert waiting == [], "fill in from benchmarks/results"


def test_the_results_that_the_benchmarks_page_quotes_are_in_the_repository() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    quoted = set(re.findall(r"benchmarks/results/[\w.-]+\.json", page))
    assert quoted, "name the results files that the figures come from"
    assert sorted(path for path in quoted if not (ROOT / path).is_file()) == []
