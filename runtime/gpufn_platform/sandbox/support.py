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
    """Why each part does not work here; "" if it does."""

    namespaces: str = ""
    network: str = ""  # a network namespace, for workers without a network
    files: str = ""  # Landlock's rules for files
    signals: str = ""  # Landlock's scopes for signals and abstract sockets
    seccomp: str = ""
    processes: str = ""  # a PID namespace, with a /proc that shows no other process

    def missing(self) -> dict[str, str]:
        """Return the reasons of the parts that do not work."""
        return {part: reason for part, reason in msgspec.structs.asdict(self).items() if reason}


def probe() -> Support:
    """Return what works. This forks: call it while the process has one thread, and before it hides its environment,
    which takes the ownership of its entries in /proc."""
    abi = system_calls.landlock_abi()
    machine = os.uname().machine
    namespaces = _trouble(_enter_twice(network=False))
    network = namespaces
    if namespaces:
        namespaces = _trouble(_enter_twice(network=True))
    processes = namespaces or _trouble(_look_at_processes)
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


def _look_at_processes() -> None:
    """Enter a worker's PID namespace, as in a template, and compare /proc with it."""
    namespace = enter.enter(Sandbox(is_template=True, own_pids=True))
    if namespace is None:
        raise OSError(errno.ECHILD, "a template has no PID namespace for its workers")
    namespace.enter()

    def look() -> None:
        enter.enter(Sandbox(own_pids=True))
        if {int(name) for name in os.listdir("/proc") if name.isdigit()} != {os.getpid()}:
            raise OSError(errno.EPERM, "/proc shows other processes")

    if reason := _trouble(look):
        raise OSError(errno.EPERM, reason)


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
