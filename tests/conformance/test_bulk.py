"""The node tests of ONNX that ONNX Runtime passes by itself, one of each kind, through build, load and infer: one
process that builds, one that serves, and hundreds of models that go through both, one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.conformance.build_all import Outcome
from tests.conftest import ROOT

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    folder = tmp_path_factory.mktemp("engines")
    with (
        _started("build_all", folder, stdin=subprocess.DEVNULL) as building,
        _started("serve_all", folder, stdin=building.stdout) as serving,
    ):
        try:
            heard = [msgspec.json.decode(line, type=Outcome) for line in serving.stdout or ()]
            assert (building.wait(), serving.wait()) == (0, 0), f"a process ended after {heard[-1:]}"
            return heard
        finally:
            building.kill()
            serving.kill()


def _started(module: str, folder: Path, *, stdin: Any) -> subprocess.Popen[bytes]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", f"tests.conformance.{module}", str(folder)]
    return subprocess.Popen(command, env=environ, cwd=folder, stdin=stdin, stdout=subprocess.PIPE)


def test_what_passes_bare_passes_here_but_for_the_exceptions(outcomes: list[Outcome]) -> None:
    assert [outcome for outcome in outcomes if not _is_right(outcome)] == []


def _is_right(outcome: Outcome) -> bool:
    """Whether it passed, or is one of the exceptions, was refused before anything else was done, and is told why."""
    if not outcome.refusal:
        return not outcome.reason
    return outcome.stage == "ingest" and outcome.refusal in outcome.reason


def test_hundreds_of_cases_were_compared(outcomes: list[Outcome]) -> None:
    assert len(outcomes) > 400
