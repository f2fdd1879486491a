"""Functions that explore the limits of their container."""

import contextlib
import itertools
import os
import signal
import socket
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from gpufn import gpu_function

_THIS_WORKER = uuid.uuid4().hex


def _write(path: str) -> str:
    try:
        with open(path, "w") as file:
            file.write("x")
    except OSError as error:
        return type(error).__name__ + " " + os.strerror(error.errno or 0)
    return "written"


@gpu_function(memory="96Mi", idle_timeout=1, scaledown_window=0.5)
def look() -> dict[str, Any]:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    reachable = []
    with contextlib.suppress(OSError), socket.create_connection(("192.0.2.1", 80), timeout=1):
        reachable.append("192.0.2.1")
    return {
        "uid": os.getuid(),
        "capabilities": {name: status[name] for name in status if name.startswith("Cap")},
        "no_new_privileges": status["NoNewPrivs"],
        "seccomp": status["Seccomp"],
        "interfaces": os.listdir("/sys/class/net"),
        "reachable": reachable,
        "mounts": sorted(line.split()[4] for line in open("/proc/self/mountinfo") if " /gpufn" in line),
        "shm": _options("/dev/shm"),
        "write": {
            path: _write(path) for path in ("/x", "/gpufn/worker/x", "/gpufn/lib/x", "/gpufn/worker/config.json")
        },
        "write_tmp": _write("/tmp/x"),
        "pids": _cgroup("pids", "pids.max"),
        "memory": _cgroup("memory", "memory.limit_in_bytes", "memory.max"),
        "environ": sorted(os.environ),
        "first": Path("/proc/1/cmdline").read_text().split("\0")[:4],
    }


def _options(target: str) -> list[str]:
    """Return the mount options that restrict its content."""
    mounts = map(str.split, Path("/proc/mounts").read_text().splitlines())
    options = next(mount[3] for mount in mounts if mount[1] == target)
    return sorted({"nosuid", "nodev", "noexec"} & set(options.split(",")))


def _cgroup(controller: str, *names: str) -> str:
    for folder in (f"/sys/fs/cgroup/{controller}", "/sys/fs/cgroup"):
        for name in names:
            with contextlib.suppress(OSError):
                return Path(f"{folder}/{name}").read_text().strip()
    return "?"


@gpu_function(egress=True, idle_timeout=1, scaledown_window=0.5)
def outward() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


@gpu_function(idle_timeout=1, scaledown_window=0.5)
def who() -> str:
    return _THIS_WORKER


@gpu_function(idle_timeout=1, scaledown_window=0.5)
def echo(body: bytes) -> bytes:
    return body


@gpu_function(memory="96Mi", idle_timeout=1, scaledown_window=0.5)
def eat() -> int:
    return len(bytearray(os.urandom(1)) * (512 << 20))


@gpu_function(idle_timeout=1, scaledown_window=0.5)
def end(how: str) -> None:
    print("last words", file=sys.stderr, flush=True)
    if how == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exit":
        os._exit(7)
    if how == "orphan":
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        os._exit(0)


@gpu_function(idle_timeout=600)
def stays() -> str:
    return _THIS_WORKER  # a later container may get the inodes of an earlier one


@gpu_function(idle_timeout=600, timeout=60)
def long() -> str:
    print("under way", file=sys.stderr, flush=True)
    time.sleep(50)
    return "done"


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in itertools.repeat(None, 100_000):  # it allocates nothing, which tracemalloc would record
            pass


@gpu_function(idle_timeout=1, scaledown_window=0.5, timeout=60)
def busy() -> None:
    spin(50)
