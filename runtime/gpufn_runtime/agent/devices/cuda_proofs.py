"""Proofs that CUDA works on each GPU, by child processes: at the agent's start and after a worker's GPU failed.

Workers on a GPU whose driver is broken would fail one after the other, with an error that only their functions see. A
proof that fails degrades the GPU with a reason instead, and is repeated until it succeeds.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from gpufn_core.domain.device import Health
from gpufn_core.protocol.launch import PROVE_CUDA, CudaProof
from gpufn_runtime.agent.devices.base import HealthCondition
from gpufn_runtime.agent.mps import control
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
        self._requested: dict[str, None] = {}
        self._wakeup = asyncio.Event()

    def trouble(self, gpu: str) -> HealthCondition | None:
        return self._troubles.get(gpu)

    def request(self, gpus: Iterable[str]) -> None:
        """Prove CUDA on these GPUs soon. Without any, the wait for the next retry continues."""
        if wanted := dict.fromkeys(gpus):
            self._requested.update(wanted)
            self._wakeup.set()

    async def run(self, gpus: Iterable[str]) -> None:
        """Prove CUDA on `gpus`, then on those that are requested or have failed, until cancelled."""
        self.request(gpus)
        while True:
            requested, self._requested = self._requested, {}
            self._wakeup.clear()
            for gpu in requested:
                self._record(gpu, await self._prove(gpu))
            try:
                async with asyncio.timeout(self._retry_s if self._troubles else None):
                    await self._wakeup.wait()
            except TimeoutError:
                self.request(self._troubles)

    async def _prove(self, gpu: str) -> str:
        """Return why CUDA does not work on a GPU; empty if it works, or if the GPU is too full for a context."""
        try:
            output = await control.run(list(self._command), proof_environment(gpu), timeout_s=self._timeout_s)
            return msgspec.json.decode(output, type=CudaProof).trouble
        except control.ControlHung:
            return f"CUDA does not answer within {self._timeout_s:g} s"
        except control.ControlFailed as error:
            return f"the proof of CUDA failed: {error}"
        except msgspec.MsgspecError:
            return f"the proof of CUDA printed {output[:80]!r}"

    def _record(self, gpu: str, reason: str) -> None:
        before = self._troubles.pop(gpu, None)
        if reason:
            self._troubles[gpu] = HealthCondition(Health.DEGRADED, reason)
        if (before.reason if before else "") != reason:
            log.log(logging.WARNING if reason else logging.INFO, "%s: %s", gpu, reason or "CUDA works again")
