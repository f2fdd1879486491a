"""Memory limits by cgroup, v1 or v2, below the agent's own group; and whether the kernel killed for them.

The worker's process moves itself in by the `entrance` before it loads anything, so what it loads is counted.
Where no group can be made (no memory controller, no right to write) the worker limits itself by RLIMIT_DATA.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from gpufn_runtime.agent.workers import processes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryGroup:
    """One worker's group; `path` is the folder that the kernel shows it as."""

    path: Path

    @property
    def procs(self) -> Path:
        return self.path / "cgroup.procs"

    @property
    def entrance(self) -> Path:
        """The file to write 0 to in order to join.

        For a whole process the kernel waits until nobody forks, which takes 12 ms; for a single thread that moves
        itself it does not, 0.1 ms. A worker that has just started is a single thread. v2 moves processes only.
        """
        tasks = self.path / "tasks"
        return tasks if tasks.exists() else self.procs

    def pids(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(pid) for pid in self.procs.read_text().split()]
        return []

    def kill(self) -> None:
        """All that is in it. v2 can do so at once, whoever forks meanwhile."""
        try:
            switch = os.open(self.path / "cgroup.kill", os.O_WRONLY)
        except OSError:
            processes.kill_each(self.pids())
            return
        with contextlib.suppress(OSError):
            os.write(switch, b"1")
        os.close(switch)

    def has_killed(self) -> bool:
        """Has a process of it been killed for want of memory?"""
        for name in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError):
                counts = dict(line.split() for line in (self.path / name).read_text().splitlines())
                return int(counts.get("oom_kill", 0)) > 0
        return False

    def limit_bytes(self) -> int | None:
        for name in ("memory.limit_in_bytes", "memory.max"):
            with contextlib.suppress(OSError, ValueError):
                return int((self.path / name).read_text())
        return None

    def remove(self) -> bool:
        """False while processes of it are still on their way out."""
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


@dataclass(frozen=True)
class MemoryGroups:
    """`base` is where groups are made, None where they cannot be."""

    base: Path | None

    @classmethod
    def find(cls) -> MemoryGroups:
        """Below this process's own group, when a group with a limit can be made there."""
        for base in _candidates():
            probe = base / f"gpufn-probe-{os.getpid()}"
            try:
                probe.mkdir()
            except OSError:
                continue
            try:
                _limit(probe, 1 << 40)
            except OSError:
                continue
            else:
                return cls(base)
            finally:
                probe.rmdir()
        log.info("no memory cgroup can be made here: workers limit themselves (RLIMIT_DATA)")
        return cls(None)

    def create(self, worker: str, limit_bytes: int) -> MemoryGroup | None:
        """None when there can be no group."""
        if self.base is None:
            return None
        path = self.base / f"gpufn-{worker}"
        try:
            path.mkdir(exist_ok=True)
            _limit(path, limit_bytes)
        except OSError as error:
            log.warning("%s: no memory cgroup (%s): it limits itself instead", worker, error)
            return None
        return MemoryGroup(path)

    def find_left(self, worker: str) -> MemoryGroup | None:
        """The group that an earlier agent made for a worker that it did not get to write down."""
        path = None if self.base is None else self.base / f"gpufn-{worker}"
        return MemoryGroup(path) if path is not None and path.is_dir() else None


def _limit(path: Path, limit_bytes: int) -> None:
    text = str(limit_bytes)
    if (path / "memory.max").exists():
        (path / "memory.max").write_text(text)
        for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
            with contextlib.suppress(OSError):
                (path / name).write_text(value)
        return
    (path / "memory.limit_in_bytes").write_text(text)
    with contextlib.suppress(OSError):  # kernels without swap accounting do not have it
        (path / "memory.memsw.limit_in_bytes").write_text(text)


def _candidates() -> list[Path]:
    """Our own group's folder in each hierarchy that may control memory."""
    groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup" and "memory" in options.split(","):
            own = next((path for names, path in groups.items() if "memory" in names.split(",")), None)
        elif kind == "cgroup2":
            own = groups.get("")
        else:
            continue
        if own is None:
            continue
        # In a container the mount shows a part of the tree, which `root` names.
        inside = own if root == "/" else own.removeprefix(root)
        base = Path(mount) / inside.lstrip("/")
        if kind == "cgroup2" and not _controls_memory(base):
            continue
        found.append(base)
    return found


def _controls_memory(base: Path) -> bool:
    """In v2 a group hands its controllers down; one that holds processes may not, unless it did so before."""
    control = base / "cgroup.subtree_control"
    with contextlib.suppress(OSError):
        if "memory" in control.read_text().split():
            return True
        control.write_text("+memory")
        return True
    return False
