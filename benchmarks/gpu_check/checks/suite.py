"""The tests in tests/gpu, if pytest is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_check.findings import Finding
from gpu_check.machine import CannotRun, Machine
from gpu_check.platform import memory

_ROOT = Path(__file__).parents[3]
_ENDED_WITHOUT_TESTS = 5
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
# A rented machine has a pytest of its own, with plugins that our tests do not expect.
_QUIETLY = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
_TEST_S = 90  # a hanging test prints its stack, and ends the run


def gpu_tests(machine: Machine) -> Finding:
    machine.need_module("pytest")
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-o", f"faulthandler_timeout={_TEST_S}"]
    environ = (
        os.environ
        | _QUIETLY
        | memory(machine)
        | {"PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    )
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            completed = subprocess.run(command, cwd=_ROOT, env=environ, stdout=output, stderr=output, check=False)
        finally:  # also when the step times out: the output then shows the last test
            output.seek(0)
            printed = output.read()
            print(printed)
    if completed.returncode == _ENDED_WITHOUT_TESTS:
        raise CannotRun("pytest found no tests")
    last_line = (printed.strip() or "pytest printed nothing").splitlines()[-1]
    counts = {outcome: int(number) for number, outcome in _COUNT.findall(last_line)}
    skipped = [line.removeprefix("SKIPPED ") for line in printed.splitlines() if line.startswith("SKIPPED")]
    if counts.keys() <= {"skipped"} and completed.returncode == 0:
        raise CannotRun(f"all tests were skipped; the first at {skipped[0] if skipped else last_line}")
    return Finding(
        summary=last_line.strip("= "),
        figures={"counts": counts, "skipped": skipped},
        wrong=[] if completed.returncode == 0 else [last_line.strip("= ")],
    )
