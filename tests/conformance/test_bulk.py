"""All node tests of ONNX that ONNX Runtime passes by itself, through build, load and infer: one process that builds,
one that serves, and a thousand models that go through both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import msgspec
import pytest

from tests.conformance import exceptions, suite
from tests.conformance.build_all import Outcome
from tests.conftest import ROOT

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Outcome]:
    """What becomes here of each case that passes bare."""
    folder = tmp_path_factory.mktemp("engines")
    served = folder / "outcomes"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    def start(module: str, **pipes: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"tests.conformance.{module}", str(folder)]
        return subprocess.Popen(command, env=environ, cwd=folder, **pipes)  # type: ignore[call-overload, no-any-return]

    with served.open("wb") as output, start("build_all", stdout=subprocess.PIPE) as building:
        try:
            with start("serve_all", stdin=building.stdout, stdout=output) as serving:
                passing = {case.name for case in suite.cases().values() if passes_bare(case)}
                codes = (building.wait(), serving.wait())
        finally:
            building.kill()
    assert codes == (0, 0)
    lines = served.read_bytes().splitlines()
    found = [msgspec.json.decode(line, type=Outcome) for line in lines]
    assert [outcome.case for outcome in found] == list(suite.cases()), "each case has an outcome"
    return {outcome.case: outcome for outcome in found if outcome.case in passing}


def passes_bare(case: suite.Case) -> bool:
    try:
        suite.bare(case)
    except Exception:
        return False
    return True


def test_what_passes_bare_passes_here_but_for_the_exceptions(outcomes: Mapping[str, Outcome]) -> None:
    assert len(outcomes) > 1000
    failed = {name: outcome for name, outcome in outcomes.items() if outcome.reason}
    expected = (exceptions.FLOATS_OF_EIGHT_BITS | exceptions.NO_TENSORS) & set(outcomes)
    assert {name: failed[name] for name in set(failed) - expected} == {}
    assert expected - set(failed) == set(), "these pass: they are no exceptions any more"


def test_the_exceptions_are_refused_before_anything_else_and_told_why(outcomes: Mapping[str, Outcome]) -> None:
    for names, words in (
        (exceptions.FLOATS_OF_EIGHT_BITS, ("has elements of type FLOAT8", ", which cannot be ")),
        (exceptions.NO_TENSORS, (" is ", ", and only tensors can be ")),
    ):
        for outcome in (outcomes[name] for name in sorted(names & set(outcomes))):
            assert outcome.stage == "ingest", outcome
            assert [word for word in words if word not in outcome.reason] == [], outcome
