"""Functions that do what user code does on a bad day, and worse."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from typing import Any

from gpufn import gpu_function


@gpu_function
def good(x: int = 1) -> int:
    return x + 1


@gpu_function
def segfaults() -> None:
    ctypes.string_at(0)


@gpu_function
def leaves() -> None:
    os._exit(7)


@gpu_function(memory="256Mi")
def eats_memory() -> int:
    hoard = []
    while True:
        hoard.append(b"x" * (16 << 20))


@gpu_function(timeout=1)
def blocks() -> None:
    time.sleep(3600)


@gpu_function
def prints_a_flood() -> str:
    line = "x" * 1023
    for _ in range(1 << 18):
        print(line)
    return "printed"


@gpu_function
def forks() -> int:
    child = os.fork()
    if child == 0:
        time.sleep(0.2)
        os._exit(0)
    return os.waitpid(child, 0)[1]


@gpu_function(timeout=60)
def holds_the_gil(seconds: float, runs: str) -> str:
    """usleep through PyDLL keeps the GIL, so no other thread of this process runs."""
    with open(runs, "a") as file:
        file.write("once\n")
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "held"


@gpu_function
def reads_its_environment() -> dict[str, str]:
    return dict(os.environ)


@gpu_function
def reads_the_environment_of(pids: list[int]) -> list[str]:
    """Return the environments of the parent and of `pids`; "" where reading is denied."""
    found = []
    for pid in (os.getppid(), *pids):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                found.append(file.read().replace(b"\0", b"\n").decode())
        except OSError:
            found.append("")
    return found


@gpu_function
def writes_garbage_to_its_socket() -> str:
    for descriptor in range(3, 64):
        try:
            peer = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        if peer.family == socket.AF_UNIX and peer.type == socket.SOCK_STREAM:
            peer.sendall(b"\xff" * 4096)
    time.sleep(5)
    return "still here"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle")


@gpu_function
def raises_what_cannot_be_encoded() -> None:
    raise Unspeakable


@gpu_function
def returns_what_cannot_be_encoded() -> Any:
    return open(os.devnull)


@gpu_function
def returns_too_much() -> bytes:
    return b"x" * (80 << 20)


@gpu_function
def raises() -> None:
    raise ValueError("a value that is no good")
