"""A function that reaches the internet and nothing else, with gVisor."""

import socket

from gpufn import gpu_function


def _outcome(address: str, port: int) -> str:
    try:
        socket.create_connection((address, port), 3).close()
    except OSError as error:
        return type(error).__name__
    return ""


@gpu_function(isolation="gvisor", network="egress", idle_timeout=60)
def reach(targets: list[tuple[str, int]]) -> list[str]:
    return [_outcome(*target) for target in targets]
