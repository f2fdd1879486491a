"""Memory of processes and of the host, as the kernel reports it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final, NamedTuple

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Held(NamedTuple):
    """Memory of a process and its descendants. A page that two of them map counts twice."""

    resident_bytes: int
    allocated_bytes: int  # without pages of files


def held(pid: int, proc: Path = Path("/proc")) -> Held:
    resident, shared, pids = 0, 0, [pid]
    while pids:
        folder = proc / str(pids.pop())
        with contextlib.suppress(OSError, ValueError, IndexError):  # the process has ended
            fields = (folder / "statm").read_text().split()
            resident += int(fields[1])
            shared += int(fields[2])
            for task in (folder / "task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return Held(resident * _PAGE, (resident - shared) * _PAGE)


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the memory that processes may still allocate on this host and in this container; None if unknown."""
    amounts = (_available_on_host(proc), _available_in_cgroup(cgroup))
    return min((amount for amount in amounts if amount is not None), default=None)


def _available_on_host(proc: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _available_in_cgroup(cgroup: Path) -> int | None:
    """Return the rest of the limit. File pages that the kernel can drop do not count as used."""
    with contextlib.suppress(OSError, ValueError, KeyError):  # no limit ("max"), or the first version of cgroups
        limit = int((cgroup / "memory.max").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used = int((cgroup / "memory.current").read_text()) - int(statistics["inactive_file"])
        return max(0, limit - used)
    return None
