"""The tests in tests/gpu, with pytest where it is installed."""

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
# A machine that is lent has a pytest of its own, with plugins that our tests do not expect.
_QUIETLY = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
_TEST_S = 90  # a test that hangs shows where, and is the last one


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
            ended = subprocess.run(command, cwd=_ROOT, env=environ, stdout=output, stderr=output, check=False)
        finally:  # also when the step's time is over: then it tells which test was the last
            output.seek(0)
            printed = output.read()
            print(printed)
    if ended.returncode == _ENDED_WITHOUT_TESTS:
        raise CannotRun("pytest found no tests")
    told = (printed.strip() or "pytest said nothing").splitlines()[-1]
    counts = {what: int(number) for number, what in _COUNT.findall(told)}
    skipped = [line.removeprefix("SKIPPED ") for line in printed.splitlines() if line.startswith("SKIPPED")]
    if counts.keys() <= {"skipped"} and ended.returncode == 0:
        raise CannotRun(f"all were skipped; the first at {skipped[0] if skipped else told}")
    return Finding(
        summary=told.strip("= "),
        figures={"counts": counts, "skipped": skipped},
        wrong=[] if ended.returncode == 0 else [told.strip("= ")],
    )
