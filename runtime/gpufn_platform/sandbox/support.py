"""Which parts of the sandbox this machine's kernel allows, found out by entering one in a child process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import msgspec

from gpufn_core.protocol.launch import Sandbox
from gpufn_platform.sandbox import enter, landlock, seccomp, system_calls

_LONGEST_REASON = 500


class Support(msgspec.Struct, frozen=True):
    """Why each part does not work here; "" if it does. All but `processes` are parts of a complete sandbox."""

    namespaces: str = ""
    network: str = ""  # a network namespace, for workers without a network
    files: str = ""  # Landlock's rules for files
    signals: str = ""  # Landlock's scopes for signals and abstract sockets
    seccomp: str = ""
    processes: str = ""  # workers cannot list the machine's processes; only a platform of root can prevent it

    def missing(self) -> dict[str, str]:
        """Return the reasons of the parts that do not work, and without which the sandbox is not complete."""
        parts = msgspec.structs.asdict(self)
        return {part: reason for part, reason in parts.items() if reason and part != "processes"}


def probe() -> Support:
    """Return what works. This forks: call it while the process has one thread, and before it hides its environment,
    which takes the ownership of its entries in /proc."""
    abi = system_calls.landlock_abi()
    machine = os.uname().machine
    namespaces = _trouble(_enter_twice(network=False))
    network = namespaces
    if namespaces:
        namespaces = _trouble(_enter_twice(network=True))
    processes = namespaces or _trouble(_look_at_parent)
    return Support(
        namespaces=namespaces,
        network=network,
        files="" if abi >= landlock.FILES_ABI else "the kernel has no Landlock (Linux 5.13 and later can have it)",
        signals=""
        if abi >= landlock.SCOPES_ABI
        else f"Landlock is of version {abi}, and version {landlock.SCOPES_ABI} is needed (Linux 6.12)",
        seccomp="" if seccomp.is_supported(machine) else f"there is no list of system calls for {machine}",
        processes=processes,
    )


def _enter_twice(*, network: bool) -> Callable[[], None]:
    """A worker enters its sandbox inside the sandbox of its template."""

    def enter_both() -> None:
        enter.enter(Sandbox(is_template=True, network=network))
        enter.enter(Sandbox(network=network))

    return enter_both


def _look_at_parent() -> None:
    _enter_twice(network=True)()
    if os.path.exists(f"/proc/{os.getppid()}"):
        raise OSError(errno.EPERM, "only root can hide them, on Linux 5.8 or later")


def _trouble(work: Callable[[], None]) -> str:
    """Return why `work` fails in a child process, or ""."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                work()
            except OSError as error:
                name = f" ({error.filename})" if error.filename else ""
                os.write(writer, f"{error.strerror}{name}".encode()[:_LONGEST_REASON] or b"?")
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        reason = pipe.read()
    os.waitpid(child, 0)
    return reason.decode(errors="replace")
