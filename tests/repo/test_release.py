"""Version, changelog and the figures that the README quotes belong together."""

from __future__ import annotations

import re
import tomllib

import gpufn
from tests.conftest import ROOT


def test_the_changelogs_top_version_is_the_packages() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    top = re.search(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert top is not None
    assert {top[1], gpufn.__version__} == {packaged}


def test_the_readme_quotes_measured_figures() -> None:
    waiting = re.findall(r".*\bTO MEASURE\b.*", (ROOT / "README.md").read_text())
    assert waiting == [], "fill in from benchmarks/results"


def test_the_results_that_the_readme_quotes_are_in_the_repository() -> None:
    quoted = set(re.findall(r"benchmarks/results/[\w.-]+\.json", (ROOT / "README.md").read_text()))
    assert quoted, "name the results files that the figures come from"
    assert sorted(path for path in quoted if not (ROOT / path).is_file()) == []
