"""The command line as a whole: help, usage errors and exit codes."""

from __future__ import annotations

import importlib
import json
from typing import Any

import click
import pytest

import gpufn
from gpufn.cli import COMMANDS, SECTIONS
from tests.sdk.cli.commands import VIEW, command
from tests.sdk.conftest import StubGateway


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_the_kind_of_a_value_by_one_word(name: str) -> None:
    text = command(name, "--help").output
    assert " range>" not in text
    assert "<list[" not in text


def test_the_help_of_a_group_shows_whole_descriptions() -> None:
    text = " ".join(command("dlq", "--help").stdout.split())
    assert "Submit a dead letter again, as a new call of the revision that serves now." in text


def test_help_lists_every_command_without_importing_them() -> None:
    result = command("--help")
    assert result.exit_code == 0
    assert [name for name in COMMANDS if name not in result.stdout] == []
    assert "2 wrong usage" in " ".join(result.stdout.split())


def test_help_lists_the_commands_below_headings() -> None:
    lines = command("--help").stdout.splitlines()
    for heading, commands in SECTIONS.items():
        start = lines.index(f"{heading}:") + 1
        section = lines[start : lines.index("", start)]
        assert [line.split()[0] for line in section if not line.startswith("   ")] == list(commands)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_list_shows_the_description_of_each_command(name: str) -> None:
    where, text = COMMANDS[name]
    module, _, attribute = where.partition(":")
    target: click.Command = getattr(importlib.import_module(module), attribute)
    assert target.help is not None
    assert (target.name, target.help.splitlines()[0]) == (name, text)
    assert command(name, "--help").exit_code == 0


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
    result = command("describe", "f")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"gpufn: {message}\n")


@pytest.mark.parametrize(
    ("request_line", "arguments"),
    [
        ("DELETE /v1/keys/k", ["rm", "k", "--yes"]),
        ("PUT /v1/keys/k/limits", ["limit", "k"]),
        ("GET /v1/keys/k/webhook-secret", ["webhook-secret", "k"]),
    ],
)
def test_a_key_that_is_not_there_is_not_found(gateway: StubGateway, request_line: str, arguments: list[str]) -> None:
    gateway.on(request_line, {"code": "bad_request", "detail": "No such key."}, status=404)
    result = command("keys", *arguments)
    assert (result.exit_code, result.stderr) == (4, "gpufn: no such key\n")


def test_no_gateway_is_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFN_URL", "http://127.0.0.1:1")
    result = command("ls")
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert "http://127.0.0.1:1" in result.stderr
    assert "`gpufn up`" in result.stderr


def test_a_key_that_cannot_be_sent_is_exit_code_5_and_not_printed(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUFN_API_KEY", "abcsecret\r")
    result = command("ls")
    assert result.exit_code == 5
    assert "GPUFN_API_KEY" in result.stderr
    assert "line break" in result.stderr
    assert "abcsecret" not in result.output


@pytest.mark.parametrize("option", [("--timezone", "Europe/Berlin"), ("--missed", "all")])
def test_an_option_of_a_cron_line_is_refused_without_one(gateway: StubGateway, option: tuple[str, str]) -> None:
    assert command("schedules", "add", "f", "--in", "5s", *option).exit_code == 2
    assert gateway.requests == []
    gateway.on("POST /v1/schedules", {"id": "s1", "function": "f"})
    assert command("schedules", "add", "f", "--cron", "* * * * *", *option).stdout == "s1\n"
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
        ["describe", "A/b"],
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
def test_wrong_usage_is_exit_code_2_without_a_request(gateway: StubGateway, arguments: list[str]) -> None:
    result = command(*arguments)
    assert (result.exit_code, gateway.requests) == (2, [])


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("invalid_spec", ["scale", "f", "--min", "5", "--max", "2"]),
        ("invalid_input", ["keys", "create", "--scope", "x"]),
        ("invalid_input", ["invoke", "f", '{"y": 1}']),
    ],
)
def test_invalid_input_that_the_gateway_rejects_is_exit_code_2(
    gateway: StubGateway, code: str, arguments: list[str]
) -> None:
    gateway.answer_to = lambda request: (  # type: ignore[method-assign]
        422,
        {"content-type": "application/problem+json"},
        json.dumps({"code": code, "detail": "no"}).encode(),
    )
    result = command(*arguments)
    assert (result.exit_code, result.stderr) == (2, "gpufn: no\n")


def test_a_message_that_names_its_field_names_it_once(gateway: StubGateway) -> None:
    detail = "X-Gpufn-Timeout is a number of seconds above 0, at most 7 days"
    problem = {"code": "invalid_input", "detail": detail, "field": "X-Gpufn-Timeout"}
    gateway.on("GET /v1/functions/f", VIEW)
    gateway.on("POST /v1/functions/f/invoke", problem, status=422)
    assert command("invoke", "f").stderr == f"gpufn: {detail}\n"


@pytest.mark.parametrize(
    ("typed", "code", "report"),
    [
        (["describe", "f"], 4, {"code": "function_not_found", "detail": "there is no f", "retryable": False}),
        (
            ["invoke", "f"],
            7,
            {
                "code": "function_raised",
                "detail": "ValueError: boom",
                "retryable": False,
                "error_type": "ValueError",
                "traceback": "Traceback ...",
            },
        ),
        (
            ["rollback", "f", "3"],
            2,
            {
                "code": "invalid_input",
                "detail": "got unexpected extra argument (3); the revision is an option: gpufn rollback f --revision 3",
                "retryable": False,
            },
        ),
        (
            ["invoke", "f", "--file", "none"],
            2,
            {"code": "invalid_input", "detail": "cannot read none: No such file or directory", "retryable": False},
        ),
        (
            ["invoke", "f", "--output", "none/there"],
            1,
            {"code": "gpufn_error", "detail": "none/there: No such file or directory", "retryable": False},
        ),
    ],
)
def test_with_json_a_failure_is_json_with_the_same_exit_code(
    gateway: StubGateway, typed: list[str], code: int, report: dict[str, Any]
) -> None:
    missing = {"code": "function_not_found", "detail": "There is no f."}
    gateway.on("GET /v1/functions/f", missing, status=404)
    raised = {"code": "function_raised", "detail": "boom", "error_type": "ValueError", "traceback": "Traceback ..."}
    gateway.on("POST /v1/functions/f/invoke", raised, status=500)
    result = command(*typed, "--json")
    assert (result.exit_code, result.stdout, json.loads(result.stderr)) == (code, "", report)
    assert command(*typed).exit_code == (
        4 if typed == ["invoke", "f"] else code
    )  # first it reads f, to know whether f is a generator


def test_debug_shows_the_exception(gateway: StubGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFN_DEBUG", "1")
    assert "FunctionNotFound" in repr(command("describe", "f").exception)


def test_an_interrupt_is_exit_code_130_without_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpufn.client.client.Client.functions", interrupt)
    result = command("ls")
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        (["prod/shop/greet"], "'prod/shop/greet'?"),
        (["other"], "`gpufn ls`"),
        ([], "`gpufn deploy --help`"),
    ],
)
def test_an_unknown_function_comes_with_the_next_step(gateway: StubGateway, names: list[str], hint: str) -> None:
    missing = {"code": "function_not_found", "detail": "There is no function 'gret'."}
    gateway.on("GET /v1/functions/gret", missing, status=404)
    gateway.on("GET /v1/functions", {"functions": [VIEW | {"name": name} for name in names]})
    assert hint in command("describe", "gret").stderr


@pytest.mark.parametrize("verb", ["invoke", "describe"])
def test_a_function_that_is_not_there_brings_up_its_neighbour(gateway: StubGateway, verb: str) -> None:
    missing = {"code": "function_not_found", "detail": "There is no function 'gret'."}
    gateway.on("GET /v1/functions/gret", missing, status=404)
    gateway.on("GET /v1/functions", {"functions": [VIEW | {"name": "greet"}]})
    stderr = command(verb, "gret").stderr
    assert "'gret'" in stderr
    assert "'greet'?" in stderr


def test_a_command_that_is_not_there_brings_up_its_neighbour() -> None:
    assert "'describe'?" in command("desribe").stderr
    assert "'rm'?" in command("delete", "greet").stderr


def test_the_version_is_an_option_too() -> None:
    assert command("--version").stdout == f"gpufn {gpufn.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (
            ["invoke", "f", "{text:", "a}"],
            """; a JSON object is one argument: put it in single quotes, as in '{"x": 1}'""",
        ),
        (
            ["submit", "f", "{x:", "1}"],
            """; a JSON object is one argument: put it in single quotes, as in '{"x": 1}'""",
        ),
        (["ls", "--url", "http://127.0.0.1:1"], "'; put it before the command: gpufn --url URL ls"),
        (["rollback", "f", "3"], "; the revision is an option: gpufn rollback f --revision 3"),
        (["scale", "f", "3"], "; the numbers are options: gpufn scale f --min 3 --max 3"),
        (["scale", "f", "1", "3"], "; the numbers are options: gpufn scale f --min 1 --max 3"),
        (["rm", "--yes", "f", "g"], "; one function at a time"),
        (["ls", "f"], "; `gpufn describe f` shows one function"),
        (
            ["down", "f"],
            "; it stops the platform. `gpufn rm f` deletes a function, `gpufn scale f --max 0` stops its workers",
        ),
        (["up", "8080"], "; the port is an option: gpufn up --port 8080"),
        (["invoke", "f", "x=1", "name=you"], """; the arguments are one JSON object: '{"x": 1, "name": "you"}'"""),
        (["invoke", "f", "name=you"], """the arguments must be a JSON object: '{"name": "you"}'"""),
        (["desc", "f"], "there is no command 'desc'; did you mean 'describe'?"),
        (["queue", "delete", "x"], "there is no command 'delete'; did you mean 'rm'?"),
        (["keys", "list"], "there is no command 'list'; did you mean 'ls'?"),
        (["keys", "call"], "there is no command 'call'"),
        (
            ["help"],
            "there is no command 'help'; `gpufn --help` lists the commands, and `gpufn COMMAND --help` describes one",
        ),
        (["deploy", "app.py", "f"], "gpufn deploy app.py --name f"),
        (["deploy", "app.py", "--timeout", "5m"], "; it is in seconds: --timeout 300"),
        (["cancel", "0" * 26, "-y"], "; this command does not ask"),
        (["invoke", "shop/", "{}"], "'shop/' is neither a name nor an id"),
    ],
)
def test_a_usual_mistake_gets_a_hint(typed: list[str], hint: str) -> None:
    result = command(*typed)
    assert (result.exit_code, " ".join(result.stderr.split())[-len(hint) :]) == (2, hint)


def test_an_extra_argument_beside_an_option_is_only_refused() -> None:
    """It is unknown which of the words is the option's value."""
    assert command("scale", "--min", "1", "f", "3").stderr.endswith("extra argument (3)\n")


def test_an_extra_argument_is_not_read_as_json() -> None:
    assert "quotes" not in command("describe", "f", "g").stderr


def test_a_terminal_without_a_gateway_names_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFN_URL", "http://127.0.0.1:1")
    result = command("exec", "f", "--", "ls")
    assert (result.exit_code, "`gpufn up`" in result.stderr) == (3, True)
