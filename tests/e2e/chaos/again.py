"""`gpufn down`, and `gpufn up` at the same address, while clients call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Self
from urllib.parse import urlsplit

import httpx

from tests.conftest import QUICK, Platform
from tests.e2e.chaos.gateway import START_S, Gateway
from tests.waiting import until

_GRACE_S = "0.3"
_STOP_S = 60.0


class Again:
    """The current process of `gpufn up`. The second gateway uses the same home, and stops with it."""

    def __init__(self, platform: Platform, second: Gateway, environ: Mapping[str, str]) -> None:
        self._platform = platform
        self._second = second
        self._environ = environ
        self._process = platform.process

    @property
    def pid(self) -> int:
        return self._process.pid

    def down_and_up(self, _: list[int]) -> None:
        self._second.stop()
        self._platform.gpufn("down", "--grace", _GRACE_S)
        self._process.wait(_STOP_S)
        port = str(urlsplit(self._platform.url).port)
        with (self._platform.home / "up.log").open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpufn", "up", "--port", port],
                env=os.environ | {"GPUFN_HOME": str(self._platform.home), **QUICK, **self._environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        until(self._is_ready, "the platform is up again", within_s=START_S)
        self._second.start()

    def _is_ready(self) -> bool:
        try:
            return self._platform.client.get("/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not self._platform.process:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
                raise
