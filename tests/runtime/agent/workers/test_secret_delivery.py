"""Delivery of secrets: to the worker alone."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpufn_runtime.agent.workers.secret_delivery import SecretDelivery

READ = """
import socket, sys
agent = socket.socket(socket.AF_UNIX)
agent.connect(sys.argv[1])
while data := agent.recv(65536):
    sys.stdout.write(data.decode())
"""
VALUES = {"TOKEN": "x" * 65_000}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "k"


async def reader(path: Path, *prefix: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *prefix, sys.executable, "-c", READ, os.fspath(path), stdout=subprocess.PIPE
    )


async def read_all(process: asyncio.subprocess.Process) -> bytes:
    output, _ = await process.communicate()
    return output


def test_the_worker_receives_its_secrets_and_the_socket_is_removed(path: Path) -> None:
    async def scenario() -> None:
        delivery = SecretDelivery(path, VALUES)
        assert os.stat(path).st_mode & 0o777 == 0o600
        worker = await reader(path)
        output, _ = await asyncio.gather(read_all(worker), delivery.deliver(worker.pid))
        assert json.loads(output) == VALUES

    asyncio.run(scenario())
    assert not path.exists()


def test_another_process_receives_nothing_and_the_worker_still_does(path: Path) -> None:
    async def scenario() -> None:
        delivery = SecretDelivery(path, VALUES)
        other = await reader(path)
        worker = await reader(path)
        outputs = await asyncio.gather(read_all(other), read_all(worker), delivery.deliver(worker.pid))
        assert outputs[0] == b""
        assert json.loads(outputs[1] or b"{}") == VALUES

    asyncio.run(scenario())


def test_the_child_of_a_containers_first_process_is_the_worker(path: Path) -> None:
    async def scenario() -> None:
        delivery = SecretDelivery(path, VALUES)
        init = await reader(path, "sh", "-c", '"$@"; true', "sh")
        output, _ = await asyncio.gather(read_all(init), delivery.deliver(init.pid))
        assert json.loads(output) == VALUES

    asyncio.run(scenario())
