from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufn import Client, gpu_function
from gpufn.call import context
from gpufn.call import transport as _transport
from gpufn.call.transport_protocol import EncodedCall, Target
from gpufn.client.http import find_url
from gpufn.client.http_transport import HttpTransport
from gpufn.client.streams import lines_of
from gpufn_core.domain.invocation import InvocationState
from gpufn_core.encoding import media, values
from gpufn_core.errors import (
    BusUnavailable,
    Forbidden,
    FunctionNotFound,
    FunctionRaised,
    GatewayUnavailable,
    GpufnError,
    InvalidBundle,
    InvalidInput,
    InvalidSpec,
    PayloadTooLarge,
    ProtocolMismatch,
    QueueFull,
    Unauthorized,
)
from gpufn_core.ids import Digest, is_invocation_id
from gpufn_core.protocol.reports import WorkerCounts
from gpufn_core.spec.priority import Priority
from tests.sdk.conftest import StubGateway

_VIEW = {
    "name": "f",
    "active": 2,
    "serving": 2,
    "latest": 2,
    "updated_at": 1.0,
    "workers": {"ready": 1, "starting": 0, "draining": 0, "parking": 0, "parked": 0, "resuming": 0},
    "queued": None,
    "running": 3,
    "something_new": True,
}
_STATUS = {"id": "0" * 26, "function": "f", "revision": 1, "state": "queued"}


def _native(value: Any) -> bytes:
    return values.encode_result(value, media.NATIVE)[1]


@pytest.mark.parametrize("url", ["http://me:s3cret@127.0.0.1:1", "me:s3cret@127.0.0.1:99999"])
def test_no_message_shows_the_password_of_an_address(url: str) -> None:
    with pytest.raises(GatewayUnavailable, match=r"127\.0\.0\.1") as caught, Client(url) as client:
        client.functions()
    assert "s3cret" not in caught.value.message


def test_the_user_of_an_address_is_sent(gateway: StubGateway) -> None:
    gateway.on("POST /v1/functions/f/invoke", _native(1), content_type=media.NATIVE)
    with Client(gateway.url.replace("http://", "http://me:s3cret@")) as client:
        assert client.invoke("f") == 1
        assert client.url == gateway.url
    (request,) = gateway.requests
    assert request.headers["authorization"].startswith("Basic ")


def test_a_value_is_sent_and_returned_unchanged(gateway: StubGateway) -> None:
    gateway.on("POST /v1/functions/f/invoke", _native((1, {2})), content_type=media.NATIVE)
    with Client() as client:
        assert client.invoke("f", x=(3,)) == (1, {2})
    (request,) = gateway.requests
    assert (request.headers["content-type"], request.headers["accept"]) == (media.NATIVE, media.NATIVE)
    assert values.decode_call(request.body) == ([], {"x": (3,)})


def test_the_key_and_the_timeout_travel_in_headers(gateway: StubGateway) -> None:
    gateway.on("POST /v1/functions/f/invoke", {"a": 1}, server_timing="queue;dur=1.5, run;dur=20")
    with Client(api_key="s3cret") as client:
        answer = client.invoke_raw("f", b"{}", timeout_s=2.5)
    headers = gateway.requests[0].headers
    assert (headers["authorization"], headers["x-gpufn-timeout"]) == ("Bearer s3cret", "2.5")
    assert (json.loads(answer.body), answer.timings) == ({"a": 1}, {"queue": 1.5, "run": 20})


def test_the_class_of_a_call_travels_in_a_header(gateway: StubGateway) -> None:
    gateway.on("POST /v1/functions/f/invoke", {})
    gateway.on(f"PUT /v1/functions/f/invocations/{'0' * 26}", _STATUS, status=202)
    with Client() as client:
        client.invoke_raw("f", b"{}", priority=Priority.HI)
        client.submit("f", b"{}", invocation="0" * 26, priority=Priority.LOW)
        client.submit("f", b"{}", invocation="0" * 26)
    assert [request.headers.get("x-gpufn-priority") for request in gateway.requests] == ["hi", "low", None]


@pytest.mark.parametrize("limits", [{"run_s": float("nan")}, {"rate": float("inf")}])
def test_a_key_whose_limit_is_no_number_is_not_one_without_a_limit(
    gateway: StubGateway, limits: dict[str, Any]
) -> None:
    """JSON encodes both as null, and null means no limit."""
    with Client() as client:
        with pytest.raises(InvalidInput, match=f"{next(iter(limits))} .*finite"):
            client.create_key("ci", ["read"], **limits)
        with pytest.raises(InvalidInput, match="finite"):
            client.limit_key("k", **limits)
    assert gateway.requests == []


@pytest.mark.parametrize(
    ("status", "problem", "kind"),
    [
        (404, {"code": "function_not_found", "detail": "no f"}, FunctionNotFound),
        (401, {"code": "unauthorized", "detail": "a key is needed"}, Unauthorized),
        (422, {"code": "invalid_input", "detail": "x: not a number", "field": "x"}, InvalidInput),
        (500, {"code": "function_raised", "detail": "boom", "error_type": "ValueError"}, FunctionRaised),
        (500, {"code": "some_new_code", "detail": "new"}, GpufnError),
        (502, b"<html>bad gateway", GpufnError),
    ],
)
def test_a_problem_becomes_its_exception(gateway: StubGateway, status: int, problem: Any, kind: type) -> None:
    gateway.on("POST /v1/functions/f/invoke", problem, status=status)
    with Client() as client, pytest.raises(GpufnError) as caught:
        client.invoke("f")
    assert type(caught.value) is kind
    assert caught.value.message == (problem["detail"] if isinstance(problem, dict) else "<html>bad gateway")


@pytest.mark.parametrize(("code", "retryable"), [("some_new_code", True), ("conflict", False), ("conflict", True)])
def test_a_problems_code_and_whether_it_is_worth_a_retry_are_kept(
    gateway: StubGateway, code: str, retryable: bool
) -> None:
    gateway.on("POST /v1/functions/f/invoke", {"code": code, "detail": "no", "retryable": retryable}, status=409)
    with Client() as client, pytest.raises(GpufnError) as caught:
        client.invoke("f")
    assert (caught.value.code, caught.value.retryable) == (code, retryable)


def test_an_exception_of_a_function_has_its_own_type(gateway: StubGateway) -> None:
    classes = ["app:NoSuchWord", "builtins:KeyError", "builtins:LookupError", "builtins:Exception"]
    problem = {"code": "function_raised", "detail": "'x'", "error_type": "NoSuchWord", "error_classes": classes}
    gateway.on("POST /v1/functions/f/invoke", problem, status=500)
    with Client() as client, pytest.raises(KeyError) as caught:
        client.invoke("f")
    assert isinstance(caught.value, FunctionRaised)
    assert (str(caught.value), caught.value.status) == ("NoSuchWord: 'x'", 500)  # type: ignore[attr-defined]


def test_an_exception_of_a_function_reads_like_a_python_exception() -> None:
    assert str(FunctionRaised("division by zero", error_type="ZeroDivisionError")) == (
        "ZeroDivisionError: division by zero"
    )


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("s3cret\r", "a line break"),
        ("s3cret\n", "a line break"),
        ("s3crét", "a character that is not ASCII"),
        ("s3cret ", "a space or a control character"),
    ],
)
def test_a_key_that_cannot_be_sent_is_refused_and_not_in_the_error(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch, key: str, wrong: str
) -> None:
    message = f"is not a key: it contains {wrong}; copy it exactly as `gpufn keys create` printed it"
    with pytest.raises(Unauthorized) as caught:
        Client(api_key=key)
    assert caught.value.message == f"api_key {message}"
    monkeypatch.setenv("GPUFN_API_KEY", key)
    with pytest.raises(Unauthorized) as caught:
        Client()
    assert caught.value.message == f"GPUFN_API_KEY {message}"


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [(401, Unauthorized, "valid API key"), (403, Forbidden, "this needs a key with the scope 'deploy'")],
)
def test_a_forbidden_upload_names_the_needed_scope(
    gateway: StubGateway, tmp_path: Path, status: int, kind: type[GpufnError], message: str
) -> None:
    gateway.on("HEAD /v1/bundles/abc", status=status)
    gateway.on("HEAD /v1/artifacts/abc", status=status)
    with Client() as client:
        with pytest.raises(kind, match=message):
            client.put_bundle(_digest("abc"), b"zip")
        with pytest.raises(kind, match=message):
            client.put_artifact("abc", tmp_path)


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_an_authority_that_cannot_be_read_is_an_error_with_the_name_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("GPUFN_CA_FILE", str(file))
    with pytest.raises(GatewayUnavailable, match=f"GPUFN_CA_FILE={file}"):
        Client("https://127.0.0.1:1")
    Client("http://127.0.0.1:1").close()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:y", "http://x:99999", ""])
def test_an_address_that_leads_nowhere_is_refused_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFN_URL", "http://:0")
    with pytest.raises(GatewayUnavailable, match=re.escape(repr(url or "http://:0"))) as caught:
        Client(url)
    assert caught.value.__cause__ is None


def test_the_error_of_an_unreachable_address_names_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GPUFN_URL", "ftp://x")
    with pytest.raises(GatewayUnavailable, match=r"^GPUFN_URL: 'ftp://x'"):
        Client()


def test_an_address_without_a_scheme_is_http(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions", {"functions": []})
    with Client(gateway.url.removeprefix("http://")) as client:
        assert client.functions() == []


def test_a_server_that_does_not_speak_http_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("the request was retried"))
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            connection.recv(4096)
            connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with (
            Client(f"http://127.0.0.1:{other.getsockname()[1]}") as client,
            pytest.raises(GatewayUnavailable) as caught,
        ):
            client.functions()
        thread.join()
    assert caught.value.__suppress_context__


def test_a_call_of_an_undeployed_function_names_the_deploy_command(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = HttpTransport()
    gateway.on(
        "POST /v1/functions/f-x/invoke", {"code": "function_not_found", "detail": "There is no function 'f-x'."}, 404
    )
    with pytest.raises(FunctionNotFound) as caught:
        transport.call(EncodedCall(Target("f-x"), media.NATIVE, b""))
    message = str(caught.value)
    assert all(each in message for each in ("'f-x'", "`gpufn deploy FILE`", "Client().deploy(f_x)"))
    transport.close()


def test_a_size_above_the_limit_names_a_remedy(gateway: StubGateway) -> None:
    problem = {"code": "payload_too_large", "detail": "The body is larger than 7.5 MiB."}
    gateway.on("POST /v1/functions/f/invoke", problem, status=413)
    gateway.on("HEAD /v1/bundles/abc", status=404)
    gateway.on("PUT /v1/bundles/abc", problem, status=413)
    gateway.on("PUT /v1/volumes/v/blobs/abc", problem, status=413)
    with Client() as client:
        with pytest.raises(PayloadTooLarge, match=r"7\.5 MiB: .*path or URL"):
            client.invoke("f")
        with pytest.raises(PayloadTooLarge, match=r"bundle of \d+ B .*leave large files"):
            client.put_bundle(_digest("abc"), b"zip")
        with pytest.raises(PayloadTooLarge, match="GPUFN_MAX_MODEL_BYTES"):
            client.put_volume_file("v", "abc", [b"zip"], 3)


def test_a_call_of_an_app_that_is_not_deployed_names_no_python_object(gateway: StubGateway) -> None:
    problem = {"code": "function_not_found", "detail": "There is no function 'board/rom'."}
    gateway.on("POST /v1/functions/-/board/rom/invoke", problem, 404)
    transport = HttpTransport()
    with pytest.raises(FunctionNotFound) as caught:
        transport.call(EncodedCall(Target("board/rom"), media.NATIVE, b""))
    assert "'board/rom'" in str(caught.value)
    assert "Client()" not in str(caught.value)
    transport.close()


def test_retry_after_is_kept(gateway: StubGateway) -> None:
    gateway.on("POST /v1/functions/f/invoke", {"code": "queue_full"}, status=429, retry_after="7")
    with Client() as client, pytest.raises(QueueFull) as caught:
        client.invoke("f")
    assert caught.value.retry_after_s == 7


def test_a_refused_connection_suggests_to_start_the_platform() -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(GatewayUnavailable, match="`gpufn up`"):
        client.functions()


def test_an_invoke_is_never_sent_twice(gateway: StubGateway) -> None:
    gateway.on("POST /v1/functions/f/invoke", status=0)
    with Client() as client, pytest.raises(GatewayUnavailable, match="broke"):
        client.invoke("f")
    assert len(gateway.requests) == 1


def test_a_submit_is_repeated_under_its_own_id_when_the_connection_breaks(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufn.client.http._RETRY_DELAYS_S", (0.0, 0.0))
    path = f"/v1/functions/f/invocations/{'0' * 26}"
    gateway.on(f"PUT {path}", status=0)
    gateway.on(f"PUT {path}", _STATUS, status=202)
    with Client() as client:
        view = client.submit("f", b"{}", invocation="0" * 26)
    assert (view.state, [request.path for request in gateway.requests]) == (InvocationState.QUEUED, [path, path])


def test_a_result_is_waited_for_until_it_is_there(gateway: StubGateway) -> None:
    path = f"GET /v1/invocations/{'0' * 26}/result"
    gateway.on(path, _STATUS, status=202)
    gateway.on(path, _native([1]), content_type=media.NATIVE)
    with Client() as client:
        assert values.decode_value(media.NATIVE, client.result_raw("0" * 26).body) == [1]
        assert [request.path.partition("?")[2] for request in gateway.requests] == ["wait=30.000"] * 2


def test_a_late_result_is_a_timeout(gateway: StubGateway) -> None:
    gateway.on(f"GET /v1/invocations/{'0' * 26}/result", _STATUS, status=202)
    with Client() as client, pytest.raises(TimeoutError, match=r"0{26} .* 0 s"):
        client.result_raw("0" * 26, timeout_s=0)


def _record(kind: int, body: bytes, content_type: str = media.NATIVE) -> bytes:
    return bytes([kind, len(content_type)]) + len(body).to_bytes(4, "big") + content_type.encode() + body


def test_a_function_reaches_the_gateway(gateway: StubGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    @gpu_function(name="counting")
    def counting(n: int) -> Any:
        yield n

    transport = HttpTransport()
    monkeypatch.setattr(_transport, "_installed", transport)
    items = [_record(0, _native(n)) for n in range(3)]
    gateway.on("POST /v1/functions/counting/invoke", b"".join([*items, _record(1, b"", "")]))
    gateway.on("POST /v1/functions/counting/invoke", items[0] + _record(2, b'{"code":"function_raised","detail":"no"}'))
    gateway.on("POST /v1/functions/counting/invoke", items[0])
    assert counting.remote(3) == [0, 1, 2]
    assert gateway.requests[0].headers["accept"] == "application/vnd.gpufn.items"
    with pytest.raises(FunctionRaised, match="no"):
        counting.remote(3)
    with pytest.raises(GatewayUnavailable, match="broke off"):
        counting.remote(3)
    transport.close()


def test_a_spawned_call_has_the_id_that_was_sent(gateway: StubGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpufn.client.endpoints.calls.new_invocation_id", lambda: "0" * 26)
    transport = HttpTransport()
    gateway.on(f"PUT /v1/functions/f.go/invocations/{'0' * 26}", _STATUS, status=202)
    gateway.on(f"GET /v1/invocations/{'0' * 26}", _STATUS | {"state": "running"})
    gateway.on(f"DELETE /v1/invocations/{'0' * 26}", _STATUS | {"cancelled": False})
    invocation = transport.submit(EncodedCall(Target("f", "go"), media.NATIVE, b""))
    assert is_invocation_id(invocation)
    assert (transport.status(invocation), transport.cancel(invocation)) == (InvocationState.RUNNING, False)
    transport.close()


def test_events_become_json_values(gateway: StubGateway) -> None:
    gateway.on(
        "POST /v1/functions/f/invoke", b'event: item\nid: 0\ndata: {"a": 1}\n\nevent: item\ndata: 2\n\nevent: end\n\n'
    )
    with Client() as client:
        assert list(client.stream_json("f", b"{}")) == [{"a": 1}, 2]


def test_views_are_typed_and_ignore_new_fields(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f", _VIEW)
    gateway.on("GET /v1/functions", {"functions": [_VIEW]})
    with Client() as client:
        view = client.function("f")
        assert (view.workers, view.queued, view.running) == (WorkerCounts(ready=1), None, 3)
        assert client.functions() == [view]
    assert repr(view) == "<FunctionView f@2, 1 ready>"


def test_an_answer_of_another_kind_is_a_mismatch(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions", b"<html>")
    with Client() as client, pytest.raises(ProtocolMismatch, match="another release"):
        client.functions()


@pytest.mark.parametrize("status", [200, 301, 404, 500])
def test_a_page_is_not_a_response_of_a_gateway(gateway: StubGateway, status: int) -> None:
    gateway.on("GET /v1/functions", b"<html>", status, content_type="text/html")
    gateway.on("GET /v1/functions/f/logs", b"<html>", 404, content_type="text/html")
    message = f"the server at {gateway.url} is not a gpufn gateway: it returned "
    with Client() as client:
        with pytest.raises(GatewayUnavailable, match=f"{message}{status}, text/html"):
            client.functions()
        with pytest.raises(GatewayUnavailable, match=f"{message}404, text/html"):
            list(client.logs("f"))


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (502, "502 Bad Gateway: it cannot reach the gateway"),
        (503, "503 Service Unavailable: it cannot reach the gateway"),
        (504, "504 Gateway Timeout: the gateway did not respond in time"),
    ],
)
@pytest.mark.parametrize("content_type", ["text/html", "text/plain; charset=utf-8"])
def test_a_page_of_a_proxy_is_reported_as_such(
    gateway: StubGateway, status: int, message: str, content_type: str
) -> None:
    gateway.on("POST /v1/functions/f/invoke", b"<html>", status, content_type=content_type)
    gateway.on("GET /v1/functions", b"<html>", status, content_type=content_type)
    gateway.on("GET /v1/functions/f/logs", b"<html>", status, content_type=content_type)
    with Client() as client:
        for send in (client.functions, lambda: client.invoke("f"), lambda: list(client.logs("f"))):
            with pytest.raises(GatewayUnavailable) as caught:
                send()
            assert caught.value.message == f"a proxy at {gateway.url} returned {message}"
    assert len(gateway.requests) == 3, "no gateway had answered before"


@pytest.mark.parametrize(("status", "tries"), [(502, 2), (503, 2), (504, 1)])
def test_a_request_is_retried_if_a_proxy_reports_a_gateway_that_responded_before_as_unreachable(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch, status: int, tries: int
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for path in ("GET /v1/functions", "POST /v1/functions/f/rollback"):
        gateway.on(path, b"<html>", status, content_type="text/html")
        gateway.on(path, {"functions": []} if path.startswith("GET") else _VIEW)
    gateway.on("GET /v1/nodes", {"nodes": []})
    with Client() as client:
        client.nodes()
        for send in (client.functions, lambda: client.rollback("f")):
            before = len(gateway.requests)
            with contextlib.suppress(GatewayUnavailable):
                send()
            is_post = gateway.requests[-1].method == "POST"
            assert len(gateway.requests) - before == (1 if is_post else tries)


def test_a_problem_of_the_gateway_itself_is_not_a_proxys(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions", {"code": "bus_unavailable", "detail": "no bus"}, status=503)
    with Client() as client, pytest.raises(BusUnavailable, match="no bus"):
        client.functions()
    assert len(gateway.requests) == 1


def test_a_bundle_that_is_there_is_not_uploaded(gateway: StubGateway) -> None:
    gateway.on("HEAD /v1/bundles/abc")
    gateway.on("PUT /v1/bundles/def", status=201)
    with Client() as client:
        assert (client.put_bundle(_digest("abc"), b"zip"), client.put_bundle(_digest("def"), b"zip")) == (False, True)
    assert [(request.method, request.path[-3:]) for request in gateway.requests] == [
        ("HEAD", "abc"),
        ("HEAD", "def"),
        ("PUT", "def"),
    ]


def test_an_object_that_is_not_a_gpu_function_is_not_deployed(gateway: StubGateway) -> None:
    def plain() -> None: ...

    not_one: Any = plain
    with Client() as client, pytest.raises(InvalidSpec, match=r"plain at .* is not a @gpu_function"):
        client.deploy(not_one)
    assert gateway.requests == []


def test_nothing_is_deployed_where_one_of_several_cannot_be(gateway: StubGateway) -> None:
    lock = threading.Lock()

    @gpu_function
    def first() -> None: ...

    @gpu_function(name="first")
    def second() -> None: ...

    @gpu_function
    def bad() -> bool:
        return lock.locked()

    with Client() as client:
        with pytest.raises(InvalidSpec, match=r"first and second .* first: set name="):
            client.deploy(first, first, second)
        with pytest.raises(InvalidBundle, match=r"bad .*by value"):
            client.deploy(first, bad)
    assert gateway.requests == []


def test_the_state_of_calls_may_be_passed_as_text(gateway: StubGateway) -> None:
    gateway.on("GET /v1/calls", {"calls": []})
    as_text: Any = "failed"
    with Client() as client:
        for state in (as_text, InvocationState.FAILED):
            assert client.calls(state=state) == []
            assert gateway.requests[-1].path == "/v1/calls?state=failed&limit=20"


def test_deploy_sends_the_bundle_then_the_spec(gateway: StubGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    @gpu_function(name="f")
    def here(x: int) -> int:
        return x

    monkeypatch.setattr(Client, "put_bundle", lambda self, digest, data: True)
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", _VIEW, status=201)
    with Client() as client:
        assert [view.active for view in client.deploy(here)] == [2]
    sent = next(request for request in gateway.requests if request.method == "POST").json
    assert (sent["spec"]["name"], sent["spec"]["entry"]["packaging"], len(sent["bundle"])) == ("f", "pickle", 64)


@given(st.lists(st.binary(max_size=9).filter(lambda line: b"\r" not in line and b"\n" not in line)), st.integers(1, 9))
def test_lines_are_the_same_at_any_cut(lines: list[bytes], size: int) -> None:
    data = b"".join(line + end for line, end in zip(lines, itertools.cycle((b"\n", b"\r\n"))))
    chunks = (data[at : at + size] for at in range(0, len(data), size))
    assert list(lines_of([*chunks, b"the rest"])) == [*lines, b"the rest"]


def test_lines_of_a_log_arrive_one_by_one(gateway: StubGateway) -> None:
    line = {"at": 1.0, "function": "f", "revision": 1, "worker": "w", "stream": "stdout", "text": "hi"}
    gateway.on("GET /v1/functions/f/logs", msgspec.json.encode(line) + b"\n" + msgspec.json.encode(line) + b"\n")
    with Client() as client:
        assert [line.text for line in client.logs("f", tail=5, follow=True)] == ["hi", "hi"]
    assert gateway.requests[0].path.endswith("/logs?tail=5&follow=true")


def test_the_address_comes_from_the_environment_then_from_the_running_platform(tmp_path: Path) -> None:
    home = {"GPUFN_HOME": str(tmp_path)}
    assert find_url({"HOME": str(tmp_path)}) == "http://127.0.0.1:8090"
    with pytest.raises(GatewayUnavailable):  # the platform at the default address is another one
        find_url(home)
    (tmp_path / "up.json").write_text('{"url": "http://127.0.0.1:9"}')
    assert find_url(home) == "http://127.0.0.1:9"
    assert find_url(home | {"GPUFN_URL": "http://x"}) == "http://x"


def _digest(text: str) -> Any:
    return text


_BY_NAME: tuple[Callable[[Client, str], Any], ...] = (
    Client.function,
    Client.delete,
    Client.revisions,
    lambda client, name: client.revision(name, 1),
    Client.rollback,
    lambda client, name: client.scale(name, 0, 1),
    Client.why,
    lambda client, name: list(client.logs(name)),
    Client.calls,
    lambda client, name: client.put_bundle(Digest(name), b""),
    Client.remove_schedule,
    Client.pause_schedule,
    Client.run_schedule,
    Client.limit_key,
    Client.delete_key,
    Client.webhook_secret,
    Client.invoke,
    lambda client, name: list(client.stream_raw(name, b"")),
    lambda client, name: list(client.stream_json(name, b"")),
    lambda client, name: client.submit(name, b""),
    lambda client, name: client.submit("f", b"", invocation=name),
    Client.invocation,
    Client.result_raw,
    Client.cancel,
    Client.dead_letters,
    lambda client, name: client.dead_letter(name, "1"),
    lambda client, name: client.dead_letter("f", name),
    lambda client, name: client.dead_letter_payload("f", name),
    lambda client, name: client.replay("f", name),
    Client.replay_all,
    lambda client, name: client.drop_dead_letter("f", name),
    Client.drop_dead_letters,
    lambda client, name: client.send_items(name, "1", 0, []),
    lambda client, name: client.send_items("f", name, 0, []),
    lambda client, name: list(client.outcomes_raw(name)),
    Client.map,
    Client.cancel_map,
    lambda client, name: client.put_artifact(name, Path(__file__)),
    Client.build,
    Client.build_report,
    Client.cancel_build,
    Client.model,
)


@pytest.mark.parametrize("send", _BY_NAME)
def test_no_name_leads_to_another_address(gateway: StubGateway, send: Callable[[Client, str], Any]) -> None:
    with Client() as client:
        for name in ("", ".", "..", "A/b", "a/b/c/d", "../nodes", "a\n", "\x1b[2J"):
            with pytest.raises(InvalidInput) as caught:
                send(client, name)
            assert repr(name) in caught.value.message
        assert gateway.requests == []
        with contextlib.suppress(GpufnError):
            send(client, "a b?c#d%2f")
    assert "/a%20b%3Fc%23d%252f" in gateway.requests[0].path


def test_in_a_worker_a_client_without_an_address_names_the_alternative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = {"GPUFN_HOME": str(tmp_path)}
    monkeypatch.setattr(context, "_find", lambda: None)  # as in a worker, which installs its own
    with pytest.raises(GatewayUnavailable, match=r"worker.*f\.remote\(.*GPUFN_URL"):
        find_url(worker)
    assert find_url(worker | {"GPUFN_URL": "http://x"}) == "http://x"
