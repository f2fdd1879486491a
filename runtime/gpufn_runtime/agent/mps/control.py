"""Questions to one control daemon, by NVIDIA's program `nvidia-cuda-mps-control`, which reads them from its standard
input. Each has a time-out: a daemon that hangs must not hang us."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping
from pathlib import Path

from gpufn_core.errors import PlatformError
from gpufn_runtime.agent.workers.environment import driver_environment

PROGRAM = "nvidia-cuda-mps-control"
TIMEOUT_S = 2.0


class ControlFailed(PlatformError):
    """The MPS daemon did not do as it was told."""


class ControlHung(ControlFailed):
    """The MPS daemon does not answer."""


class Control:
    """`asking` counts the questions under way: their processes are ours to reap."""

    asking = 0

    def __init__(self, pipe: Path, timeout_s: float = TIMEOUT_S) -> None:
        self._environment = control_environment(pipe)
        self._timeout_s = timeout_s

    async def servers(self) -> list[int]:
        return _numbers(await self.ask("get_server_list"))

    async def status(self, server: int) -> str:
        """INITIALIZING, ACTIVE or FAULT."""
        return (await self.ask(f"get_server_status {server}")).strip().upper()

    async def clients(self, server: int) -> list[int]:
        return _numbers(await self.ask(f"get_client_list {server}"))

    async def start_server(self, uid: int) -> None:
        """Without one, the first client waits for it to start."""
        await self.ask(f"start_server -uid {uid}")

    async def terminate_client(self, server: int, client: int) -> None:
        await self.ask(f"terminate_client {server} {client}")

    async def quit(self) -> None:
        await self.ask("quit")

    async def ask(self, question: str) -> str:
        """Raises ControlHung and ControlFailed."""
        return await run([PROGRAM], self._environment, question, self._timeout_s)


def control_environment(pipe: Path) -> dict[str, str]:
    return {**driver_environment(), "CUDA_MPS_PIPE_DIRECTORY": str(pipe)}


async def run(command: list[str], environment: Mapping[str, str], said: str = "", timeout_s: float = TIMEOUT_S) -> str:
    """What a program answers to `said`. Raises ControlHung and ControlFailed."""
    Control.asking += 1
    try:
        return await asyncio.to_thread(_run, command, environment, said, timeout_s)
    finally:
        Control.asking -= 1


def _run(command: list[str], environment: Mapping[str, str], said: str, timeout_s: float) -> str:
    what = f"{command[0]}: {said or ' '.join(command[1:])}"
    try:
        ended = subprocess.run(  # noqa: S603
            command, env=environment, input=said + "\n", capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ControlHung(f"{what}: no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise ControlFailed(f"{command[0]} cannot be run: {error.strerror}") from error
    if ended.returncode != 0:
        why = (ended.stderr or ended.stdout).strip().splitlines()
        raise ControlFailed(f"{what}: {why[-1] if why else f'exit code {ended.returncode}'}")
    return ended.stdout


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdigit()]
