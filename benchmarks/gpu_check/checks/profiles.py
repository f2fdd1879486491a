"""GPU profiles of a worker that is called all the time: what the trace has, and what it costs the calls.

The worker is forked from a template that imported torch, if templates work here. CUPTI, which records kernels, is ready
in no process before its first trace, and stays in it afterwards. So the calls are timed before, during and after a
trace, and a second trace is taken of the same worker.

A trace that is refused, or lacks something, is reported with raw answers from within the worker: torch's version and
what its profiler supports, the loaded libcupti, the driver's permission, capabilities, and the variables that matter.
"""

from __future__ import annotations

import gzip
import threading
from collections import Counter
from typing import Final

import msgspec

from gpu_check.findings import Finding, Plot, Table
from gpu_check.load import Caller, CallStats
from gpu_check.machine import Machine
from gpu_check.platform import Platform, up
from gpufn.client.client import Client
from gpufn_core.domain.profiles import chrome_trace
from gpufn_core.errors import GpufnError

_NAME: Final = "gpu-check-profile"
_SECONDS: Final = 3.0  # of calls without a trace
_TRACE_S: Final = 2.0
_SOURCE: Final = """\
import contextlib
import os
import pathlib

import torch
import torch.profiler

from gpufn import gpu_function


@gpu_function(name={name!r}, gpu={gpu!r}, max_workers=1, idle_timeout=120)
def multiply(facts: bool = False) -> dict[str, float | str]:
    if facts:
        return answers()
    nvtx = torch.cuda.nvtx.range("products") if {device!r} == "cuda" else contextlib.nullcontext()
    a = torch.ones({size}, {size}).to({device!r})
    with nvtx:
        for _ in range(4):
            a = a @ a / {size}
    return {{"mean": float(a.mean())}}


def answers() -> dict[str, str]:
    lines = {{}}
    for file in ("/proc/self/maps", "/proc/self/status", "/proc/driver/nvidia/params", "/proc/driver/nvidia/version"):
        with contextlib.suppress(OSError):
            lines[file] = pathlib.Path(file).read_text().splitlines()
    cupti = {{line.split(maxsplit=5)[5] for line in lines["/proc/self/maps"] if "libcupti" in line}}
    starts = ("Uid", "CapEff", "NVRM", "RmProf")
    words = [line for file in list(lines)[1:] for line in lines[file] if line.startswith(starts)]
    names = ("TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT", "KINETO_USE_DAEMON", "CUDA_INJECTION64_PATH",
             "CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "NVTX_INJECTION64_PATH")
    return {{
        "process": pathlib.Path("/proc/self/cmdline").read_text().replace("\\0", " "),
        "torch": f"{{torch.__version__}}, CUDA {{torch.version.cuda}}",
        "kineto": str(torch.autograd.kineto_available()),
        "supported activities": str(torch.profiler.supported_activities()),
        "libcupti": ", ".join(sorted(cupti)) or "not loaded",
        "kernel and driver": "; ".join(" ".join(line.split()) for line in words),
        "variables": "; ".join(f"{{name}}={{os.environ[name]}}" for name in names if name in os.environ) or "none",
    }}
"""
_SHOWN: Final = (
    "kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_runtime", "cuda_driver", "cpu_op",
    "user_annotation",
)  # fmt: skip


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """What Perfetto and TensorBoard read of an event with a duration."""

    name: str
    pid: int | str
    tid: int | str
    ts: float
    dur: float
    cat: str = ""


class _Kind(msgspec.Struct, frozen=True):
    ph: str


class _File(msgspec.Struct, frozen=True):
    """`schemaVersion` is what TensorBoard's plugin looks for."""

    schema: int = msgspec.field(name="schemaVersion")
    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")


def profile(machine: Machine) -> Finding:
    """Profile on the GPU, or on the CPU without one."""
    machine.need_module("torch")
    is_gpu = machine.torch_device == "cuda"
    with up(machine) as platform:
        platform.deploy(_source(machine))
        platform.invoke(_NAME)
        stats, traces, refused = {"before": _calls(platform)}, [], ""
        try:
            trace, stats["during"] = _traced(platform)
            traces.append(trace)
            stats["after"] = _calls(platform)
            traces.append(_traced(platform)[0])
        except GpufnError as error:
            refused = f"trace {len(traces) + 1}: {error.code}: {error}"
        facts = platform.invoke(_NAME, facts=True)
    counted = [examine(trace, is_gpu=is_gpu) for trace in traces]
    wrong = [f"trace {number}: {text}" for number, (_, lacks) in enumerate(counted, start=1) for text in lacks]
    wrong += [refused] if refused else []
    wrong += [f"calls {when} a trace: {each.failures[0]}" for when, each in stats.items() if each.failures]
    rows = [
        (when, len(each.calls_s), *(_ms(each, share) for share in (0.5, 0.99, 1.0))) for when, each in stats.items()
    ]
    took = ", ".join(f"{p50} ms {when}" for when, _, p50, *_ in rows)
    return Finding(
        summary=f"on {machine.torch_device}: a call takes {took} a trace",
        figures={
            "p50_ms": {when: each.quantile_ms(0.5) for when, each in stats.items()},
            "bytes": [len(trace) for trace in traces],
            "events": [dict(counts) for counts, _ in counted],
        },
        tables=[
            Table(("calls", "number", "p50, ms", "p99, ms", "max, ms"), rows),
            Table(
                ("events", *(f"trace {number}" for number in range(1, len(counted) + 1))),
                [(kind, *(counts[kind] for counts, _ in counted)) for kind in _SHOWN],
            ),
        ],
        plots=[
            Plot("Calls around a GPU profile, p50", "ms", list(stats), {"p50": [_p50(each) for each in stats.values()]})
        ],
        said={f"in the worker: {name}": value for name, value in facts.items()},
        wrong=wrong,
    )


def examine(trace: bytes, *, is_gpu: bool) -> tuple[Counter[str], list[str]]:
    """Return the number of events by category, and what the trace lacks."""
    try:
        events = _events(trace)
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        return Counter(), [f"no valid trace: {error}"]
    counts = Counter(event.cat for event in events)
    needed = ("kernel", "gpu_memcpy", "cuda_runtime") if is_gpu else ("cpu_op",)
    wrong = [f"it has no event {kind}" for kind in needed if not counts[kind]]
    if any(event.dur < 0 for event in events) or not sum(event.dur for event in events if event.cat == needed[0]):
        wrong.append(f"the durations of {needed[0]} are negative, or all zero")
    if not any(event.cat == "user_annotation" and event.name.startswith("call ") for event in events):
        wrong.append("it has no range of a call")
    summary, stacks = chrome_trace.summary(trace, 1), chrome_trace.flame_graph(trace) or []
    if summary is None or summary.kind != needed[0]:
        wrong.append(f"the table of gpufn has no {needed[0]}")
    if not any(len(stack.frames) > 1 and stack.frames[0] == ("GPU" if is_gpu else "CPU") for stack in stacks):
        wrong.append("the flame graph has no stack of the device")
    return counts, wrong


def _events(trace: bytes) -> list[Event]:
    file = msgspec.json.decode(gzip.decompress(trace), type=_File)
    complete = [raw for raw in file.events if msgspec.json.decode(raw, type=_Kind).ph == "X"]
    return [msgspec.json.decode(raw, type=Event) for raw in complete]


def _source(machine: Machine) -> str:
    device = machine.torch_device
    size = 2048 if device == "cuda" else 256  # a trace of short calls would be too large
    return _SOURCE.format(name=_NAME, gpu="any" if machine.gpus else None, device=device, size=size)


def _calls(platform: Platform) -> CallStats:
    return Caller(platform.url, _NAME, {}).for_seconds(_SECONDS)


def _traced(platform: Platform) -> tuple[bytes, CallStats]:
    """Return a trace, and the calls from its request until its end. Raises GpufnError."""
    ended, stats = threading.Event(), []
    thread = threading.Thread(target=lambda: stats.append(Caller(platform.url, _NAME, {}).for_seconds(300, ended)))
    thread.start()
    try:
        with Client(platform.url) as client:
            _, trace = client.gpu_profile(_NAME, seconds=_TRACE_S)
    finally:
        ended.set()
        thread.join()
    return trace, stats[0]


def _p50(stats: CallStats) -> float | None:
    return stats.quantile_ms(0.5)


def _ms(stats: CallStats, share: float) -> str:
    value = stats.quantile_ms(share)
    return "-" if value is None else f"{value:.1f}"
