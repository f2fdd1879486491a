"""`gpufn run`: the function of a file, its parameters as options, and the files that remain after errors."""

from __future__ import annotations

import base64
import json
import signal
from typing import Any, Literal

import click
import pytest

from gpufn.cli.develop import temporary as temporary_module
from gpufn.cli.develop.parameters import arguments_of, command_of
from gpufn.cli.terminal.command import connect
from gpufn.declare.hints.signature_schema import methods_of
from gpufn_core.spec.function_spec import MethodSpec
from tests.sdk.cli.commands import APP, VIEW, command
from tests.sdk.conftest import Project, StubGateway
from tests.waiting import until


def function(  # noqa: PLR0917
    text: str,
    count: int = 1,
    share: float | None = None,
    is_loud: bool = False,
    mode: Literal["a", "b"] = "a",
    tags: list[str] | None = None,
    data: bytes = b"",
    anything: Any = None,
) -> None:
    """Do something."""


def keywords(x: int, **more: int) -> None: ...


def method_of(declared: Any) -> MethodSpec:
    (method,) = methods_of(declared, None)
    return method


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["--text", "1"], {"text": "1"}),
        (["--text=null", "--count", "-3"], {"text": "null", "count": -3}),
        (["--text", "@@x", "--share", "2"], {"text": "@x", "share": 2.0}),
        (["--text", "", "--share", "null"], {"text": "", "share": None}),
        (["--text", "a", "--is-loud"], {"text": "a", "is_loud": True}),
        (["--text", "a", "--no-is-loud"], {"text": "a", "is_loud": False}),
        (["--text", "a", "--is_loud", "--mode", "b"], {"text": "a", "is_loud": True, "mode": "b"}),
        (["--text", "a", "--tags", '["x"]'], {"text": "a", "tags": ["x"]}),
        (["--text", "a", "--data", "ab"], {"text": "a", "data": base64.b64encode(b"ab").decode()}),
        (["--text", "a", "--anything", '{"x": 1}'], {"text": "a", "anything": {"x": 1}}),
        (["--text", "a", "--anything", "plain"], {"text": "a", "anything": "plain"}),
        (["--text", "@text.txt", "--tags", "@tags.json"], {"text": "from a file\n", "tags": ["y"]}),
        (["--text", "a", "--data", "@text.txt"], {"text": "a", "data": base64.b64encode(b"from a file\n").decode()}),
    ],
)
def test_a_value_has_the_type_of_its_parameter(words: list[str], arguments: dict[str, Any], project: Project) -> None:
    project({"text.txt": "from a file\n", "tags.json": '["y"]\n'})
    given = arguments_of("run f", method_of(function), words, None)
    assert given == arguments
    assert [type(each) for each in given.values()] == [type(each) for each in arguments.values()]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--text"],
        ["--text", "a", "--count", "1.5"],
        ["--text", "a", "--count", "true"],
        ["--text", "a", "--share", "much"],
        ["--text", "a", "--mode", "c"],
        ["--text", "a", "--tags", "x"],
        ["--text", "a", "--tags", "3"],
        ["--text", "@missing"],
        ["--text", "a", "--other", "1"],
        ["--text", "a", "b"],
    ],
)
def test_a_mismatch_is_wrong_usage(words: list[str]) -> None:
    with pytest.raises(click.UsageError):
        arguments_of("run f", method_of(function), words, None)


def test_keywords_accept_any_option() -> None:
    words = ["--x", "1", "--y", "2", "--some-name=3"]
    assert arguments_of("run f", method_of(keywords), words, None) == {"x": 1, "y": 2, "some_name": 3}
    for wrong in (["--x", "1", "y"], ["--x", "1", "--y"]):
        with pytest.raises(click.UsageError):
            arguments_of("run f", method_of(keywords), wrong, None)


def test_the_help_has_the_parameters() -> None:
    built = command_of("run f", method_of(function))
    text = built.get_help(click.Context(built, info_name="run f"))
    for part in ("Do something.", "--text <str>", "[required]", "--is-loud", "[default: 1]", "--mode <a|b>"):
        assert part in text


TWO = (
    APP["app.py"]
    + """
@gpu_function
class Box:
    @method
    def add(self, x: int) -> int: return x
    @method
    def take(self) -> int: return 1
"""
)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["missing.py"], 2),
        (["app.py", "--x", "1"], 2),  # several functions
        (["app.py::g"], 4),
        (["app.py::Box"], 2),  # several methods
        (["app.py::box.put"], 4),
        (["app.py::f"], 2),
        (["app.py::f", "--x", "one"], 2),
        (["--env", "No", "app.py::f", "--x", "1"], 2),
        (["app.py::f", "--help"], 0),
        (["app.py::Box.take", "--help"], 0),
    ],
)
def test_a_wrong_command_line_sends_nothing(
    words: list[str], code: int, gateway: StubGateway, project: Project
) -> None:
    project({"app.py": TWO.replace("import gpu_function", "import gpu_function, method")})
    assert command("run", *words).exit_code == code
    assert gateway.requests == []


def test_a_deploy_that_fails_is_undone(gateway: StubGateway, project: Project) -> None:
    project(APP)
    gateway.any_bundle = True
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", {"code": "conflict", "detail": "no"}, status=409)
    assert command("run", "--env", "dev", "app.py", "--x", "1").exit_code == 1
    deleted = [each.path for each in gateway.requests if each.method == "DELETE"]
    assert [path.partition("?lease=")[0] for path in deleted] == ["/v1/functions/dev/default/f"]


def test_a_result_is_printed_and_the_function_deleted(gateway: StubGateway, project: Project) -> None:
    project({"app.py": APP["app.py"].replace("@gpu_function", "@gpu_function(min_workers=2)", 1)})
    gateway.any_bundle = True
    name = "/v1/functions/dev/default/f"
    view = VIEW | {"name": "dev/default/f", "serving": 3}
    gateway.on("POST /v1/functions", view, status=201)
    gateway.on(f"GET {name}", {"code": "function_not_found"}, status=404)
    gateway.on(f"GET {name}", view)
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on(f"GET {name}/logs", b"")
    gateway.on(f"POST {name}/invoke", 7)
    result = command("run", "--env", "dev", "app.py", "--x", "1")
    assert (result.exit_code, result.stdout) == (0, "7\n")
    deploy = next(each for each in gateway.requests if each.path == "/v1/functions" and each.method == "POST").json
    assert deploy["spec"]["scaling"]["min_workers"] == 0
    (deleted,) = [each for each in gateway.requests if each.method == "DELETE"]
    assert deleted.path == f"{name}?lease={deploy['lease']['id']}"
    called = next(each for each in gateway.requests if each.path.endswith("/invoke"))
    assert json.loads(called.body) == {"x": 1}


def test_a_lost_lease_and_an_expired_function_are_noticed(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(temporary_module, "_RENEW_S", 0.01)
    taken = {"code": "conflict", "detail": "another client took it over", "retryable": False}
    gateway.on("POST /v1/functions/taken/lease", taken, status=409)
    with connect() as client, temporary_module.temporary(client) as functions:
        for name in ("taken", "expired", "never-deployed"):
            functions.add(name)
        functions.on_deployed("taken")
        functions.on_deployed("expired")
        until(lambda: functions.lost and functions.gone)
        assert functions.gone == {"expired"}
        assert functions.names == ["expired", "never-deployed"]
    deleted = [each.path.partition("?")[0] for each in gateway.requests if each.method == "DELETE"]
    assert deleted == ["/v1/functions/expired", "/v1/functions/never-deployed"]


def test_a_termination_ends_a_command_as_an_interrupt_does(gateway: StubGateway) -> None:
    def terminated() -> None:
        with connect() as client, temporary_module.temporary(client) as functions:
            functions.add("f")
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        terminated()
    assert [each.method for each in gateway.requests] == ["DELETE"]
