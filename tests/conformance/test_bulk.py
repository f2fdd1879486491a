"""The node tests of ONNX that bare ONNX Runtime passes, one of each kind, through build, load and infer.

One process builds hundreds of models one after the other, and another process serves them.
"""

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
            received = [msgspec.json.decode(line, type=Outcome) for line in serving.stdout or ()]
            assert (building.wait(), serving.wait()) == (0, 0), f"a process ended after {received[-1:]}"
            return received
        finally:
            building.kill()
            serving.kill()


def _started(module: str, folder: Path, *, stdin: Any) -> subprocess.Popen[bytes]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", f"tests.conformance.{module}", str(folder)]
    return subprocess.Popen(command, env=environ, cwd=folder, stdin=stdin, stdout=subprocess.PIPE)


def test_cases_that_pass_on_bare_onnx_runtime_pass_here_except_for_known_refusals(outcomes: list[Outcome]) -> None:
    assert [outcome for outcome in outcomes if not _is_right(outcome)] == []


def _is_right(outcome: Outcome) -> bool:
    """Return whether the case passed, or whether the first stage refused it for the expected reason."""
    if not outcome.refusal:
        return not outcome.reason
    return outcome.stage == "ingest" and outcome.refusal in outcome.reason


def test_hundreds_of_cases_were_compared(outcomes: list[Outcome]) -> None:
    assert len(outcomes) > 400
