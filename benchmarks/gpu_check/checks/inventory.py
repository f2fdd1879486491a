"""What is there: GPUs as NVML tells and as gpufn sees them, drivers, programs, packages."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Callable
from typing import Any

from gpu_check.findings import Finding, Table
from gpu_check.machine import Machine
from gpu_check.platform import up
from gpu_check.words import of_all

_MIB = 1 << 20
_ASKED = (
    "nvidia-smi",
    "nvidia-smi -q",
    "ls -l /dev/nvidia* /dev/nvidia-caps /dev/shm",
    "ls -l /usr/local/nvidia/bin /usr/bin/nvidia*",
    "ldconfig -p | grep -E 'libcuda|nvidia|cudart|nvinfer'",
    "cat /proc/driver/nvidia/version /proc/driver/nvidia/params",
    "cat /proc/self/cgroup /proc/mounts",
    "id; ulimit -a; free -m; df -h / /tmp /dev/shm",
    "env | cut -d= -f1 | sort",
    "nvidia-cuda-mps-control -h",
)


def inventory(machine: Machine) -> Finding:
    """As NVML tells, and as gpufn sees it."""
    with up(machine) as platform:
        node = platform.get("/v1/nodes")["nodes"][0]
    devices = [(each["uuid"], each["kind"], each["memory_bytes"] // _MIB) for each in node["devices"]]
    facts = node.get("facts", {})
    tables = [
        Table(("device", "kind", "memory, MiB"), devices, "As gpufn sees it"),
        Table(("fact", "value"), [*sorted(facts.items()), ("docker", _docker(machine))], "The node"),
        Table(("package", "version"), sorted(machine.packages.items()), "Packages"),
        Table(("program", "where"), sorted(machine.programs.items()), "Programs"),
    ]
    figures: dict[str, Any] = {"devices": node["devices"], "facts": facts, "docker": _docker(machine), "gpus": {}}
    if not machine.gpus or machine.pretended:
        return Finding(summary=f"no GPU: {machine.why_no_gpu}", figures=figures, tables=tables)
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        for gpu in machine.gpus:
            read = metrics(nvml, nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
            figures["gpus"][gpu.uuid] = read
            tables.insert(0, Table(("metric", "value"), list(read.items()), gpu.name))
    finally:
        nvml.nvmlShutdown()
    first = machine.gpus[0]
    seen = [uuid for uuid, _, _ in devices]
    return Finding(
        summary=f"{len(machine.gpus)} GPU, {first.name}, {first.memory_bytes / 2**30:.0f} GiB, driver {machine.driver}",
        figures=figures,
        tables=tables,
        wrong=[] if first.uuid in seen else [f"gpufn sees {seen} and not {first.uuid}"],
    )


def programs(machine: Machine) -> Finding:
    """In a step of its own: what else is wrong here can be read from it."""
    said = of_all(_ASKED)
    return Finding(summary=f"{len(said)} answers, and {len(machine.programs)} of the programs are there", said=said)


def metrics(nvml: Any, handle: Any) -> dict[str, Any]:
    """What the device tells; what it does not support says so in the driver's words."""
    clock = nvml.nvmlDeviceGetClockInfo
    memory = nvml.nvmlDeviceGetMemoryInfo
    readers: dict[str, Callable[[], Any]] = {
        "compute capability": lambda: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        "memory_total_mib": lambda: memory(handle).total // _MIB,
        "memory_used_mib": lambda: memory(handle).used // _MIB,
        "gpu_utilisation_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_utilisation_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "sm_clock_mhz": lambda: clock(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: clock(handle, nvml.NVML_CLOCK_MEM),
        "clock_limit_reasons": lambda: hex(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        "compute_mode": lambda: nvml.nvmlDeviceGetComputeMode(handle),
        "mig_mode": lambda: nvml.nvmlDeviceGetMigMode(handle)[0],
        "ecc_mode": lambda: nvml.nvmlDeviceGetEccMode(handle)[0],
        "ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "remapped_rows": lambda: str(nvml.nvmlDeviceGetRemappedRows(handle)),
        "pcie_generation": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        "pcie_width": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "processes": lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        "mps_processes": lambda: len(nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)),
    }
    return {name: _read(reader) for name, reader in readers.items()}


def _read(reader: Callable[[], Any]) -> Any:
    try:
        return reader()
    except Exception as error:  # the library raises what is no NVMLError, too
        return str(error)


def _docker(machine: Machine) -> str:
    if "docker" not in machine.programs:
        return "there is no docker on the PATH"
    asked = "{{.ServerVersion}}, runtimes{{range $name, $_ := .Runtimes}} {{$name}}{{end}}"
    command = [machine.programs["docker"], "info", "--format", asked]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return "docker info does not answer"
    return ended.stdout.strip() if ended.returncode == 0 else ended.stderr.strip().splitlines()[-1]
