"""Commands to one MPS control daemon, through NVIDIA's program `nvidia-cuda-mps-control`, which reads them from its
standard input. Each command has a timeout, so that a hanging daemon cannot block the agent."""

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
    """The MPS daemon did not execute a command."""


class ControlHung(ControlFailed):
    """The MPS daemon does not answer."""


class Control:
    """Control client of one daemon. `running` counts all running control processes: only `run` may reap them."""

    running = 0

    def __init__(self, pipe: Path, timeout_s: float = TIMEOUT_S) -> None:
        self._environment = control_environment(pipe)
        self._timeout_s = timeout_s

    async def servers(self) -> list[int]:
        return _numbers(await self.command("get_server_list"))

    async def status(self, server: int) -> str:
        """INITIALIZING, ACTIVE or FAULT."""
        return (await self.command(f"get_server_status {server}")).strip().upper()

    async def clients(self, server: int) -> list[int]:
        return _numbers(await self.command(f"get_client_list {server}"))

    async def start_server(self, uid: int) -> None:
        """Start a server. Otherwise the first client would wait until a server has started."""
        await self.command(f"start_server -uid {uid}")

    async def terminate_client(self, server: int, client: int) -> None:
        await self.command(f"terminate_client {server} {client}")

    async def quit(self) -> None:
        await self.command("quit")

    async def command(self, text: str) -> str:
        """Send a command and return the reply. Raises ControlHung and ControlFailed."""
        return await run([PROGRAM], self._environment, text, self._timeout_s)


def control_environment(pipe: Path) -> dict[str, str]:
    return {**driver_environment(), "CUDA_MPS_PIPE_DIRECTORY": str(pipe)}


async def run(command: list[str], environment: Mapping[str, str], stdin: str = "", timeout_s: float = TIMEOUT_S) -> str:
    """Run a program with `stdin` as its input and return its output. Raises ControlHung and ControlFailed."""
    Control.running += 1
    try:
        return await asyncio.to_thread(_run, command, environment, stdin, timeout_s)
    finally:
        Control.running -= 1


def _run(command: list[str], environment: Mapping[str, str], stdin: str, timeout_s: float) -> str:
    description = f"{command[0]}: {stdin or ' '.join(command[1:])}"
    try:
        result = subprocess.run(  # noqa: S603
            command, env=environment, input=stdin + "\n", capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ControlHung(f"{description}: no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise ControlFailed(f"cannot run {command[0]}: {error.strerror}") from error
    if result.returncode != 0:
        output = (result.stderr or result.stdout).strip().splitlines()
        raise ControlFailed(f"{description}: {output[-1] if output else f'exit code {result.returncode}'}")
    return result.stdout


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdigit()]
