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

from gpufn_platform.sandbox import namespaces, seccomp
from gpufn_platform.sandbox import system_calls as calls

_PROCESS_1: Final = "cat"  # a Python process would take 10 MiB
_CREATED: Final = b"0"  # instead of the number of an error
_LONGEST_MESSAGE: Final = 16
_PARTS: Final = 3


class PidNamespace:
    """A PID namespace inside its creator's.

    It ends with the last process that holds the descriptor `_held`: the creator, the workers, and what they fork.
    `proc` is its /proc, attached nowhere, which shows a reader the processes that it may trace: a worker sees itself
    and its child processes, but no other worker."""

    def __init__(self, *, network: bool) -> None:
        """Create the namespace. Without `network`, process 1 has none either. This process must have one thread. Raises
        OSError."""
        program = seccomp.program(os.uname().machine, may_set_up=False)  # cached for the worker
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            until, self._held = os.pipe()
            if (helper := os.fork()) == 0:
                os.close(self._held)
                _create(theirs, until, program, network=network)
            os.close(until)
            theirs.close()
            os.waitpid(helper, 0)
            self._user, self._pids, self.proc = _receive(ours)
        os.set_inheritable(self._held, True)  # a worker with packages of its own becomes another Python by exec

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


def go_on_inside(report: Callable[[int], object], *, network: bool) -> PidNamespace:
    """Return in a child process inside a new PID namespace, which leads a session. This process ends, after `report`
    has received the child's number outside. Raises OSError."""
    namespace = PidNamespace(network=network)
    namespace.enter()
    if child := os.fork():
        report(child)
        os._exit(0)
    os.setsid()
    return namespace


def _receive(channel: socket.socket) -> list[int]:
    """Return the descriptors of the namespaces and of /proc, when process 1 runs. Raises OSError."""
    descriptors: list[int] = []
    message = _CREATED
    while message == _CREATED:
        message, received, _, _ = socket.recv_fds(channel, _LONGEST_MESSAGE, _PARTS, socket.MSG_CMSG_CLOEXEC)
        descriptors += received
    if message or len(descriptors) < _PARTS:
        number = int(message or errno.ECHILD)
        raise OSError(number, os.strerror(number), "a PID namespace")
    return descriptors


def _create(channel: socket.socket, until: int, program: bytes, *, network: bool) -> NoReturn:
    try:
        namespaces.enter_user_namespace(calls.CLONE_NEWPID)
        if os.fork() == 0:
            _become_process_1(channel, until, program, network=network)
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


def _become_process_1(channel: socket.socket, until: int, program: bytes, *, network: bool) -> NoReturn:
    """Leave the session, the folder and the descriptors, by which others detect the end of the creator. Read `until`
    to its end. Raises OSError with `channel` open; the exec closes it."""
    os.setsid()
    os.chdir("/")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    null = os.open(os.devnull, os.O_RDWR)
    for stream, descriptor in enumerate((until, null, null)):
        os.dup2(descriptor, stream)
    os.closerange(3, channel.fileno())
    os.closerange(channel.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    # A template owns the user namespace. Where Landlock has no scopes, it may trace this process and use its rights.
    if not network:
        calls.unshare(calls.CLONE_NEWNET)
    calls.bound_capabilities(frozenset())
    calls.drop_capabilities(frozenset())
    calls.set_no_new_privileges()
    if program:
        calls.set_seccomp_filter(program)
    # The environment's PATH may start with programs of a user's packages, and this process has no sandbox.
    os.execvpe(_PROCESS_1, [_PROCESS_1], {"PATH": os.defpath})  # noqa: S606
