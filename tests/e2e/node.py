"""A second node beside the node of `gpufn up`: an agent and a runner on the same bus, with their own GPUFN_HOME."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.e2e.chaos.gateway import embedded_bus

_STOP_S = 30.0


class Node:
    """`platform_home` is the GPUFN_HOME of `gpufn up`; `environ` comes last."""

    def __init__(
        self,
        platform_home: Path,
        home: Path,
        name: str,
        *,
        roles: Sequence[str] = ("agent", "runner"),
        environ: Mapping[str, str] = {},
    ) -> None:
        self._platform_home = platform_home
        self._home = home
        self._name = name
        self._roles, self._environ = roles, environ
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str) -> None:
        variables = {
            "GPUFN_HOME": str(self._home),
            "GPUFN_NODE": self._name,
            "GPUFN_NATS_URL": embedded_bus(self._platform_home, role),
            "GPUFN_GRACE": "2",
        }
        with (self._home / f"{role}.log").open("ab") as log:
            self.processes[role] = subprocess.Popen(
                [sys.executable, "-P", "-m", f"gpufn_runtime.{role}"],
                env=os.environ | variables | dict(self._environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, role: str) -> None:
        self.processes[role].kill()
        self.processes[role].wait()

    def __enter__(self) -> Self:
        self._home.mkdir(parents=True, exist_ok=True)
        for role in self._roles:
            self.start(role)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():  # the agent ends the workers first
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
