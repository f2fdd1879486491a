"""A session with a control daemon of NVIDIA's MPS, and its clients on plain libcuda. Records every answer verbatim."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from gpu_check.machine import Gpu
from gpu_check.mps import START_TIMEOUT_S
from gpu_check.program_output import output_of
from gpufn_runtime.agent.mps.control import PROGRAM, control_environment
from measure import descendants

_CLIENT: Final = Path(__file__).with_name("mps_client.py")
_ANSWER_S: Final = 20.0  # for the daemon, and for a client
_EXIT_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.25


class ControlSession:
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
    def client(self, environ: Mapping[str, str]) -> Iterator[Client]:
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": self._gpu.uuid, **environ}
        env["CUDA_MPS_PIPE_DIRECTORY"] = self._environ["CUDA_MPS_PIPE_DIRECTORY"]
        command = [sys.executable, str(_CLIENT)]
        with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield Client(process)
            finally:
                _end(process)


class Client:
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


def nvml_processes(uuid: str) -> str:
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
def daemon_of(gpu: Gpu, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
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


def record_logs(session: ControlSession, folder: Path) -> None:
    for log in sorted((folder / "log").glob("*")):
        session.said[f"{len(session.said)}: {log.name}"] = log.read_text(errors="replace")[-8_000:]
