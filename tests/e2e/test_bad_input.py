"""Bad input gets a clear error: a status, a stable code, and a message with the next step. It loses no data.

After each test a good function still answers.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import httpx
import msgspec
import pytest

from gpufn_core.encoding import media
from gpufn_core.ids import new_ulid
from tests.conftest import Platform, http_client

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "picky.py"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def deployed(platform: Platform) -> Iterator[Platform]:
    names = [view["name"] for view in json.loads(platform.gpufn("deploy", APP, "--json"))]
    yield platform
    for name in names:
        platform.client.delete(f"/v1/functions/{name}")


@pytest.fixture
def picky(deployed: Platform) -> Iterator[Platform]:
    yield deployed
    assert deployed.invoke("add", {"x": 1}) == 2, "a good function still answers"


def refusal(answer: httpx.Response) -> tuple[int, str, str, str | None]:
    """Status, code, message and field of a problem."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    problem = answer.json()
    assert (problem["status"], problem["type"]) == (answer.status_code, "about:blank")
    return answer.status_code, problem["code"], problem["detail"], problem.get("field")


# Calls


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("content_type", [media.NATIVE, media.PICKLED])
def test_an_argument_that_is_a_program_runs_nowhere(picky: Platform, tmp_path: Path, content_type: str) -> None:
    made = tmp_path / "made"
    pickle = cloudpickle.dumps(Exploit(made))
    for code, content in ((40, pickle), (41, msgspec.msgpack.encode(["Exploit", pickle]))):
        body = msgspec.msgpack.encode({"args": [], "kwargs": {"x": msgspec.msgpack.Ext(code, content)}})
        answer = picky.client.post("/v1/functions/add/invoke", content=body, headers={"content-type": content_type})
        assert refusal(answer)[:2] in {(422, "invalid_input"), (415, "unsupported_media_type")}
    assert not made.exists()


def test_an_unknown_function(picky: Platform) -> None:
    for verb in ("invoke", "submit"):
        answer = picky.client.post(f"/v1/functions/no-such-thing/{verb}", json={})
        assert refusal(answer) == (404, "function_not_found", "There is no function 'no-such-thing'.", None)
    assert refusal(picky.post("add.nothing")) == (
        404, "function_not_found", "'add.nothing' cannot be called; call add.", None,
    )  # fmt: skip


@pytest.mark.parametrize("verb", ["invoke", "submit"])
@pytest.mark.parametrize(
    ("arguments", "said", "field"),
    [
        ({"x": "1"}, "x: expected int, got str", "x"),
        ({"x": True}, "x: expected int, got bool", "x"),
        ({"x": 1, "y": None}, "y: expected int, got null", "y"),
        ({}, "x: this argument is missing", "x"),
        ({"x": 1, "z": 2}, "z: there is no such argument; it takes x, y", "z"),
        ([1], "the body must be a JSON object of keyword arguments: expected object, got array", None),
    ],
)
def test_arguments_that_do_not_fit(picky: Platform, verb: str, arguments: Any, said: str, field: str | None) -> None:
    answer = picky.client.post(f"/v1/functions/add/{verb}", json=arguments)
    assert refusal(answer) == (422, "invalid_input", said, field)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"x": 1', "truncated"),
        (b'{"x": 1} and more', "trailing characters"),
        (b'\xef\xbb\xbf{"x": 1}', "invalid character (byte 0)"),
        (b'{"\xff": 1}', "utf-8"),
    ],
)
def test_invalid_json(picky: Platform, body: bytes, said: str) -> None:
    status, code, detail, _ = refusal(picky.post("add", body, headers=JSON))
    assert (status, code) == (422, "invalid_input")
    assert detail.startswith("the body is not valid JSON: ")
    assert said in detail


def test_a_number_that_json_lacks(picky: Platform) -> None:
    refused = refusal(picky.post("add", b'{"x": NaN}', headers=JSON))
    assert (refused[:2], refused[3]) == ((422, "invalid_input"), "x")
    assert refused[2].startswith("x: JSON has no NaN (byte 6): ")


@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 5000])
def test_a_number_out_of_range(picky: Platform, number: str) -> None:
    status, code, detail, field = refusal(picky.post("add", f'{{"x": {number}}}'.encode(), headers=JSON))
    assert (status, code, field) == (422, "invalid_input", "x")
    assert "out of range" in detail


def test_invalid_msgpack(picky: Platform) -> None:
    msgpack = {"content-type": "application/msgpack"}
    for body in (b"\xc1", b"\xdf\xff\xff\xff\xff", b"\x81\xa1x\xdd\xff\xff\xff\xff", b"\x81\xa1x" + b"\x91" * 100_000):
        status, code, detail, _ = refusal(picky.post("add", body, headers=msgpack))
        assert (status, code) == (422, "invalid_input"), body[:10]
        assert "msgpack" in detail or "x: expected int" in detail
    assert refusal(picky.post("add", b"\x81\x01\x01", headers=msgpack)) == (
        422, "invalid_input", "a key of the body: expected str, got int", None,
    )  # fmt: skip


@pytest.mark.parametrize("depth", [100, 100_000])
def test_a_body_that_is_too_deep(picky: Platform, depth: int) -> None:
    body = b'{"value": ' + b"[" * depth + b"]" * depth + b"}"
    assert refusal(picky.post("echo", body, headers=JSON)) == (
        422, "invalid_input", "the body is nested more than 64 levels deep", None,
    )  # fmt: skip


def test_a_body_that_is_too_large(picky: Platform) -> None:
    too_large = refusal(picky.post("size", b"x" * (65 << 20)))
    most = "The body has 68,157,440 bytes: the limit for a call's arguments is 64 MiB."
    assert too_large == (413, "payload_too_large", most, None)
    # A body of unknown length travels in a message.
    said = "The body is too large: the limit for a call's arguments is 7.5 MiB."
    body = b"x" * (8 << 20)
    pieces = (body[at : at + 65_536] for at in range(0, len(body), 65_536))
    chunked = picky.client.post("/v1/functions/size/invoke", content=pieces)
    hint = f"{said} For a larger body, send Content-Length."
    assert refusal(chunked) == (413, "payload_too_large", hint, None)


def test_a_wrong_content_type(picky: Platform) -> None:
    answer = picky.post("add", b"x=1", headers={"content-type": "text/plain"})
    assert refusal(answer) == (
        415,
        "unsupported_media_type",
        "add takes its arguments as application/json or application/msgpack, not as text/plain.",
        None,
    )


def test_a_function_name_with_bad_characters(picky: Platform) -> None:
    for name in ("%00", "%2e%2e", "%F0%9F%98%80", "a;b", "*", "%3E", "a" * 5000):
        status, code, detail, _ = refusal(picky.client.post(f"/v1/functions/{name}/invoke"))
        assert (status, code) == (404, "function_not_found"), name
        assert len(detail) < 200, "a long name is cut"
        assert detail.isprintable()
    for path in ("/v1/functions/..%2F..%2Fetc/invoke", "//v1//functions", "/v1/functions//invoke"):
        assert refusal(picky.client.post(path)) == (404, "bad_request", "There is nothing at this path.", None)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/functions/add/invoke", "POST"), ("PUT", "/v1/functions", "GET"), ("TRACE", "/v1/functions", "GET")],
)
def test_a_wrong_method(picky: Platform, method: str, path: str, allowed: str) -> None:
    answer = picky.client.request(method, path)
    status, code, detail, _ = refusal(answer)
    assert (status, code) == (405, "bad_request")
    assert allowed in answer.headers["allow"].split(", ")
    assert detail.startswith(f"{method} is not allowed here; ")


def test_input_that_is_not_http(picky: Platform) -> None:
    host, port = picky.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01 this is TLS\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"application/problem+json" in answer


# Results


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        ("too_much", {"megabytes": 65}, "more than the"),
        ("not_sendable", {}, "cannot be sent as application/json"),
    ],
)
def test_a_result_that_cannot_be_sent(
    picky: Platform, function: str, arguments: dict[str, Any], said: str, waits: bool
) -> None:
    if waits:
        answer = picky.post(function, arguments)
    else:
        invocation = picky.client.post(f"/v1/functions/{function}/submit", json=arguments).json()["id"]
        answer = picky.client.get(f"/v1/invocations/{invocation}/result", params={"wait": 30})
    status, code, detail, _ = refusal(answer)
    assert (status, code) == (500, "result_not_encodable")
    assert said in detail


def test_an_item_that_cannot_be_sent_ends_the_stream(picky: Platform) -> None:
    answer = picky.post("items_until_one_is_not_sendable", {}, headers={"accept": "text/event-stream"})
    assert re.findall(r"^event: (\w+)$", answer.text, re.MULTILINE) == ["item", "error"]
    problem = json.loads(answer.text.rpartition("data: ")[2])
    assert problem["code"] == "result_not_encodable"
    assert "cannot be sent as application/json" in problem["detail"]


# Submitted calls


def test_ids_and_waits_that_make_no_sense(picky: Platform) -> None:
    client = picky.client
    put = client.put("/v1/functions/add/invocations/not-an-id", json={"x": 1})
    assert refusal(put) == (
        422, "invalid_input", "an invocation id must be a ULID: 26 characters of 0-9 and a-z, the first 0 to 7", "id",
    )  # fmt: skip
    for path in ("not-an-id", "0" * 25 + "1", "%00"):
        assert refusal(client.get(f"/v1/invocations/{path}"))[:2] == (404, "invocation_not_found")
        assert refusal(client.delete(f"/v1/invocations/{path}"))[:2] == (404, "invocation_not_found")
    for wait in ("abc", "nan", "-1", "1e9"):
        answer = client.get(f"/v1/invocations/{'0' * 26}/result", params={"wait": wait})
        assert refusal(answer) == (422, "invalid_input", f"wait must be a number from 0 to 60, not {wait!r}", "wait")


def test_an_id_of_another_functions_call_is_not_taken_over(picky: Platform) -> None:
    mine = new_ulid()
    assert picky.client.put(f"/v1/functions/add/invocations/{mine}", json={"x": 1}).status_code == 202
    taken = picky.client.put(f"/v1/functions/echo/invocations/{mine}", json={})
    assert refusal(taken)[:2] == (409, "idempotency_mismatch")
    assert taken.json()["retryable"] is False, "another try fails the same way"
    assert picky.client.get(f"/v1/invocations/{mine}/result", params={"wait": 30}).json() == 2


def test_an_idempotency_key_belongs_to_its_function(picky: Platform) -> None:
    mine = picky.client.post("/v1/functions/add/submit", json={"x": 1}, headers={"idempotency-key": "k"}).json()["id"]
    derived = picky.client.put(f"/v1/functions/echo/invocations/{mine}", json={})
    assert refusal(derived)[:2] == (422, "invalid_input"), "a client cannot choose an id that a key derives"
    other = picky.client.post("/v1/functions/echo/submit", json={}, headers={"idempotency-key": "k"}).json()["id"]
    assert other != mine
    assert picky.client.get(f"/v1/invocations/{mine}/result", params={"wait": 30}).json() == 2


# Deploys


def upload(platform: Platform, data: bytes, digest: str | None = None) -> httpx.Response:
    digest = digest or hashlib.sha256(data).hexdigest()
    return platform.client.put(f"/v1/bundles/{digest}", content=data, headers={"content-type": "application/zip"})


def archive(*entries: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in entries:
            made.writestr(name, data)
    return buffer.getvalue()


def link(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: archive(("../escape.py", b"")), "leaves it or is not plain: '../escape.py'"),
        (lambda: archive(("a/../../escape.py", b"")), "leaves it or is not plain"),
        (lambda: archive(("/etc/passwd", b"")), "absolute path: '/etc/passwd'"),
        (lambda: archive(("C:/windows.py", b"")), "absolute path"),
        (lambda: archive((link("app.py"), b"/etc/passwd")), "'app.py' is a link or a device"),
        (lambda: archive(("a\\..\\b.py", b"")), "unusable name"),
        (lambda: archive(("app.py", b"1"), ("APP.py", b"2")), "'APP.py' twice"),
        (lambda: archive(("zeros", bytes(200 << 20))), "unpacks to more than 100 times its size"),
        (lambda: archive(*((f"{number}", b"") for number in range(10_001))), "more than 10,000 entries"),
        (lambda: b"print('no zip')", "not a zip archive"),
    ],
    ids=[
        "parent",
        "inner-parent",
        "absolute",
        "drive",
        "link",
        "backslash",
        "twice",
        "bomb",
        "many",
        "no-zip",
    ],
)
def test_a_bundle_that_is_no_good(picky: Platform, make: Callable[[], bytes], said: str) -> None:
    status, code, detail, _ = refusal(upload(picky, make()))
    assert (status, code) == (422, "invalid_bundle")
    assert said in detail


def test_a_bundle_that_was_damaged_on_its_way(picky: Platform) -> None:
    status, code, detail, _ = refusal(upload(picky, archive(("app.py", b"")), "0" * 64))
    assert (status, code) == (422, "invalid_bundle")
    assert "damaged" in detail
    assert picky.client.head(f"/v1/bundles/{'0' * 64}").status_code == 404


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": "red"}, "unknown field `colour`"),
        ({"name": "Bad Name"}, "'Bad Name' is not a function name: use a to z, 0 to 9 and hyphens"),
        ({"name": "../add"}, "is not a function name"),
        ({"scaling": {"min_workers": 5, "max_workers": 1}}, "min_workers=5 is more than max_workers=1"),
        ({"concurrency": 0}, "concurrency is a whole number from 1 to 1000, not 0"),
        ({"timeout_s": "soon"}, "`$.timeout_s`"),
        ({"methods": []}, "there is nothing to call"),
        ({"methods": [{"kind": "generator"}], "batch": {"max_size": 4}}, "contradict each other"),
        ({"env": {"LD_PRELOAD": "x"}}, "LD_PRELOAD is set by gpufn itself"),
        ({"env": {"A": "x\0y"}}, "A: an environment variable cannot hold a null character"),
    ],
)
def test_a_spec_that_is_no_good(picky: Platform, change: dict[str, Any], said: str) -> None:
    view = picky.client.get("/v1/functions/add").json()
    bundle = picky.client.get("/v1/functions/add/revisions").json()["revisions"][-1]["bundle"]
    answer = picky.client.post("/v1/functions", json={"spec": view["spec"] | change, "bundle": bundle})
    status, code, detail, _ = refusal(answer)
    assert (status, code) == (422, "invalid_spec")
    assert said in detail
    assert picky.client.get("/v1/functions/add").json()["latest"] == view["latest"], "no revision was made"


def test_a_deploy_without_its_bundle(picky: Platform) -> None:
    spec = picky.client.get("/v1/functions/add").json()["spec"]
    answer = picky.client.post("/v1/functions", json={"spec": spec, "bundle": "1" * 64})
    said = f"The bundle 111111111111 is not uploaded: PUT /v1/bundles/{'1' * 64} first."
    assert refusal(answer) == (422, "invalid_bundle", said, None)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def broken(:\n    pass\n", "line 1, `def broken(:`: SyntaxError: invalid syntax"),
        (
            "import os\nimport json.gone\n",
            "line 2, `import json.gone`: ModuleNotFoundError: No module named 'json.gone'",
        ),
        ("def helper():\n    return 1 / 0\nhelper()\n", "line 2, `return 1 / 0`: ZeroDivisionError: division by zero"),
        (
            "from gpufn import gpu_function\n@gpu_function(gpus=1)\ndef f() -> None: ...\n",
            "line 2, `@gpu_function(gpus=1)`: there is no option 'gpus'; did you mean 'gpu'?",
        ),
    ],
    ids=["syntax", "import", "raises", "option"],
)
def test_a_deploy_of_a_file_that_cannot_be_imported(picky: Platform, tmp_path: Path, source: str, said: str) -> None:
    file = tmp_path / "mistaken.py"
    file.write_text(source)
    ended = subprocess.run(
        [sys.executable, "-m", "gpufn", "deploy", file],
        env=os.environ | {"GPUFN_URL": picky.url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
    assert ended.stderr.splitlines()[-1] == f"gpufn: cannot import {file}: {said}"
    assert "Traceback" not in ended.stderr


def test_many_deploys_at_once_all_happen(picky: Platform, tmp_path: Path) -> None:
    """Each deploy gets its own number. The highest number is active, whichever deploy finished last."""
    (tmp_path / "contended.py").write_text(
        "from gpufn import gpu_function\n@gpu_function\ndef contended() -> str:\n    return 'served'\n"
    )
    first = json.loads(picky.gpufn("deploy", tmp_path / "contended.py", "--json"))[0]
    bundle = picky.client.get("/v1/functions/contended/revisions").json()["revisions"][0]["bundle"]
    request = {"spec": first["spec"], "bundle": bundle, "replace": True}  # a client that names no source
    statuses: list[int] = []
    gate = threading.Barrier(8)

    def deploy() -> None:
        with http_client(picky.url, timeout_s=30) as client:
            gate.wait()
            statuses.append(client.post("/v1/functions", json=request).status_code)

    callers = [threading.Thread(target=deploy) for _ in range(gate.parties)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert statuses == [201] * gate.parties
    view = picky.client.get("/v1/functions/contended").json()
    assert (view["active"], view["latest"]) == (9, 9)
    listed = picky.client.get("/v1/functions/contended/revisions").json()["revisions"]
    assert [revision["number"] for revision in listed] == list(range(1, 10))
    assert picky.invoke("contended") == "served"
    picky.client.delete("/v1/functions/contended")


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "said"),
    [
        ("scale", {"min_workers": -1}, 422, "invalid_spec", "min_workers is a whole number from 0 to 1000, not -1"),
        ("scale", {"max_workers": 1.5}, 422, "invalid_input", "max_workers: "),
        ("scale", {"workers": 2}, 422, "invalid_input", "it takes min_workers, max_workers"),
        ("scale", {"min_workers": 9}, 422, "invalid_spec", "min_workers=9 is more than max_workers=4"),
        ("rollback", {"revision": 99}, 404, "revision_not_found", "add has no revision 99; it has {latest}."),
        ("rollback", {"revision": "1"}, 422, "invalid_input", "revision: "),
    ],
)
def test_a_meaningless_change(  # noqa: PLR0917
    picky: Platform, path: str, body: dict[str, Any], status: int, code: str, said: str
) -> None:
    latest = picky.client.get("/v1/functions/add").json()["latest"]  # above 1 if an earlier file had such a function
    found = refusal(picky.client.post(f"/v1/functions/add/{path}", json=body))
    assert found[:2] == (status, code)
    assert said.replace("{latest}", str(latest)) in found[2]


# Who may


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"host": "evil.example"}, "serves only the hosts localhost and 127.0.0.1"),
        ({"host": "127.0.0.1.evil.example"}, "serves only the hosts localhost and 127.0.0.1"),
        ({"origin": "http://evil.example"}, "Requests from web pages are not allowed here."),
        ({"origin": "null"}, "Requests from web pages are not allowed here."),
    ],
)
def test_a_web_page_cannot_reach_a_gateway_without_keys(picky: Platform, headers: dict[str, str], said: str) -> None:
    status, code, detail, _ = refusal(picky.post("add", {"x": 1}, headers=headers))
    assert (status, code) == (403, "forbidden")
    assert said in detail
