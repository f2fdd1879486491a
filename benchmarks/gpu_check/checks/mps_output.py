"""Verbatim behavior of NVIDIA's MPS: the answer to each command that gpufn sends to a control daemon, and clients on
plain libcuda that inspect, are terminated, and fault. No platform, and no parsing of the answers."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from gpu_check.findings import Finding, Table
from gpu_check.machine import Gpu, Machine
from gpu_check.mps import START_TIMEOUT_S
from gpu_check.program_output import output_of
from gpufn_runtime.agent.mps.control import PROGRAM, control_environment
from measure import descendants

_CLIENT: Final = Path(__file__).parents[1] / "mps_client.py"
_ANSWER_S: Final = 20.0  # for the daemon, and for a client
_EXIT_S: Final = 5.0
_RECOVERY_S: Final = 15.0
_LOOK_EVERY_S: Final = 0.25
_PERCENT: Final = (1, 10, 25, 33, 50, 75, 100)
_LIMIT_BYTES: Final = 2 << 30
_LIMITS: Final = ("0=2048M", "0=2G", "{uuid}=2G")


class _ControlSession:
    """A session with the control daemon. `said` keeps all commands and answers, in order."""

    def __init__(self, gpu: Gpu, folder: Path) -> None:
        self._gpu = gpu
        self._environ = control_environment(folder / "pipe")
        self.said: dict[str, str] = {}

    def send(self, command: str, when: str = "") -> str:
        """Send a command, record its answer, and return the answer without the exit line."""
        answer = output_of([PROGRAM], command, environ=self._environ, timeout_s=_ANSWER_S)
        self.said[f"{len(self.said)}: {command}{when and f', {when}'}"] = answer
        return answer.partition("[exit code 0")[0].strip()

    def wait_until_it_answers(self, daemon: subprocess.Popen[bytes]) -> None:
        """Wait until the daemon answers or has ended; the recorded output shows which."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while daemon.poll() is None and time.monotonic() < deadline:
            if "[exit code 0" in output_of([PROGRAM], "get_server_list", environ=self._environ):
                return
            time.sleep(_LOOK_EVERY_S)

    def wait_for(self, status: str, timeout_s: float, when: str, daemon: subprocess.Popen[bytes]) -> str:
        """Wait for a server status and return the server's pid, or "". The statuses are recorded with their times."""
        started, seen, server = time.monotonic(), list[str](), ""
        while time.monotonic() - started < timeout_s:
            listed = output_of([PROGRAM], "get_server_list", environ=self._environ)
            server = listed.partition("[exit")[0].split("\n")[0]
            answer = "no server\n["
            if server:
                answer = output_of([PROGRAM], f"get_server_status {server}", environ=self._environ)
            current = answer.partition("[exit")[0].strip()
            if not seen or not seen[-1].endswith(f" {current}"):
                seen.append(f"{time.monotonic() - started:.2f} s {current}")
            if current == status or daemon.poll() is not None:
                break
            time.sleep(_LOOK_EVERY_S)
        self.said[f"{len(self.said)}: the server's status {when}"] = "\n".join(seen)
        return server if seen and seen[-1].endswith(f" {status}") else ""

    @contextmanager
    def client(self, environ: Mapping[str, str]) -> Iterator[_Client]:
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": self._gpu.uuid, **environ}
        env["CUDA_MPS_PIPE_DIRECTORY"] = self._environ["CUDA_MPS_PIPE_DIRECTORY"]
        command = [sys.executable, str(_CLIENT)]
        with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield _Client(process)
            finally:
                _end(process)


class _Client:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def send(self, command: str) -> Any:
        """Send a command and return the answer, or how the client ended. Only the step's limit stops a hang."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(command, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return {"error": f"it had ended with {self._process.wait()}"}
        for line in self._process.stdout:
            with suppress(ValueError):  # a library may have printed something, too
                return json.loads(line)
        return {"error": f"it ended with {self._process.wait()}"}


def _end(process: subprocess.Popen[str]) -> None:
    """End a client, by itself if possible: a killed client is a different case from the ones under test."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def mps_output(machine: Machine) -> Finding:
    gpu = machine.real_gpu()
    machine.need_program(PROGRAM)
    with tempfile.TemporaryDirectory(prefix="mps-") as name:  # short: a daemon listens on unix sockets in it
        folder = Path(name)
        session = _ControlSession(gpu, folder)
        try:
            return _run_session(session, gpu, folder)
        finally:
            print(json.dumps(session.said, indent=1))  # in case the step does not finish


def _run_session(session: _ControlSession, gpu: Gpu, folder: Path) -> Finding:
    rows: list[tuple[Any, ...]] = []
    wrong: list[str] = []
    with _daemon(gpu, folder) as daemon, ExitStack() as logs:
        logs.callback(_record_logs, session, folder)
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


def _seen(session: _ControlSession, environ: dict[str, str], wrong: list[str]) -> tuple[Any, ...]:
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


def _two_clients(session: _ControlSession, uuid: str, server: str, daemon: subprocess.Popen[bytes]) -> list[str]:
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
        session.said[f"{len(session.said)}: NVML, with two clients"] = _nvml_processes(uuid)
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


def _nvml_processes(uuid: str) -> str:
    """Return which NVML list has the clients, and whether it has their memory."""
    nvml: Any = importlib.import_module("pynvml")
    lines = []
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
            processes = [(each.pid, each.usedGpuMemory) for each in getattr(nvml, name)(handle)]
            lines.append(f"{name}: {processes}")
        used = [(each.pid, each.smUtil) for each in nvml.nvmlDeviceGetProcessUtilization(handle, 0)]
        lines.append(f"nvmlDeviceGetProcessUtilization: {used}")
    except Exception as error:
        lines.append(str(error))
    return "\n".join(lines)


@contextmanager
def _daemon(gpu: Gpu, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    for name in ("pipe", "log"):
        (folder / name).mkdir()
    environ = control_environment(folder / "pipe")
    environ |= {"CUDA_MPS_LOG_DIRECTORY": str(folder / "log"), "CUDA_VISIBLE_DEVICES": gpu.uuid}
    process = subprocess.Popen([PROGRAM, "-f"], env=environ, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        pids = descendants(process.pid)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)  # it received `quit`, unless something failed
        for pid in pids:  # its server too
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _record_logs(session: _ControlSession, folder: Path) -> None:
    for log in sorted((folder / "log").glob("*")):
        session.said[f"{len(session.said)}: {log.name}"] = log.read_text(errors="replace")[-8_000:]
