"""Support for `async def` tests, each in its own event loop with a time limit, and a Bus that is closed afterwards."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus
from tests.builder import bench

_TEST_TIMEOUT_S = 60


class Connect:
    """`await connect(server)`: a Bus with the permissions of a role."""

    def __init__(self) -> None:
        self.open: list[Bus] = []

    async def __call__(self, server: EmbeddedServer, role: str = "admin") -> Bus:
        bus = await Bus.connect(server.url_for(role), name=role)
        self.open.append(bus)
        if role == "admin":
            await bench.create_buckets(bus)
        return bus


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def scenario() -> None:
        try:
            async with asyncio.timeout(_TEST_TIMEOUT_S):
                await pyfuncitem.obj(**arguments)
        finally:
            for argument in arguments.values():
                if isinstance(argument, Connect):
                    for bus in argument.open:
                        await bus.close()

    with asyncio.Runner() as runner:
        runner.run(scenario())
    return True


@pytest.fixture
def connect() -> Connect:
    return Connect()
