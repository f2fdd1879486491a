"""The assumptions about CUDA and forks behind the template processes of GPU functions."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

from gpu_check.findings import Finding, Table
from gpu_check.machine import Machine

_TIMEOUT_S: Final = 60.0
# Each case does one thing in a parent, lists the device files that are open, and uses CUDA in a forked child.
_PROGRAM: Final = """
import json, os, sys
case = sys.argv[1]
for name in ("OMP", "OPENBLAS", "MKL"):  # as in a template: imports start no threads
    os.environ[f"{name}_NUM_THREADS"] = "1"
if case == "torch counts by NVML":
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
import torch
if case.startswith("torch counts"):
    assert torch.cuda.is_available()
elif case == "the driver is initialized":
    import ctypes
    assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
files = sorted({os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                if os.path.islink(f"/proc/self/fd/{fd}")})
from gpufn_runtime.worker.fork_safety import reason_not_to_fork
refusal = reason_not_to_fork()
if os.fork() == 0:
    try:
        torch.ones(4, device="cuda").sum().item()
        print("child: works", flush=True)
    except Exception as error:
        print("child:", type(error).__name__, str(error).splitlines()[0], flush=True)
    os._exit(0)
os.wait()
print(json.dumps([[each for each in files if "nvidia" in each], refusal]), flush=True)
"""
# Whether a worker that forks afterwards can use CUDA.
_CASES: Final = {
    "torch is imported": True,
    "torch counts by NVML": True,
    "torch counts by CUDA": False,
    "the driver is initialized": False,
}


def forks(machine: Machine) -> Finding:
    machine.real_gpu()
    machine.need_module("torch")
    rows, wrong = [], []
    for case, can_fork in _CASES.items():
        files, refusal, child, said = _run(case)
        rows.append((case, "yes" if can_fork else "no", child, refusal or "-", ", ".join(files) or "-"))
        if ("works" in child) != can_fork:
            wrong.append(f"{case}: a forked child should {'' if can_fork else 'not '}work, but: {child or said}")
        if bool(refusal) == can_fork:
            wrong.append(f"{case}: the template's check reports {refusal or 'no reason not to fork'}")
    return Finding(
        summary=f"{len(rows) - len({each.partition(':')[0] for each in wrong})} of {len(rows)} cases as assumed",
        tables=[Table(("in the parent", "fork expected", "in the child", "the check reports", "device files"), rows)],
        wrong=wrong,
    )


def _run(case: str) -> tuple[list[str], str, str, str]:
    """Return the parent's device files, the check's reason, the child's line, and the last line of all."""
    try:
        completed = subprocess.run(
            [sys.executable, "-c", _PROGRAM, case],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [], "", "", f"not finished after {_TIMEOUT_S:g} s"
    lines = completed.stdout.splitlines()
    child = next((line.removeprefix("child: ") for line in lines if line.startswith("child: ")), "")
    last = lines[-1] if lines else "no output"
    files, refusal = json.loads(last) if last.startswith("[[") else ([], "")
    return files, refusal, child, last
