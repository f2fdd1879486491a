from __future__ import annotations

import struct

import pytest

from gpufn_platform.sandbox import seccomp

ALLOWED, EPERM, ENOSYS, EAFNOSUPPORT = 0x7FFF0000, 0x00050001, 0x00050026, 0x00050061
X86_64, I386 = 0xC000003E, 0x40000003
CLONE, CLONE3, SOCKET, SOCKETPAIR, UNSHARE, MOUNT, BPF, READ, OPENAT = 56, 435, 41, 53, 272, 165, 321, 0, 257
PRLIMIT, SETPRIORITY, IOPRIO_SET, SCHED_SETSCHEDULER, SCHED_SETAFFINITY = 302, 141, 251, 144, 203


def run(program: bytes, number: int, *arguments: int, architecture: int = X86_64) -> int:
    """Run a BPF program as the kernel does, for one system call."""
    data = struct.pack("iIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = [struct.unpack_from("HBBI", program, offset) for offset in range(0, len(program), 8)]
    at, value = 0, 0
    while True:
        code, if_true, if_false, operand = steps[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("I", data, operand)
        elif code == 0x54:
            value &= operand
        elif code == 0x06:
            return int(operand)
        else:
            holds = {0x15: value == operand, 0x25: value > operand, 0x35: value >= operand}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize(
    ("number", "arguments", "result"),
    [
        (READ, (), ALLOWED),
        (OPENAT, (), ALLOWED),
        (MOUNT, (), EPERM),
        (UNSHARE, (), EPERM),
        (BPF, (), EPERM),
        (CLONE, (0x11,), ALLOWED),  # a fork
        (CLONE, (0x10000011,), EPERM),  # CLONE_NEWUSER
        (CLONE3, (), ENOSYS),  # the C library uses clone instead
        (SOCKET, (2,), ALLOWED),
        (SOCKET, (38,), EAFNOSUPPORT),  # AF_ALG
        (SOCKET, (40,), EAFNOSUPPORT),  # AF_VSOCK
        (SOCKETPAIR, (1,), ALLOWED),
        (SOCKETPAIR, (30,), EAFNOSUPPORT),  # AF_TIPC
        (SOCKET, (16, 3, 0), ALLOWED),  # NETLINK_ROUTE
        (SOCKET, (16, 3, 2), EPERM),  # NETLINK_USERSOCK
        (PRLIMIT, (0, 7, 1), ALLOWED),
        (PRLIMIT, (4321, 7, 1), EPERM),
        (SETPRIORITY, (0, 0, 19), ALLOWED),
        (SETPRIORITY, (0, 4321, 19), EPERM),
        (SETPRIORITY, (2, 0, 19), EPERM),  # all processes of the user
        (IOPRIO_SET, (1, 0, 0), ALLOWED),
        (IOPRIO_SET, (1, 4321, 0), EPERM),
        (IOPRIO_SET, (3, 0, 0), EPERM),
        (SCHED_SETSCHEDULER, (4321, 5), EPERM),
        (SCHED_SETAFFINITY, (4321, 8), ALLOWED),  # the C library names the thread
        (9_999, (), ENOSYS),
        (0x40000000, (), ENOSYS),  # `read` of the x32 ABI
    ],
)
def test_the_filter_decides_as_dockers_profile(number: int, arguments: tuple[int, ...], result: int) -> None:
    assert run(seccomp.program("x86_64", may_set_up=False), number, *arguments) == result


def test_calls_of_another_architecture_do_not_exist() -> None:
    assert run(seccomp.program("x86_64", may_set_up=False), READ, architecture=I386) == ENOSYS


def test_a_template_may_set_up_the_sandboxes_of_its_workers() -> None:
    program = seccomp.program("x86_64", may_set_up=True)
    assert [run(program, number) for number in (UNSHARE, MOUNT, BPF)] == [ALLOWED, ALLOWED, EPERM]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_each_call_of_the_list_is_allowed_and_the_program_is_short_enough(machine: str) -> None:
    program = seccomp.program(machine, may_set_up=False)
    architecture = {"x86_64": X86_64, "aarch64": 0xC00000B7}[machine]
    numbers = seccomp.allowed_calls(machine)
    first = {"ioprio_set": 1, "socket": 1, "socketpair": 1}  # IOPRIO_WHO_PROCESS, AF_UNIX
    results = {run(program, number, first.get(name, 0), architecture=architecture) for name, number in numbers.items()}
    assert results == {ALLOWED}
    assert len(program) // 8 <= 4096  # BPF_MAXINSNS
