"""Functions that reach the internet and nothing else."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable

from gpufn import gpu_function


def outcome(work: Callable[[], object]) -> object:
    try:
        return work()
    except OSError as error:
        return type(error).__name__


def connect(address: str, port: int) -> None:
    socket.create_connection((address, port), 3).close()


@gpu_function(idle_timeout=60, network="egress")
def reach(targets: list[tuple[str, int]]) -> list[object]:
    return [outcome(functools.partial(connect, *target)) for target in targets]


@gpu_function(idle_timeout=60, network="egress")
def resolve(name: str) -> str:
    return socket.gethostbyname(name)


@gpu_function(idle_timeout=60, network="egress")
def listen() -> str:
    """Listen in this process, and return the address that other workers may try."""
    server = socket.create_server(("", 9090))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0gpufn-test-egress")
    abstract.listen()
    threading.Thread(target=lambda: (server.accept(), abstract.accept()), daemon=True).start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("93.184.216.34", 1))
        return str(probe.getsockname()[0])


@gpu_function(idle_timeout=60, network="egress")
def abstract() -> object:
    with socket.socket(socket.AF_UNIX) as peer:
        return outcome(lambda: peer.connect("\0gpufn-test-egress"))
