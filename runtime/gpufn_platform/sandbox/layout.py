"""The files of a sandbox: the mounts that its root consists of, and the rules for Landlock. Pure.

A sandbox has the host's paths, but only the required ones. The paths of the system are the same for all sandboxes.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from gpufn_core.protocol.launch import Sandbox


class Access(enum.Enum):
    READ = "read"
    OVERWRITE = "overwrite"  # read, and write existing files
    BY_NAME = "by name"  # all but listing the names
    ALL = "all"


class Kind(enum.Enum):
    READ_ONLY = "read-only"
    WRITABLE = "writable"
    MEMORY = "memory"  # a new, empty file system in memory
    TERMINALS = "terminals"  # its own pseudo-terminals: the host's include the terminals of its users
    HIDDEN = "hidden"  # an empty folder that cannot be written to, or an empty file


Rule = tuple[str, Access]


class Mount(NamedTuple):
    path: str
    kind: Kind
    source: str = ""  # the file that is shown at the path, if it is another one


# Absent ones are skipped.
SYSTEM: Final = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix", "/gnu", "/etc", "/sys"),
    # Files that the ones above link to, and the sockets of the NVIDIA driver.
    *(
        "/run/opengl-driver",
        "/run/nvidia-persistenced",
        "/run/nvidia-fabricmanager",
        "/var/run",
        "/var/lib/ca-certificates",
    ),
)
# Shown with the node's network only: they have sockets of resolvers.
RESOLVERS: Final = ("/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager")
PROC: Final = "/proc"
TMP: Final = "/tmp"  # noqa: S108
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108
TERMINALS: Final = "/dev/pts"
_DEVICE_FOLDER: Final = "/dev"
TEMPORARY: Final = (TMP, "/var/tmp")  # noqa: S108
# As in Docker's containers: the kernel's settings, and files with data about other users of the machine. Nothing is
# mounted inside the hidden ones.
_PROC_READ_ONLY: Final = tuple(f"/proc/{name}" for name in ("bus", "fs", "irq", "sys", "sysrq-trigger"))
HIDDEN: Final = (
    *(
        f"/proc/{name}"
        for name in ("acpi", "asound", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list")
    ),
    *("/sys/firmware", "/sys/kernel/debug", "/sys/kernel/security", "/sys/kernel/tracing"),
    *("/etc/gshadow", "/etc/gshadow-", "/etc/shadow", "/etc/shadow-", "/etc/ssh", "/etc/ssl/private"),
)
_DEVICES: Final = ("full", "null", "random", "tty", "urandom", "zero", "fd", "stdin", "stdout", "stderr")
_NO_MOUNTS: Final[Mapping[str, Kind]] = MappingProxyType({})
# Devices that compute, and the network between them.
_ACCELERATORS: Final = ("nvidia", "dri", "kfd", "infiniband", "gdrdrv", "dxg", "accel")


def own_paths(sandbox: Sandbox, names: Iterable[str], pid: int) -> list[str]:
    """Return the paths that a process may write to in addition to the paths in `sandbox`: devices, from the names in
    /dev, and its own entries in /proc, where CUDA names its threads. A template may write to all entries, because its
    workers need theirs."""
    chosen = [name for name in names if name in _DEVICES or (sandbox.gpus and name.startswith(_ACCELERATORS))]
    return [*(f"/dev/{name}" for name in sorted(chosen)), PROC if sandbox.is_template else f"{PROC}/{pid}"]


def common(template: Sandbox) -> Sandbox:
    """Return the part that the sandboxes of all workers have that are forked from `template`."""
    return Sandbox(
        shared=template.shared, hidden=template.hidden, network=template.network, namespace=template.namespace
    )


def mounts(sandbox: Sandbox, own: Iterable[str], present: Mapping[str, Kind] = _NO_MOUNTS) -> list[Mount]:
    """Return the mounts that are not `present`, each after the mounts that contain it. They include the mounts that new
    ones cover. A writable path inside a read-only path is writable."""
    kinds: dict[str, Kind] = dict.fromkeys(
        (*SYSTEM, *_resolvers(sandbox), PROC, *sandbox.shared, *sandbox.readable, *_PROC_READ_ONLY), Kind.READ_ONLY
    )
    kinds |= dict.fromkeys((*own, *sandbox.writable), Kind.WRITABLE)
    kinds |= dict.fromkeys(TEMPORARY, Kind.MEMORY)
    kinds[TERMINALS] = Kind.TERMINALS
    kinds[SHARED_MEMORY] = Kind.WRITABLE if sandbox.shares_memory else Kind.MEMORY
    sources: dict[str, str] = {}
    if (namespace := sandbox.namespace) is not None:
        kinds[namespace.resolv_conf] = Kind.READ_ONLY
        sources[namespace.resolv_conf] = namespace.own_resolv_conf
    shown = as_prefixes(path for path, kind in kinds.items() if kind is not Kind.MEMORY)
    for path in (*HIDDEN, *sandbox.hidden):
        if path not in kinds and (path in present or (path + "/").startswith(shown)):
            kinds[path] = Kind.HIDDEN
    new = {path for path, kind in kinds.items() if present.get(path) is not kind}
    covered = as_prefixes(new)
    chosen = sorted(path for path in kinds if path in new or (path + "/").startswith(covered))
    return [Mount(path, kinds[path], sources.get(path, "")) for path in chosen]


def _resolvers(sandbox: Sandbox) -> tuple[str, ...]:
    return RESOLVERS if sandbox.network and sandbox.namespace is None else ()


def rules(
    sandbox: Sandbox, own: Iterable[str], list_folder: Callable[[str], Sequence[str]], real: Callable[[str], str]
) -> list[Rule]:
    """Return the rules for Landlock. It knows no exceptions: without namespaces, each path next to a hidden path is
    listed. `real` returns a path without links, because Landlock allows the target of a link."""
    if sandbox.namespaces:  # there are no other files
        writable = (_DEVICE_FOLDER, *(path for path in own if not is_inside(path, _DEVICE_FOLDER)))
        return [("/", Access.READ), *((path, Access.ALL) for path in (*writable, *sandbox.writable, *TEMPORARY))]
    found = [(PROC, Access.READ), *((path, Access.OVERWRITE if path == PROC else Access.ALL) for path in own)]
    shown = map(real, (*sandbox.shared, *sandbox.readable, *sandbox.writable))
    hidden = {*map(real, (*HIDDEN, *sandbox.hidden))}.difference(shown)
    for access, paths in (
        (Access.READ, (*SYSTEM, *_resolvers(sandbox), *sandbox.shared, *sandbox.readable)),
        (Access.ALL, sandbox.writable),
    ):
        found += [(part, access) for path in map(real, paths) for part in _without(path, hidden, list_folder)]
    # Semaphores of other processes and the bodies of other workers are there too: their names are random.
    return [*found, (SHARED_MEMORY, Access.BY_NAME)]


def _without(path: str, hidden: Collection[str], list_folder: Callable[[str], Sequence[str]]) -> list[str]:
    """Return paths that together contain `path` without `hidden`.

    >>> _without("/opt", ["/opt/home"], {"/opt": ["home", "a", "b"]}.__getitem__)
    ['/opt/a', '/opt/b']
    """
    if path in hidden:
        return []
    if not any(is_inside(each, path) for each in hidden):
        return [path]
    parts = (os.path.join(path, name) for name in list_folder(path))
    return [part for each in parts for part in _without(each, hidden, list_folder)]


def as_prefixes(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths with a slash at the end. `str.startswith` then finds the paths inside one of them."""
    return tuple(path.rstrip("/") + "/" for path in paths)


def is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
