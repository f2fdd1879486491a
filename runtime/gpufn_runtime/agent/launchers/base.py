"""What starts a worker's process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class LaunchOrder:
    """`output` is a FIFO that somebody reads; the process works in `folder`."""

    worker: str
    folder: Path
    config: Path
    output: Path
    environment: dict[str, str] = field(repr=False)
    modules: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Launched:
    pid: int
    is_standby: bool = False  # forked from a template


class Launcher(Protocol):
    async def launch(self, order: LaunchOrder) -> Launched:
        """Raises PlatformError when there is no process."""
        ...
