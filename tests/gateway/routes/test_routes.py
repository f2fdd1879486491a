"""Routes that need no bus; the others are in test_on_bus.py and beside it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn import gpu_function
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.reports import NextRevision, Waiting, WaitReason
from gpufn_core.spec.function_spec import MethodSpec, spec_from_json
from gpufn_gateway.auth.access import new_key


async def test_the_root_links_to_existing_pages(gateway: Any) -> None:
    links = (await gateway.get("/")).json()["links"]
    assert "/v1/functions" in links.values()
    assert {(await gateway.get(path)).status_code for path in links.values()} == {200}


async def test_alive_and_ready(gateway: Any) -> None:
    assert (await gateway.get("/healthz")).json() == {"status": "alive"}
    assert (await gateway.get("/readyz")).status_code == 200
    gateway.reason = "the reason"
    answer = await gateway.get("/readyz")
    assert (answer.status_code, answer.json()["reason"]) == (503, "the reason")


async def test_a_function_is_shown_with_the_last_status_of_the_controller(gateway: Any, make: Any) -> None:
    waiting = Waiting(WaitReason.NO_CAPACITY, "needs 1 L4", 12.0)
    gateway.report(make.status(queued=3, running=1, wanted=2, reason="burst", waiting=waiting, service_s=0.5))
    view = (await gateway.get("/v1/functions/embed")).json()
    assert {name: view[name] for name in ("name", "active", "serving", "latest", "queued", "running", "wanted")} == {
        "name": "embed", "active": 1, "serving": 1, "latest": 1, "queued": 3, "running": 1, "wanted": 2,
    }  # fmt: skip
    assert view["workers"] == {"ready": 1, "starting": 0, "draining": 0, "parking": 0, "parked": 0, "resuming": 0}
    assert view["waiting"] == {"reason": "no_capacity", "detail": "needs 1 L4", "eta_s": 12.0}
    assert (view["spec"]["name"], view["service_s"], view["cold_start_s"], view["reason"]) == (
        "embed", 0.5, None, "burst",
    )  # fmt: skip
    assert (await gateway.get("/v1/functions")).json() == {"functions": [view]}


async def test_the_values_of_env_need_the_scope_deploy(gateway: Any, make: Any, problem: Any) -> None:
    gateway.deploy(make.spec(env={"TOKEN": "hunter2"}), 2)
    keys = {}
    for scope in ("read", "deploy", "admin"):
        made, secret = new_key("", (scope,), 0.0)
        gateway.access.put(made)
        keys[scope] = f"Bearer {secret}"
    shown = ("", "/embed", "/embed/revisions", "/embed/why")
    for path in (*(f"/v1/functions{each}" for each in shown), "/openapi.json"):
        for key in keys.values():
            answer = await gateway.get(path, authorization=key)
            assert (answer.status_code, b"hunter2" in answer.content) == (200, False), path
    view = (await gateway.get("/v1/functions/embed", authorization=keys["read"])).json()
    assert (view["env"], "env" in view["spec"]) == (["TOKEN"], False)
    assert spec_from_json(view["spec"]).name == "embed", "clients read it as a spec"
    asked = "/v1/functions/embed?env=values"
    assert problem(await gateway.get(asked, authorization=keys["read"])) == (403, "forbidden")
    for path in ("/v1/functions", "/v1/functions/embed/revisions/1"):
        assert problem(await gateway.get(f"{path}?env=values", authorization=keys["read"])) == (403, "forbidden")
    assert problem(await gateway.get("/v1/functions?env=x", authorization=keys["admin"])) == (422, "invalid_input")
    for scope in ("deploy", "admin"):
        view = (await gateway.get(asked, authorization=keys[scope])).json()
        assert view["spec"]["env"] == {"TOKEN": "hunter2"}
        listed = (await gateway.get("/v1/functions?env=values", authorization=keys[scope])).json()
        assert listed["functions"][0]["spec"]["env"] == {"TOKEN": "hunter2"}


async def test_unknown_values_are_null(gateway: Any) -> None:
    gateway.report()
    view = (await gateway.get("/v1/functions/embed")).json()
    assert (view["queued"], view["running"], view["waiting"], view["start_error"]) == (None, None, None, None)
    why = (await gateway.get("/v1/functions/embed/why")).json()
    assert (why["queued"], "not reported" in why["reason"]) == (None, True)


async def test_why_shows_the_terms_of_the_decision(gateway: Any, make: Any) -> None:
    error = ErrorInfo("function_raised", "no")
    gateway.report(
        make.status(
            queued=0, running=2, wanted=3, reason="because", terms={"L": 2.0}, start_error=error, next=NextRevision(2)
        )
    )
    assert (await gateway.get("/v1/functions/embed/why")).json() == {
        "function": "embed",
        "workers": {"ready": 1, "starting": 0, "draining": 0, "parking": 0, "parked": 0, "resuming": 0},
        "queued": 0,
        "running": 2,
        "classes": None,
        "wanted": 3,
        "reason": "because",
        "terms": {"L": 2.0},
        "waiting": None,
        "last_start": None,
        "start_error": {"code": "function_raised", "message": "no"},
        "next": {"revision": 2, "start_error": None},
    }


async def test_revisions_are_listed(gateway: Any, make: Any) -> None:
    gateway.deploy(make.spec(), 2)
    listed = (await gateway.get("/v1/functions/embed/revisions")).json()["revisions"]
    assert [(each["number"], each["state"], each["active"], each["serving"]) for each in listed] == [
        (1, "ready", False, False),
        (2, "ready", True, True),
    ]


@pytest.mark.parametrize("number", ["٢", "²", "-2", "2" * 10, "2.0"])  # `int` would accept the first one
async def test_a_revision_is_named_by_the_digits_0_to_9(gateway: Any, make: Any, problem: Any, number: str) -> None:
    gateway.deploy(make.spec(), 2)
    assert problem(await gateway.get(f"/v1/functions/embed/revisions/{number}")) == (404, "revision_not_found")


async def test_nodes_that_are_silent_are_not_shown(gateway: Any) -> None:
    gateway.hear_node()
    for ahead_s in (0.0, 3600.0, -3600.0):
        gateway.clock.ahead_s = ahead_s
        assert [node["node"] for node in (await gateway.get("/v1/nodes")).json()["nodes"]] == ["n"]
    gateway.clock.now += 11
    assert (await gateway.get("/v1/nodes")).json() == {"nodes": [], "not_reporting": []}


@pytest.mark.parametrize("path", ["", "/revisions", "/why", "/logs", "/calls"])
async def test_an_unknown_function_is_not_found_anywhere(gateway: Any, problem: Any, path: str) -> None:
    assert problem(await gateway.get(f"/v1/functions/nobody{path}")) == (404, "function_not_found")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/functions/embed/logs?tail=-1", "tail"),
        ("/v1/functions/embed/logs?tail=x", "tail"),
        ("/v1/functions/embed/logs?tail=٣", "tail"),
        ("/v1/functions/embed/logs?follow=maybe", "follow"),
        ("/v1/functions/embed/calls?limit=0", "limit"),
        ("/v1/invocations/x/result?wait=nan", "wait"),
        ("/v1/invocations/x/result?wait=1e9", "wait"),
    ],
)
async def test_a_query_must_make_sense(gateway: Any, problem: Any, path: str, field: str) -> None:
    answer = await gateway.get(path)
    assert (problem(answer), answer.json()["field"]) == ((422, "invalid_input"), field)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "Bad Name"}, "is not a function name"),
        ({"name": "-a"}, "is not a function name"),
        ({"name": "a" * 41}, "is not a function name"),
        ({"name": "a.b"}, "is not a function name"),
        ({"name": "../a"}, "is not a function name"),
        ({"nonsense": 1}, "unknown field `nonsense`"),
        ({"scaling": {"min_workers": 5, "max_workers": 1}}, "min_workers=5 is more than max_workers=1"),
        ({"timeout_s": -1}, "timeout is a number"),
        ({"env": {"LD_PRELOAD": "x"}}, "is set by gpufn itself"),
        ({"env": {"A B": "x"}}, "is not the name of an environment variable"),
        ({"env": {"A": "x\0y"}}, "A: an environment variable cannot hold a null character"),
        ({"methods": []}, "nothing to call"),
        ({"methods": [{"kind": "generator"}], "batch": {"max_size": 4}}, "contradict each other"),
        ({"methods": [{"kind": "telepathy"}]}, "telepathy"),
    ],
)
async def test_a_spec_must_be_valid(gateway: Any, make: Any, problem: Any, change: Any, said: str) -> None:
    spec = msgspec.to_builtins(make.spec()) | change
    answer = await gateway.post("/v1/functions", msgspec.json.encode({"spec": spec, "bundle": "0" * 64}))
    assert problem(answer) == (422, "invalid_spec")
    assert said in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_input"),
        (b"{}", "invalid_input"),
        (b'{"spec":{},"bundle":"x","more":1}', "invalid_input"),
        (b'{"spec":' + b"[" * 500 + b"]" * 500 + b',"bundle":"x"}', "invalid_spec"),
        (b'{"spec":[],"bundle":"x"}', "invalid_spec"),
    ],
)
async def test_a_deploy_must_be_whole(gateway: Any, problem: Any, body: bytes, code: str) -> None:
    assert problem(await gateway.post("/v1/functions", body)) == (422, code)


@pytest.mark.parametrize("digest", ["0" * 63, "Z" * 64, "A" * 64])
async def test_a_digest_must_be_one(gateway: Any, problem: Any, digest: str) -> None:
    async with gateway.client() as client:
        answer = await client.put(f"/v1/bundles/{digest}", content=b"x", headers={"content-type": "application/zip"})
    assert problem(answer) == (422, "invalid_input")


async def test_a_bundle_is_a_zip(gateway: Any, problem: Any) -> None:
    async with gateway.client() as client:
        answer = await client.put(f"/v1/bundles/{'0' * 64}", content=b"x", headers={"content-type": "text/plain"})
    assert problem(answer) == (415, "unsupported_media_type")


async def test_keys_are_checked_before_they_are_made(gateway: Any, problem: Any) -> None:
    for body in (b'{"scopes":["invoke:embed"]}', b'{"scopes":["root"]}', b'{"scopes":"admin"}', b"{}"):
        assert problem(await gateway.post("/v1/keys", body)) == (422, "invalid_input")


async def test_an_unknown_field_is_named_with_the_known_ones(gateway: Any, problem: Any) -> None:
    answer = await gateway.post("/v1/functions/embed/scale", b'{"workers": 2}')
    assert problem(answer) == (422, "invalid_input")
    assert "min_workers, max_workers" in answer.json()["detail"]
    assert answer.json()["field"] == "workers"


@pytest.mark.parametrize(
    ("path", "body", "field", "said"),
    [
        ("/v1/functions", b"{}", "spec", "missing"),
        ("/v1/functions", b'{"spec": {}}', "bundle", "missing"),
        ("/v1/functions/embed/scale", b'{"min_workers": "2"}', "min_workers", "expected int | null, got str"),
        ("/v1/functions/embed/scale", b"[]", None, "expected object, got array"),
        ("/v1/keys", b'{"limits": {"speed": 2}}', "limits.speed", "there is no such field"),
    ],
)
async def test_an_invalid_body_is_reported_with_the_field_as_in_an_invoke(
    gateway: Any, path: str, body: bytes, field: str | None, said: str
) -> None:
    gateway.report()
    answer = await gateway.post(path, content=body)
    told = answer.json()
    assert (answer.status_code, told.get("field")) == (422, field)
    assert told["detail"].startswith(f"{field}: " if field else "the body ")
    assert told["detail"].endswith(f": {said}")


async def test_openapi_describes_deployed_functions(gateway: Any, make: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/P"}},
        "required": ["p"],
        "$defs": {"P": {"type": "object", "properties": {"next": {"$ref": "#/$defs/P"}}}},
    }
    items = {"type": "array", "items": {"type": "integer"}}

    def thumbnail(picture: bytes) -> bytes:
        return picture

    (method,) = gpu_function(thumbnail).spec().methods
    gateway.deploy(
        make.spec(
            "model",
            MethodSpec(name="rank", parameters=parameters, doc="Rank.\n\nMore."),
            msgspec.structs.replace(method, name="raw"),
            make.generator(name="count", returns=items),
            is_class=True,
        )
    )
    document = (await gateway.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    assert "security" not in document
    rank = document["paths"]["/v1/functions/model.rank/invoke"]["post"]
    assert (rank["summary"], rank["requestBody"]["required"]) == ("Rank.", True)
    schema = rank["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["p"] == {"$ref": "#/components/schemas/model.rank.arguments.P"}
    hoisted = document["components"]["schemas"]["model.rank.arguments.P"]
    assert hoisted["properties"]["next"] == {"$ref": "#/components/schemas/model.rank.arguments.P"}
    raw = document["paths"]["/v1/functions/model.raw/invoke"]["post"]["requestBody"]["content"]
    assert set(raw) == {"application/json", "application/octet-stream", "multipart/form-data"}
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    assert raw["multipart/form-data"]["schema"]["properties"] == {"picture": file}
    made = document["paths"]["/v1/functions/model.raw/invoke"]["post"]["responses"]["200"]["content"]
    assert made == {"application/octet-stream": {"schema": {}}}, "bytes are sent as they are"
    count = document["paths"]["/v1/functions/model.count/invoke"]["post"]["responses"]["200"]["content"]
    assert (count["application/json"]["schema"], set(count)) == (items, {"application/json", "text/event-stream"})
    assert "/v1/functions/embed/submit" in document["paths"]
    submitted = document["components"]["schemas"]["Submitted"]["properties"]
    assert (set(submitted["links"]["properties"]), "timed_out" in submitted["state"]["enum"]) == (
        {"self", "result", "events"},
        True,
    )


async def test_openapi_describes_calls_that_are_kept(gateway: Any, make: Any) -> None:
    gateway.deploy(make.spec("count", make.generator()))
    paths = (await gateway.get("/openapi.json")).json()["paths"]

    def parameters(path: str, verb: str) -> set[str]:
        return {each["name"] for each in paths[path][verb]["parameters"]}

    assert {"Idempotency-Key", "X-Gpufn-Timeout", "Last-Event-ID"} <= parameters("/v1/functions/count/invoke", "post")
    assert "Last-Event-ID" not in parameters("/v1/functions/embed/invoke", "post")
    assert {"Idempotency-Key", "X-Gpufn-Webhook"} <= parameters("/v1/functions/embed/submit", "post")
    assert {"id", "X-Gpufn-Priority"} <= parameters("/v1/functions/embed/invocations/{id}", "put")
    assert parameters("/v1/invocations/{id}/result", "get") == {"id", "wait"}
    assert {"get", "delete"} <= set(paths["/v1/invocations/{id}"])
    assert parameters("/v1/invocations/{id}/events", "get") == {"id", "Last-Event-ID"}


async def test_openapi_describes_the_query_beside_raw_bytes(gateway: Any, make: Any) -> None:
    def detect(image: bytes, min_score: float = 0.5) -> int:
        return len(image)

    gateway.deploy(make.spec("detect", *gpu_function(detect).spec().methods))
    document = (await gateway.get("/openapi.json")).json()
    described = document["paths"]["/v1/functions/detect/invoke"]["post"]["parameters"]
    query = {each["name"]: each["schema"]["type"] for each in described if each["in"] == "query"}
    assert query == {"min_score": "number"}


async def test_openapi_has_the_bounds_of_management_bodies(gateway: Any) -> None:
    schemas = (await gateway.get("/openapi.json")).json()["components"]["schemas"]
    assert schemas["Deploy"]["required"] == ["spec", "bundle"]
    assert schemas["Deploy"]["properties"]["spec"] == {"$ref": "#/components/schemas/FunctionSpec"}
    assert schemas["NewKey"]["properties"]["scopes"]["minItems"] == 1
    assert schemas["KeyLimits"]["properties"]["burst"]["minimum"] == 1
