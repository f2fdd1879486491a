from __future__ import annotations

import importlib
import inspect
import json
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import gpufn
from gpufn import Client, media, values
from gpufn.cli import COMMANDS, app
from gpufn.cli._render import print_table
from gpufn.cli.doctor import CHECKS
from tests.sdk.conftest import Project, StubGateway

_VIEW: dict[str, Any] = {
    "name": "f",
    "active": 3,
    "serving": 2,
    "latest": 3,
    "updated_at": 1.0,
    "min_workers": None,
    "max_workers": 8,
    "spec": {
        "name": "f",
        "entry": {"module": "app", "qualname": "f"},
        "methods": [{"name": ""}],
        "scaling": {"min_workers": 0, "max_workers": 4},
        "resources": {"gpu": ["L4"], "share": "time", "cpu": 1.0, "memory_bytes": 1 << 30},
    },
    "workers": {"ready": 2, "starting": 1, "draining": 0, "parking": 0, "parked": 0, "resuming": 0},
    "queued": None,
    "running": 1,
    "wanted": 3,
    "reason": "1 running: 3 workers",
    "waiting": {"reason": "no_capacity", "detail": "no GPU is free", "eta_s": None},
}
_APP = {"app.py": "from gpufn import gpu_function\n@gpu_function\ndef f(x: int) -> int: return x\n"}


def _gpufn(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, arguments, **options)


def test_help_lists_every_command_without_importing_them() -> None:
    result = _gpufn("--help")
    assert result.exit_code == 0
    assert [name for name in COMMANDS if name not in result.stdout] == []
    assert "2 wrong usage" in " ".join(result.stdout.split())


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_list_says_what_the_command_says_of_itself(name: str) -> None:
    where, text = COMMANDS[name]
    module, _, attribute = where.partition(":")
    found = getattr(importlib.import_module(f"gpufn.cli.{module}"), attribute)
    own = found.info.help if isinstance(found, typer.Typer) else (inspect.getdoc(found) or "").splitlines()[0]
    assert own == text
    assert _gpufn(name, "--help").exit_code == 0


@pytest.mark.parametrize(
    ("status", "problem", "code", "message"),
    [
        (404, {"code": "function_not_found", "detail": "There is no function 'f'."}, 4, "there is no function 'f'"),
        (403, {"code": "forbidden", "detail": "scope"}, 5, "scope"),
        (429, {"code": "queue_full", "detail": "full", "retry_after_s": 3}, 6, "full (try again in 3 s)"),
        (
            429,
            {"code": "rate_limited", "detail": "One in 30 s.", "retry_after_s": 3},
            6,
            "one in 30 s (try again in 3 s)",
        ),
        (500, {"code": "platform_error", "detail": "oops"}, 1, "oops"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(
    gateway: StubGateway, status: int, problem: Any, code: int, message: str
) -> None:
    gateway.on("GET /v1/functions/f", problem, status=status)
    result = _gpufn("describe", "f")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"gpufn: {message}\n")


@pytest.mark.parametrize(
    ("request_line", "arguments"),
    [
        ("DELETE /v1/keys/k", ["rm", "k"]),
        ("PUT /v1/keys/k/limits", ["limit", "k"]),
        ("GET /v1/keys/k/webhook-secret", ["webhook-secret", "k"]),
    ],
)
def test_a_key_that_is_not_there_is_not_found(gateway: StubGateway, request_line: str, arguments: list[str]) -> None:
    gateway.on(request_line, {"code": "bad_request", "detail": "There is no key with this id."}, status=404)
    result = _gpufn("keys", *arguments)
    assert (result.exit_code, result.stderr) == (4, "gpufn: there is no key with this id\n")


def test_no_gateway_is_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFN_URL", "http://127.0.0.1:1")
    result = _gpufn("ls")
    assert result.exit_code == 3
    assert result.stderr == "gpufn: no gateway answers at http://127.0.0.1:1: is `gpufn up` running?\n"


def test_a_map_begins_with_a_gateway_that_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gpufn._map_items._PATIENCE_S", 0.0)
    monkeypatch.setenv("GPUFN_URL", "http://127.0.0.1:1")
    (lines := tmp_path / "lines.jsonl").write_text("{}\n")
    monkeypatch.setattr(Client, "send_items", lambda *_, **__: pytest.fail("it was sent"))
    result = _gpufn("map", "f", "-d", f"@{lines}")
    assert (result.exit_code, result.stderr.startswith("gpufn: no gateway answers at ")) == (3, True)


def test_a_map_of_a_function_that_is_not_there_brings_up_its_neighbour(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/g", {"code": "function_not_found", "detail": "There is no function 'g'."}, status=404)
    gateway.on("GET /v1/functions", {"functions": [_VIEW | {"name": "gg"}]})
    result = _gpufn("map", "g", "-d", "@/dev/null")
    assert (result.exit_code, result.stderr) == (4, "gpufn: there is no function 'g'; did you mean 'gg'?\n")


def test_a_key_that_cannot_be_sent_is_exit_code_5_and_not_told(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUFN_API_KEY", "abcsecret\r")
    result = _gpufn("ls")
    assert result.exit_code == 5
    assert result.stderr.startswith("gpufn: GPUFN_API_KEY is not a key: it has a line break in it")
    assert "abcsecret" not in result.output


def test_a_deploy_with_a_key_that_may_not_is_exit_code_5(gateway: StubGateway, project: Project) -> None:
    project(_APP)
    gateway.on("GET /v1/nodes", {"nodes": []})
    original = gateway.answer_to
    gateway.answer_to = lambda request: (  # type: ignore[method-assign]
        (403, {}, b"") if request.method == "HEAD" else original(request)
    )
    result = _gpufn("deploy", "app.py")
    told = "gpufn: this needs a key with the scope 'deploy'"
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (5, told)


@pytest.mark.parametrize("option", [("--timezone", "Europe/Berlin"), ("--missed", "all")])
def test_an_option_of_a_cron_line_is_refused_without_one(gateway: StubGateway, option: tuple[str, str]) -> None:
    assert _gpufn("schedules", "add", "f", "--in", "5s", *option).exit_code == 2
    assert gateway.requests == []
    gateway.on("POST /v1/schedules", {"id": "s1", "function": "f"})
    assert _gpufn("schedules", "add", "f", "--cron", "* * * * *", *option).stdout == "s1\n"
    assert gateway.requests[-1].json[option[0][2:]] == option[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["invoke"],
        ["scale", "f", "--min", "-1"],
        ["schedules", "add", "f", "--in", "soon"],
        ["schedules", "add", "f", "--cron", "* * *"],
        ["schedules", "add", "f", "--cron", "* * * * *", "--timezone", "Mars"],
        ["invoke", "f", "--timeout", "1e9"],
        ["submit", "f", "--timeout", "inf"],
        ["invoke", "f", "--file", "nosuch"],
        ["invoke", "f", "-d", "@nosuch"],
        ["map", "f", "-d", "@nosuch"],
        ["map", "f", "-d", "@/dev/null", "--id", "x"],
        ["describe", "a/b"],
        ["keys", "create", "--run-seconds", "nan"],
        ["keys", "create", "--gpu-seconds", "inf"],
        ["keys", "create", "--run-seconds", "0"],
        ["keys", "limit", "k", "--gpu-seconds", "-1"],
        ["usage", "--since", "999999d"],
        ["usage", "--since", "99999999999d"],
        ["--url", "ftp://h", "ls"],
        ["--url", "http://h:99999", "ls"],
        ["--url", "http://a b", "ls"],
        ["--url", "http://h/x?y", "ls"],
        ["deploy", "nosuch.py"],
        ["deploy", "/"],
        ["deploy", "nosuch.onnx"],
        ["simulate", "--plot", "/nosuch/plot.html"],
        ["build", "nosuch.pt"],
        ["build", "nosuch.py:make"],
    ],
)
def test_wrong_usage_is_exit_code_2_and_nothing_is_asked(gateway: StubGateway, arguments: list[str]) -> None:
    result = _gpufn(*arguments)
    assert (result.exit_code, gateway.requests) == (2, [])


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("invalid_spec", ["scale", "f", "--min", "5", "--max", "2"]),
        ("invalid_input", ["keys", "create", "--scope", "x"]),
        ("invalid_input", ["invoke", "f", '{"y": 1}']),
    ],
)
def test_what_the_gateway_finds_wrong_with_what_was_typed_is_exit_code_2(
    gateway: StubGateway, code: str, arguments: list[str]
) -> None:
    gateway.answer_to = lambda request: (  # type: ignore[method-assign]
        422,
        {"content-type": "application/problem+json"},
        json.dumps({"code": code, "detail": "no"}).encode(),
    )
    result = _gpufn(*arguments)
    assert (result.exit_code, result.stderr) == (2, "gpufn: no\n")


def test_a_message_that_names_its_field_names_it_once(gateway: StubGateway) -> None:
    detail = "X-Gpufn-Timeout is a number of seconds above 0, at most 7 days"
    problem = {"code": "invalid_input", "detail": detail, "field": "X-Gpufn-Timeout"}
    gateway.on("GET /v1/functions/f", _VIEW)
    gateway.on("POST /v1/functions/f/invoke", problem, status=422)
    assert _gpufn("invoke", "f").stderr == f"gpufn: {detail}\n"


def test_debug_shows_the_exception(gateway: StubGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFN_DEBUG", "1")
    assert "FunctionNotFound" in repr(_gpufn("describe", "f").exception)


def test_deploy_sends_each_function_of_the_file(gateway: StubGateway, project: Project) -> None:
    project(_APP)
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", _VIEW, status=201)
    gateway.on("GET /v1/functions/f", {"code": "function_not_found"}, status=404)
    gateway.on("GET /v1/functions/f", _VIEW)
    gateway.on("GET /v1/functions/f", _VIEW | {"serving": 3})
    digest_paths: list[str] = []
    original = gateway.answer_to

    def answer(request: Any) -> Any:
        if "/bundles/" in request.path:
            digest_paths.append(f"{request.method} {request.path}")
            return (404 if request.method == "HEAD" else 201), {}, b""
        return original(request)

    gateway.answer_to = answer  # type: ignore[method-assign]
    result = _gpufn("deploy", "app.py")
    assert (result.exit_code, result.stdout) == (0, f"f@3  {gateway.url}/v1/functions/f/invoke\n")
    sent = next(request for request in gateway.requests if request.method == "POST").json
    assert sent["spec"]["entry"] == {"module": "app", "qualname": "f", "packaging": "source"}
    assert [path.partition(" ")[0] for path in digest_paths] == ["HEAD", "PUT"]
    assert digest_paths[0].endswith(sent["bundle"])


@pytest.mark.parametrize(
    ("options", "code", "stdout", "stderr"),
    [
        (["--no-wait"], 0, "f@3  URL/v1/functions/f/invoke  2 serves until it is ready\n", ""),
        ([], 1, "", "gpufn: f@3 does not start, f@2 still serves: no such file\n"),
    ],
)
def test_deploy_says_which_revision_serves(  # noqa: PLR0917
    gateway: StubGateway, project: Project, options: list[str], code: int, stdout: str, stderr: str
) -> None:
    project(_APP)
    failing = _VIEW | {"reason": "revision 3: fails to start: calls stay with the old one: no such file"}
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("GET /v1/functions/f", failing)
    gateway.on("POST /v1/functions", failing, status=201)
    gateway.any_bundle = True
    result = _gpufn("deploy", "app.py", *options)
    assert (result.exit_code, result.stdout.replace(gateway.url, "URL"), result.stderr) == (code, stdout, stderr)


def test_what_a_file_prints_when_it_is_imported_is_no_part_of_the_json(gateway: StubGateway, project: Project) -> None:
    project({"app.py": "print('imported')\n" + _APP["app.py"]})
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", _VIEW | {"serving": 3}, status=201)
    gateway.any_bundle = True
    result = _gpufn("deploy", "app.py", "--json")
    assert ([view["name"] for view in json.loads(result.stdout)], result.stderr) == (["f"], "imported\n")


def test_deploy_warns_of_what_no_node_has(gateway: StubGateway, project: Project) -> None:
    project({"app.py": _APP["app.py"].replace("@gpu_function", "@gpu_function(gpu='H100')")})
    device = {"type": "cpu", "kind": "EPYC", "memory_bytes": 1 << 30, "cores": 2.0}
    gateway.on("GET /v1/nodes", {"nodes": [{"node": "n1", "devices": [device]}]})
    gateway.on("POST /v1/functions", _VIEW | {"serving": 3}, status=201)
    gateway.any_bundle = True
    result = _gpufn("deploy", "app.py")
    assert result.stderr == "gpufn: warning: calls of f will wait: no node has the GPU 'H100'\n"
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("files", "arguments", "code", "message"),
    [
        ({"app.py": "x = 1"}, [], 1, "app.py declares no @gpu_function"),
        (_APP, ["--name", "g"], 4, "app.py declares no g; it has f"),
        (
            {"app.py": "import nothing"},
            [],
            1,
            "cannot import app.py: line 1, `import nothing`: ModuleNotFound",
        ),
        ({}, [], 2, "there is no file app.py"),
        (_APP, ["--include", "../x"], 2, "include='../x' is not a glob below "),
        (_APP, ["--include", "/etc/passwd"], 2, "include='/etc/passwd' is not a glob below "),
    ],
)
def test_deploy_says_what_is_wrong_with_the_file(
    project: Project, files: dict[str, str], arguments: list[str], code: int, message: str
) -> None:
    project(files)
    result = _gpufn("deploy", "app.py", *arguments)
    assert result.exit_code == code
    assert result.stderr.startswith(f"gpufn: {message}")


@pytest.mark.parametrize(
    ("arguments", "stdin", "body", "content_type"),
    [
        ([], None, b"{}", "application/json"),
        (['{"x": 1}'], None, b'{"x": 1}', "application/json"),
        (["-d", "@in.json"], None, b'{"x": 2}', "application/json"),
        (["-d", "@-"], '{"x": 3}', b'{"x": 3}', "application/json"),
        (["--file", "cat.png"], None, b"PNG", "image/png"),
        (["--file", "in.json"], None, b'{"x": 2}', "application/octet-stream"),
    ],
)
def test_invoke_sends_what_it_is_given(  # noqa: PLR0917
    gateway: StubGateway,
    project: Project,
    arguments: list[str],
    stdin: str | None,
    body: bytes,
    content_type: str,
) -> None:
    project({"in.json": '{"x": 2}', "cat.png": "PNG"})
    gateway.on("GET /v1/functions/f", _VIEW)
    gateway.on("POST /v1/functions/f/invoke", [1, 2])
    result = _gpufn("invoke", "f", *arguments, input=stdin)
    assert (result.exit_code, result.stdout) == (0, "[1, 2]\n")
    assert (gateway.requests[-1].body, gateway.requests[-1].headers["content-type"]) == (body, content_type)


def test_invoke_prints_items_as_they_come(gateway: StubGateway) -> None:
    spec = _VIEW["spec"] | {"methods": [{"name": "", "kind": "generator"}]}
    gateway.on("GET /v1/functions/f", _VIEW | {"spec": spec})
    gateway.on("POST /v1/functions/f/invoke", b'event: item\ndata: {"a":1}\n\nevent: end\ndata: {"items":1}\n\n')
    result = _gpufn("invoke", "f")
    assert (result.exit_code, result.stdout) == (0, '{"a":1}\n')
    assert gateway.requests[-1].headers["accept"] == "text/event-stream"


def test_invoke_of_a_generator_as_json_is_one_document(gateway: StubGateway) -> None:
    gateway.on("POST /v1/functions/f/invoke", [1, 2], x_gpufn_invocation="ID", server_timing="run;dur=2")
    found = json.loads(_gpufn("invoke", "f", "--json").stdout)
    assert found == {"invocation": "ID", "timings_ms": {"run": 2}, "result": [1, 2]}


def test_the_class_of_a_call_is_an_option(gateway: StubGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    id_ = "0" * 26
    monkeypatch.setattr("gpufn._http_calls.new_invocation_id", lambda: id_)
    gateway.on("GET /v1/functions/f", b"", status=403)
    gateway.on("POST /v1/functions/f/invoke", 1)
    gateway.on(f"PUT /v1/functions/f/invocations/{id_}", {"id": id_, "state": "queued"}, status=202)
    assert _gpufn("invoke", "f", "--priority", "hi", "--json").exit_code == 0
    assert _gpufn("submit", "f", "--priority", "low").exit_code == 0
    assert [request.headers.get("x-gpufn-priority") for request in gateway.requests] == ["hi", "low"]
    wrong = _gpufn("submit", "f", "--priority", "high")
    assert (wrong.exit_code, len(gateway.requests)) == (2, 2)
    assert "'hi', 'normal', 'low'" in wrong.stderr


def test_a_call_is_submitted_and_its_result_fetched_later(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = "0" * 26
    monkeypatch.setattr("gpufn._http_calls.new_invocation_id", lambda: id_)
    status = {"id": id_, "state": "queued"}
    gateway.on(f"PUT /v1/functions/f/invocations/{id_}", status, status=202)
    gateway.on(f"GET /v1/invocations/{id_}", status | {"state": "running"})
    gateway.on(f"GET /v1/invocations/{id_}/result", status, status=202)
    gateway.on(f"GET /v1/invocations/{id_}/result", [7])
    gateway.on(f"DELETE /v1/invocations/{id_}", status | {"cancelled": False})
    assert _gpufn("submit", "f", '{"x": 1}', "--timeout", "90").stdout == f"{id_}\n"
    assert gateway.requests[0].headers["x-gpufn-timeout"] == "90"
    assert (gateway.requests[0].json, gateway.requests[0].headers["accept"]) == ({"x": 1}, "application/json")
    early = _gpufn("result", id_)
    assert (early.exit_code, early.stderr) == (
        1,
        f"gpufn: {id_} is still running; `gpufn result {id_} --wait` waits for its end\n",
    )
    assert _gpufn("result", id_, "--wait").stdout == "[7]\n"
    assert gateway.requests[-1].path.endswith("wait=30.000")
    gateway.answers.pop(f"GET /v1/invocations/{id_}/result")
    gateway.on(
        f"GET /v1/invocations/{id_}/result", values.encode_result((1, 2), media.NATIVE)[1], content_type=media.NATIVE
    )
    assert _gpufn("result", id_).stdout == "[1,2]\n"  # as `.spawn` from Python keeps it
    assert _gpufn("cancel", id_).stdout == f"{id_} had ended already\n"


@pytest.mark.parametrize("command", ["invoke", "describe"])
def test_a_function_that_is_not_there_brings_up_its_neighbour(gateway: StubGateway, command: str) -> None:
    missing = {"code": "function_not_found", "detail": "There is no function 'gret'."}
    gateway.on("GET /v1/functions/gret", missing, status=404)
    gateway.on("GET /v1/functions", {"functions": [_VIEW | {"name": "greet"}]})
    assert _gpufn(command, "gret").stderr == "gpufn: there is no function 'gret'; did you mean 'greet'?\n"


def test_a_command_that_is_not_there_brings_up_its_neighbour() -> None:
    assert "there is no command 'desribe'; did you mean 'describe'?" in _gpufn("desribe").stderr
    assert "there is no command 'delete'; did you mean 'rm'?" in _gpufn("delete", "greet").stderr


def test_the_version_is_an_option_too() -> None:
    assert _gpufn("--version").stdout == f"gpufn {gpufn.__version__}\n"


def test_what_the_system_refuses_is_one_line(gateway: StubGateway, tmp_path: Path) -> None:
    gateway.on("GET /v1/functions/f", _VIEW)
    gateway.on("POST /v1/functions/f/invoke", b"png", content_type="image/png")
    out = tmp_path / "no" / "out.png"
    result = _gpufn("invoke", "f", "-o", str(out))
    assert (result.exit_code, result.stderr) == (1, f"gpufn: {out}: No such file or directory\n")


@pytest.mark.parametrize(("out", "why"), [("no/out.png", "No such file or directory"), (".", "Is a directory")])
def test_a_file_that_cannot_be_written_is_told_before_the_call_whose_result_it_would_lose(
    gateway: StubGateway, tmp_path: Path, out: str, why: str
) -> None:
    result = _gpufn("invoke", "f", "-o", str(tmp_path / out))
    assert (result.exit_code, result.stderr) == (1, f"gpufn: {tmp_path / out}: {why}\n")
    assert gateway.requests == []


def test_a_result_goes_to_the_file_with_json_too(gateway: StubGateway, tmp_path: Path) -> None:
    gateway.on("GET /v1/functions/f", _VIEW)
    gateway.on("POST /v1/functions/f/invoke", b"png", content_type="image/png")
    out = tmp_path / "out.png"
    result = _gpufn("invoke", "f", "-o", str(out), "--json")
    assert (result.exit_code, json.loads(result.stdout)["output"]) == (0, str(out))
    assert out.read_bytes() == b"png"


def test_a_function_without_a_line_says_so(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f/logs", b"")
    result = _gpufn("logs", "f")
    assert (result.stdout, result.stderr) == ("", "f has written nothing\n")


def test_none_of_a_functions_lines_does_not_say_that_there_are_none(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f/logs", b"")
    result = _gpufn("logs", "f", "-n", "0")
    assert (result.stdout, result.stderr) == ("", "")


def test_a_log_says_where_another_revision_begins(gateway: StubGateway) -> None:
    line = {"at": 1.0, "function": "f", "worker": "w", "stream": "stdout", "text": "hi"}
    lines = [json.dumps(line | {"revision": revision}).encode() for revision in (1, 1, 2)]
    gateway.on("GET /v1/functions/f/logs", b"\n".join(lines))
    day = time.strftime("%Y-%m-%d", time.localtime(1.0))
    shown = [text if text.startswith("---") else "line" for text in _gpufn("logs", "f").stdout.splitlines()]
    assert shown == [f"--- {day}  f@1", "line", "line", f"--- {day}  f@2", "line"]


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(0, 0, "f gets no workers: its calls wait"), (2, 2, "f has 2 workers"), (0, 1, "f has 0 to 1 worker")],
)
def test_scale_says_what_it_means(gateway: StubGateway, low: int, high: int, text: str) -> None:
    gateway.on("POST /v1/functions/f/scale", _VIEW | {"min_workers": low, "max_workers": high})
    assert _gpufn("scale", "f").stdout == f"{text}\n"


def test_at_a_terminal_only_the_last_column_is_wrapped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table(("id", "note"), [("0" * 26, "one two three four five")], empty="")
    assert capsys.readouterr().out.splitlines() == [
        f"\x1b[1m{'ID':<28}NOTE\x1b[0m",
        f"{'0' * 26}  one two three four",
        f"{'':<28}five",
    ]


def test_invoke_shows_the_traceback_of_the_users_code(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f", _VIEW)
    problem = {
        "code": "function_raised",
        "detail": "no",
        "error_type": "ValueError",
        "traceback": "Traceback ...\nValueError: no",
    }
    gateway.on("POST /v1/functions/f/invoke", problem, status=500)
    result = _gpufn("invoke", "f")
    assert (result.exit_code, result.stderr) == (7, "Traceback ...\nValueError: no\ngpufn: ValueError: no\n")


def test_a_result_that_cannot_be_sent_is_told_as_no_exception_of_the_function(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f", _VIEW)
    problem = {"code": "result_not_encodable", "detail": "the result is a lock, which cannot be sent"}
    gateway.on("POST /v1/functions/f/invoke", problem, status=500)
    result = _gpufn("invoke", "f")
    assert (result.exit_code, result.stderr) == (7, "gpufn: the result is a lock, which cannot be sent\n")


def test_invoke_writes_bytes_to_a_file(gateway: StubGateway, tmp_path: Path) -> None:
    gateway.on("GET /v1/functions/f", _VIEW)
    gateway.on("POST /v1/functions/f/invoke", b"\x00\x01", content_type="image/png")
    out = tmp_path / "out.png"
    assert _gpufn("invoke", "f", "-o", str(out)).exit_code == 0
    assert out.read_bytes() == b"\x00\x01"


def test_invoke_refuses_arguments_that_are_no_object() -> None:
    result = _gpufn("invoke", "f", "[1]")
    assert (result.exit_code, result.stderr.startswith("gpufn: the arguments are a JSON object such as")) == (2, True)


def test_a_key_that_may_only_invoke_can_invoke(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f", {"code": "forbidden"}, status=403)
    gateway.on("POST /v1/functions/f/invoke", 5)
    assert _gpufn("invoke", "f").stdout == "5\n"


def test_ls_in_a_pipe_is_aligned_text(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions", {"functions": [_VIEW]})
    header, row = _gpufn("ls").stdout.splitlines()
    assert header.split() == ["NAME", "REVISION", "WORKERS", "QUEUED", "RUNNING", "UPDATED", "NOTE"]
    assert row.startswith("f     3 (still serving 2)  2 ready, 1 starting  ?       1 ")
    assert row.endswith("calls wait: no GPU is free")


def test_describe_as_json_is_the_functions_view(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f", _VIEW)
    found = json.loads(_gpufn("describe", "f", "--json").stdout)
    assert {name: found[name] for name in _VIEW} == _VIEW


def test_describe_says_where_a_figure_comes_from(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f", _VIEW)
    gateway.on("GET /v1/functions/f/revisions", {"revisions": []})
    lines = _gpufn("describe", "f").stdout.splitlines()
    assert "min, max workers  0, 8 (gpufn scale)" in lines
    assert "gpu               L4, time" in lines


@pytest.mark.parametrize(
    ("arguments", "request_", "body"),
    [
        (
            ["scale", "f", "--min", "1", "--max", "8"],
            "POST /v1/functions/f/scale",
            {"min_workers": 1, "max_workers": 8},
        ),
        (["scale", "f"], "POST /v1/functions/f/scale", {"min_workers": None, "max_workers": None}),
        (["rollback", "f"], "POST /v1/functions/f/rollback", {}),
        (["rollback", "f", "--revision", "2"], "POST /v1/functions/f/rollback", {"revision": 2}),
    ],
)
def test_changes_are_sent_as_documented(
    gateway: StubGateway, arguments: list[str], request_: str, body: dict[str, Any]
) -> None:
    gateway.on(request_, _VIEW | {"serving": 3})
    assert _gpufn(*arguments).exit_code == 0
    assert gateway.requests[-1].json == body


def test_rollback_returns_when_calls_go_there(gateway: StubGateway) -> None:
    gateway.on("POST /v1/functions/f/rollback", _VIEW)
    gateway.on("GET /v1/functions/f", _VIEW)
    gateway.on("GET /v1/functions/f", _VIEW | {"serving": 3})
    assert _gpufn("rollback", "f").stdout == "f@3 serves\n"
    assert len(gateway.requests) == 3
    assert _gpufn("rollback", "f", "--no-wait").stdout == "f@3 is active\n"


def test_rm_asks_unless_told_not_to(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f", _VIEW)
    gateway.on("DELETE /v1/functions/f", status=204)
    assert _gpufn("rm", "f", input="n\n").exit_code == 1
    assert "--yes deletes without asking" in _gpufn("rm", "f", input="").stderr
    assert [request.method for request in gateway.requests] == ["GET", "GET"]
    assert _gpufn("rm", "f", "--yes").stdout == "deleted f\n"


def test_a_new_key_is_on_standard_output_alone(gateway: StubGateway) -> None:
    gateway.on("POST /v1/keys", {"id": "k1", "key": "s3cret", "scopes": ["deploy"], "label": "ci"}, status=201)
    result = _gpufn("keys", "create", "ci", "--scope", "deploy")
    assert (result.stdout, gateway.requests[-1].json) == (
        "s3cret\n",
        {"label": "ci", "scopes": ["deploy"], "limits": {}},
    )


@pytest.mark.parametrize("own", ["", "gpufn_k0"])
def test_who_makes_the_first_key_is_told_that_all_need_one_now(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    monkeypatch.setenv("GPUFN_API_KEY", own)
    gateway.on("POST /v1/keys", {"id": "k1", "key": "s3cret", "scopes": ["admin"]}, status=201)
    said = _gpufn("keys", "create").stderr
    assert ("every request needs a key" in said, "it is not shown again" in said) == (not own, True)


def test_a_key_is_made_with_limits_and_they_are_listed(gateway: StubGateway) -> None:
    limits = {"rate": 10.0, "burst": 100, "concurrency": 8, "queued": 1000, "gpu_s": 3600.0}
    gateway.on("POST /v1/keys", {"id": "k1", "key": "s3cret", "scopes": ["hi"], "limits": limits}, status=201)
    gateway.on("GET /v1/keys", {"keys": [{"id": "k1", "scopes": ["hi"], "created_at": 1.0, "limits": limits}]})
    options = ("--rate", "600/min", "--burst", "100", "--concurrency", "8", "--queued", "1000", "--gpu-seconds", "3600")
    assert _gpufn("keys", "create", "ci", "--scope", "hi", *options).exit_code == 0
    assert gateway.requests[-1].json == {"label": "ci", "scopes": ["hi"], "limits": limits}
    assert "10/s (burst 100), 8 at a time, 1,000 queued, 3,600 GPU s/day" in _gpufn("keys", "ls").stdout
    for wrong in (("--rate", "50"), ("--rate", "0/s"), ("--rate=-5/s",), ("--concurrency", "0"), ("--queued", "x")):
        assert _gpufn("keys", "create", *wrong).exit_code == 2


def test_the_limits_of_a_key_are_changed(gateway: StubGateway) -> None:
    gateway.on("PUT /v1/keys/k1/limits", {"id": "k1", "scopes": ["hi"], "limits": {"rate": 0.5, "burst": 2}})
    assert _gpufn("keys", "limit", "k1", "--rate", "30/min").stdout == "key k1: 30/min (burst 2)\n"
    assert gateway.requests[-1].json == {"rate": 0.5}


def test_the_other_lists_have_a_text_and_a_json_form(gateway: StubGateway) -> None:
    device = {"uuid": "cpu", "type": "cpu", "kind": "EPYC", "memory_bytes": 1 << 30, "cores": 2.0}
    status = {"id": "0" * 26, "state": "failed", "submitted_at": 1.0, "error": {"message": "boom\nmore"}, "attempt": 2}
    line = {"at": 1.0, "function": "f", "revision": 1, "worker": "w-1", "stream": "stderr", "text": "hi"}
    gateway.on("GET /v1/nodes", {"nodes": [{"node": "n1", "sent_at": 1.0, "devices": [device]}]})
    gateway.on("GET /v1/functions/f/calls", {"calls": [status]})
    map_ = {"id": "1" * 26, "function": "f", "state": "open", "submitted_at": 2.0, "accepted": 3000, "ended": 1200}
    gateway.on("GET /v1/maps", {"maps": [map_]})
    gateway.on("GET /v1/functions/f/logs", json.dumps(line).encode())
    gateway.on("GET /v1/functions/f/why", {"function": "f", "reason": "because", "terms": {"calls": 2.0}})
    gateway.on("GET /v1/keys", {"keys": []})
    for arguments, text in {
        ("nodes",): "EPYC, 2 cores",
        ("calls", "f"): "failed, attempt 2",
        ("logs", "f"): "  f@1\n" + time.strftime("%H:%M:%S", time.localtime(1.0)) + "  w-1  ! hi\n",
        ("calls", "f", "-n", "1"): "a map: 1,200 of 3,000 items have ended",
        ("why", "f"): "because  because\ncalls    not known yet\n",
        ("why", "f", "--verbose"): "figures  calls 2",
    }.items():
        assert text in _gpufn(*arguments).stdout
        json.loads(_gpufn(*arguments, "--json").stdout)
    assert (_gpufn("keys", "ls").stdout, _gpufn("keys", "ls", "--json").stdout) == ("", "[]\n")


@pytest.mark.parametrize("noun", ["builds", "dlq", "engines", "keys", "models", "schedules"])
def test_a_noun_alone_lists(gateway: StubGateway, noun: str) -> None:
    path = {"dlq": "/v1/dlq?limit=20"}.get(noun, f"/v1/{noun}")
    gateway.on(f"GET {path.partition('?')[0]}", {"letters" if noun == "dlq" else noun: []})
    assert (_gpufn(noun).exit_code, _gpufn(noun, "--json").stdout) == (0, "[]\n")
    assert {request.path for request in gateway.requests} == {path}
    assert _gpufn(noun, "nothing").exit_code == 2


def test_what_keeps_a_function_from_starting_has_its_type(gateway: StubGateway) -> None:
    error = {"code": "function_start_failed", "message": "'missing-key'", "error_type": "KeyError"}
    gateway.on("GET /v1/functions/f/why", {"function": "f", "start_error": error})
    view = {"name": "f", "active": 1, "serving": 1, "latest": 1, "start_error": error}
    gateway.on("GET /v1/functions", {"functions": [view]})
    assert "last start error  KeyError: 'missing-key'" in _gpufn("why", "f").stdout
    assert "does not start: KeyError: 'missing-key'" in _gpufn("ls").stdout


def test_version_has_a_json_form() -> None:
    assert {"gpufn", "python"} <= set(json.loads(_gpufn("version", "--json").stdout))


def test_doctor_says_what_to_do_about_what_it_finds(gateway: StubGateway, tmp_path: Path) -> None:
    findings = [finding for check in CHECKS for finding in check()]
    assert [finding for finding in findings if finding.state == "bad" and not finding.do] == []
    result = _gpufn("doctor", "--json")
    assert {finding["check"] for finding in json.loads(result.stdout)} >= {"Python", "nats-server", "GPUFN_HOME"}


@pytest.mark.parametrize(("name", "value"), [("GPUFN_API_KEY", "s3cret\r"), ("GPUFN_URL", "ftp://x")])
def test_doctor_goes_on_when_an_address_or_a_key_is_none(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    found = {finding["check"]: finding for finding in json.loads(_gpufn("doctor", "--json").stdout)}
    assert (found["gateway"]["state"], found["gateway"]["do"]) == ("bad", "mend GPUFN_URL or GPUFN_API_KEY")


def test_down_without_a_platform_says_so(gateway: StubGateway, tmp_path: Path) -> None:
    result = _gpufn("down")
    assert (result.exit_code, result.stdout) == (0, f"gpufn is not running in {tmp_path / 'home'}\n")


def test_a_file_of_a_dead_platform_is_not_believed(gateway: StubGateway, tmp_path: Path) -> None:
    import os

    home = tmp_path / "home"
    home.mkdir()
    (home / "up.lock").touch()
    (home / "up.json").write_text(json.dumps({"pid": os.getppid(), "url": "http://x", "nats_url": "", "node": "n"}))
    assert "not running" in _gpufn("down").stdout
