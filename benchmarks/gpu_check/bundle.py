"""Collect wheels for a machine that reaches no package registry. Uses only the standard library and pip.

platform/  what gpufn needs except numpy, onnx and onnxruntime; always needed, in one file with the repository
models/    numpy, onnx, onnxruntime and their dependencies, for a machine without them
cuda/      onnxruntime-gpu

No file is larger than 30 MiB, so that each can be transferred by itself.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpu_check.environment import EVERYWHERE, required

_EXTRAS: Final = (*EVERYWHERE, "docker")
_BESIDES: Final = ("nvidia-ml-py", "pytest>=9", "hypothesis>=6.100")  # tests/conftest.py imports hypothesis
_MODELS: Final = ("numpy>=2", "onnx>=1.18", "onnxruntime>=1.20")
_CUDA: Final = ("onnxruntime-gpu>=1.21",)
_PART_BYTES: Final = 30 << 20
_REPOSITORY_BYTES: Final = 3 << 20  # compressed
PYTHONS: Final = ("3.11", "3.12")
# pip matches these names exactly, so each glibc version that wheels exist for is listed.
_PLATFORMS: Final = (
    "manylinux_2_34",
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_17",
    "manylinux2014",
    "manylinux1",
)


def collect(folder: Path, pythons: Sequence[str] = PYTHONS) -> None:
    """Collect all wheels and print the sizes. Raises CalledProcessError if pip fails."""
    platform = _download(folder / "platform", [*required(_EXTRAS), *_BESIDES], pythons)
    models = _download(folder / "models", _MODELS, pythons)
    for name in models & platform:
        (folder / "models" / name).unlink()
    _download(folder / "cuda", _CUDA, pythons, with_needs=False)
    cut_large(folder)
    for part in ("platform", "models", "cuda"):
        sizes = [file.stat().st_size for file in (folder / part).iterdir()]
        print(f"{folder / part}: {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB")
    if warning := size_warning(folder / "platform", len(pythons)):
        print(warning)


def size_warning(platform: Path, pythons: int) -> str:
    """Return what is wrong if the platform's wheels for one Python and the repository exceed one part."""
    size = sum(file.stat().st_size for file in platform.iterdir()) + _REPOSITORY_BYTES
    if pythons > 1 or size <= _PART_BYTES:
        return ""
    return (
        f"{platform} and the repository are {size / 2**20:.1f} MiB together, more than a part of "
        f"{_PART_BYTES >> 20} MiB: does every step need its largest wheels?"
    )


def cut_large(folder: Path, part_bytes: int = _PART_BYTES) -> None:
    """Split all wheels that are larger than a part."""
    for wheel in list(folder.rglob("*.whl")):
        if wheel.stat().st_size > part_bytes:
            cut(wheel, part_bytes)


def _download(
    folder: Path, requirements: Sequence[str], pythons: Sequence[str], *, with_needs: bool = True
) -> set[str]:
    """Download wheels and return the names of all wheels in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [word for platform in _PLATFORMS for word in ("--platform", f"{platform}_x86_64")]
    for python in pythons:
        # A folder per version, so that pip does not accept a wheel of one version for the other.
        with tempfile.TemporaryDirectory(dir=folder.parent) as version_folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
            command += [] if with_needs else ["--no-deps"]
            subprocess.run([*command, "--dest", version_folder, *requirements], check=True)
            for wheel in Path(version_folder).glob("*.whl"):
                wheel.replace(folder / wheel.name)
    return {wheel.name for wheel in folder.glob("*.whl")}


def cut(wheel: Path, part_bytes: int = _PART_BYTES) -> None:
    """Split `NAME.whl` into `NAME.whl.00`, `NAME.whl.01`… of at most `part_bytes` each."""
    with wheel.open("rb") as whole:
        for number in range(100):
            if not (content := whole.read(part_bytes)):
                break
            wheel.with_name(f"{wheel.name}.{number:02}").write_bytes(content)
    wheel.unlink()
