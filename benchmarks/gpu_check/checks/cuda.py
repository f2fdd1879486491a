"""CUDA on its own, without a platform: a failure here is the machine's. The imports also warm the page cache, so that
first calls in later steps do not wait for a disk."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

from gpu_check.findings import Finding, Table
from gpu_check.machine import Machine
from gpu_check.program_output import output_of

_TIMEOUT_S: Final = 90.0
# The program prints a line per finished stage, so that a hanging stage can be identified.
_PROGRAM: Final = """
import json, time
started = time.perf_counter()
def finished(stage, detail):
    global started
    print(json.dumps([stage, time.perf_counter() - started, str(detail)]), flush=True)
    started = time.perf_counter()
from gpufn_runtime.worker.gpu.cuda_driver import Driver
driver = Driver()
finished("load libcuda", "")
driver.open()
finished("create a context", f"{driver.multiprocessors()} multiprocessors, {driver.free_bytes() >> 20} MiB free")
import torch
finished("import torch", torch.__version__)
a = torch.ones(512, 512, device="cuda")
finished("allocate a tensor", torch.cuda.get_device_name(0))
finished("multiply correctly", float((a @ a).mean()) == 512.0)
"""
# The limit of the builder's processes, and of workers without a cgroup.
_LIMIT: Final = "RLIMIT_DATA of 16 GiB"
_LIMITED: Final = "import resource\nresource.setrlimit(resource.RLIMIT_DATA, (16 << 30, 16 << 30))\n"


def cuda(machine: Machine) -> Finding:
    machine.real_gpu()
    machine.need_module("torch")
    try:
        completed = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        printed, outcome = completed.stdout, f"exit code {completed.returncode}"
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        outcome = f"not finished after {_TIMEOUT_S:g} s"
    stages = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
    rest = "\n".join(line for line in printed.splitlines() if not line.startswith("["))
    is_done = bool(stages) and stages[-1][0] == "multiply correctly" and stages[-1][2] == "True"
    limited = output_of([sys.executable, "-c", _LIMITED + _PROGRAM.partition("import torch")[0]], timeout_s=30)
    wrong = [] if is_done else [f"{outcome}; {(rest.splitlines() or ['no output'])[-1]}"]
    if is_done and "[exit code 0" not in limited:
        wrong.append(f"no CUDA context can be created within {_LIMIT}")
    return Finding(
        summary=", ".join(f"{stage}: {seconds:.1f} s" for stage, seconds, _ in stages),
        figures={stage: seconds for stage, seconds, _ in stages},
        tables=[Table(("stage", "s", "detail"), [(stage, f"{seconds:.2f}", text) for stage, seconds, text in stages])],
        said={"other output": rest, f"within {_LIMIT}": limited},
        wrong=wrong,
    )
