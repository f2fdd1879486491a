"""All node tests of ONNX that ONNX Runtime passes by itself, through build, load and infer: one process that builds,
one that serves, and more than a thousand models that go through both, one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.conformance import suite
from tests.conformance.build_all import Outcome
from tests.conformance.exceptions import why_refused
from tests.conftest import ROOT

pytestmark = pytest.mark.e2e

PARTS = 12  # none of which takes long on a machine that does other things as well


class Outcomes:
    """What becomes of the cases here, as it is heard. `compared` are those that were asked for and pass bare."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines
        self._heard: dict[str, Outcome] = {}
        self.compared: set[str] = set()

    def of(self, case: suite.Case) -> Outcome | None:
        """None for a case that ONNX Runtime does not pass by itself."""
        while case.name not in self._heard:
            line = self._lines.readline()
            assert line, f"a process ended before {case.name}"
            outcome = msgspec.json.decode(line, type=Outcome)
            self._heard[outcome.case] = outcome
        try:
            suite.bare(case)
        except Exception:
            return None
        self.compared.add(case.name)
        return self._heard[case.name]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    folder = tmp_path_factory.mktemp("engines")
    with (
        _started("build_all", folder, stdin=subprocess.DEVNULL) as building,
        _started("serve_all", folder, stdin=building.stdout) as serving,
    ):
        try:
            yield Outcomes(serving.stdout)
        finally:
            building.kill()
            serving.kill()


def _started(module: str, folder: Path, *, stdin: Any) -> subprocess.Popen[bytes]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", f"tests.conformance.{module}", str(folder)]
    return subprocess.Popen(command, env=environ, cwd=folder, stdin=stdin, stdout=subprocess.PIPE)


@pytest.mark.parametrize("part", range(PARTS))
def test_what_passes_bare_passes_here_but_for_the_exceptions(outcomes: Outcomes, part: int) -> None:
    cases = list(suite.cases().values())
    wrong = []
    for case in cases[len(cases) * part // PARTS : len(cases) * (part + 1) // PARTS]:
        outcome = outcomes.of(case)
        if outcome is not None and not _is_right(outcome, why_refused(case)):
            wrong.append(outcome)
    assert wrong == []


def _is_right(outcome: Outcome, why_refused: str) -> bool:
    """Whether it passed, or is one of the exceptions, was refused before anything else was done, and is told why."""
    if not why_refused:
        return not outcome.reason
    return outcome.stage == "ingest" and why_refused in outcome.reason


def test_more_than_a_thousand_cases_were_compared(outcomes: Outcomes) -> None:
    for case in suite.cases().values():
        if case.name not in outcomes.compared:
            outcomes.of(case)
    assert len(outcomes.compared) > 1000
