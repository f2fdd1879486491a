"""What this machine has, read once before the steps, and what a step needs of it."""

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
    """This machine cannot do a step; the text is the reason, in one line."""


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
    pretended: bool = False  # there is no GPU; steps run on the CPU as if there were one
    about: dict[str, Any] = {}

    def gpu(self) -> Gpu:
        """The first, which is the one that is measured. Raises CannotRun."""
        if not self.gpus:
            raise CannotRun(f"no GPU: {self.why_no_gpu}")
        return self.gpus[0]

    def real_gpu(self) -> Gpu:
        """One that is there. Raises CannotRun."""
        if self.pretended:
            raise CannotRun("no GPU: it is pretended only")
        return self.gpu()

    def need_module(self, name: str) -> None:
        """Raises CannotRun. Imports nothing."""
        if importlib.util.find_spec(name) is None:
            raise CannotRun(f"{name} is not installed")

    def need_program(self, name: str) -> str:
        """Its path. Raises CannotRun."""
        if name not in self.programs:
            raise CannotRun(f"there is no {name} on the PATH")
        return self.programs[name]

    @property
    def torch_device(self) -> str:
        """What torch calls the device that is measured."""
        return "cuda" if self.gpus and not self.pretended else "cpu"


def look(*, pretend: bool = False) -> Machine:
    """What is there. `pretend`: a GPU of 8 GiB stands in when there is none."""
    _extend_path()
    gpus, driver, why_no_gpu = _gpus()
    pretended = pretend and not gpus
    if pretended:
        gpus = (Gpu("GPU-pretended", "a GPU that is pretended", 8 << 30, "0.0"),)
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
def awake(nodes: str = _NODES) -> Iterator[None]:
    """Without persistence mode the driver puts a GPU to sleep that nobody has open, and to wake one takes seconds, of
    each step. Nothing of the GPU is changed."""
    with contextlib.ExitStack() as opened:
        for path in glob.glob(nodes):
            with contextlib.suppress(OSError):
                opened.callback(os.close, os.open(path, os.O_RDWR))
        yield


def _gpus() -> tuple[tuple[Gpu, ...], str, str]:
    """The devices and the driver's version; or none, and why."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return (), "", "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), "", f"the NVIDIA driver does not answer ({error})"
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
        return gpus, nvml.nvmlSystemGetDriverVersion(), "" if gpus else "the driver knows none"
    except nvml.NVMLError as error:
        return (), "", f"NVML cannot read the devices ({error})"
    finally:
        nvml.nvmlShutdown()


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _extend_path() -> None:
    """For all that is started from here: drivers of virtual machines put their programs beside the PATH."""
    known = os.environ.get("PATH", os.defpath).split(os.pathsep)
    found = [folder for folder in _DRIVER_FOLDERS if folder not in known and os.path.isdir(folder)]
    os.environ["PATH"] = os.pathsep.join([*known, *found])
