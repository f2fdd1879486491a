"""Calls from the command line: `gpufn invoke`, `submit`, `result`, `cancel` and `map`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpufn import Client
from gpufn_core.encoding import media, values
from tests.sdk.cli.commands import VIEW, command
from tests.sdk.conftest import Project, StubGateway


def test_a_map_begins_with_a_gateway_that_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gpufn.maps.sender._RETRY_S", 0.0)
    monkeypatch.setenv("GPUFN_URL", "http://127.0.0.1:1")
    (lines := tmp_path / "lines.jsonl").write_text("{}\n")
    monkeypatch.setattr(Client, "send_items", lambda *_, **__: pytest.fail("it was sent"))
    result = command("map", "f", "-d", f"@{lines}")
    assert (result.exit_code, "http://127.0.0.1:1" in result.stderr) == (3, True)


def test_a_map_of_a_function_that_is_not_there_brings_up_its_neighbour(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/g", {"code": "function_not_found", "detail": "There is no function 'g'."}, status=404)
    gateway.on("GET /v1/functions", {"functions": [VIEW | {"name": "gg"}]})
    result = command("map", "g", "-d", "@/dev/null")
    assert (result.exit_code, "'gg'" in result.stderr) == (4, True)


@pytest.mark.parametrize(
    ("arguments", "stdin", "body", "content_type"),
    [
        ([], None, b"{}", "application/json"),
        (['{"x": 1}'], None, b'{"x": 1}', "application/json"),
        (["-d", "@in.json"], None, b'{"x": 2}', "application/json"),
        (["-d", "@-"], '{"x": 3}', b'{"x": 3}', "application/json"),
        (["-d", "-"], '{"x": 3}', b'{"x": 3}', "application/json"),
        (["-"], '{"x": 3}', b'{"x": 3}', "application/json"),
        (["@in.json"], None, b'{"x": 2}', "application/json"),
        (["--file", "cat.png"], None, b"PNG", "image/png"),
        (["--file", "in.json"], None, b'{"x": 2}', "application/octet-stream"),
    ],
)
def test_invoke_sends_its_arguments(  # noqa: PLR0917
    gateway: StubGateway,
    project: Project,
    arguments: list[str],
    stdin: str | None,
    body: bytes,
    content_type: str,
) -> None:
    project({"in.json": '{"x": 2}', "cat.png": "PNG"})
    gateway.on("GET /v1/functions/f", VIEW)
    gateway.on("POST /v1/functions/f/invoke", [1, 2])
    result = command("invoke", "f", *arguments, input=stdin)
    assert (result.exit_code, result.stdout) == (0, "[1, 2]\n")
    assert (gateway.requests[-1].body, gateway.requests[-1].headers["content-type"]) == (body, content_type)


@pytest.mark.parametrize("arguments", [["--file", "cat.png", '{"min_score": 0.9, "tags": ["a b"], "label": "5"}']])
def test_arguments_beside_a_file_are_sent_in_the_query(
    gateway: StubGateway, project: Project, arguments: list[str]
) -> None:
    project({"cat.png": "PNG"})
    gateway.on("GET /v1/functions/f", VIEW)
    gateway.on("POST /v1/functions/f/invoke", 1)
    assert command("invoke", "f", *arguments).exit_code == 0
    sent = gateway.requests[-1]
    assert (sent.body, sent.headers["content-type"]) == (b"PNG", "image/png")
    assert sent.path.partition("?")[2] == "min_score=0.9&tags=%5B%22a+b%22%5D&label=5"


def test_invoke_prints_items_as_they_arrive(gateway: StubGateway) -> None:
    spec = VIEW["spec"] | {"methods": [{"name": "", "kind": "generator"}]}
    gateway.on("GET /v1/functions/f", VIEW | {"spec": spec})
    gateway.on("POST /v1/functions/f/invoke", b'event: item\ndata: {"a":1}\n\nevent: end\ndata: {"items":1}\n\n')
    result = command("invoke", "f")
    assert (result.exit_code, result.stdout) == (0, '{"a":1}\n')
    assert gateway.requests[-1].headers["accept"] == "text/event-stream"


def test_invoke_of_a_generator_as_json_is_one_document(gateway: StubGateway) -> None:
    gateway.on("POST /v1/functions/f/invoke", [1, 2], x_gpufn_invocation="ID", server_timing="run;dur=2")
    document = json.loads(command("invoke", "f", "--json").stdout)
    assert document == {"invocation": "ID", "timings_ms": {"run": 2}, "result": [1, 2]}


def test_the_class_of_a_call_is_an_option(gateway: StubGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    id_ = "0" * 26
    monkeypatch.setattr("gpufn.client.endpoints.calls.new_invocation_id", lambda: id_)
    gateway.on("GET /v1/functions/f", b"", status=403)
    gateway.on("POST /v1/functions/f/invoke", 1)
    gateway.on(f"PUT /v1/functions/f/invocations/{id_}", {"id": id_, "state": "queued"}, status=202)
    assert command("invoke", "f", "--priority", "hi", "--json").exit_code == 0
    assert command("submit", "f", "--priority", "low").exit_code == 0
    assert [request.headers.get("x-gpufn-priority") for request in gateway.requests] == ["hi", "low"]
    wrong = command("submit", "f", "--priority", "high")
    assert (wrong.exit_code, len(gateway.requests)) == (2, 2)
    assert "'hi', 'normal', 'low'" in wrong.stderr


def test_a_call_is_submitted_and_its_result_fetched_later(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = "0" * 26
    monkeypatch.setattr("gpufn.client.endpoints.calls.new_invocation_id", lambda: id_)
    status = {"id": id_, "state": "queued"}
    gateway.on(f"PUT /v1/functions/f/invocations/{id_}", status, status=202)
    gateway.on(f"GET /v1/invocations/{id_}", status | {"state": "running"})
    gateway.on(f"GET /v1/invocations/{id_}/result", status, status=202)
    gateway.on(f"GET /v1/invocations/{id_}/result", [7])
    gateway.on(f"DELETE /v1/invocations/{id_}", status | {"cancelled": False})
    assert command("submit", "f", '{"x": 1}', "--timeout", "90").stdout == f"{id_}\n"
    assert gateway.requests[0].headers["x-gpufn-timeout"] == "90"
    assert (gateway.requests[0].json, gateway.requests[0].headers["accept"]) == ({"x": 1}, "application/json")
    early = command("result", id_)
    assert (early.exit_code, early.stderr.count("\n")) == (1, 1)
    assert "running" in early.stderr
    assert f"`gpufn result {id_} --wait`" in early.stderr
    assert command("result", id_, "--wait").stdout == "[7]\n"
    assert gateway.requests[-1].path.endswith("wait=30.000")
    gateway.answers.pop(f"GET /v1/invocations/{id_}/result")
    gateway.on(
        f"GET /v1/invocations/{id_}/result", values.encode_result((1, 2), media.NATIVE)[1], content_type=media.NATIVE
    )
    assert command("result", id_).stdout == "[1,2]\n"  # as `.spawn` from Python keeps it
    assert command("cancel", id_).stdout == f"{id_} had already ended\n"


@pytest.mark.parametrize(("out", "why"), [("no/out.png", "No such file or directory"), (".", "Is a directory")])
def test_an_output_file_that_cannot_be_written_fails_before_the_call(
    gateway: StubGateway, tmp_path: Path, out: str, why: str
) -> None:
    result = command("invoke", "f", "-o", str(tmp_path / out))
    assert (result.exit_code, result.stderr) == (1, f"gpufn: {tmp_path / out}: {why}\n")
    assert gateway.requests == []


def test_a_result_is_written_to_the_file_with_json_too(gateway: StubGateway, tmp_path: Path) -> None:
    gateway.on("GET /v1/functions/f", VIEW)
    gateway.on("POST /v1/functions/f/invoke", b"png", content_type="image/png")
    out = tmp_path / "out.png"
    result = command("invoke", "f", "-o", str(out), "--json")
    assert (result.exit_code, json.loads(result.stdout)["output"]) == (0, str(out))
    assert out.read_bytes() == b"png"


def test_invoke_shows_the_traceback_of_the_users_code(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f", VIEW)
    problem = {
        "code": "function_raised",
        "detail": "no",
        "error_type": "ValueError",
        "traceback": "Traceback ...\nValueError: no",
    }
    gateway.on("POST /v1/functions/f/invoke", problem, status=500)
    result = command("invoke", "f")
    assert (result.exit_code, result.stderr) == (7, "Traceback ...\nValueError: no\ngpufn: ValueError: no\n")


def test_a_result_that_cannot_be_sent_is_not_shown_as_an_exception_of_the_function(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f", VIEW)
    problem = {"code": "result_not_encodable", "detail": "a lock"}
    gateway.on("POST /v1/functions/f/invoke", problem, status=500)
    result = command("invoke", "f")
    assert (result.exit_code, result.stderr) == (7, "gpufn: a lock\n")


def test_invoke_writes_bytes_to_a_file(gateway: StubGateway, tmp_path: Path) -> None:
    gateway.on("GET /v1/functions/f", VIEW)
    gateway.on("POST /v1/functions/f/invoke", b"\x00\x01", content_type="image/png")
    out = tmp_path / "out.png"
    assert command("invoke", "f", "-o", str(out)).exit_code == 0
    assert out.read_bytes() == b"\x00\x01"


def test_invoke_refuses_arguments_that_are_no_object() -> None:
    result = command("invoke", "f", "[1]")
    assert (result.exit_code, "JSON object" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("scopes", "paths"),
    [
        (["invoke:*"], ["/v1/auth/me", "/v1/functions/f/invoke"]),
        (["invoke:f", "read:g"], ["/v1/auth/me", "/v1/functions/f", "/v1/functions/f/invoke"]),
    ],
)
def test_a_key_that_may_only_invoke_can_invoke(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch, scopes: list[str], paths: list[str]
) -> None:
    """A refused request would be in the audit log."""
    monkeypatch.setenv("GPUFN_API_KEY", "gpufn_key_secret")
    gateway.on("GET /v1/auth/me", {"id": "key", "scopes": scopes})
    gateway.on("GET /v1/functions/f", {"code": "forbidden"}, status=403)
    gateway.on("POST /v1/functions/f/invoke", 5)
    assert command("invoke", "f").stdout == "5\n"
    assert [request.path for request in gateway.requests] == paths


@pytest.mark.parametrize(
    ("arguments", "method", "hint"),
    [
        (("result", "0" * 26, "--wait"), "result_raw", f"gpufn result {'0' * 26} --wait"),
        (("invoke", "f"), "invoke_raw", "gpufn submit f"),
    ],
)
def test_an_interrupt_says_whether_the_call_continues(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], method: str, hint: str
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    gateway.on("GET /v1/functions/f", VIEW)
    monkeypatch.setattr(f"gpufn.client.client.Client.{method}", interrupt)
    result = command(*arguments)
    assert (result.exit_code, hint in result.stderr) == (130, True)
    assert command(*arguments, "--json").stderr == ""
