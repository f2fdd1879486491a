"""The CLI without rich, and without the platform, as on a laptop with the distribution `gpufn` alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gpufn.cli.models.build_progress import build_progress
from gpufn.cli.terminal.output import step
from gpufn.client.views.models import BuildView
from gpufn.maps.progress_bar import Bar, WaitDisplay
from gpufn_core.domain.devices.engine import BuildStage, BuildState
from tests.conftest import ROOT
from tests.sdk.cli.commands import command
from tests.sdk.conftest import StubGateway

_PLATFORM_FOLDERS = [str(ROOT / folder) for folder in ("runtime", "gateway", "builder")]


@pytest.fixture
def no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("rich.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)


@pytest.mark.usefixtures("no_rich")
def test_top_needs_rich(gateway: StubGateway) -> None:
    result = command("top", "--once")
    assert (result.exit_code, gateway.requests) == (1, [])
    assert result.stderr.endswith(": pip install rich\n")


@pytest.mark.usefixtures("no_rich")
def test_without_rich_a_step_shows_nothing_and_a_build_prints_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with step("Deploying") as update:
        update("a reason")
    assert capsys.readouterr().err == ""
    with build_progress(["b1"]) as show:
        show([BuildView(id="b1", device="cpu", state=BuildState.BUILDING, stage=BuildStage.VERIFY)])
    assert capsys.readouterr().err.endswith("on cpu: verify\n")


@pytest.mark.usefixtures("no_rich")
def test_without_rich_the_wait_of_a_map_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    waits = WaitDisplay()
    with Bar("f", 3) as waits.bar:
        waits("a limit")
    assert capsys.readouterr().err == "gpufn: a limit\n"


def _gpufn_without_platform(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = (
        f"import os, sys\nsys.path[:] = [path for path in sys.path if path not in {_PLATFORM_FOLDERS}]\n"
        f"sys.argv[1:] = {list(arguments)}\nos.environ.update({environment})\n"
        "from gpufn.__main__ import main\nmain()"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "arguments",
    [["up", "--port", "0"], ["up", "--help"], ["down"], ["doctor"], ["simulate", "--turns", "2"], ["keys", "reset"]],
)
def test_a_command_of_the_platform_names_the_package_to_install(arguments: list[str]) -> None:
    name = "keys reset" if arguments[0] == "keys" else arguments[0]
    ended = _gpufn_without_platform(*arguments)
    message = f"gpufn {name} needs the platform on this machine: pip install gpufn-platform"
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", f"gpufn: {message}\n")


def test_with_json_the_missing_platform_is_reported_as_json() -> None:
    ended = _gpufn_without_platform("down", "--json")
    assert ended.returncode == 1
    assert "pip install gpufn-platform" in json.loads(ended.stderr)["detail"]


@pytest.mark.parametrize(
    ("words", "completed"),
    [("gpufn d", ["down", "deploy", "describe", "dict", "diff", "dlq", "doctor"]), ("gpufn up --", None)],
)
def test_completion_works_without_the_platform(words: str, completed: list[str] | None) -> None:
    ended = _gpufn_without_platform(_GPUFN_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    assert ended.stderr == ""
    if completed is not None:
        assert sorted(line.partition(",")[2] for line in ended.stdout.splitlines()) == sorted(completed)
