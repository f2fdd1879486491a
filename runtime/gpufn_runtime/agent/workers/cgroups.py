"""Memory limits by cgroup (v1 or v2) below the agent's own cgroup, and detection of OOM kills. With v2 the group also
limits the number of processes.

A worker process joins its group through the `join_file` file before it loads anything, so all its memory counts. If no
group can be created (no memory controller, no write permission), the worker limits itself with RLIMIT_DATA.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from gpufn_platform.sandbox.enter import MAX_PROCESSES
from gpufn_runtime.agent.workers import processes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryGroup:
    """Cgroup of one worker. `path` is its folder in the cgroup file system."""

    path: Path

    @property
    def procs(self) -> Path:
        return self.path / "cgroup.procs"

    @property
    def join_file(self) -> Path:
        """The file to write 0 to in order to join.

        When a whole process moves, the kernel waits until no process forks, which takes 12 ms. A single thread that
        moves itself takes 0.1 ms, and a worker that has just started has one thread. v2 moves only whole processes.
        """
        tasks = self.path / "tasks"
        return tasks if tasks.exists() else self.procs

    def pids(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(pid) for pid in self.procs.read_text().split()]
        return []

    def kill(self) -> None:
        """Kill all processes in the group. v2 does so atomically, even if processes fork meanwhile."""
        try:
            kill_file = os.open(self.path / "cgroup.kill", os.O_WRONLY)
        except OSError:
            processes.kill_each(self.pids())
            return
        with contextlib.suppress(OSError):
            os.write(kill_file, b"1")
        os.close(kill_file)

    def has_killed(self) -> bool:
        """Return whether the kernel has killed a process of the group for exceeding the memory limit."""
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
        """Remove the group. Returns False while it still has processes."""
        with contextlib.suppress(OSError):
            self.path.rmdir()
        return not self.path.exists()


@dataclass(frozen=True)
class MemoryGroups:
    """Creates memory cgroups in the folder `base`; None if that is not possible."""

    base: Path | None

    @classmethod
    def find(cls) -> MemoryGroups:
        """Find a cgroup of this process in which groups with a memory limit can be created."""
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
        log.info("cannot create memory cgroups here: workers limit themselves (RLIMIT_DATA)")
        return cls(None)

    def create(self, worker: str, limit_bytes: int) -> MemoryGroup | None:
        """Create a worker's group. Returns None if that is not possible."""
        if self.base is None:
            return None
        path = self.base / f"gpufn-{worker}"
        try:
            path.mkdir(exist_ok=True)
            _limit(path, limit_bytes)
        except OSError as error:
            log.warning("no memory cgroup for worker %s (%s): it limits itself instead", worker, error)
            return None
        return MemoryGroup(path)

    def create_for(self, folder: Path, limit_bytes: int) -> MemoryGroup | None:
        """Create the group of a command that works on `folder`. Returns None if that is not possible.

        Other agents of the machine, with other homes, may work on a folder of the same name.
        """
        return self.create(hashlib.sha256(os.fsencode(folder)).hexdigest()[:16], limit_bytes)

    def find_existing(self, worker: str) -> MemoryGroup | None:
        """Return the group that an earlier agent created for a worker that it did not record."""
        path = None if self.base is None else self.base / f"gpufn-{worker}"
        return MemoryGroup(path) if path is not None and path.is_dir() else None


def _limit(path: Path, limit_bytes: int) -> None:
    text = str(limit_bytes)
    if (path / "memory.max").exists():
        (path / "memory.max").write_text(text)
        for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1"), ("pids.max", str(MAX_PROCESSES))):
            with contextlib.suppress(OSError):
                (path / name).write_text(value)
        return
    (path / "memory.limit_in_bytes").write_text(text)
    with contextlib.suppress(OSError):  # missing on kernels without swap accounting
        (path / "memory.memsw.limit_in_bytes").write_text(text)


def _candidates() -> list[Path]:
    """Return the folder of our own group in each hierarchy that may control memory."""
    groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    bases = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup" and "memory" in options.split(","):
            own_group = next((path for names, path in groups.items() if "memory" in names.split(",")), None)
        elif kind == "cgroup2":
            own_group = groups.get("")
        else:
            continue
        if own_group is None:
            continue
        # In a container the mount shows only a part of the tree; `root` is that part's path.
        visible_path = own_group if root == "/" else own_group.removeprefix(root)
        base = Path(mount) / visible_path.lstrip("/")
        if kind == "cgroup" or _controls_memory(base):
            bases.append(base)
    return bases


def _controls_memory(base: Path) -> bool:
    """Enable the memory controller for subgroups (v2). A group with processes can do so only if it did so before."""
    control = base / "cgroup.subtree_control"
    with contextlib.suppress(OSError):
        if "memory" in control.read_text().split():
            return True
        control.write_text("+memory")
        with contextlib.suppress(OSError):
            control.write_text("+pids")
        return True
    return False
