"""PID namespace of workers: its process 1, and the way into it.

    1. A helper process creates a user namespace and in it the PID namespace, and forks two processes into it. Process 1
       is `cat`, which reaps orphans. The other one mounts the /proc of the namespace, passes it on, and ends.
    2. `enter`: the user of this process owns the user namespace, and may therefore enter both. The next child of this
       process is inside.

A worker is not process 1, so signals have their usual effect on it. Its parent is outside: when the parent has ended,
the agent, as the nearest subreaper outside, adopts the worker and receives its exit status.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Final, NoReturn

from gpufn_platform.sandbox import namespaces
from gpufn_platform.sandbox import system_calls as calls

_PROCESS_1: Final = "cat"  # a Python process would take 10 MiB
_CREATED: Final = b"0"  # instead of the number of an error
_LONGEST_MESSAGE: Final = 16


class PidNamespace:
    """A PID namespace inside its creator's.

    It ends with the last process that holds the descriptor `_held`: the creator, the workers, and what they fork.
    `proc` is its /proc, attached nowhere, which shows a reader the processes that it may trace: a worker sees itself
    and its child processes, but no other worker."""

    def __init__(self) -> None:
        """Create the namespace. This process must have one thread. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            until, self._held = os.pipe()
            if (helper := os.fork()) == 0:
                os.close(self._held)
                _create(theirs, until)
            os.close(until)
            theirs.close()
            os.waitpid(helper, 0)
            message, descriptors, _, _ = socket.recv_fds(ours, _LONGEST_MESSAGE, 3)
        if message != _CREATED:
            os.close(self._held)
            number = int(message) if message else errno.ECHILD
            raise OSError(number, os.strerror(number), "a PID namespace")
        os.set_inheritable(self._held, True)  # a worker with packages of its own becomes another Python by exec
        self._user, self._pids, self.proc = descriptors

    def has_ended(self) -> bool:
        """Return whether process 1 has ended, and with it all workers. No further one can be forked."""
        end = select.poll()
        end.register(self._held, 0)
        return bool(end.poll(0))

    def enter(self) -> None:
        """Let the next child of this process be inside. It has all capabilities in the user namespace. Raises
        OSError."""
        for descriptor, kind in ((self._user, calls.CLONE_NEWUSER), (self._pids, calls.CLONE_NEWPID)):
            calls.enter_namespace(descriptor, kind)
            os.close(descriptor)


def go_on_inside(report: Callable[[int], object]) -> PidNamespace:
    """Return in a child process inside a new PID namespace, which leads a session. This process ends, after `report`
    has received the child's number outside. Raises OSError."""
    namespace = PidNamespace()
    namespace.enter()
    if child := os.fork():
        report(child)
        os._exit(0)
    os.setsid()
    return namespace


def _create(channel: socket.socket, until: int) -> NoReturn:
    try:
        namespaces.enter_user_namespace(calls.CLONE_NEWPID)
        if os.fork() == 0:
            _become_process_1(until)
        os.close(until)
        if mounter := os.fork():
            os.waitpid(mounter, 0)
            os._exit(0)
        parts = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("user", "pid")]
        calls.unshare(calls.CLONE_NEWNS)
        parts.append(calls.new_file_system("proc", {"hidepid": "ptraceable"}))
        socket.send_fds(channel, [_CREATED], parts)
    except OSError as error:
        with contextlib.suppress(OSError):
            channel.send(str(error.errno).encode())
    finally:
        os._exit(1)


def _become_process_1(until: int) -> NoReturn:
    """Leave the session, the folder and the descriptors, by which others detect the end of the creator. Read `until`
    to its end."""
    os.setsid()
    os.chdir("/")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    null = os.open(os.devnull, os.O_RDWR)
    for stream, descriptor in enumerate((until, null, null)):
        os.dup2(descriptor, stream)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.execvp(_PROCESS_1, [_PROCESS_1])  # noqa: S606
