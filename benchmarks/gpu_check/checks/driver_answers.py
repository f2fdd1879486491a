"""Raw answers of the driver: recovery action and state of the fabric, which decide over the health of a GPU; energy,
power and power limits. The limits are read, never set.

`nvidia-smi -q` prints them in words. NVML's numbers are read as the agent reads them. Sources: NVML's API reference
(nvmlDeviceGetFieldValues, nvmlDeviceGetGpuFabricInfoV) and nvidia-ml-py.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, Final

from gpu_check.findings import Finding, Table
from gpu_check.machine import Machine
from gpu_check.program_output import outputs_of

_COMMANDS: Final = (
    "nvidia-smi -q | grep -A 12 -i 'fabric'",
    "nvidia-smi -q | grep -i 'recovery'",
    "nvidia-smi -q -d POWER",
    "systemctl is-active nvidia-fabricmanager",
    "dmesg | grep -i -E 'xid|nvswitch|fabric' | tail -40",
)
_NUMBERS: Final = {
    "energy in mJ": "nvmlDeviceGetTotalEnergyConsumption",
    "power in mW": "nvmlDeviceGetPowerUsage",
    "power limit in mW": "nvmlDeviceGetPowerManagementLimit",
    "default power limit in mW": "nvmlDeviceGetPowerManagementDefaultLimit",
    "possible power limits in mW": "nvmlDeviceGetPowerManagementLimitConstraints",
}


def driver_answers(machine: Machine) -> Finding:
    machine.real_gpu()
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        rows = [
            (gpu.uuid, name, answer)
            for gpu in machine.gpus
            for name, answer in answers(nvml, nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)).items()
        ]
    finally:
        nvml.nvmlShutdown()
    first = {name: answer for uuid, name, answer in rows if uuid == machine.gpus[0].uuid}
    return Finding(
        summary="; ".join(f"{name}: {answer}" for name, answer in first.items()),
        figures={"answers": [list(row) for row in rows]},
        tables=[Table(("GPU", "question", "answer"), rows)],
        said=outputs_of(_COMMANDS),
    )


def answers(nvml: Any, handle: Any) -> dict[str, str]:
    """Return the raw numbers. An unsupported question has the driver's error as its answer."""
    numbers = {question: _number(nvml, function, handle) for question, function in _NUMBERS.items()}
    return {"recovery action": _recovery_action(nvml, handle), "fabric": _fabric(nvml, handle), **numbers}


def _number(nvml: Any, function: str, handle: Any) -> str:
    if not hasattr(nvml, function):
        return "this nvidia-ml-py does not know the function"
    try:
        return str(getattr(nvml, function)(handle))
    except nvml.NVMLError as error:
        return str(error)


def _recovery_action(nvml: Any, handle: Any) -> str:
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return "this nvidia-ml-py does not know the field"
    try:
        (value,) = nvml.nvmlDeviceGetFieldValues(handle, [field])
    except nvml.NVMLError as error:
        return str(error)
    return f"status {value.nvmlReturn}, type {value.valueType}, value {value.value.uiVal}"


def _fabric(nvml: Any, handle: Any) -> str:
    if not hasattr(nvml, "c_nvmlGpuFabricInfoV_t"):
        return "this nvidia-ml-py does not know the structure"
    info = nvml.c_nvmlGpuFabricInfoV_t()  # sets its version
    try:
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    except nvml.NVMLError as error:
        return str(error)
    return f"state {info.state}, status {info.status}, clique {info.cliqueId}, health mask {info.healthMask:#x}"
