"""What NVIDIA's MPS really says and does: each question that gpufn asks of a control daemon, answered word by word, and
clients of libcuda alone that look, are terminated, and fault. No platform, and nothing that understands the answers."""

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
from gpu_check.words import heard
from gpufn_runtime.agent.mps.control import PROGRAM, control_environment
from measure import descendants

_CLIENT: Final = Path(__file__).parents[1] / "mps_client.py"
_ANSWER_S: Final = 20.0  # of the daemon, and of a client
_EXIT_S: Final = 5.0
_RECOVERY_S: Final = 15.0
_LOOK_EVERY_S: Final = 0.25
_PERCENT: Final = (1, 10, 25, 33, 50, 75, 100)
_LIMIT_BYTES: Final = 2 << 30
_LIMITS: Final = ("0=2048M", "0=2G", "{uuid}=2G")


class _Talk:
    """With the daemon whose folder of pipes is `pipe`. `said` keeps all of it, in its order."""

    def __init__(self, gpu: Gpu, folder: Path) -> None:
        self._gpu = gpu
        self._environ = control_environment(folder / "pipe")
        self.said: dict[str, str] = {}

    def ask(self, question: str, when: str = "") -> str:
        """The first line of its answer is returned, all of it is kept."""
        answer = heard([PROGRAM], question, environ=self._environ, timeout_s=_ANSWER_S)
        self.said[f"{len(self.said)}: {question}{when and f', {when}'}"] = answer
        return answer.partition("[exit code 0")[0].strip()

    def wait_until_it_answers(self, daemon: subprocess.Popen[bytes]) -> None:
        """Or has ended; what it says then tells."""
        give_up = time.monotonic() + START_TIMEOUT_S
        while daemon.poll() is None and time.monotonic() < give_up:
            if "[exit code 0" in heard([PROGRAM], "get_server_list", environ=self._environ):
                return
            time.sleep(_LOOK_EVERY_S)

    def wait_for(self, status: str, timeout_s: float, when: str, daemon: subprocess.Popen[bytes]) -> str:
        """The server's pid, or nothing; the statuses that it had are kept, with the time."""
        began, seen, server = time.monotonic(), list[str](), ""
        while time.monotonic() - began < timeout_s:
            server = heard([PROGRAM], "get_server_list", environ=self._environ).partition("[exit")[0].split("\n")[0]
            found = heard([PROGRAM], f"get_server_status {server}", environ=self._environ) if server else "no server\n["
            told = found.partition("[exit")[0].strip()
            if not seen or not seen[-1].endswith(f" {told}"):
                seen.append(f"{time.monotonic() - began:.2f} s {told}")
            if told == status or daemon.poll() is not None:
                break
            time.sleep(_LOOK_EVERY_S)
        self.said[f"{len(self.said)}: the server's status {when}"] = "\n".join(seen)
        return server if seen and seen[-1].endswith(f" {status}") else ""

    @contextmanager
    def client(self, environ: Mapping[str, str]) -> Iterator[_Client]:
        told = {**os.environ, "CUDA_VISIBLE_DEVICES": self._gpu.uuid, **environ}
        told["CUDA_MPS_PIPE_DIRECTORY"] = self._environ["CUDA_MPS_PIPE_DIRECTORY"]
        command = [sys.executable, str(_CLIENT)]
        with subprocess.Popen(command, env=told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield _Client(process)
            finally:
                _end(process)


class _Client:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def tell(self, words: str) -> Any:
        """Its answer; how it ended, where it did. A step's limit is what one that hangs has."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(words, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return {"error": f"it has ended with {self._process.wait()}"}
        for line in self._process.stdout:
            with suppress(ValueError):  # a library may have said something, too
                return json.loads(line)
        return {"error": f"it ended with {self._process.wait()}"}


def _end(process: subprocess.Popen[str]) -> None:
    """By itself, if it can: a client that is killed is another trial than those that are meant."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def mps_words(machine: Machine) -> Finding:
    gpu = machine.real_gpu()
    machine.need_program(PROGRAM)
    with tempfile.TemporaryDirectory(prefix="mps-") as name:  # short: a daemon listens on unix sockets in it
        folder = Path(name)
        talk = _Talk(gpu, folder)
        try:
            return _talked(talk, gpu, folder)
        finally:
            print(json.dumps(talk.said, indent=1))  # where the step does not get to its end


def _talked(talk: _Talk, gpu: Gpu, folder: Path) -> Finding:
    rows: list[tuple[Any, ...]] = []
    wrong: list[str] = []
    with _daemon(gpu, folder) as daemon, ExitStack() as logs:
        logs.callback(_keep_logs, talk, folder)
        talk.wait_until_it_answers(daemon)
        for question in ("get_server_list", "get_default_active_thread_percentage", f"start_server -uid {os.getuid()}"):
            talk.ask(question, "before there is a server")
        server = talk.wait_for("ACTIVE", START_TIMEOUT_S, "from start_server on", daemon)
        if not server.isdigit():
            return Finding(summary="", said=talk.said, wrong=["no server got ACTIVE: see what was said"])
        for limit in _LIMITS:
            rows.append(_seen(talk, {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": limit.format(uuid=gpu.uuid)}, wrong))
        for percent in _PERCENT:
            rows.append(_seen(talk, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}, wrong))
        wrong += _two_clients(talk, gpu.uuid, server, daemon)
        talk.ask("quit")
    return Finding(
        summary=f"MPS answers, {len(rows)} kinds of client joined, {len(talk.said)} answers are kept",
        tables=[Table(("a client's", "is one", "multiprocessors", "free, MiB", "2 GiB and a bit"), rows)],
        said=talk.said,
        wrong=wrong,
    )


def _seen(talk: _Talk, environ: dict[str, str], wrong: list[str]) -> tuple[Any, ...]:
    (what,) = (f"{name.removeprefix('CUDA_MPS_')} {value}" for name, value in environ.items())
    with talk.client(environ) as client:
        seen = client.tell("look")
        fits = client.tell(f"fits {_LIMIT_BYTES + (1 << 20)}")
    if "error" in seen:
        wrong.append(f"{what}: {seen['error']}")
        return what, seen["error"], "", "", ""
    if not seen["is_client"]:
        wrong.append(f"{what}: it is no client")
    if "MEM_LIMIT" in what and (seen["free_bytes"] > _LIMIT_BYTES or fits is not False):
        wrong.append(f"{what}: {seen['free_bytes']:,} bytes are free, and more than the limit: {fits}")
    return what, seen["is_client"], seen["multiprocessors"], seen["free_bytes"] >> 20, fits


def _two_clients(talk: _Talk, uuid: str, server: str, daemon: subprocess.Popen[bytes]) -> list[str]:
    """One is terminated beside another, then one faults."""
    wrong = []
    with talk.client({}) as goes, talk.client({}) as stays:
        for each in (goes, stays):
            each.tell("look")
        listed = talk.ask(f"get_client_list {server}", f"with clients {goes.pid} and {stays.pid}")
        wrong += [f"client {each.pid} is not listed" for each in (goes, stays) if str(each.pid) not in listed.split()]
        talk.ask("ps")
        talk.said[f"{len(talk.said)}: nvidia-smi, with two clients"] = heard(["nvidia-smi"])
        talk.said[f"{len(talk.said)}: NVML, with two clients"] = _told_by_nvml(uuid)
        talk.ask(f"terminate_client {server} {goes.pid}")
        told = {"the one that was terminated": goes.tell("check"), "the other one": stays.tell("check")}
        talk.said[f"{len(talk.said)}: afterwards"] = json.dumps(told)
        talk.ask(f"get_server_status {server}")
    with talk.client({}) as faulty, talk.client({}) as stays:
        for each in (faulty, stays):
            each.tell("look")
        told = {"the one that faults": faulty.tell("fault"), "the other one": stays.tell("check")}
        talk.said[f"{len(talk.said)}: a fault"] = json.dumps(told)
        talk.ask(f"get_server_status {server}", "after a fault, with both clients")
        talk.ask(f"get_client_list {server}", "after a fault")
    if not talk.wait_for("ACTIVE", _RECOVERY_S, "after a fault, from the end of both clients on", daemon):
        wrong.append(f"the server was not ACTIVE again {_RECOVERY_S:.0f} s after a fault")
    with talk.client({}) as client:
        talk.said[f"{len(talk.said)}: a client after the fault"] = json.dumps(client.tell("look"))
    return wrong


def _told_by_nvml(uuid: str) -> str:
    """Which list a client is in, and whether its memory is told there."""
    nvml: Any = importlib.import_module("pynvml")
    lines = []
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
            found = [(each.pid, each.usedGpuMemory) for each in getattr(nvml, name)(handle)]
            lines.append(f"{name}: {found}")
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
        below = descendants(process.pid)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)  # it was told to quit, unless something broke
        for pid in below:  # its server as well
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _keep_logs(talk: _Talk, folder: Path) -> None:
    for log in sorted((folder / "log").glob("*")):
        talk.said[f"{len(talk.said)}: {log.name}"] = log.read_text(errors="replace")[-8_000:]
