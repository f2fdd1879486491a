"""What the tests use of a real OpenID provider, and its process on loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import httpx
import pytest

from tests.waiting import until

CLIENT = "gpufn-cli"
PASSWORD = "password"


class Provider(Protocol):
    """A provider with the client `CLIENT`, and users with an address at example.org."""

    @property
    def issuer(self) -> str: ...

    @property
    def renews(self) -> bool:
        """Return whether a refresh token yields an ID token."""

    def approve(self, verification_url: str, user: str) -> None:
        """Approve a device, as the user's browser does."""

    def allow_redirect(self, address: str) -> None:
        """Register the address to which the provider sends browsers."""

    def log_in(self, url: str, user: str) -> str:
        """Log in, as the user's browser does. Return the address to which the browser is sent."""


def named_by(variable: str) -> Path:
    """Return the path of a provider that the environment names. Skips the test if it names none."""
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set")
    return Path(os.environ[variable])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, answers_at: str, environ: Mapping[str, str] = {}) -> Iterator[None]:
    """Run the process of a provider, which is ready when it answers at an address."""

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(answers_at, trust_env=False).status_code == 200
        return False

    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=dict(environ))
    try:
        until(is_ready)
        yield
    finally:
        process.terminate()
        process.wait(10)
