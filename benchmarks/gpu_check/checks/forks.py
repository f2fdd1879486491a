"""The assumptions about CUDA and forks behind the template processes of GPU functions."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpu_check.findings import Finding, Table
from gpu_check.machine import CannotRun, Machine
from gpu_check.platform import up

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


_NAME: Final = "gpu-check-poisoned"
_POISON: Final = "gpu_check_poison"
_STARTS: Final = 2
_INITIALIZES_CUDA: Final = "import torch\n\ntorch.cuda.init()\n"
_STARTS_A_THREAD: Final = """\
import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
_APP: Final = """\
import uuid

import {poison}
{imports}
from gpufn import gpu_function

PROCESS = uuid.uuid4().hex


@gpu_function(
    name={name!r}, gpu="any", max_workers=1, idle_timeout=0.5, scaledown_window=0.5, park_timeout=0
)
def compute() -> dict[str, float | str]:
    return {{"process": PROCESS, "sum": {compute}}}
"""


def poisoned(machine: Machine) -> Finding:
    """Import a module that initializes CUDA, and start two workers. The template omits the module, so each worker forks
    from it and can use CUDA. With a pretended GPU the module starts a thread, which forbids forks as well. A template
    imports installed modules only, so the module is installed for the time of the step."""
    machine.gpu()
    if not machine.pretended:
        machine.need_module("torch")
    source = _APP.format(
        name=_NAME,
        poison=_POISON,
        imports="" if machine.pretended else "import torch",
        compute="4" if machine.pretended else 'float(torch.ones(4, device="cuda").sum())',
    )
    starts = []
    with _installed(_STARTS_A_THREAD if machine.pretended else _INITIALIZES_CUDA), up(machine) as platform:
        platform.deploy(source)
        for _ in range(_STARTS):
            platform.wait_for_zero(_NAME)  # the deploy checks a worker, and a template follows
            starts.append(platform.timed(_NAME))
        why = platform.why(_NAME)
    processes = {result["process"] for _, result in starts}
    wrong = [f"a worker computed {result['sum']} instead of 4" for _, result in starts if result["sum"] != 4]
    if len(processes) != _STARTS:
        wrong.append(f"{_STARTS} starts had {len(processes)} processes")
    if _POISON not in why:
        wrong.append(f"`gpufn why` does not name {_POISON}: {why}")
    milliseconds = [seconds * 1e3 for seconds, _ in starts]
    return Finding(
        summary=f"{_STARTS} starts in {' and '.join(f'{each:.0f} ms' for each in milliseconds)}; {why}",
        figures={"starts_ms": milliseconds},
        said={"gpufn why": why},
        wrong=wrong,
    )


@contextlib.contextmanager
def _installed(source: str) -> Iterator[None]:
    """Install a module named _POISON. Raises CannotRun if the folder of installed modules cannot be written."""
    file = Path(sysconfig.get_path("purelib")) / f"{_POISON}.py"
    try:
        file.write_text(source)
    except OSError as error:
        raise CannotRun(f"{file} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
