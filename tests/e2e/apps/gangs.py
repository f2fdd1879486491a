"""Functions on two nodes. Their ranks exchange values over a plain socket, with the variables of torch.distributed."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import gpufn
from gpufn import Retry, gpu_function

RANK = int(os.environ.get("RANK", "0"))


def exchange(value: int) -> int:
    """Return the sum of both ranks' values."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if RANK == 0:
        with socket.create_server(address) as server:
            peer, _ = server.accept()
    else:
        while True:
            try:
                peer = socket.create_connection(address)
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
    with peer:
        peer.sendall(b"%d\n" % value)
        return value + int(peer.makefile().readline())


@gpu_function(nodes=2, max_workers=1, idle_timeout=2)
def total(value: int) -> dict[str, str | int]:
    print("value", value)
    return {"total": exchange(value * (RANK + 1)), "world": os.environ["WORLD_SIZE"], "rank": os.environ["RANK"]}


@gpu_function(nodes=2, max_workers=1, idle_timeout=60, retries=Retry(3, delay_s=0.05))
def train(folder: str, steps: int) -> list[int]:
    """Return the steps at which attempts began. In the first attempt, rank 1 hangs at step 2."""
    ctx = gpufn.current()
    restored: tuple[list[int], int] = ctx.restored or ([], 0)
    began, step = restored
    began.append(step)
    while step < steps:
        if step == 2 and ctx.attempt == 1 and RANK == 1:
            Path(folder, "worker").write_text(Path(os.environ["TMPDIR"]).parent.name)
            time.sleep(600)
        exchange(step)
        step += 1
        ctx.checkpoint((began, step))
    return began


@gpu_function(nodes=2, max_workers=1, idle_timeout=2)
def patient(folder: str) -> int:
    """Wait until the file `go` exists."""
    Path(folder, str(RANK)).touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return exchange(1)


@gpu_function(nodes=2, max_workers=1, idle_timeout=1)
def raises(value: int) -> int:
    if RANK == 1:
        raise ValueError(f"rank 1 got {value}")
    return exchange(value)


@gpu_function(nodes=9)
def huge() -> None:
    pass


@gpu_function(max_workers=1)
def single() -> str:
    return "served"
