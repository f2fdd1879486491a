"""Verbatim behavior of NVIDIA's MPS: the answer to each command that gpufn sends to a control daemon, and clients on
plain libcuda that inspect, are terminated, and fault. No platform, and no parsing of the answers."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from typing import Any, Final

from gpu_check.findings import Finding, Table
from gpu_check.machine import Gpu, Machine
from gpu_check.mps import START_TIMEOUT_S
from gpu_check.mps_session import ControlSession, daemon_of, nvml_processes, record_logs
from gpu_check.program_output import output_of
from gpufn_runtime.agent.mps.control import PROGRAM

_RECOVERY_S: Final = 15.0
_LOOK_EVERY_S: Final = 0.25
_PERCENT: Final = (1, 10, 25, 33, 50, 75, 100)
_LIMIT_BYTES: Final = 2 << 30
_LIMITS: Final = ("0=2048M", "0=2G", "{uuid}=2G")


def mps_output(machine: Machine) -> Finding:
    gpu = machine.real_gpu()
    machine.need_program(PROGRAM)
    with tempfile.TemporaryDirectory(prefix="mps-") as name:  # short: a daemon listens on unix sockets in it
        folder = Path(name)
        session = ControlSession(gpu, folder)
        try:
            return _run_session(session, gpu, folder)
        finally:
            print(json.dumps(session.said, indent=1))  # in case the step does not finish


def _run_session(session: ControlSession, gpu: Gpu, folder: Path) -> Finding:
    rows: list[tuple[Any, ...]] = []
    wrong: list[str] = []
    with daemon_of(gpu, folder) as daemon, ExitStack() as logs:
        logs.callback(record_logs, session, folder)
        session.wait_until_it_answers(daemon)
        for command in ("get_server_list", "get_default_active_thread_percentage", f"start_server -uid {os.getuid()}"):
            session.send(command, "before there is a server")
        server = session.wait_for("ACTIVE", START_TIMEOUT_S, "after start_server", daemon)
        if not server.isdigit():
            return Finding(summary="", said=session.said, wrong=["no server became ACTIVE: see the recorded answers"])
        for limit in _LIMITS:
            rows.append(_seen(session, {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": limit.format(uuid=gpu.uuid)}, wrong))
        for percent in _PERCENT:
            rows.append(_seen(session, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}, wrong))
        wrong += _two_clients(session, gpu.uuid, server, daemon)
        session.send("quit")
    return Finding(
        summary=f"MPS answers, {len(rows)} kinds of client connected, {len(session.said)} answers recorded",
        tables=[Table(("setting", "is a client", "multiprocessors", "free, MiB", "2 GiB and 1 MiB fit"), rows)],
        said=session.said,
        wrong=wrong,
    )


def _seen(session: ControlSession, environ: dict[str, str], wrong: list[str]) -> tuple[Any, ...]:
    (setting,) = (f"{name.removeprefix('CUDA_MPS_')} {value}" for name, value in environ.items())
    with session.client(environ) as client:
        seen = client.send("look")
        fits = client.send(f"fits {_LIMIT_BYTES + (1 << 20)}")
    if "error" in seen:
        wrong.append(f"{setting}: {seen['error']}")
        return setting, seen["error"], "", "", ""
    if not seen["is_client"]:
        wrong.append(f"{setting}: the process is no MPS client")
    if "MEM_LIMIT" in setting and (seen["free_bytes"] > _LIMIT_BYTES or fits is not False):
        wrong.append(f"{setting}: {seen['free_bytes']:,} bytes are free, and allocating more than the limit: {fits}")
    return setting, seen["is_client"], seen["multiprocessors"], seen["free_bytes"] >> 20, fits


def _two_clients(session: ControlSession, uuid: str, server: str, daemon: Popen[bytes]) -> list[str]:
    """Terminate one of two clients, then let one of two clients fault."""
    wrong = []
    with session.client({}) as terminated, session.client({}) as other:
        for each in (terminated, other):
            each.send("look")
        listed = session.send(f"get_client_list {server}", f"with clients {terminated.pid} and {other.pid}")
        pids = listed.split()
        wrong += [f"client {each.pid} is not listed" for each in (terminated, other) if str(each.pid) not in pids]
        session.send("ps")
        session.said[f"{len(session.said)}: nvidia-smi, with two clients"] = output_of(["nvidia-smi"])
        session.said[f"{len(session.said)}: NVML, with two clients"] = nvml_processes(uuid)
        session.send(f"terminate_client {server} {terminated.pid}")
        answers = {"the terminated client": terminated.send("check"), "the other client": other.send("check")}
        session.said[f"{len(session.said)}: afterwards"] = json.dumps(answers)
        session.send(f"get_server_status {server}")
    with session.client({}) as faulty, session.client({}) as other:
        for each in (faulty, other):
            each.send("look")
        answers = {"the faulty client": faulty.send("fault"), "the other client": other.send("check")}
        session.said[f"{len(session.said)}: a fault"] = json.dumps(answers)
        session.send(f"get_server_status {server}", "after a fault, with both clients")
        session.send(f"get_client_list {server}", "after a fault")
    if not session.wait_for("ACTIVE", _RECOVERY_S, "after a fault, once both clients have ended", daemon):
        wrong.append(f"the server was not ACTIVE again {_RECOVERY_S:.0f} s after a fault")
    with session.client({}) as client:
        session.said[f"{len(session.said)}: a client after the fault"] = json.dumps(client.send("look"))
    return wrong
