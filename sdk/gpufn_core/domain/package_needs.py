"""The needs of locked packages on a node: its kind of machine, a Python, and a driver for their CUDA. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from gpufn_core.spec.function_spec import FunctionSpec


class PackageNeeds(NamedTuple):
    """`cuda` is the major version of the CUDA libraries among the packages; 0: the function has no GPU, or the packages
    have no such libraries."""

    python: str
    machine: str
    cuda: int

    def trouble(self, *, machine: str, pythons: Collection[str], cuda: str) -> str:
        """Return why a node cannot run the packages; "" if it can, or has not reported enough to know.

        `cuda` is the newest version of CUDA that the node's driver supports, such as "12.8".

        >>> needs = PackageNeeds("3.12", "x86_64", 13)
        >>> needs.trouble(machine="aarch64", pythons=["3.12"], cuda="13.0")
        'the packages are locked for x86_64, and it is aarch64'
        >>> needs.trouble(machine="x86_64", pythons=["3.11", "3.13"], cuda="13.0")
        'the packages are locked for Python 3.12, and it has 3.11 and 3.13'
        >>> needs.trouble(machine="x86_64", pythons=["3.12"], cuda="12.8")
        'the packages contain CUDA 13, and its driver supports CUDA 12.8'
        >>> needs.trouble(machine="x86_64", pythons=["3.12"], cuda="")
        ''
        """
        if machine and machine != self.machine:
            return f"the packages are locked for {self.machine}, and it is {machine}"
        if pythons and self.python not in pythons:
            return f"the packages are locked for Python {self.python}, and it has {' and '.join(pythons)}"
        if cuda and int(cuda.partition(".")[0]) < self.cuda:
            return f"the packages contain CUDA {self.cuda}, and its driver supports CUDA {cuda}"
        return ""


def package_needs(spec: FunctionSpec) -> PackageNeeds | None:
    """Return the needs of a function with locked packages; None without such packages."""
    image = spec.image
    if image is None or not image.locked:
        return None
    return PackageNeeds(image.python, image.machine, image.cuda if spec.resources.gpu else 0)
