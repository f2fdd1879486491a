"""`python -m gpufn_platform.sandbox.visit PID COMMAND...`: runs a command in the PID namespace of a process.

The command has a /proc of that namespace, and otherwise the files of this process. A user other than root gets the
right to enter and to mount from the user namespace that owns the PID namespace. Programs such as nsenter lose it with
each exec.
"""

from __future__ import annotations

import fcntl
import os
import sys

from gpufn_platform.sandbox import layout
from gpufn_platform.sandbox import system_calls as calls
from gpufn_platform.sandbox.descendants import end_as

_NS_GET_USERNS = 0xB701  # ioctl_ns(2)


def main(pid: str, command: list[str]) -> None:
    try:
        pids = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        try:
            calls.enter_namespace(pids, calls.CLONE_NEWPID)
        except PermissionError:  # this user has the right only in the namespace that owns it
            calls.enter_namespace(fcntl.ioctl(pids, _NS_GET_USERNS), calls.CLONE_NEWUSER)
            calls.enter_namespace(pids, calls.CLONE_NEWPID)
        if child := os.fork():  # only children are inside
            end_as(child)
        calls.unshare(calls.CLONE_NEWNS)
        calls.mount("none", "/", None, calls.MS_REC | calls.MS_PRIVATE)
        calls.mount("none", layout.PROC, "proc", calls.MS_NOSUID | calls.MS_NODEV | calls.MS_NOEXEC)
        os.execv(command[0], command)  # noqa: S606
    except OSError as error:
        sys.exit(f"cannot run {command[0]} in the PID namespace of {pid}: {error}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
