"""The pages name what the gateway names: a kind without its line would be shown without its colour, or left out."""

from __future__ import annotations

import re

import pytest

from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.spec.isolation import LEAST
from gpufn_gateway.history.blocks import EventKind
from tests.conftest import ROOT

PAGES = ROOT / "gateway" / "console" / "src"


@pytest.mark.parametrize(
    ("file", "constant", "names"),
    [
        ("core/operate/time-line.ts", "KINDS", list(EventKind)),
        ("core/operate/report.ts", "STAGES", list(BuildStage)),
        ("pages/teams/set.tsx", "TIERS", list(LEAST)),
    ],
)
def test_the_pages_have_every_name(file: str, constant: str, names: list[str]) -> None:
    text = (PAGES / file).read_text()
    found = re.search(rf"const {constant}\b[^=]*=\s*[\[{{](.*?)[\]}}]", text, re.DOTALL)
    assert found is not None, f"{file} has no {constant}"
    assert set(names) <= set(re.findall(r"\w+", found[1]))
