"""Claims of the README and the guides about GPUs, each with the steps that prove it. Pure.

`scripts/reference` writes docs/gpu-claims.md from this table and from the reports in benchmarks/results. So the state
of a claim is never written by hand. A test compares each quote with its page, and each step with the catalogue.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from gpu_check.findings import Report, State


class Claim(msgspec.Struct, frozen=True):
    """`quote` is verbatim from `page`. All `steps` must pass. `records`: the steps record raw answers, which a person
    compares with the claim. `lacks` is what no step provides, so the steps prove the rest only."""

    page: str
    quote: str
    steps: tuple[str, ...] = ()
    records: bool = False
    lacks: str = ""


class ClaimState(enum.StrEnum):
    PROVEN = "proven"
    PARTLY = "proven in part"
    RECORDED = "recorded"
    FAILED = "failed"
    NOT_RUN = "not run"


class Status(msgspec.Struct, frozen=True):
    state: ClaimState
    detail: str = ""  # date and device, and of a failure the step


_README, _GPU, _CONTAINERS, _MODELS, _CONCEPTS, _WEIGHTS = (
    "README.md", "docs/gpu.md", "docs/containers.md", "docs/models.md", "docs/concepts.md", "docs/weights.md",
)  # fmt: skip
_ALERTS, _BATCHING, _GANGS, _METRICS, _PACKAGES, _PRIORITIES, _PROFILES, _TRUST = (
    "docs/alerts.md", "docs/batching.md", "docs/gangs.md", "docs/metrics.md", "docs/packages.md", "docs/priorities.md",
    "docs/profiles.md", "docs/trust.md",
)  # fmt: skip
_SEVERAL: Final = "two GPUs in one machine"
_SEVERAL_NODES: Final = "two machines with GPUs"
_MIG: Final = "a GPU in MIG mode"
_BROKEN: Final = "a GPU or driver that fails in this way"

CLAIMS: Final = (
    Claim(_README, "Functions use whole GPUs, parts (CUDA MPS, MIG), turns, or",
          ("sharing-exclusive", "sharing-mps", "sharing-time"), lacks="a GPU in MIG mode, and several nodes"),
    Claim(_README, "gpufn compiles an ONNX model for the devices of your nodes", ("onnxruntime", "tensorrt")),
    Claim(_README, "A worker forks in milliseconds from a template process", ("torch", "forks"), records=True),
    Claim(_CONCEPTS, "its GPU memory moves to the host", ("parking",)),
    Claim(_WEIGHTS, "`load_safetensors` reads with several threads into pinned buffers", ("loaders",)),
    # Requesting a GPU
    Claim(_GPU, "is a limit for **each process** of the worker", ("limits", "tests")),
    Claim(_GPU, "a ceiling in percent of the multiprocessors.", ("limits", "tests")),
    Claim(_GPU, "A worker has one instance, and instances are not shared by MPS.", lacks=_MIG),
    Claim(_GPU, "an illegal access of one client ends the work of all", ("faults-mps",)),
    # Where a worker goes
    Claim(_GPU, "the set whose worst link is best", lacks=_SEVERAL),
    Claim(_GPU, "A GPU has at most 48 MPS clients, or 8 workers in turns.", ("sharing-time",),
          lacks="48 clients at a time"),
    Claim(_GPU, "the agent reports the memory of processes that are neither its own nor a worker's",
          lacks="a process of others that holds GPU memory"),
    # Turns
    Claim(_GPU, "of two functions that wait all the time, neither gets more than 0.4 s and one turn each ahead",
          ("sharing-time",), records=True),
    # Parking
    Claim(_GPU, "all torch tensors on the GPU, wherever the function keeps them", ("parking", "parking-10gb", "tests")),
    Claim(_GPU, "This is a CUDA context of a few hundred MB, which stays leased.", ("parking-kept",), records=True),
    Claim(_GPU, "the plan of a TensorRT engine, or the file of an ONNX Runtime engine, stays in memory",
          lacks="a step that parks a session"),
    # What a call is charged
    Claim(_GPU, "as the driver reports it per process; for MPS clients the driver reports none", ("mps-words",),
          records=True),
    Claim(_GPU, "Energy is unknown, not zero, where the driver does not report it", ("driver-answers", "tests"),
          records=True, lacks="a GPU before Volta, and a MIG instance"),
    Claim(_GPU, "The energy between two samples is divided among the calls", ("driver-answers",), records=True,
          lacks="a step that compares the energy of calls with the counter"),
    # How MPS runs
    Claim(_GPU, "For each shared GPU the agent runs a control daemon", ("mps-words", "sharing-mps")),
    Claim(_GPU, "Workers in containers have a daemon of their own", ("container",)),
    Claim(_GPU, "it is a client of the daemon (drivers from CUDA 12.2 on report it)", ("mps-words", "limits")),
    Claim(_GPU, "no more memory is free to it than its limit", ("mps-memory", "limits")),
    Claim(_GPU, "an allocation above the limit fails", ("mps-words", "limits")),
    Claim(_GPU, "The driver reports the memory of the whole GPU as the total", ("mps-memory", "limits"), records=True),
    Claim(_GPU, "`set_per_process_memory_fraction`, as soon as torch initializes CUDA", ("limits",)),
    Claim(_GPU, "`XLA_PYTHON_CLIENT_MEM_FRACTION`, unless `env` has it", lacks="JAX"),
    Claim(_GPU, "`TF_FORCE_GPU_ALLOW_GROWTH`, unless `env` has it", lacks="TensorFlow"),
    Claim(_GPU, "`GPUFN_GPU_MEMORY_FRACTION`, from 0 to 1", lacks="vLLM"),
    Claim(_GPU, "sets a shared GPU to EXCLUSIVE_PROCESS, so that no process bypasses the daemon",
          lacks="consent to change the GPU: the check changes no setting"),
    Claim(_GPU, "first `terminate_client`, then SIGKILL", ("mps-words",), records=True),
    Claim(_GPU, "The daemon is restarted if the server is not ACTIVE within 10 s after that",
          ("mps-words", "faults-mps")),
    Claim(_GPU, "it returns to the queue and runs elsewhere, whatever its `retries`", ("faults-mps",), lacks=_SEVERAL),
    # Imports and CUDA
    Claim(_GPU, "With it, `torch.cuda.is_available()` does not initialize CUDA", ("forks",)),
    Claim(_GPU, "If a module fails, the next template omits it, and workers import it themselves.",
          ("poisoned-import",)),
    Claim(_GPU, "CUDA looks for an MPS daemon in `/tmp/nvidia-mps` by default", lacks="an MPS daemon of the host"),
    # What a CUDA error means
    Claim(_GPU, "raised, as by the function", ("faults-time",)),
    Claim(_GPU, "raised; with MPS it returns to the queue", ("faults-time", "faults-mps", "tests")),
    Claim(_GPU, "is replaced; the agent proves CUDA on its GPUs", lacks=_BROKEN),
    Claim(_GPU, "a child process of the agent initializes the driver and creates a context on the GPU", ("torch",)),
    # What is watched
    Claim(_GPU, "A value that a GPU does not report is absent, never zero.", ("inventory", "tests"), records=True),
    Claim(_GPU, "Drivers from release 565 on report the recovery that a GPU needs.", ("driver-answers",), records=True),
    Claim(_GPU, "802, for example, means that the Fabric Manager does not run", ("driver-answers",), records=True,
          lacks="an HGX machine without its Fabric Manager"),
    Claim(_GPU, "A permanent Xid is kept in `failed-gpus.json` of GPUFN_HOME", lacks=_BROKEN),
    Claim(_GPU, "What happens to a GPU happens to its MIG instances.", lacks=_MIG),
    # Power limits
    Claim(_GPU, "A limit that the GPU does not allow becomes the nearest one that it allows.", ("driver-answers",),
          records=True, lacks="consent to change the GPU: the check changes no setting"),
    Claim(_GPU, "It restores the limit before it when it stops",
          lacks="consent to change the GPU: the check changes no setting"),
    # Containers
    Claim(_CONTAINERS, "the GPUs of its lease, by NVIDIA's hook or by CDI", ("container",)),
    Claim(_CONTAINERS, "two more writable mounts: the pipes of its daemon, and as `/dev/shm` the memory",
          ("container",)),
    Claim(_CONTAINERS, "the agent labels the folders that containers mount `container_file_t`",
          lacks="a host that enforces SELinux"),
    # Isolation, priorities, gangs and packages
    Claim(_TRUST, "A worker with a GPU has the device files of all GPUs.",
          lacks="a report that says how workers are confined; `inventory` records it now"),
    Claim(_PRIORITIES, "their kernels wait for those of the others", lacks="a step that compares classes under MPS"),
    Claim(_GANGS, "takes eight GPUs on each of two nodes", lacks=_SEVERAL_NODES),
    Claim(_GANGS, "NCCL chooses its interfaces itself", lacks=_SEVERAL_NODES),
    Claim(_PACKAGES, "if it contains CUDA libraries, one major version of CUDA", lacks="a step with packages"),
    # Metrics and alerts
    Claim(_METRICS, "GPUs, under the names of DCGM", lacks="dcgm-exporter"),
    Claim(_ALERTS, "A GPU is at the temperature where its hardware slows it down", lacks="a GPU that is hot"),
    Claim(_ALERTS, "A failed GPU needs a reset or a reboot", lacks=_BROKEN),
    # Profiles
    Claim(_PROFILES, "The table has the kernels, or without a GPU the operators, that took longest.", ("profile",)),
    Claim(_PROFILES, "kernels and copies below the calls on the GPU", ("profile",)),
    Claim(_PROFILES, "its calls are NVTX ranges too", lacks="Nsight Systems, which shows NVTX ranges"),
    Claim(_PROFILES, "a kernel of the profiler pays for that before the time begins", ("profile",), records=True),
    Claim(_PROFILES, "CUPTI stays in the worker after the first trace", ("profile",), records=True),
    Claim(_PROFILES, "no root and no `SYS_ADMIN`", ("profile",), records=True, lacks="a profile in a container"),
    Claim(_PROFILES, "a worker that was forked from a template can be traced", ("profile",)),
    Claim(_PROFILES, "Traces work on", lacks=_MIG),
    Claim(_PROFILES, "it captures a CUDA graph", lacks="a step that captures CUDA graphs"),
    # Models
    Claim(_BATCHING, "one batch computes while the next one gathers", lacks="a step that compares `concurrency`"),
    Claim(_MODELS, "A GPU draws other numbers than the reference.", lacks="a model that draws random numbers"),
    Claim(_MODELS, "All values as outputs prevent fusions.", lacks="an engine that loses its accuracy"),
    Claim(_MODELS, "fp32. Also tf32, bf16, and int8, which needs samples", ("engine-fp16", "engine-int8"),
          lacks="tf32 and bf16"),
    Claim(_MODELS, "On a GPU, an engine of ONNX Runtime serves such a model.", ("onnxruntime",),
          lacks="a model with operators of ONNX Runtime"),
    Claim(_MODELS, "An output of NonZero or NonMaxSuppression is as large as each run makes it.", ("engine-shapes",)),
    Claim(_MODELS, "the build fails if an engine of TensorRT needs more than `vram`", lacks="a step with a small vram"),
    Claim(_MODELS, "It compiles and measures beside the workers that run there.", lacks="a build beside a worker"),
    Claim(_MODELS, "each with its own context and stream", lacks="a step with concurrent runs"),
)  # fmt: skip

_HEAD: Final = """# GPU claims

<!-- Written by scripts/reference from benchmarks/gpu_check/claims.py and the reports in benchmarks/results. -->
The claims of the README and the guides that only a GPU can prove, in their words, and what has proven them.
`scripts/gpu-check --steps NAME` runs a step; `benchmarks/README.md` has the commands for all steps in order.

| state | meaning |
|---|---|
| proven | all its steps passed on this date and device |
| proven in part | the same, and no step covers what the claim lacks |
| recorded | its steps recorded raw answers on this date and device; the claim is to be compared with them |
| failed | one of its steps failed |
| not run | no report has all its steps |

{counts}
"""


def status_of(claim: Claim, reports: Iterable[Report]) -> Status:
    """Return the state by the newest result of each step on a real GPU. `reports` are the oldest first."""
    newest: dict[str, tuple[Report, State]] = {}
    for report in reports:
        if not report.pretended:
            newest |= {
                result.step: (report, result.state)
                for result in report.results
                if result.state is not State.SKIPPED and not result.is_left
            }
    known = [(step, *newest[step]) for step in claim.steps if step in newest]
    for step, report, state in known:
        if state is not State.PASSED:
            return Status(ClaimState.FAILED, f"{_where(report)}, {step}")
    if not claim.steps or len(known) < len(claim.steps):
        return Status(ClaimState.NOT_RUN)
    oldest = min((report for _, report, _ in known), key=lambda report: report.date)
    if claim.records:
        return Status(ClaimState.RECORDED, _where(oldest))
    return Status(ClaimState.PARTLY if claim.lacks else ClaimState.PROVEN, _where(oldest))


def _where(report: Report) -> str:
    return f"{report.date}, {report.device}"


def page(reports: Iterable[Report], claims: Iterable[Claim] = CLAIMS) -> str:
    """Return the page as Markdown."""
    stored = sorted(reports, key=lambda report: report.date)
    statuses = {claim: status_of(claim, stored) for claim in claims}
    counts = {state: sum(each.state is state for each in statuses.values()) for state in ClaimState}
    text = ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)
    lines = [_HEAD.format(counts=f"Of {len(statuses)} claims: {text}.")]
    by_page: dict[str, list[Claim]] = {}
    for claim in statuses:
        by_page.setdefault(claim.page, []).append(claim)
    for name, own in by_page.items():
        lines += [f"\n## {_title(name)}\n\n| claim | step | state |\n|---|---|---|\n"]
        lines += [_row(claim, statuses) for claim in own]
    return "".join(lines)


def _title(name: str) -> str:
    folder, _, file = name.rpartition("/")
    title = {"gpu.md": "GPUs"}.get(file, file.removesuffix(".md").capitalize())
    return f"[{title}]({file})" if folder else name


def _row(claim: Claim, statuses: Mapping[Claim, Status]) -> str:
    status = statuses[claim]
    steps = ", ".join(f"`{step}`" for step in claim.steps) or "none"
    lacks = f"; lacks {claim.lacks}" if claim.lacks else ""
    state = f"{status.state.value}: {status.detail}" if status.detail else status.state.value
    return f"| {claim.quote} | {steps}{lacks} | {state} |\n"
