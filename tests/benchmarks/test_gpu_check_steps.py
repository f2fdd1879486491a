"""Steps that pass, fail, hang, crash or cannot run: the result of each, and that the next one runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpu_check import report, steps
from gpu_check.checks import parking, sharing, suite
from gpu_check.findings import Finding, Result, State, Table
from gpu_check.load import CallStats
from gpu_check.machine import CannotRun, Gpu, Machine
from gpu_check.platform import up
from gpu_check.steps import Step, is_running, perform, run

MACHINE = Machine(why_no_gpu="a test")
FOUND = Finding(summary="all is well", figures={"calls": 3}, tables=[Table(("a",), [("b",)])])


def step(check: Callable[[Machine], Finding], name: str = "fake") -> Step:
    return Step(name, "A fake step", 60, check)


def performed(check: Callable[[Machine], Finding], *, limit_s: float = 60) -> Result:
    return perform(step(check), MACHINE, limit_s=limit_s, grace_s=0.3)


def test_the_result_of_a_step_returns_from_its_process() -> None:
    pids: list[int] = []

    def check(machine: Machine) -> Finding:
        return Finding(summary=machine.why_no_gpu, figures={"pid": os.getpid()}, tables=FOUND.tables)

    result = performed(check)
    assert (result.state, result.line, result.detail) == (State.PASSED, "a test", "")
    assert result.finding is not None
    assert result.finding.figures["pid"] not in [os.getpid(), *pids]
    assert list(map(tuple, result.finding.tables[0].rows)) == [("b",)]


def test_a_step_that_the_machine_cannot_run_has_its_reason_in_one_line() -> None:
    result = performed(lambda machine: Finding(summary=machine.gpu().name))
    assert (result.state, result.line, result.detail) == (State.SKIPPED, "no GPU: a test", "")


def test_a_failed_step_shows_its_traceback_notes_and_output() -> None:
    def check(machine: Machine) -> Finding:
        print("on its way")
        error = ValueError("it broke\nand more of it")
        error.add_note("--- gateway.log: refused")
        raise error

    result = performed(check)
    assert (result.state, result.line) == (State.FAILED, "ValueError: it broke")
    for part in ("Traceback", "in check", "and more of it", "--- gateway.log: refused", "--- output\non its way"):
        assert part in result.detail


def test_an_unexpected_value_fails_a_step_and_its_figures_stay() -> None:
    wrong = Finding(summary="slow", figures={"calls": 0}, wrong=["no calls", "nor a second"])
    result = performed(lambda _: wrong)
    assert (result.state, result.line) == (State.FAILED, "no calls; nor a second")
    assert result.finding is not None
    assert result.finding.figures == {"calls": 0}


def test_a_crashed_step_does_not_affect_others() -> None:
    def crash(_: Machine) -> Finding:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
        return FOUND

    results = list(run([step(crash, "first"), step(lambda _: FOUND, "second")], MACHINE, total_s=60))
    assert [(each.step, each.state, each.line) for each in results] == [
        ("first", State.FAILED, "its process ended with signal 11"),
        ("second", State.PASSED, "all is well"),
    ]


def test_a_step_beyond_its_limit_may_clean_up_and_reports_its_position(tmp_path: Path) -> None:
    def hang(_: Machine) -> Finding:
        try:
            time.sleep(600)
        finally:
            (tmp_path / "tidied").touch()
        return FOUND

    result = performed(hang, limit_s=0.3)
    assert (result.state, result.line) == (State.TIMED_OUT, "not finished after 0 s")
    assert "time.sleep(600)" in result.detail
    assert (tmp_path / "tidied").exists()


def test_a_step_that_does_not_end_is_killed_with_its_descendants(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

    def hang(_: Machine) -> Finding:
        child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
        (tmp_path / "pid").write_text(str(child.pid))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        return FOUND

    result = performed(hang, limit_s=1.0)
    assert result.state is State.TIMED_OUT
    pid = int((tmp_path / "pid").read_text())
    assert not is_running(pid)


def test_a_step_does_not_inherit_settings_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFN_HOME", "somebodys")

    def check(_: Machine) -> Finding:
        return Finding(summary=str([name for name in os.environ if name.startswith("GPUFN_")]))

    assert performed(check).line == "[]"


def test_steps_for_which_no_time_is_left_are_not_begun() -> None:
    def unexpected(_: Machine) -> Finding:
        raise AssertionError("it was begun")

    results = list(run([step(unexpected, "a"), step(unexpected, "b")], MACHINE, total_s=0))
    assert [(each.state, each.line) for each in results] == [(State.SKIPPED, "no time remained of 0 s")] * 2
    assert report.remaining(results) == ["a", "b"]


def test_a_step_that_the_whole_checks_end_cut_short_is_left_and_one_beyond_its_own_limit_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hang = Result(step="", state=State.TIMED_OUT)
    monkeypatch.setattr(steps, "perform", lambda step, *_, **__: msgspec.structs.replace(hang, step=step.name))
    tried = [Step("own", "", 30, lambda _: FOUND), Step("cut", "", 6000, lambda _: FOUND)]
    results = list(run(tried, MACHINE, total_s=600))
    assert report.remaining(results) == ["cut"]


def test_a_pretended_gpu_is_none_for_steps_that_need_a_real_one() -> None:
    machine = Machine(gpus=(Gpu("GPU-x", "x", 1 << 30, "9.0"),), pretended=True)
    assert machine.gpu().name == "x"
    assert machine.torch_device == "cpu"
    with pytest.raises(CannotRun, match="pretended"):
        machine.real_gpu()


def test_figures_of_fewer_functions_are_reported_when_more_find_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(_platform: Any, count: int, _times: int) -> CallStats:
        if count == 8:
            raise sharing._Refused("no room")
        return CallStats(1.0, [0.01] * count)

    monkeypatch.setattr(
        sharing, "up", lambda machine: contextlib.nullcontext(SimpleNamespace(deploy=lambda source: None))
    )
    monkeypatch.setattr(sharing, "_together", measured)
    monkeypatch.setattr(Machine, "need_module", lambda machine, name: None)
    found = sharing.by_time(Machine(gpus=(Gpu("GPU-x", "x", 1 << 30, "9.0"),)))
    assert found.figures["per_second"] == {"1": 1.0, "2": 2.0, "4": 4.0}
    assert found.wrong == ["8 functions: no room"]


def test_tests_of_gpus_that_can_be_run_are_not_held_up_by_a_package_that_others_need() -> None:
    """One module that could not be imported used to end the run of all tests."""
    without = "import sys; sys.modules.update(dict.fromkeys(['numpy', 'onnx', 'onnxruntime', 'torch']))"
    collect = "import pytest; sys.exit(pytest.main(['tests/gpu', '--collect-only', '-q', '-p', 'no:cacheprovider']))"
    ended = subprocess.run([sys.executable, "-c", f"{without}; {collect}"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.e2e
def test_a_step_that_fails_beside_a_platform_shows_the_ends_of_its_logs() -> None:
    def check(machine: Machine) -> Finding:
        with up(machine) as platform:
            return Finding(summary=platform.invoke("nobody"))

    result = performed(check)
    assert result.state is State.FAILED
    assert "function_not_found" in result.line
    assert "--- agent.log" in result.detail


def test_parking_is_not_possible_without_a_gpu() -> None:
    with pytest.raises(CannotRun, match="no GPU"):
        parking.small(MACHINE)


@pytest.mark.e2e
def test_parking_is_measured_with_the_same_worker_before_and_after() -> None:
    machine = Machine(gpus=(Gpu("GPU-x", "x", 1 << 30, "9.0"),), pretended=True)
    found = parking.check(machine, (0.1,))
    assert list(found.figures) == ["0.1 GB"]
    assert set(found.figures["0.1 GB"]) == {"cold_ms", "resumed_ms", "warm_ms"}


def test_tests_that_time_out_name_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = tmp_path / "waits"
    os.mkfifo(fifo)
    tests = tmp_path / "tests" / "gpu"
    tests.mkdir(parents=True)
    (tests / "test_hangs.py").write_text(
        f"import pytest\n\n@pytest.mark.gpu\ndef test_it(): open({str(fifo)!r}).read()\n"
    )
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['gpu']\n")
    monkeypatch.setattr(suite, "_ROOT", tmp_path)

    def end_our_time() -> None:
        with fifo.open("w"):  # opens when the test has begun; the test blocks until then
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()

    def check(machine: Machine) -> Finding:
        threading.Thread(target=end_our_time, daemon=True).start()
        return suite.gpu_tests(machine)

    result = performed(check)
    assert result.state is State.TIMED_OUT
    assert "test_hangs.py::test_it" in result.detail


def test_platforms_of_tests_get_a_memory_setting_where_the_kernel_reports_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "import os, pytest\n\n@pytest.mark.gpu\ndef test_it(): assert os.environ['GPUFN_MEMORY'] == '64Gi'\n"
    tests = tmp_path / "tests" / "gpu"
    tests.mkdir(parents=True)
    (tests / "test_memory.py").write_text(told)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['gpu']\n")
    monkeypatch.setattr(suite, "_ROOT", tmp_path)
    grows = Machine(gpus=(Gpu("GPU-1", "NVIDIA X", 80 << 30, "9.0"),), about={"memory_gib": 3.8})
    assert suite.gpu_tests(grows).wrong == []
