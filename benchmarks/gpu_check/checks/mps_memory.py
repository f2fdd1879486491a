"""Memory under MPS, as the driver reports it: of each client, of the server, and what a client with a limit sees.

Placement counts neither the server's memory nor a client's context. These figures show how large they are, and whether
NVML reports the memory of a client by its pid or all of it as the server's.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from gpu_check.findings import Finding, Table
from gpu_check.machine import Gpu, Machine
from gpu_check.mps import START_TIMEOUT_S
from gpu_check.mps_session import ControlSession, daemon_of, nvml_processes, record_logs
from gpu_check.program_output import output_of
from gpufn_runtime.agent.mps.control import PROGRAM

_LIMIT_BYTES: Final = 4 << 30
_HELD_BYTES: Final = (1 << 30, 2 << 30)  # by two clients


def mps_memory(machine: Machine) -> Finding:
    gpu = machine.real_gpu()
    machine.need_program(PROGRAM)
    with tempfile.TemporaryDirectory(prefix="mps-") as name:  # short: a daemon listens on unix sockets in it
        folder = Path(name)
        session = ControlSession(gpu, folder)
        try:
            return _measure(session, gpu, folder)
        finally:
            print(json.dumps(session.said, indent=1))  # in case the step does not finish


def _measure(session: ControlSession, gpu: Gpu, folder: Path) -> Finding:
    rows: list[tuple[Any, ...]] = []
    wrong: list[str] = []
    said = {"NVML before a daemon": nvml_processes(gpu.uuid)}
    with daemon_of(gpu, folder) as daemon, ExitStack() as logs:
        logs.callback(record_logs, session, folder)
        session.wait_until_it_answers(daemon)
        session.send(f"start_server -uid {os.getuid()}")
        server = session.wait_for("ACTIVE", START_TIMEOUT_S, "after start_server", daemon)
        if not server.isdigit():
            return Finding(summary="", said=session.said, wrong=["no server became ACTIVE: see the recorded answers"])
        said[f"NVML with the server {server}, without clients"] = nvml_processes(gpu.uuid)
        with ExitStack() as clients:  # they end before `quit`, which waits for connected clients
            for held_bytes in _HELD_BYTES:
                limit = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={_LIMIT_BYTES >> 20}M"}
                client = clients.enter_context(session.client(limit))
                before, held, after = client.send("memory"), client.send(f"hold {held_bytes}"), client.send("memory")
                rows.append((client.pid, held_bytes >> 20, *_mib(before), *_mib(after)))
                wrong += _problems(client.pid, before, held, after, held_bytes)
            pids = " and ".join(str(row[0]) for row in rows)
            said[f"NVML with clients {pids} that hold {' and '.join(f'{each >> 20} MiB' for each in _HELD_BYTES)}"] = (
                nvml_processes(gpu.uuid)
            )
            said["nvidia-smi with these clients"] = output_of(["nvidia-smi"])
        session.send("quit")
    return Finding(
        summary=f"{len(rows)} clients within {_LIMIT_BYTES >> 30} GiB each; NVML's answers are recorded",
        tables=[Table(("pid", "holds, MiB", "free before, MiB", "total before", "free after", "total after"), rows)],
        said={**said, **session.said},
        wrong=wrong,
    )


def _mib(memory: Any) -> tuple[Any, Any]:
    if "error" in memory:
        return memory["error"], ""
    return memory["free_bytes"] >> 20, memory["total_bytes"] >> 20


def _problems(pid: int, before: Any, held: Any, after: Any, held_bytes: int) -> list[str]:
    if failed := next((each for each in (before, held, after) if isinstance(each, dict) and "error" in each), None):
        return [f"client {pid}: {failed['error']}"]
    problems = []
    if before["free_bytes"] > _LIMIT_BYTES:
        problems.append(f"client {pid} sees {before['free_bytes']:,} bytes free, beyond its limit")
    if before["free_bytes"] - after["free_bytes"] < held_bytes:
        problems.append(f"client {pid} holds {held_bytes:,} bytes, and its free memory shrank by less")
    return problems
