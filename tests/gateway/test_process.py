"""The gateway process: its address, its end, and settings that it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpufn_local.nats_process import find_binary
from tests.gateway.whole import gateway_on


class Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def url(self) -> str:
        assert self.process.stdout is not None
        line = json.loads(await self.process.stdout.readline())
        assert line["event"] == "listening"
        return str(line["url"])

    async def end(self) -> tuple[int, str]:
        _, log = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, log.decode()


async def start(nats: Any, **settings: str) -> Process:
    environ = (
        os.environ | {"GPUFN_PORT": "0"} | ({"GPUFN_NATS_URL": nats.url_for("gateway")} if nats else {}) | settings
    )
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    return Process(
        await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "gpufn_gateway"),
            env=environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    )


async def test_the_process_prints_its_address_and_ends_in_order(nats: Any) -> None:
    gateway = await start(nats)
    try:
        url = await gateway.url()
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/healthz")).status_code == 200
            answer = await client.get("/readyz")
            assert (answer.status_code, "server" in answer.headers) == (503, False)
            assert (await client.get("/v1/functions")).status_code == 200
    finally:
        gateway.process.send_signal(signal.SIGTERM)
    code, log = await gateway.end()
    assert (code, "Traceback" in log, "ERROR" in log) == (0, False, False), log


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"GPUFN_PORT": "x"}, "GPUFN_PORT='x'"),
        ({"GPUFN_HOST": "0.0.0.0"}, "cannot listen on 0.0.0.0 without an API key"),
        ({"GPUFN_HOST": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
    ],
)
async def test_the_process_refuses_settings_that_it_cannot_serve(
    nats: Any, settings: dict[str, str], said: str
) -> None:
    code, log = await (await start(nats, **settings)).end()
    assert (code, log.splitlines()[-1].startswith(said), "Traceback" in log) == (78, True, False), log


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        ("", "runs without JetStream: add `jetstream {}`"),
        (
            "jetstream { store_dir: STORE }\nfeature_flags { js_ack_fc_v2: true }",
            "set `feature_flags { js_ack_fc_v2: false }`",
        ),
    ],
)
async def test_the_process_names_the_fault_of_a_foreign_server(tmp_path: Path, configuration: str, said: str) -> None:
    store = json.dumps(str(tmp_path))
    config = tmp_path / "nats.conf"
    config.write_text(f"listen: 127.0.0.1:-1\nports_file_dir: {store}\n" + configuration.replace("STORE", store))
    server = subprocess.Popen([find_binary(), "-c", config], stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        # The file is written after it is created.
        while not (ports := [path for path in tmp_path.glob("*.ports") if path.stat().st_size]):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.001)
        url = json.loads(ports[0].read_bytes())["nats"][0]
        code, log = await (await start(None, GPUFN_NATS_URL=url)).end()
        assert (code, said in log, "Traceback" in log) == (78, True, False), log
    finally:
        server.kill()
        server.wait()


async def test_openapi_describes_every_route(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        paths = (await gateway.http.get("/openapi.json")).json()["paths"]
        documented = {(verb.upper(), path) for path, operations in paths.items() for verb in operations}
        # A call is under its function's name; protocols of other platforms have specifications of their own.
        registered = {
            (method, route.path_format)
            for route in gateway.app._routes
            if not route.path.startswith("/v2")
            and gateway.app._protocols.at(route.path_format) is None
            and "{fn}/invocations" not in route.path_format
            and "{fn}/maps" not in route.path_format
            for method in route.methods or ()
            if method != "HEAD" or "GET" not in (route.methods or ())
        }
        assert registered - documented == set()
