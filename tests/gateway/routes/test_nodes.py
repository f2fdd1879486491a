"""The drain of a node over HTTP, and its events."""

from __future__ import annotations

from typing import Any

from gpufn_core.protocol.records import NodeDrain
from gpufn_core.protocol.reports import NodeReport
from gpufn_gateway.history.blocks import EventKind
from gpufn_gateway.history.changes import Changes
from tests.gateway.whole import gateway_on
from tests.waiting import until_async


async def test_a_node_is_drained_until_the_drain_is_ended(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        gateway.registry.receive_node_report(NodeReport("gpu-7", 1.0, ()))
        path = "/v1/nodes/gpu-7/drain"
        first = (await gateway.http.put(path)).json()
        assert first["node"] == "gpu-7"
        await until_async(lambda: "gpu-7" in gateway.registry.drains)
        assert (await gateway.http.put(path)).json() == first, "a second drain changes nothing"
        listed = (await gateway.http.get("/v1/nodes")).json()["nodes"]
        assert [each["drained"] for each in listed if each["node"] == "gpu-7"] == [first]
        assert (await gateway.http.delete(path)).status_code == 204
        await until_async(lambda: not gateway.registry.drains)
        assert problem(await gateway.http.delete(path)) == (409, "conflict")


async def test_a_node_that_does_not_report_cannot_be_drained(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        for method in ("PUT", "DELETE"):
            assert (await gateway.http.request(method, "/v1/nodes/nothing/drain")).status_code == 404


async def test_a_drain_outlives_the_gateway_and_the_reports_of_the_node(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        gateway.registry.receive_node_report(NodeReport("gone", 1.0, ()))
        await gateway.http.put("/v1/nodes/gone/drain")
    async with gateway_on(nats) as gateway:
        assert "gone" in gateway.registry.drains
        listed = (await gateway.http.get("/v1/nodes")).json()
        assert ([each["node"] for each in listed["not_reporting"]], listed["nodes"]) == (["gone"], [])
        assert (await gateway.http.get("/v1/console/nodes")).json()["not_reporting"]["gone"]["since"] > 0
        gateway.registry.receive_node_report(NodeReport("gone", 1.0, ()))
        assert (await gateway.http.get("/v1/nodes")).json()["not_reporting"] == []
        assert (await gateway.http.delete("/v1/nodes/gone/drain")).status_code == 204


def test_the_time_line_has_the_drain_and_its_end() -> None:
    changes, drain = Changes(), NodeDrain(node="n", since=5.0, by="key-1")
    changes.on_node_drains({"old": NodeDrain(node="old", since=1.0)}, 4.0)
    changes.on_node_drains({"n": drain, "old": NodeDrain(node="old", since=1.0)}, 6.0)
    changes.on_node_drains({"n": drain}, 7.0)
    events = changes.take()
    assert [(each.kind, each.subject, each.at) for each in events] == [
        (EventKind.NODE_DRAIN, "node:n", 5.0),
        (EventKind.NODE_DRAIN, "node:old", 7.0),
    ]
    assert "key-1" in events[0].text
