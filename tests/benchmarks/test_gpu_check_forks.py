from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest

from gpu_check.checks import forks
from gpu_check.machine import Gpu, Machine, inspect

_FILES = ["/dev/nvidiactl"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(Machine, "need_module", lambda self, name: None)
    monkeypatch.setattr(Machine, "real_gpu", lambda self: None)
    return inspect(pretend=True)


@pytest.mark.parametrize(
    ("surprising", "replies", "wrong"),
    [
        ("", {}, 0),
        ("torch counts by NVML", {"child": "RuntimeError Cannot re-initialize CUDA"}, 1),
        ("torch counts by NVML", {"refusal": "opened /dev/nvidia-uvm"}, 1),
        ("torch counts by CUDA", {"refusal": ""}, 1),
        ("the driver is initialized", {"child": "works", "refusal": ""}, 2),
    ],
)
def test_each_assumption_that_does_not_hold_is_reported(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, surprising: str, replies: dict[str, Any], wrong: int
) -> None:
    def run(case: str) -> tuple[list[str], str, str, str]:
        can_fork = forks._CASES[case]
        usual = {"refusal": "" if can_fork else "made torch initialize CUDA", "child": "works" if can_fork else "Error"}
        reply = usual | (replies if case == surprising else {})
        return _FILES, reply["refusal"], reply["child"], ""

    monkeypatch.setattr(forks, "_run", run)
    finding = forks.forks(machine)
    assert len(finding.wrong) == wrong
    assert all(each.startswith(surprising) for each in finding.wrong)
    assert len(finding.tables[0].rows) == len(forks._CASES)


@pytest.mark.e2e
def test_two_workers_start_beside_a_module_that_forbids_forks_and_it_is_named() -> None:
    machine = Machine(gpus=(Gpu("GPU-x", "x", 1 << 30, "9.0"),), pretended=True)
    finding = forks.poisoned(machine)
    assert finding.wrong == []
    assert len(finding.figures["starts_ms"]) == 2
    assert not list(Path(sysconfig.get_path("purelib")).glob(f"{forks._POISON}*"))
