"""RunPod's protocol on a gateway's port. The bus is real; the tests play the runner.

The `runpod` package needs 60 others, boto3 and sentry among them, so it is not a test dependency. The tests send the
requests that the source of runpod 1.12.0 shows. `test_runpod_works_unmodified` runs where the package is installed.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.protocol.records import CallRecord
from gpufn_gateway.protocols.runpod import jobs
from tests.gateway.listening import serving
from tests.gateway.protocols.keys import with_key, without_keys
from tests.gateway.protocols.runner import running
from tests.gateway.whole import DIGEST, gateway_on

CLIENT = Path(__file__).with_name("runpod_client.py")
PYTHON = os.environ.get("GPUFN_TEST_RUNPOD")
# As runpod 1.12.0 sends them, with requests 2.34.2.
HEADERS = {"content-type": "application/json", "accept": "*/*", "user-agent": "python-requests/2.34.2"}
GOOD = {"input": {"texts": ["a", "b"]}}


@pytest.mark.skipif(PYTHON is None, reason="GPUFN_TEST_RUNPOD names no Python with runpod")
async def test_runpod_works_unmodified(nats: Any, make: Any) -> None:
    assert PYTHON is not None
    async with gateway_on(nats) as gateway:
        for name in ("rp-works", "rp-idle"):
            await gateway.deploys.deploy(make.spec(name), DIGEST)
        key = await with_key(gateway, "invoke:*")
        try:
            async with running(gateway, "rp-works"), serving(gateway.app) as (_, port):
                environment = os.environ | {"RUNPOD_ENDPOINT_BASE_URL": f"http://127.0.0.1:{port}/v2"}
                process = await asyncio.create_subprocess_exec(
                    PYTHON, CLIENT, key, "rp-works", "rp-idle", env=environment, stdout=asyncio.subprocess.PIPE
                )
                printed, _ = await process.communicate()
        finally:
            await without_keys(gateway)
    assert process.returncode == 0
    got = json.loads(printed.splitlines()[-1])
    assert got.pop("wrong")[0] == 400
    assert got.pop("extra")[0] == 400
    assert got.pop("unknown")[0] == 404
    assert got == {
        "run_sync": ["a", "b"], "output": [["a", "b"], "COMPLETED"], "stream": ["a", "b"], "failed": 0,
        "waiting": "IN_QUEUE", "cancel": ["CANCELLED", "CANCELLED"], "purge": {"removed": 1, "status": "completed"},
        "health": ["jobs", "workers"], "asyncio": [["a", "b"], "COMPLETED"], "401": True,
    }  # fmt: skip


async def test_the_requests_of_a_client(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        for name in ("rp-run", "rp-held"):
            await gateway.deploys.deploy(make.spec(name), DIGEST)
        key = await with_key(gateway, "invoke:*")
        try:
            async with running(gateway, "rp-run"), serving(gateway.app) as (_, port):
                base = f"http://127.0.0.1:{port}/v2/"
                headers = HEADERS | {"authorization": f"Bearer {key}"}
                async with httpx.AsyncClient(base_url=base, headers=headers) as client:
                    await _talk(client)
                    await _refusals(client, key)
        finally:
            await without_keys(gateway)


async def _talk(client: httpx.AsyncClient) -> None:
    done = (await client.post("rp-run/runsync", json=GOOD)).json()
    assert {**done, "id": ""} == {
        "id": "", "status": "COMPLETED", "output": ["a", "b"], "delayTime": 500, "executionTime": 250,
        "workerId": "w-1",
    }  # fmt: skip
    job = done["id"]
    streams = [(await client.get(f"rp-run/stream/{job}")).json() for _ in range(2)]
    assert streams == [
        {"status": "COMPLETED", "stream": [{"output": "a"}, {"output": "b"}]},
        {"status": "COMPLETED", "stream": []},
    ]
    failed = (await client.post("rp-run/runsync", json={"input": {"texts": ["bad"]}})).json()
    assert (failed["status"], failed["error"]) == ("FAILED", "no such text")
    held = [(await client.post("rp-held/run", json=GOOD)).json() for _ in range(3)]
    assert [each["status"] for each in held] == ["IN_QUEUE"] * 3
    one = held[0]["id"]
    assert (await client.get(f"rp-held/status/{one}")).json() == {"id": one, "status": "IN_QUEUE"}
    cancelled = await client.post(f"rp-held/cancel/{one}", content=b"null")
    assert cancelled.json() == {"id": one, "status": "CANCELLED"}
    assert (await client.get(f"rp-held/stream/{one}")).json() == {"status": "FAILED", "stream": []}
    assert (await client.post("rp-held/purge-queue", content=b"null")).json() == {"removed": 2, "status": "completed"}
    health = (await client.get("rp-held/health")).json()
    assert (health["jobs"]["inQueue"], health["workers"]["running"]) == (0, 0)


async def _refusals(client: httpx.AsyncClient, key: str) -> None:
    async def refused(path: str, status: int, fact: str, **request: Any) -> None:
        answer = await client.post(path, **request)
        assert list(answer.json()) == ["error"]
        assert (answer.status_code, fact in answer.json()["error"]) == (status, True), answer.text

    run = "rp-run/run"
    await refused("none/run", 404, "'none'", json=GOOD)
    await refused(run, 400, "texts", json={"input": {"texts": 1}})
    await refused(run, 400, "more", json={"input": {"texts": [], "more": 1}})
    await refused(run, 400, "s3Config", json={**GOOD, "s3Config": {}})
    await refused(run, 400, "no webhook is sent", json={**GOOD, "webhook": "http://10.0.0.1/"})
    await refused(run, 400, "policy.ttl", json={**GOOD, "policy": {"ttl": "soon"}})
    await refused(run, 400, "policy.ttl", json={**GOOD, "policy": {"ttl": -1}})
    await refused(run, 400, "executionTimeout", json={**GOOD, "policy": {"executionTimeout": 5}})
    await refused(run, 400, "input", json={})
    await refused(run, 400, "JSON", content=b"{")
    await refused(run, 401, "unknown", json=GOOD, headers={"authorization": "Bearer gpufn_a_b"})
    await refused("rp-run/retry/01arz3ndektsv4rrffq69g5faw", 404, "", content=b"null")
    job = (await client.post("rp-held/run", json=GOOD)).json()["id"]
    assert (await client.get(f"rp-run/status/{job}")).status_code == 404  # it is a job of another function
    assert (await client.get(run)).status_code == 405
    raw = {"authorization": key}  # as RunPod permits
    alone = client.base_url.join("/runpod/v2/rp-run/")
    assert (await client.get(alone.join("health"), headers=raw)).status_code == 200
    assert list((await client.get(alone.join("nothing"))).json()) == ["error"]
    assert (await client.get("models/none")).json() == {"error": "There is no model 'none'."}


def test_the_webhook_of_a_job_is_the_job() -> None:
    record = CallRecord(
        id="x", function="f", revision=1, state=InvocationState.SUCCEEDED, submitted_at=0.0, ended_at=1.0, run_s=0.5,
        content_type="application/json",
    )  # fmt: skip
    payload = jobs.webhook_payload(record, b'["a"]')
    assert json.loads(payload.body) == {"id": "x", "status": "COMPLETED", "executionTime": 500, "output": ["a"]}
    large = msgspec.structs.replace(record, blob="d")
    assert "output" not in json.loads(jobs.webhook_payload(large, b"").body)
