"""A step's own platform, used as its users do: `gpufn up` in a temporary folder, deploys, calls.

Exceptions raised inside carry the ends of the platform's logs as a note, because the logs are removed with the folder.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

import measure
from gpu_check.machine import CannotRun, Machine
from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.home import Home

_CALL_TIMEOUT_S = 60.0
# Some virtual machines grow their memory on demand, so the initial size is no measure. A worker gets a quarter, which
# suffices for a CUDA context and 10 GB of parked weights.
_MEMORY_GIB = 64
_LINES = 60  # shown from the end of each log


class CallFailed(RuntimeError):
    """The platform answered with an error instead of a result."""


class Platform:
    def __init__(self, server: measure.Server, client: httpx.Client) -> None:
        self._server = server
        self._client = client

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def logs(self) -> Path:
        return Home(Path(self._server.environ["GPUFN_HOME"])).logs

    def gpufn(self, *arguments: str | Path) -> str:
        """Return what the command prints. Raises RuntimeError."""
        command = [sys.executable, "-m", "gpufn", *map(str, arguments)]
        completed = subprocess.run(command, env=self._server.environ, capture_output=True, text=True, check=False)
        if completed.returncode:
            output = completed.stderr.strip() or completed.stdout.strip()
            raise RuntimeError(f"gpufn {' '.join(map(str, arguments))}: {output}")
        return completed.stdout

    def deploy(self, source: str) -> None:
        """Deploy the functions of one file."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "checked.py"
            file.write_text(source)
            self.gpufn("deploy", file, "--no-check")

    def get(self, path: str) -> Any:
        return self._client.get(path).raise_for_status().json()

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> Any:
        """Return the answer. Raises CallFailed with the platform's message."""
        try:
            answer = self._client.post(path, content=body, headers=headers)
        except httpx.TransportError as error:
            raise CallFailed(f"{path}: {error!r}") from None  # httpx's long traceback adds nothing
        if not answer.is_success:
            raise CallFailed(f"{path}: {answer.status_code} {_problem(answer)}")
        return answer.json()

    def invoke(self, function: str, **arguments: Any) -> Any:
        """Return the result. Raises CallFailed, with the output of `gpufn why` as a note."""
        body = json.dumps(arguments).encode()
        try:
            return self.post(f"/v1/functions/{function}/invoke", body, {"Content-Type": "application/json"})
        except CallFailed as error:
            with contextlib.suppress(httpx.HTTPError, LookupError):
                error.add_note(f"--- gpufn why\n{self.why(function.partition('.')[0])}")
            raise

    def timed(self, function: str, **arguments: Any) -> tuple[float, Any]:
        """Return the seconds of a call, and its result."""
        started = time.perf_counter()
        result = self.invoke(function, **arguments)
        return time.perf_counter() - started, result

    def wait_for(self, function: str, state: str, timeout_s: float = 30.0) -> None:
        """Wait until a worker of the function is in this state."""
        deadline = time.monotonic() + timeout_s
        while not self.get(f"/v1/functions/{function}")["workers"][state]:
            if time.monotonic() >= deadline:
                raise RuntimeError(f"{function} has no {state} worker after {timeout_s:.0f} s: {self.why(function)}")
            time.sleep(0.05)

    def wait_for_zero(self, function: str, timeout_s: float = 30.0) -> None:
        """Wait until the function has no workers, and a moment longer for a new template process."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not any(self.get(f"/v1/functions/{function}")["workers"].values()):
                time.sleep(1.0)
                return
            time.sleep(0.1)
        raise RuntimeError(f"{function} did not scale to zero in {timeout_s:.0f} s: {self.why(function)}")

    def why(self, function: str) -> str:
        reason: str = self.get(f"/v1/functions/{function}/why")["reason"]
        return reason


@contextlib.contextmanager
def up(machine: Machine, **environ: str) -> Iterator[Platform]:
    """Start a platform that has only the measured device."""
    with (
        measure.gpufn_up(**declared(machine), **environ) as server,
        httpx.Client(base_url=server.url, timeout=_CALL_TIMEOUT_S) as client,
    ):
        platform = Platform(server, client)
        try:
            yield platform
        except CannotRun:
            raise
        except BaseException as error:
            error.add_note(measure.log_tails(platform.logs, lines=_LINES))
            raise


def _problem(answer: httpx.Response) -> str:
    """Return the code and detail of a problem response; else the whole body."""
    if "problem+json" not in answer.headers.get("content-type", ""):
        return answer.text
    problem = answer.json()
    return f"{problem.get('code')}: {problem.get('detail')}"


def declared(machine: Machine) -> dict[str, str]:
    """Return settings that describe the machine: the measured device, if the driver would report none or several; and
    memory, if the kernel may report too little."""
    settings = memory(machine)
    if not machine.gpus:
        return settings
    if machine.pretended or len(machine.gpus) > 1:
        gpu = machine.gpu()
        device = Device(gpu.uuid, DeviceType.GPU, gpu.name, gpu.memory_bytes, compute_capability=gpu.compute_capability)
        settings["GPUFN_DEVICES"] = json.dumps(msgspec.to_builtins((device,)))
    return settings


def memory(machine: Machine) -> dict[str, str]:
    """Return the memory setting, in case the kernel reports too little memory at first."""
    if not machine.gpus or machine.pretended or machine.about.get("memory_gib", _MEMORY_GIB) >= _MEMORY_GIB:
        return {}
    return {"GPUFN_MEMORY": f"{_MEMORY_GIB}Gi"}
