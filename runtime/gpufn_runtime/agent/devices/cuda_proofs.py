"""Proofs that CUDA works on each GPU, by child processes: at the agent's start and after a worker's GPU failed.

Workers on a GPU whose driver is broken would fail one after the other, with an error that only their functions see. A
proof that fails degrades the GPU with a reason instead, and is repeated until it succeeds.

The process of a successful proof stays, without a context: while any process has initialized CUDA on a GPU, others
initialize it in 9 ms instead of 97 (H100, driver 580). So it shortens each start of a GPU function.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterable, Sequence
from subprocess import Popen
from typing import Final

import msgspec

from gpufn_core.domain.devices.device import Health
from gpufn_core.protocol.launch import PROVE_CUDA, CudaProof
from gpufn_runtime.agent.devices.base import HealthCondition
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.environment import proof_environment

log = logging.getLogger(__name__)

_RETRY_S: Final = 30.0
_TIMEOUT_S: Final = 60.0  # the first context after a boot takes seconds on a GPU without persistence mode


class CudaProofs:
    def __init__(
        self,
        command: Sequence[str] = (sys.executable, "-m", "gpufn_runtime.worker", PROVE_CUDA),
        *,
        retry_s: float = _RETRY_S,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._command = command
        self._retry_s = retry_s
        self._timeout_s = timeout_s
        self._troubles: dict[str, HealthCondition] = {}
        self._due_at: dict[str, float] = {}  # GPUs to prove, and when, in seconds of the event loop
        self._wakeup = asyncio.Event()
        self._holders: dict[str, Popen[bytes]] = {}  # by GPU: the process of its last successful proof
        self._killed: dict[str, processes.Process] = {}  # by GPU: the last prover that was killed; it may not end

    def trouble(self, gpu: str) -> HealthCondition | None:
        return self._troubles.get(gpu)

    def request(self, gpus: Iterable[str]) -> None:
        """Prove CUDA on these GPUs soon."""
        self._due_at.update(dict.fromkeys(gpus, 0.0))
        self._wakeup.set()

    async def run(self) -> None:
        """Prove CUDA on the GPUs that are requested or have failed, until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._wakeup.clear()
                for gpu in [gpu for gpu, due_at in self._due_at.items() if due_at <= loop.time()]:
                    del self._due_at[gpu]
                    self._record(gpu, await self._try_to_prove(gpu))
                    if gpu in self._troubles:
                        self._due_at.setdefault(gpu, loop.time() + self._retry_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(min(self._due_at.values(), default=None)):
                        await self._wakeup.wait()
        finally:
            for gpu in list(self._holders):
                self._release(gpu)

    async def _try_to_prove(self, gpu: str) -> str:
        """Return why CUDA does not work on a GPU, or why no proof is possible."""
        killed = self._killed.get(gpu)
        if killed is not None and processes.is_running(killed):  # another one would hang as well
            return f"CUDA does not answer: process {killed.pid} hangs in the driver and cannot be killed"
        self._killed.pop(gpu, None)
        try:
            return await self._prove(gpu)
        except Exception as error:  # it must not end the agent
            log.exception("the proof of CUDA on %s failed", gpu)
            return f"the proof of CUDA failed: {error}"

    async def _prove(self, gpu: str) -> str:
        """Return why CUDA does not work on a GPU; empty if it works, or if the GPU is too full for a context."""
        try:
            prover = Popen(  # noqa: S603, ASYNC220  (it takes a millisecond)
                self._command,
                stdin=subprocess.PIPE,  # its end, also by the agent's death, ends the prover
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=proof_environment(gpu),
                start_new_session=True,
            )
        except OSError as error:
            return f"the proof of CUDA cannot start: {error}"
        prover.returncode = 0  # the agent reaps all children by pid: a child that hangs in the driver may never end
        assert prover.stdin is not None
        assert prover.stdout is not None
        process = None
        try:
            process = processes.identify(prover.pid)
            async with asyncio.timeout(self._timeout_s):
                output = await _read_all(prover)
            if not (trouble := msgspec.json.decode(output, type=CudaProof).trouble):
                self._release(gpu)
                self._holders[gpu] = prover
            return trouble
        except TimeoutError:
            return f"CUDA does not answer within {self._timeout_s:g} s"
        except msgspec.MsgspecError:
            printed = f", but printed {output[:80].decode(errors='replace')!r}" if output else ""
            return f"the proof of CUDA ended without a result{printed}"
        finally:
            prover.stdout.close()
            if self._holders.get(gpu) is not prover:
                prover.stdin.close()
                if process is not None:
                    self._killed[gpu] = process
                    processes.kill(process)

    def _release(self, gpu: str) -> None:
        """End the process that keeps CUDA initialized on a GPU, if there is one."""
        if (holder := self._holders.pop(gpu, None)) is not None:
            assert holder.stdin is not None
            holder.stdin.close()

    def _record(self, gpu: str, reason: str) -> None:
        before = self._troubles.pop(gpu, None)
        if reason:
            self._troubles[gpu] = HealthCondition(Health.DEGRADED, reason)
        if (before.reason if before else "") != reason:
            log.log(logging.WARNING if reason else logging.INFO, "%s: %s", gpu, reason or "CUDA works again")


async def _read_all(process: Popen[bytes]) -> bytes:
    """Read the output of a process until it closes it."""
    assert process.stdout is not None
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, process.stdout)
    try:
        return await reader.read()
    finally:
        transport.close()
