"""A real nats-server per module, and `async def` tests: each runs in its own event loop, with a time limit."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus
from tests.waiting import until_async

_TEST_TIMEOUT_S = 60


class Connect:
    """`await connect(server)`: a Bus that is closed after the test."""

    def __init__(self) -> None:
        self.open: list[Bus] = []

    async def __call__(self, server: EmbeddedServer, role: str = "admin", *, ping_interval_s: float = 5.0) -> Bus:
        bus = await Bus.connect(server.url_for(role), name=role, ping_interval_s=ping_interval_s)
        self.open.append(bus)
        return bus


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}

    async def scenario() -> None:
        try:
            async with asyncio.timeout(_TEST_TIMEOUT_S):
                await pyfuncitem.obj(**arguments)
        finally:
            if isinstance(connect := arguments.get("connect"), Connect):
                for bus in connect.open:
                    await bus.close()

    with asyncio.Runner() as runner:
        runner.run(scenario())
    return True


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def crash(tmp_path: Path) -> Iterator[Crash]:
    """A server for one test, to be killed and restarted."""
    crash = Crash(tmp_path)
    yield crash
    crash.server.stop()


class Crash:
    def __init__(self, directory: Path) -> None:
        self.server = EmbeddedServer.start(directory)

    async def restart(self, *buses: Bus, kill: bool = True) -> None:
        """Kill the server under its clients, restart it, and return once they are connected again."""
        if kill:
            self.server.kill()
        else:
            self.server.stop()
        await until_async(lambda: not any(bus.connected for bus in buses))
        self.server = EmbeddedServer.start(self.server.directory)
        await until_async(lambda: all(bus.connected for bus in buses))


@pytest.fixture
def connect() -> Connect:
    return Connect()


def lead_astray(bus: Bus, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """Misdirect direct reads to a subject without subscribers, or to a node without the data."""
    publish = bus.publish

    def astray(subject: str, payload: bytes, **more: Any) -> None:
        publish(to if ".DIRECT.GET." in subject else subject, payload, **more)

    monkeypatch.setattr(bus, "publish", astray)
