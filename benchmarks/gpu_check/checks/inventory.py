"""Inventory: GPUs as reported by NVML and by gpufn, drivers, programs, packages."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_check.findings import Finding, Table
from gpu_check.machine import Machine
from gpu_check.platform import up
from gpu_check.program_output import outputs_of

_MIB = 1 << 20
_CONFINEMENT = re.compile(r"worker processes run (.+)")
_COMMANDS = (
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
    "docker info --format '{{json .DiscoveredDevices}} {{json .CDISpecDirs}} {{json .Runtimes}}'",
    "command -v nvidia-container-runtime-hook nvidia-cdi-hook; ls -l /etc/cdi /var/run/cdi",
    "cat /sys/fs/selinux/enforce",
)


def inventory(machine: Machine) -> Finding:
    """Report the devices as NVML and gpufn report them."""
    with up(machine) as platform:
        node = platform.get("/v1/nodes")["nodes"][0]
        confinement = confinement_of(platform.logs / "agent.log")
    devices = [(each["uuid"], each["kind"], each["memory_bytes"] // _MIB) for each in node["devices"]]
    facts = node.get("facts", {})
    tables = [
        Table(("device", "kind", "memory, MiB"), devices, "As reported by gpufn"),
        Table(
            ("fact", "value"),
            [*sorted(facts.items()), ("docker", _docker(machine)), ("workers run", confinement)],
            "The node",
        ),
        Table(("package", "version"), sorted(machine.packages.items()), "Packages"),
        Table(("program", "where"), sorted(machine.programs.items()), "Programs"),
    ]
    figures: dict[str, Any] = {
        "devices": node["devices"],
        "facts": facts,
        "docker": _docker(machine),
        "workers_run": confinement,
        "gpus": {},
    }
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
        wrong=[] if first.uuid in seen else [f"gpufn reports {seen} and not {first.uuid}"],
    )


def confinement_of(log: Path) -> str:
    """Return how the agent confines its workers, such as `in a sandbox with all parts`, from its log."""
    found = _CONFINEMENT.findall(log.read_text(errors="replace"))
    return str(found[-1]) if found else "unknown"


def programs(machine: Machine) -> Finding:
    """A step of its own, so that its output explains failures of the other steps."""
    outputs = outputs_of(_COMMANDS)
    found = len(machine.programs)
    return Finding(summary=f"output of {len(outputs)} commands; {found} of the programs are installed", said=outputs)


def metrics(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return the device's metrics; an unsupported one has the driver's error message as its value."""
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
    except Exception as error:  # the library raises other exceptions than NVMLError, too
        return str(error)


def _docker(machine: Machine) -> str:
    if "docker" not in machine.programs:
        return "docker is not on the PATH"
    template = "{{.ServerVersion}}, runtimes{{range $name, $_ := .Runtimes}} {{$name}}{{end}}"
    command = [machine.programs["docker"], "info", "--format", template]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return "docker info timed out"
    return completed.stdout.strip() if completed.returncode == 0 else completed.stderr.strip().splitlines()[-1]
