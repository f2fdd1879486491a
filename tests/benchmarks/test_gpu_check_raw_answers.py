"""Raw answers of the driver: its recovery action and fabric, memory under MPS, memory of a parked process."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gpu_check.checks import driver_answers, mps_memory, parking
from gpu_check.machine import Gpu, Machine
from tests.benchmarks.test_gpu_check_mps_output import machine, programs  # noqa: F401
from tests.runtime.agent.mps.machine import Machine as Programs

GPU = Gpu("GPU-1", "NVIDIA X", 24 << 30, "9.0")


def _nvml(**functions: Any) -> Any:
    """The real nvidia-ml-py, with these functions in place of the driver's."""
    real = {name: getattr(pynvml, name) for name in dir(pynvml)}
    handles = {"nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetHandleByUUID": lambda uuid: uuid}
    return SimpleNamespace(**(real | handles | functions))


def _fields(handle: Any, fields: list[int]) -> Any:
    assert fields == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    values = (pynvml.c_nvmlFieldValue_t * 1)()
    values[0].value.uiVal = pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P
    return values


def _fabric(handle: Any, info: Any) -> None:
    info._obj.state = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED


def _unsupported(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_the_drivers_numbers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = _nvml(
        nvmlDeviceGetFieldValues=_fields,
        nvmlDeviceGetGpuFabricInfoV=_fabric,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 5_000_000,
        nvmlDeviceGetPowerUsage=lambda handle: 71_500,
        nvmlDeviceGetPowerManagementLimit=lambda handle: 300_000,
        nvmlDeviceGetPowerManagementDefaultLimit=_unsupported,
        nvmlDeviceGetPowerManagementLimitConstraints=lambda handle: [100_000, 400_000],
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: nvml)
    finding = driver_answers.driver_answers(Machine(gpus=(GPU,)))
    rows = {row[1]: row[2] for row in finding.tables[0].rows}
    assert f"value {pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P}" in rows["recovery action"]
    assert f"state {pynvml.NVML_GPU_FABRIC_STATE_COMPLETED}," in rows["fabric"]
    assert (rows["energy in mJ"], rows["power in mW"], rows["power limit in mW"]) == ("5000000", "71500", "300000")
    assert rows["default power limit in mW"] == "Not Supported"
    assert rows["possible power limits in mW"] == "[100000, 400000]"


def test_a_question_that_the_driver_does_not_support_has_its_error_as_the_answer() -> None:
    functions = (
        "nvmlDeviceGetFieldValues", "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetPowerUsage", "nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetPowerManagementDefaultLimit",
        "nvmlDeviceGetPowerManagementLimitConstraints",
    )  # fmt: skip
    nvml = _nvml(**dict.fromkeys(functions, _unsupported))
    assert set(driver_answers.answers(nvml, "GPU-1").values()) == {"Not Supported"}
    old = SimpleNamespace(NVMLError=pynvml.NVMLError)
    assert all("does not know" in answer for answer in driver_answers.answers(old, "GPU-1").values())


def test_clients_hold_memory_within_their_limits(programs: Programs) -> None:  # noqa: F811
    finding = mps_memory.mps_memory(machine(programs))
    assert finding.wrong == []
    assert [list(row[1:]) for row in finding.tables[0].rows] == [
        [1024, 4096, 24 << 10, 3072, 24 << 10],
        [2048, 4096, 24 << 10, 2048, 24 << 10],
    ]
    assert sum("NVML" in question for question in finding.said) == 3
    assert programs.rests()


def test_the_memory_of_a_parked_process_is_read_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter([900 << 20, 300 << 20, 2000 << 20, 1100 << 20])
    platform = SimpleNamespace(
        deploy=lambda source: None,
        invoke=lambda function: {"pid": 7, "sum": 0},
        wait_for=lambda function, state: None,
        get=lambda path: {"nodes": [{"processes": [{"pid": 7, "parked": {"device_bytes": 5}}]}]},
    )
    monkeypatch.setattr(parking, "up", lambda machine: contextlib.nullcontext(platform))
    monkeypatch.setattr(Machine, "need_module", lambda self, name: None)
    nvml = _nvml(nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=7, usedGpuMemory=next(held))])
    monkeypatch.setattr(importlib, "import_module", lambda name: nvml)
    finding = parking.kept(Machine(gpus=(GPU,)))
    assert [list(row[1:3]) for row in finding.tables[0].rows] == [[900 << 20, 300 << 20], [2000 << 20, 1100 << 20]]
    assert [each.partition(":")[0] for each in finding.wrong] == ["1 GB"], "more than 1 GiB is left"
