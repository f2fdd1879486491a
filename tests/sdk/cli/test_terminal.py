"""Escaping for terminals, and closed, full or missing output streams."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpufn.cli import _open_streams, app
from gpufn.cli.calls.arguments import show
from gpufn.cli.terminal.output import print_json_line, print_table, say, step
from gpufn.client.views.calls import RawResult
from gpufn_platform.process.grace_period import describe_running_calls
from tests.sdk.conftest import StubGateway
from tests.waiting import until

_EVIL = "a\x1b[31mb\x1b]0;c\x07d\x9be\u202ef\rg"
_SHOWN = r"ab\x1b]0;c\x07d\x9be\u202ef"
_UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_ID = "0" * 26
_CALL = {"id": _ID, "function": _EVIL, "state": "failed", "submitted_at": 1.0, "error": {"message": _EVIL}}
_LINE = {"at": 1.0, "function": _EVIL, "revision": 1, "worker": _EVIL, "stream": "stdout", "text": _EVIL}
_NODE = {
    "node": _EVIL,
    "sent_at": 1.0,
    "devices": [{"uuid": "cpu", "type": "cpu", "kind": _EVIL, "memory_bytes": 1 << 30, "health_reason": _EVIL}],
    "processes": [{"worker": _EVIL, "function": _EVIL, "revision": 1, "started_at": 1.0, "resident_bytes": 1}],
}
_VIEW = {
    "name": _EVIL,
    "active": 1,
    "serving": 1,
    "latest": 1,
    "spec": {"name": "f", "entry": {"module": "app", "qualname": "f"}, "methods": [{"name": ""}]},
    "start_error": {"code": "function_start_failed", "message": _EVIL},
}


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _gpufn(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, arguments, **options)


@pytest.fixture
def evil(gateway: StubGateway) -> StubGateway:
    gateway.on("GET /v1/functions", {"functions": [_VIEW]})
    gateway.on("GET /v1/functions/f", _VIEW)
    gateway.on("GET /v1/functions/f/revisions", {"revisions": []})
    gateway.on("GET /v1/functions/f/why", {"function": "f", "reason": _EVIL})
    gateway.on("GET /v1/functions/f/logs", json.dumps(_LINE).encode())
    gateway.on("GET /v1/functions/g/logs", {"code": "function_not_found", "detail": _EVIL}, status=404)
    gateway.on("POST /v1/functions/f/invoke", {"code": "function_raised", "detail": _EVIL, "traceback": _EVIL}, 500)
    gateway.on("GET /v1/calls", {"calls": [_CALL]})
    gateway.on("GET /v1/maps", {"maps": []})
    gateway.on("GET /v1/nodes", {"nodes": [_NODE]})
    gateway.on(f"GET /v1/invocations/{_ID}", _CALL)
    gateway.on("GET /v1/keys", {"keys": [{"id": "k", "scopes": ["read"], "created_at": 1.0, "label": _EVIL}]})
    return gateway


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"],
        ["describe", "f"],
        ["why", "f"],
        ["logs", "f"],
        ["logs", "g"],
        ["invoke", "f"],
        ["calls"],
        ["nodes"],
        ["status", _ID],
        ["keys", "ls"],
        ["top", "--once"],
    ],
)
def test_nothing_that_a_terminal_would_obey_is_printed(
    evil: StubGateway, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    result = _gpufn(*arguments)
    assert _UNSAFE.findall(result.output) == []
    assert _SHOWN in result.output


@pytest.mark.parametrize("arguments", [["ls"], ["describe", "f"], ["logs", "f"], ["calls"], ["nodes"]])
def test_json_has_it_as_escapes(evil: StubGateway, arguments: list[str]) -> None:
    result = _gpufn(*arguments, "--json")
    assert _UNSAFE.findall(result.stdout) == []
    assert json.dumps(_EVIL) in json.dumps(json.loads(result.stdout))


def test_a_cell_is_one_line(gateway: StubGateway) -> None:
    gateway.on("GET /v1/keys", {"keys": [{"id": "k", "scopes": ["read"], "created_at": 1.0, "label": "a\nb"}]})
    assert len(_gpufn("keys", "ls").stdout.splitlines()) == 2


def test_a_question_spells_it_out_too(evil: StubGateway) -> None:
    assert _UNSAFE.findall(_gpufn("rm", "f", input="n\n").output) == []


@pytest.mark.parametrize(
    ("content_type", "body", "shown"),
    [
        ("text/plain", b"a\x1b]0;b\x07c\n", "a\\x1b]0;b\\x07c\n"),
        ("application/json", b'"a\xc2\x9bb"', '"a\\u009bb"\n'),
    ],
)
def test_a_result_is_spelled_out_at_a_terminal_and_bytes_in_a_pipe(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch, content_type: str, body: bytes, shown: str
) -> None:
    gateway.on("GET /v1/functions/f", _VIEW)
    gateway.on("POST /v1/functions/f/invoke", body, content_type=content_type)
    assert _gpufn("invoke", "f").stdout_bytes.rstrip(b"\n") == body.rstrip(b"\n")
    monkeypatch.setattr("sys.stdout", terminal := _Terminal())
    answer = RawResult(content_type=content_type, body=body, invocation=_ID, revision="", timings={})
    show(answer, None, json=False)
    assert terminal.getvalue() == shown


def _run(command: str) -> tuple[int, str]:
    """Run a shell command with `gpufn` in it. Return the exit code of the first program, and the output."""
    script = f'set -o pipefail; gpufn() {{ exec "{sys.executable}" -m gpufn "$@"; }}; ( {command}; )'
    process = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ)
    )
    return process.returncode, process.stdout + process.stderr


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("gpufn logs f --tail 9 | true", 0, ""),
        ("gpufn ls --json | true", 0, ""),
        ("gpufn --help | true", 0, ""),
        ("gpufn ls --help | true", 0, ""),
        ("gpufn ls >&-", 0, ""),
        ("gpufn invoke g >&-", 0, ""),
        ("gpufn ls <&- >&- 2>&-", 0, ""),
        ("gpufn describe no 2>&-", 4, ""),
        ("gpufn rm g <&-", 2, "gpufn: nothing was done, because the question was not answered: --yes answers it"),
        ("gpufn invoke g -d @- <&-", 2, "gpufn: the arguments must be a JSON object such as"),
        ("gpufn ls >/dev/full", 1, "gpufn: No space left on device\n"),
        ("gpufn invoke g >/dev/full", 1, "gpufn: No space left on device\n"),
        ("gpufn --help >/dev/full", 1, "gpufn: No space left on device\n"),
        ("gpufn --version >/dev/full", 1, "gpufn: No space left on device\n"),
        ("gpufn describe no 2>/dev/full", 4, ""),
        ("gpufn frobnicate 2>/dev/full", 1, ""),
    ],
)
def test_streams_that_are_closed_or_full_end_it_without_a_traceback(
    gateway: StubGateway, command: str, code: int, message: str
) -> None:
    line = json.dumps(_LINE).encode() + b"\n"
    gateway.on("GET /v1/functions/f/logs", line * 10_000)
    gateway.on("GET /v1/functions/g", _VIEW)
    gateway.on("POST /v1/functions/g/invoke", 1)
    gateway.on("GET /v1/functions", {"functions": [_VIEW] * 2000})
    exit_code, output = _run(command)
    assert (exit_code, "Traceback" in output) == (code, False), output
    assert message in output


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_outside_the_locale_are_escaped_and_json_stays_json(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    _open_streams()
    print_json_line({"text": "ü🦊"})
    say("→")
    line, arrow = written.getvalue().decode(encoding).splitlines()
    assert json.loads(line) == {"text": "ü🦊"}
    assert arrow == ("→" if encoding == "utf-8" else r"\u2192")


def test_an_interrupt_during_the_import_of_the_command_line_only_sets_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "gpufn", "version"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_step_shows_its_reason_for_as_long_as_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := _Terminal())
    with step("Stopping") as because:
        because(describe_running_calls(1))
        until(lambda: "Stopping: 1 call still runs …" in terminal.getvalue())
        for calls in (0, None):
            because(describe_running_calls(calls))
            terminal.truncate(0)
            until(lambda: "Stopping …" in terminal.getvalue())
    assert "0 calls" not in terminal.getvalue()


def test_without_a_terminal_each_phase_of_a_step_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    reasons = ("resolving packages", "w.bin 1 MiB of 2 GiB", "", "w.bin 1.5 GiB of 2 GiB", "w.bin 100%", "w.bin 1%")
    with step("Starting f@1", has_lines=True) as update:
        for reason in reasons:
            update(reason)
    with step("Calling f") as update:
        update("a limit")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"Starting f@1: {reasons[place]}" for place in (0, 1, 4)]


def test_at_a_terminal_only_the_last_column_is_wrapped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table(("id", "note"), [("0" * 26, "one two three four five")], empty="")
    assert capsys.readouterr().out.splitlines() == [
        f"\x1b[1m{'ID':<28}NOTE\x1b[0m",
        f"{'0' * 26}  one two three four",
        f"{'':<28}five",
    ]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_styles_gets_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table(("id",), [("0",)], empty="")
    assert capsys.readouterr().out == "ID\n0\n"


@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
def test_a_result_is_escaped_at_a_terminal_and_unchanged_in_a_pipe(
    content_type: str, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    evil = "a\x9be\u202e\u200f\u061cf"
    body = (json.dumps(evil, ensure_ascii=False) if content_type == "application/json" else evil).encode()
    result = RawResult(content_type=content_type, body=body)
    show(result, None, json=False)
    assert capsysbinary.readouterr().out.rstrip(b"\n") == body
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show(result, None, json=False)
    assert r"\u202e\u200f\u061cf" in capsysbinary.readouterr().out.decode()
