"""A platform of a step's own, as its users see it: `gpufn up` in a temporary folder, deploys, calls.

What goes wrong inside carries the ends of the platform's logs as a note, for they are gone with the folder.
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
from gpufn_core.domain.device import Device, DeviceType
from gpufn_core.home import Home

_CALL_TIMEOUT_S = 60.0
# Some virtual machines are given memory as they use it: what they have at first is no measure. A worker gets a quarter,
# which takes a CUDA context and 10 GB that are parked.
_MEMORY_GIB = 64
_LINES = 60  # of each log, at its end
_NOT_BUILT = "does not have"  # how gpufn refuses an option that it knows and has not built


class CallFailed(RuntimeError):
    """The platform's answer was not a result."""


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
        """What the command prints. CannotRun when this release has not built what it asks for; else RuntimeError."""
        command = [sys.executable, "-m", "gpufn", *map(str, arguments)]
        ended = subprocess.run(command, env=self._server.environ, capture_output=True, text=True, check=False)
        if ended.returncode:
            said = ended.stderr.strip() or ended.stdout.strip()
            if _NOT_BUILT in said:
                raise CannotRun(said.splitlines()[-1])
            raise RuntimeError(f"gpufn {' '.join(map(str, arguments))}: {said}")
        return ended.stdout

    def deploy(self, source: str) -> None:
        """The functions of one file."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "checked.py"
            file.write_text(source)
            self.gpufn("deploy", file, "--no-check")

    def get(self, path: str) -> Any:
        return self._client.get(path).raise_for_status().json()

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> Any:
        """The answer. Raises CallFailed with what the platform says."""
        try:
            answer = self._client.post(path, content=body, headers=headers)
        except httpx.TransportError as error:
            raise CallFailed(f"{path}: {error!r}") from None  # forty lines of httpx say no more
        if not answer.is_success:
            raise CallFailed(f"{path}: {answer.status_code} {_problem(answer)}")
        return answer.json()

    def invoke(self, function: str, **arguments: Any) -> Any:
        """The result. Raises CallFailed, of a call that waits for a worker with what it waits for."""
        body = json.dumps(arguments).encode()
        try:
            return self.post(f"/v1/functions/{function}/invoke", body, {"Content-Type": "application/json"})
        except CallFailed as error:
            with contextlib.suppress(httpx.HTTPError, LookupError):
                error.add_note(f"--- gpufn why\n{self.why(function.partition('.')[0])}")
            raise

    def timed(self, function: str, **arguments: Any) -> tuple[float, Any]:
        """Seconds of a call, and its result."""
        began = time.perf_counter()
        result = self.invoke(function, **arguments)
        return time.perf_counter() - began, result

    def wait_for(self, function: str, state: str, timeout_s: float = 30.0) -> None:
        """Until a worker of it is in this state."""
        give_up = time.monotonic() + timeout_s
        while not self.get(f"/v1/functions/{function}")["workers"][state]:
            if time.monotonic() >= give_up:
                raise RuntimeError(f"{function} has no {state} worker after {timeout_s:.0f} s: {self.why(function)}")
            time.sleep(0.05)

    def wait_for_zero(self, function: str, timeout_s: float = 30.0) -> None:
        """Until no worker of it is left, and a moment more, for the standby is made again meanwhile."""
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
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
    """A platform with the device that is measured and no other."""
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
    """Its code and its detail, of what is one; else all of it."""
    if "problem+json" not in answer.headers.get("content-type", ""):
        return answer.text
    problem = answer.json()
    return f"{problem.get('code')}: {problem.get('detail')}"


def declared(machine: Machine) -> dict[str, str]:
    """What the platform is told of the machine: the device that is measured, where the driver would tell of none, or of
    several; and memory, where the kernel may tell of too little."""
    told = memory(machine)
    if not machine.gpus:
        return told
    if machine.pretended or len(machine.gpus) > 1:
        gpu = machine.gpu()
        device = Device(gpu.uuid, DeviceType.GPU, gpu.name, gpu.memory_bytes, compute_capability=gpu.compute_capability)
        told["GPUFN_DEVICES"] = json.dumps(msgspec.to_builtins((device,)))
    return told


def memory(machine: Machine) -> dict[str, str]:
    """What a platform is told of the host's memory, in place of the little that its kernel may tell of at first."""
    if not machine.gpus or machine.pretended or machine.about.get("memory_gib", _MEMORY_GIB) >= _MEMORY_GIB:
        return {}
    return {"GPUFN_MEMORY": f"{_MEMORY_GIB}Gi"}
