"""The machine's devices and packages, read once before the steps, and what a step requires of them."""

from __future__ import annotations

import contextlib
import glob
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

import msgspec

import measure

_PACKAGES = ("torch", "onnx", "onnxruntime", "onnxruntime-gpu", "tensorrt", "nvidia-ml-py", "docker", "pytest")
_PROGRAMS = ("nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvcc", "docker")
_DRIVER_FOLDERS = ("/usr/local/nvidia/bin",)
_NODES = "/dev/nvidia[0-9]*"


class CannotRun(Exception):
    """This machine cannot run a step; the text is the reason, in one line."""


class Gpu(msgspec.Struct, frozen=True):
    uuid: str
    name: str
    memory_bytes: int
    compute_capability: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    gpus: tuple[Gpu, ...] = ()
    why_no_gpu: str = ""
    driver: str = ""
    packages: dict[str, str] = {}
    programs: dict[str, str] = {}  # name → path
    pretended: bool = False  # no GPU; the steps run on the CPU as if there were one
    about: dict[str, Any] = {}

    def gpu(self) -> Gpu:
        """Return the first GPU, which is the measured one. Raises CannotRun."""
        if not self.gpus:
            raise CannotRun(f"no GPU: {self.why_no_gpu}")
        return self.gpus[0]

    def real_gpu(self) -> Gpu:
        """Return the measured GPU if it is not pretended. Raises CannotRun."""
        if self.pretended:
            raise CannotRun("no GPU: it is only pretended")
        return self.gpu()

    def need_module(self, name: str) -> None:
        """Raises CannotRun if the module is not installed. Imports nothing."""
        if importlib.util.find_spec(name) is None:
            raise CannotRun(f"{name} is not installed")

    def need_program(self, name: str) -> str:
        """Return the path of a program. Raises CannotRun."""
        if name not in self.programs:
            raise CannotRun(f"{name} is not on the PATH")
        return self.programs[name]

    @property
    def torch_device(self) -> str:
        """torch's name of the measured device."""
        return "cuda" if self.gpus and not self.pretended else "cpu"


def inspect(*, pretend: bool = False) -> Machine:
    """Inspect the machine. With `pretend`, a GPU of 8 GiB is simulated if there is none."""
    _extend_path()
    gpus, driver, why_no_gpu = _gpus()
    pretended = pretend and not gpus
    if pretended:
        gpus = (Gpu("GPU-pretended", "a pretended GPU", 8 << 30, "0.0"),)
    about = measure.machine()
    return Machine(
        gpus=gpus,
        why_no_gpu=why_no_gpu,
        driver=driver,
        packages=_versions(),
        programs={name: path for name in _PROGRAMS if (path := shutil.which(name))},
        pretended=pretended,
        about=about,
    )


@contextlib.contextmanager
def keep_awake(nodes: str = _NODES) -> Iterator[None]:
    """Keep the GPU devices open. Without persistence mode the driver suspends an unused GPU, and waking it takes
    seconds in each step. No GPU setting is changed."""
    with contextlib.ExitStack() as stack:
        for path in glob.glob(nodes):
            with contextlib.suppress(OSError):
                stack.callback(os.close, os.open(path, os.O_RDWR))
        yield


def _gpus() -> tuple[tuple[Gpu, ...], str, str]:
    """Return the devices and the driver's version; or no devices and the reason."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return (), "", "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), "", f"the NVIDIA driver does not respond ({error})"
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(
            Gpu(
                nvml.nvmlDeviceGetUUID(handle),
                nvml.nvmlDeviceGetName(handle),
                int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
            )
            for handle in handles
        )
        return gpus, nvml.nvmlSystemGetDriverVersion(), "" if gpus else "the driver reports none"
    except nvml.NVMLError as error:
        return (), "", f"NVML cannot read the devices ({error})"
    finally:
        nvml.nvmlShutdown()


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _extend_path() -> None:
    """Extend the PATH of all child processes: drivers of virtual machines put their programs outside of it."""
    known = os.environ.get("PATH", os.defpath).split(os.pathsep)
    extra = [folder for folder in _DRIVER_FOLDERS if folder not in known and os.path.isdir(folder)]
    os.environ["PATH"] = os.pathsep.join([*known, *extra])
