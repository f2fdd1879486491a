"""Namespaces of a sandbox: a root that consists of its mounts, and optionally a network without interfaces.

The process gets its own user namespace, in which it may mount. Its user and group stay the same.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Sequence

from gpufn_platform.sandbox import layout
from gpufn_platform.sandbox import system_calls as calls
from gpufn_platform.sandbox.descendants import go_on_in_child
from gpufn_platform.sandbox.layout import Kind, Mount

_ROOT_BYTES = 16 << 20  # only folders and links are stored there
_MEMORY_FLAGS = calls.MS_NOSUID | calls.MS_NODEV
_INNER_PLACE = "/.root"  # an empty folder in each root: the place for the root of a forked process


class _New:
    """A part of a root that is a new file system."""


class Root:
    """A root under construction, in new user and mount namespaces. The process must have one thread.

    It is mounted over a folder of the present root. In a worker that is forked from a template this covers nothing, so
    that mounts can be added later."""

    def __init__(self, *, own_pids: bool = False) -> None:
        """Enter the namespaces. With `own_pids` the caller goes on in a child process. Raises OSError."""
        uid, gid = os.geteuid(), os.getegid()
        self.place = _INNER_PLACE if os.path.isdir(_INNER_PLACE) else layout.TMP
        self._is_mounted = False
        self._read_only = [self.place]
        self.kinds: dict[str, Kind] = {}  # of the mounts, by path
        self._memory_bytes = 0  # of each file system in memory
        self._proc = _proc_of_own_processes()  # before the namespaces, in which this process is not root
        calls.unshare(calls.CLONE_NEWUSER | calls.CLONE_NEWNS | (calls.CLONE_NEWPID if own_pids else 0))
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
        if own_pids:
            go_on_in_child(is_in_namespace=True)
        calls.mount("none", "/", None, calls.MS_REC | calls.MS_PRIVATE)

    def add(self, mounts: Sequence[Mount], memory_bytes: int) -> None:
        """Add mounts, each after the mounts that contain it. Each file system in memory holds at most `memory_bytes`.
        Raises OSError."""
        # Before the root covers any.
        parts = [(mount, part) for mount in mounts if (part := self._read(mount)) is not None]
        if not self._is_mounted:
            calls.mount("none", self.place, "tmpfs", _MEMORY_FLAGS, f"mode=755,size={_ROOT_BYTES}")
            os.mkdir(self.place + _INNER_PLACE)
            self._is_mounted = True
        for mount, part in parts:
            self._add(mount, part, memory_bytes)
        self.kinds.update((mount.path, mount.kind) for mount in mounts)
        self._memory_bytes = memory_bytes

    def make_folders(self, paths: Iterable[str]) -> None:
        """Create the folders for later mounts."""
        for path in paths:
            if os.path.isdir(path):
                with contextlib.suppress(OSError):  # inside a mount that cannot be written to
                    os.makedirs(self.place + path, exist_ok=True)

    def limit_memory(self, memory_bytes: int) -> None:
        """Change the size of each file system in memory. Raises OSError."""
        if memory_bytes == self._memory_bytes:
            return
        for path, kind in self.kinds.items():
            if kind is Kind.MEMORY:
                flags = calls.MS_REMOUNT | _MEMORY_FLAGS
                calls.mount("none", self.place + path, None, flags, f"size={memory_bytes}")

    def move_in(self, *, network: bool, shares_memory: bool) -> None:
        """Make this the root. Raises OSError."""
        folder = os.getcwd()
        flags = (0 if network else calls.CLONE_NEWNET) | (0 if shares_memory else calls.CLONE_NEWIPC)
        if flags:
            calls.unshare(flags)
        for target in self._read_only:
            calls.set_mount_attributes(target, calls.MOUNT_READ_ONLY, recursive=False)
        os.chdir(self.place)
        calls.pivot_root(".", ".")  # the old root is now mounted over the new one
        calls.unmount(".")
        try:
            os.chdir(folder)
        except OSError:
            os.chdir("/")

    def _read(self, mount: Mount) -> str | int | _New | None:
        if mount.path != layout.PROC or self._proc is None:
            return _read(mount)
        proc, self._proc = self._proc, None
        return _prepared(proc, read_only=mount.kind is Kind.READ_ONLY)

    def _add(self, mount: Mount, part: str | int | _New, memory_bytes: int) -> None:
        target = self.place + mount.path
        if isinstance(part, str):
            _make_folder(os.path.dirname(target))
            if not os.path.lexists(target):
                os.symlink(part, target)
        elif isinstance(part, int):
            _attach(part, target)
        elif mount.kind is Kind.TERMINALS:
            _make_folder(target)
            calls.mount("none", target, "devpts", calls.MS_NOSUID | calls.MS_NOEXEC, "newinstance,ptmxmode=0666")
            os.symlink("pts/ptmx", os.path.join(os.path.dirname(target), "ptmx"))
        else:
            _make_folder(target)
            options = f"mode=1777,size={memory_bytes}" if mount.kind is Kind.MEMORY else "mode=755,size=1M"
            stays_empty = mount.path in layout.HIDDEN
            calls.mount("none", target, "tmpfs", _MEMORY_FLAGS | (calls.MS_RDONLY if stays_empty else 0), options)
            if mount.kind is Kind.HIDDEN and not stays_empty:
                self._read_only.append(target)


def _read(mount: Mount) -> str | int | _New | None:
    """Return the part to create: the target of a link, a copy of mounts, or a new file system. None if it is absent."""
    path, kind, source = mount
    if kind in (Kind.MEMORY, Kind.TERMINALS):
        return _New()
    if source:
        return _clone(source, read_only=True)
    if os.path.islink(path):
        return os.readlink(path)
    if not os.path.exists(path):
        return None
    if kind is not Kind.HIDDEN:
        return _clone(path, read_only=kind is Kind.READ_ONLY)
    return _New() if os.path.isdir(path) else _clone("/dev/null", read_only=True)


def _proc_of_own_processes() -> int | None:
    """Return a /proc that shows only the processes that its reader may trace, which are in the same user namespace.

    None if the kernel is older than Linux 5.8, or if this process is not root. Workers copy the /proc of their
    template."""
    with contextlib.suppress(OSError):
        return calls.new_file_system("proc", {"hidepid": "ptraceable"})
    return None


def _clone(path: str, *, read_only: bool) -> int:
    return _prepared(calls.clone_mounts(path), read_only=read_only)


def _prepared(source: int, *, read_only: bool) -> int:
    calls.set_mount_attributes(source, calls.MOUNT_NO_SUID | (calls.MOUNT_READ_ONLY if read_only else 0))
    return source


def _attach(source: int, target: str) -> None:
    try:
        is_folder = stat.S_ISDIR(os.fstat(source).st_mode)
        if not os.path.exists(target):
            _make_folder(target if is_folder else os.path.dirname(target))
            if not is_folder:
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        calls.attach_mounts(source, target)
    finally:
        os.close(source)


def _make_folder(path: str) -> None:
    try:
        os.mkdir(path)  # `makedirs` takes four times as long, and most parents exist
    except FileExistsError:
        pass
    except FileNotFoundError:
        os.makedirs(path)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
