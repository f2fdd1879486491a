"""Tests on a GPU. Where there is none they skip and say what is missing, in CI as well: no machine of its has one.

torch is imported by workers only, so that what it warns of, and the context that it opens, is not ours.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Platform

APPS = Path(__file__).parent / "apps"


@pytest.fixture(scope="session")
def nvml() -> Iterator[Any]:
    """pynvml, opened, on a machine with a GPU."""
    if find_spec("pynvml") is None:
        pytest.skip("nvidia-ml-py is not installed")
    library: Any = importlib.import_module("pynvml")
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        pytest.skip(f"no GPU: the NVIDIA driver does not answer ({error})")
    try:
        if not library.nvmlDeviceGetCount():
            pytest.skip("no GPU: the driver knows none")
        yield library
    finally:
        library.nvmlShutdown()


@pytest.fixture(scope="session")
def device_kind(nvml: Any) -> str:
    """The first GPU's model name."""
    name = nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0))
    return name if isinstance(name, str) else name.decode()


@pytest.fixture(scope="session")
def torch_app(nvml: Any, platform: Platform) -> Platform:
    """A platform with apps/look.py."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    platform.gpufn("deploy", APPS / "look.py")
    return platform


@pytest.fixture(scope="session")
def mps_app(torch_app: Platform) -> Platform:
    """A platform with apps/part.py, whose functions share a GPU with MPS."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("there is no nvidia-cuda-mps-control on the PATH")
    torch_app.gpufn("deploy", APPS / "part.py")
    return torch_app
