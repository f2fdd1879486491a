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
_PROC_OF_WORKERS = "/.proc"  # in the root of a template: the /proc of the PID namespace of its workers


class _New:
    """A part of a root that is a new file system."""


class Root:
    """A root under construction, in new user and mount namespaces. The process must have one thread.

    It is mounted over a folder of the present root. In a worker that is forked from a template this covers nothing, so
    that mounts can be added later."""

    def __init__(self, *, proc: int | None = None, is_command: bool = False) -> None:
        """Enter the namespaces. `proc` is the /proc of this process's PID namespace, attached nowhere, unless this
        process is forked from a template. With `is_command` the caller goes on in a child process, in a new PID
        namespace. Raises OSError."""
        self.place = _INNER_PLACE if os.path.isdir(_INNER_PLACE) else layout.TMP
        self._is_mounted = False
        self._read_only = [self.place]
        self.kinds: dict[str, Kind] = {}  # of the mounts, by path
        self._memory_bytes = 0  # of each file system in memory
        self._proc_of_workers: int | None = None
        enter_user_namespace(calls.CLONE_NEWNS | (calls.CLONE_NEWPID if is_command else 0))
        calls.mount("none", "/", None, calls.MS_REC | calls.MS_PRIVATE)
        if is_command:
            go_on_in_child(is_in_namespace=True)
            with contextlib.suppress(OSError):  # parts of the machine's /proc are hidden, as in a container
                proc = calls.new_file_system("proc", {})
        elif proc is None and os.path.isdir(_PROC_OF_WORKERS):
            proc = calls.clone_mounts(_PROC_OF_WORKERS)
        if proc is not None:
            _attach(proc, layout.PROC)

    def show_to_workers(self, proc: int) -> None:
        """Add the /proc of the workers that will be forked from this process. It is attached nowhere."""
        self._proc_of_workers = proc

    def add(self, mounts: Sequence[Mount], memory_bytes: int) -> None:
        """Add mounts, each after the mounts that contain it. Each file system in memory holds at most `memory_bytes`.
        Raises OSError."""
        # Before the root covers any.
        parts = [(mount, part) for mount in mounts if (part := _read(mount)) is not None]
        if self._proc_of_workers is not None:  # parts of it are hidden too
            inside = (mount for mount in mounts if mount.path.startswith(layout.PROC + "/"))
            parts += [(_in_proc_of_workers(mount), part) for mount in inside if (part := _read(mount)) is not None]
        if not self._is_mounted:
            calls.mount("none", self.place, "tmpfs", _MEMORY_FLAGS, f"mode=755,size={_ROOT_BYTES}")
            os.mkdir(self.place + _INNER_PLACE)
            if self._proc_of_workers is not None:
                _attach(self._proc_of_workers, self.place + _PROC_OF_WORKERS)
                self._proc_of_workers = None
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


def _in_proc_of_workers(mount: Mount) -> Mount:
    return mount._replace(path=_PROC_OF_WORKERS + mount.path.removeprefix(layout.PROC))


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


def enter_user_namespace(flags: int) -> None:
    """Enter a new user namespace with all capabilities, and the other new namespaces of `flags`. User and group stay
    the same. Raises OSError."""
    uid, gid = os.geteuid(), os.getegid()
    calls.unshare(calls.CLONE_NEWUSER | flags)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")


def _clone(path: str, *, read_only: bool) -> int:
    source = calls.clone_mounts(path)
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
