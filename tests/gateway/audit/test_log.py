"""The audit log on a bus: requests that are recorded, two writers, forgery."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.audit import AuditRecord, ChainCheck, check
from gpufn_core.errors import AuditLogUnavailable
from gpufn_core.protocol import subjects
from gpufn_gateway.audit.log import AuditLog
from gpufn_gateway.audit.request_audit import is_audited
from gpufn_gateway.auth.access import new_key
from gpufn_platform.bus.connection import Bus, JetStreamError
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import SystemClock
from tests.gateway.whole import DIGEST, gateway_on


async def records(gateway: Any, after: int = 0) -> list[AuditRecord]:
    answer = await gateway.http.get(f"/v1/audit?after={after}&limit=1000")
    return [msgspec.convert(each, AuditRecord) for each in answer.json()["records"]]


async def head(gateway: Any) -> int:
    view = (await gateway.http.get("/v1/audit")).json()["head"]
    return 0 if view is None else int(view["seq"])


async def test_an_action_is_recorded_before_its_response(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        before = await head(gateway)
        spec = msgspec.to_builtins(make.spec("prod/shop/sell", env={"TOKEN": "s3cret"}))
        deployed = await gateway.http.post("/v1/functions", json={"spec": spec, "bundle": DIGEST})
        assert deployed.status_code == 201
        await gateway.http.post("/v1/functions/sell/scale", json={"max_workers": 3})
        await gateway.http.post("/v1/functions/sell/rollback", json={"revision": 7})
        await gateway.http.put("/v1/teams/shop", json={"owns": ["prod/shop/*"]})
        await gateway.http.delete("/v1/teams/shop")
        assert (await gateway.http.post("/v1/functions/sell/submit", json={"texts": []})).status_code == 202
        await gateway.http.delete("/v1/functions/prod/shop/sell")
        found = await records(gateway, before)
        assert [(each.action, each.object, each.status, each.code) for each in found] == [
            ("POST /v1/functions", "", 201, ""),
            ("POST /v1/functions/{fn}/scale", "prod/shop/sell", 200, ""),
            ("POST /v1/functions/{fn}/rollback", "prod/shop/sell", 404, "revision_not_found"),
            ("PUT /v1/teams/{team}", "shop", 200, ""),
            ("DELETE /v1/teams/{team}", "shop", 204, ""),
            ("DELETE /v1/functions/{fn}", "prod/shop/sell", 204, ""),
        ]
        assert found[0].details == {"function": "prod/shop/sell", "bundle": DIGEST}
        assert found[0].principal == "local"
        assert found[1].details == {"max_workers": "3"}
        assert "s3cret" not in msgspec.json.encode(found).decode()
        assert check(found) is None


async def test_a_refusal_has_the_key_and_the_route(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("guarded"), DIGEST)
        before = await head(gateway)
        admin, secret = new_key("root", ("admin",), 1.0)
        reader, reader_secret = new_key("reader", ("read",), 1.0)
        for key in (admin, reader):
            gateway.access.put(key)
        bearer = {"authorization": f"Bearer {reader_secret}"}
        for _ in range(5):
            await gateway.http.post("/v1/functions/guarded/invoke", json={})
            await gateway.http.post("/v1/functions/guarded/invoke", json={}, headers=bearer)
            await gateway.http.delete("/v1/functions/guarded", headers=bearer)
        gateway.http.headers["authorization"] = f"Bearer {secret}"
        await gateway.http.delete("/v1/functions/nothing")  # recorded after the refusals
        *found, _ = await records(gateway, before)
        assert {(each.principal, each.label, each.action, each.status) for each in found} == {
            ("", "", "POST /v1/functions/{fn}/invoke", 401),
            (reader.id, "reader", "POST /v1/functions/{fn}/invoke", 403),
            (reader.id, "reader", "DELETE /v1/functions/{fn}", 403),
        }
        assert len(found) == 3
        for key in (admin, reader):
            gateway.access.remove(key.id)


async def test_every_changing_route_is_audited_or_a_call(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        left_out = {
            route.path_format
            for route in gateway.app._routes
            for method in route.methods or ()
            if method not in ("GET", "HEAD") and not is_audited(method, route.path_format)
        }
    assert {path for path in left_out if not path.startswith("/v2")} == {
        "/v1/functions/{fn}/invocations/{id}",
        "/v1/functions/{fn}/lease",
        "/v1/functions/{fn}/maps/{id}/items/{first}",
        "/v1/invocations/{id}",
        "/v1/maps/{id}",
    }


async def test_calls_of_other_protocols_are_not_audited_but_replays_and_uploads_are(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("adapted"), DIGEST)
        before = await head(gateway)
        job = {"input": {"texts": ["a"]}}
        submitted = await gateway.http.post("/runpod/v2/adapted/run", json=job)
        assert submitted.status_code == 200, submitted.text
        assert (await gateway.http.post(f"/v2/adapted/cancel/{submitted.json()['id']}")).status_code == 200
        ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        assert (await gateway.http.post("/mcp", json=ping)).status_code == 200
        for path in ("/v1/chat/completions", "/openai/v1/embeddings"):
            assert (await gateway.http.post(path, json={"model": "none"})).status_code >= 400
        for prefix in ("/v2", "/runpod/v2"):
            assert (await gateway.http.post(f"{prefix}/adapted/retry/{DIGEST}")).status_code == 404
        uploaded = await gateway.http.post("/replicate/v1/files", files={"content": ("a.txt", b"a")})
        assert (await gateway.http.delete(f"/replicate/v1/files/{uploaded.json()['id']}")).status_code == 204
        assert [(each.action, each.status) for each in await records(gateway, before)] == [
            ("POST /v2/{fn}/retry/{id}", 404),
            ("POST /runpod/v2/{fn}/retry/{id}", 404),
            ("POST /replicate/v1/files", 201),
            ("DELETE /replicate/v1/files/{id}", 204),
        ]


async def test_two_writers_make_one_chain(nats: Any) -> None:
    buses = [await Bus.connect(nats.url, name="gateway") for _ in range(2)]
    await streams.ensure_streams(buses[0])
    logs = [AuditLog(bus, SystemClock()) for bus in buses]
    tasks = [asyncio.create_task(log.run()) for log in logs]
    try:
        last = await logs[0].last()
        start = 0 if last is None else last.seq
        await asyncio.gather(
            *(logs[n % 2].append(action="POST /v1/keys", status=201, object=str(n)) for n in range(40))
        )
        stored = [record async for record in logs[0].records(start, 1000)]
        chain = ChainCheck()
        for record in stored:
            chain.add(msgspec.json.decode(record, type=AuditRecord), record)
        assert (len(stored), chain.fault) == (40, None)
        assert {msgspec.json.decode(record)["object"] for record in stored} == {str(n) for n in range(40)}
    finally:
        for task in tasks:
            task.cancel()
        for bus in buses:
            await bus.close()


async def test_details_that_a_caller_changes_later_do_not_break_the_chain(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        before, details = await head(gateway), {"command": "start"}
        for status in (101, 200):  # a terminal records its start and its end
            await gateway.audit.append(action="GET /v1/functions/{fn}/exec", status=status, details=details)
            details["exit_code"] = "0"
        stored = await records(gateway, before)
        assert ([each.status for each in stored], check(stored)) == ([101, 200], None)


async def test_no_role_deletes_or_purges_records(nats: Any) -> None:
    bus = await Bus.connect(nats.url, name="gateway")  # without users, this client may do everything
    await streams.ensure_streams(bus)
    for verb, body in (("STREAM.PURGE", {}), ("STREAM.MSG.DELETE", {"seq": 1})):
        with pytest.raises(JetStreamError):
            await bus.js(f"{verb}.{subjects.AUDIT}", body)
    with pytest.raises(JetStreamError):  # the denial cannot be lifted
        await bus.js(
            f"STREAM.UPDATE.{subjects.AUDIT}",
            {"name": subjects.AUDIT, "subjects": [subjects.AUDIT_FILTER], "deny_purge": False, "deny_delete": False},
        )
    await bus.close()


async def test_without_the_log_nothing_changes(nats: Any) -> None:
    bus = await Bus.connect(nats.url, name="gateway")
    log = AuditLog(bus, SystemClock())
    log.check_writable()
    await bus.close()
    with pytest.raises(AuditLogUnavailable):
        log.check_writable()
