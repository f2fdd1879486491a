"""An environment as a launcher sees it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Environment:
    """A Python environment in the folder `path`. `interpreter` has the folders that its Python also reads. `packages`
    is the folder with gpufn's packages, which the environment does not contain."""

    path: str
    interpreter: tuple[str, ...]
    packages: str

    @property
    def python(self) -> str:
        return f"{self.path}/bin/python"

    @property
    def variables(self) -> dict[str, str]:
        """Variables of its processes, in addition to PATH."""
        return {"VIRTUAL_ENV": self.path, "PYTHONPATH": self.packages}
