"""CUDA by itself, before any platform: what fails here is the machine's. What is imported here is in memory for the
steps that follow, where a first call must not wait for a disk."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

from gpu_check.findings import Finding, Table
from gpu_check.machine import Machine
from gpu_check.words import heard

_TIMEOUT_S: Final = 90.0
# A line for each stage that is over, so that one that hangs is known.
_PROGRAM: Final = """
import json, time
began = time.perf_counter()
def over(stage, told):
    global began
    print(json.dumps([stage, time.perf_counter() - began, str(told)]), flush=True)
    began = time.perf_counter()
from gpufn_runtime.worker.gpu.cuda_driver import Driver
driver = Driver()
over("libcuda is loaded", "")
driver.open()
over("a context is made", f"{driver.multiprocessors()} multiprocessors, {driver.free_bytes() >> 20} MiB free")
import torch
over("torch is imported", torch.__version__)
a = torch.ones(512, 512, device="cuda")
over("torch has a tensor", torch.cuda.get_device_name(0))
over("a product is right", float((a @ a).mean()) == 512.0)
"""
# What holds the builder's processes, and workers where there is no cgroup.
_LIMIT: Final = "RLIMIT_DATA of 16 GiB"
_LIMITED: Final = "import resource\nresource.setrlimit(resource.RLIMIT_DATA, (16 << 30, 16 << 30))\n"


def cuda(machine: Machine) -> Finding:
    machine.real_gpu()
    machine.need_module("torch")
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        printed, how = ended.stdout, f"exit code {ended.returncode}"
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        how = f"no end after {_TIMEOUT_S:g} s"
    stages = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
    rest = "\n".join(line for line in printed.splitlines() if not line.startswith("["))
    is_done = bool(stages) and stages[-1][0] == "a product is right" and stages[-1][2] == "True"
    limited = heard([sys.executable, "-c", _LIMITED + _PROGRAM.partition("import torch")[0]], timeout_s=30)
    wrong = [] if is_done else [f"{how}; {(rest.splitlines() or ['it said nothing'])[-1]}"]
    if is_done and "[exit code 0" not in limited:
        wrong.append(f"no context can be had within {_LIMIT}")
    return Finding(
        summary=", ".join(f"{stage} after {seconds:.1f} s" for stage, seconds, _ in stages),
        figures={stage: seconds for stage, seconds, _ in stages},
        tables=[Table(("stage", "s", "told"), [(stage, f"{seconds:.2f}", told) for stage, seconds, told in stages])],
        said={"what else was printed": rest, f"within {_LIMIT}": limited},
        wrong=wrong,
    )
