"""A second gateway beside the gateway of `gpufn up`: the same bus and GPUFN_HOME, another port."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from gpufn_core.home import Home
from tests.waiting import until

START_S, STOP_S = 60.0, 30.0


def embedded_bus(home: Path, role: str = "gateway") -> str:
    """Return the address of the nats-server that `gpufn up` started for `home`, with the credentials of a role."""
    folder = Home(home).nats
    password = json.loads((folder / "credentials.json").read_bytes())[role]
    return f"nats://{role}:{password}@127.0.0.1:{(folder / 'port').read_text()}"


def name_of(home: Path, pid: int) -> str:
    """Return the name of a gateway on the bus, which is the name of its lock; "" while it holds no lock."""
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            file = descriptor.readlink()
            if file.name == "lock" and file.parent.parent == Home(home).shared_bodies:
                return file.parent.name
    return ""


class Gateway:
    """A gateway process that keeps its port over restarts. Its output goes to a file in `home`."""

    def __init__(self, home: Path, bus_url: str, environ: Mapping[str, str] = {}) -> None:
        self._home = home
        self._bus_url = bus_url
        self._environ = environ
        self._log = home / "second-gateway.log"
        self._port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start the gateway, and return when it listens. Start it again if it finds no bus, as `gpufn up` does."""
        line = until(self._started, f"the gateway starts; its log is {self._log}", within_s=START_S)
        self._port = int(json.loads(line)["url"].rpartition(":")[2])

    def _started(self) -> bytes:
        """Return the line that the gateway prints when it listens; b"" if it ended before."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gpufn_gateway"],
                env=os.environ
                | {"GPUFN_HOME": str(self._home), "GPUFN_NATS_URL": self._bus_url, "GPUFN_PORT": str(self._port)}
                | dict(self._environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self._wait(STOP_S)
        return line

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self._wait(None)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self._wait(STOP_S)

    def _wait(self, timeout_s: float | None) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
