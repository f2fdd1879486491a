"""The steps of the check, in the order in which they run: the most informative ones first."""

from __future__ import annotations

from typing import Final

from gpu_check.checks import (
    containers,
    copies,
    cuda,
    driver_answers,
    engines,
    faults,
    forks,
    inventory,
    limits,
    loaders,
    mps_memory,
    mps_output,
    parking,
    profiles,
    sharing,
    suite,
    torch_function,
)
from gpu_check.steps import Step

# A command may be limited to ten minutes, which is too short for all steps. Steps that no simulation can replace come
# first, and the check prints the steps that remain for another command.
TOTAL_S: Final = 520.0

STEPS: Final = (
    Step("programs", "Output of the driver's programs", 60, inventory.programs),
    Step("cuda", "CUDA and torch without a platform", 130, cuda.cuda),
    Step("forks", "CUDA in processes that fork after imports", 90, forks.forks),
    Step("poisoned-import", "Two starts from a template beside an import that poisons CUDA", 120, forks.poisoned),
    Step("driver-answers", "Raw answers: recovery, fabric, energy and power", 30, driver_answers.driver_answers),
    Step("inventory", "Devices, drivers and packages", 45, inventory.inventory),
    Step("mps-words", "Verbatim output of MPS", 90, mps_output.mps_output),
    Step("mps-memory", "Raw answers: memory of MPS clients by pid, and within a limit", 90, mps_memory.mps_memory),
    Step("torch", "A torch function from cold start to warm calls", 120, torch_function.torch_function),
    Step(
        "profile",
        "A GPU profile of a worker that is called: kernels, copies, ranges, and its cost",
        120,
        profiles.profile,
    ),
    Step("limits", "MPS limits hold", 60, limits.mps_limits),
    Step("container", "A GPU in a container, whole and by MPS", 300, containers.gpu_container),
    Step("tests", "tests/gpu", 240, suite.gpu_tests),
    Step("faults-mps", "Faults beside a neighbor, MPS", 150, faults.by_mps),
    Step("parking", "Park and resume 0.1 and 1 GB", 90, parking.small),
    Step("parking-kept", "Raw answers: memory that a parked torch process keeps", 120, parking.kept),
    Step("sharing-mps", "Functions share the GPU with MPS", 90, sharing.by_mps),
    Step("sharing-time", "Functions share the GPU in time slices", 90, sharing.by_time),
    Step("faults-time", "Faults beside a neighbor, time slices", 90, faults.by_time),
    Step("onnxruntime", "An ONNX Runtime engine, built, served and compared", 90, engines.onnxruntime_engine),
    Step("tensorrt", "A TensorRT engine, built, served and compared", 150, engines.tensorrt_engine),
    Step("engine-fp16", "An engine in fp16, built, served and compared", 180, engines.fp16_engine),
    Step("engine-int8", "An engine in int8, built, served and compared", 240, engines.int8_engine),
    Step("engine-shapes", "An engine whose output shape depends on the data", 90, engines.data_dependent),
    Step("parking-10gb", "Park and resume 10 GB", 90, parking.large),
    Step("copies", "The copies behind parking: 0.1 and 1 GB to pinned memory and back", 45, copies.park_small),
    Step("copies-10gb", "The copies behind parking: 10 GB to pinned memory and back", 60, copies.park_large),
    Step("loaders", "A safetensors file to the GPU: plans and phases of the loader", 110, loaders.loaders),
    Step("overlap", "Copies while the GPU computes", 20, copies.overlap),
    Step("sharing-exclusive", "Functions use the GPU in turns", 120, sharing.exclusively),
)


def commands() -> list[str]:
    """Return the commands that run all steps in order. The limits of a command's steps fit into `TOTAL_S`, so that no
    step is cut short."""
    groups: list[list[Step]] = []
    for step in STEPS:
        if not groups or sum(each.limit_s for each in groups[-1]) + step.limit_s > TOTAL_S:
            groups.append([])
        groups[-1].append(step)
    return [
        f"scripts/gpu-check --out report/{number} --steps {','.join(step.name for step in group)}"
        for number, group in enumerate(groups, start=1)
    ]
