"""Functions that run what an attacker would, in a sandbox and in none, and a victim."""

from __future__ import annotations

import ctypes
import os
import resource  # noqa: F401  (attacks use it)
import socket
import subprocess
from pathlib import Path

from gpufn import gpu_function

LIBC = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, CLONE_NEWUSER, KEYCTL = 16, 0x10000000, {"x86_64": 250, "aarch64": 219}[os.uname().machine]


def call(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def connect(family: int, address: str | tuple[str, int]) -> bool:
    with socket.socket(family) as peer:
        peer.settimeout(5)
        peer.connect(address)
    return True


def ptrace(pid: int) -> int:
    return call(LIBC.ptrace(PTRACE_ATTACH, pid, 0, 0))


def new_user_namespace() -> int:
    return call(LIBC.unshare(CLONE_NEWUSER))


def read_keyring() -> int:
    return call(LIBC.syscall(ctypes.c_long(KEYCTL), ctypes.c_long(0), ctypes.c_long(-3), ctypes.c_long(0)))


def attach(segment: int) -> bool:
    """Attach System V memory."""
    LIBC.shmat.restype = ctypes.c_ssize_t
    return call(LIBC.shmat(segment, None, 0)) != 0


def outcome_of(*command: str) -> int:
    return subprocess.run(command, check=False).returncode


def status() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def attempt(code: str) -> object:
    """The outcome of an expression: its value, or the name of the error."""
    try:
        return eval(code)
    except OSError as error:
        return type(error).__name__ if type(error) is not OSError else f"OSError {error.errno}"


@gpu_function(idle_timeout=60)
def attacker(code: str) -> object:
    return attempt(code)


@gpu_function(idle_timeout=60, isolation="process")
def unconfined(code: str) -> object:
    return attempt(code)


@gpu_function(idle_timeout=60)
def victim() -> int:
    return os.getpid()
