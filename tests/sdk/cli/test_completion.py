"""Shell completion of commands, options and functions."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from gpufn.cli import COMPLETE
from tests.sdk.cli.commands import VIEW, command
from tests.sdk.conftest import StubGateway

_CLASS = VIEW | {"name": "g", "spec": VIEW["spec"] | {"methods": [{"name": "up"}, {"name": "down"}]}}


def _completed(words: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name, value in {COMPLETE: "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}.items():
        monkeypatch.setenv(name, value)
    process = subprocess.run([sys.executable, "-m", "gpufn"], capture_output=True, text=True, timeout=60, check=False)
    assert process.stderr == ""
    return [line.partition(",")[2] for line in process.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("gpufn des", ["describe"]),
        ("gpufn keys re", ["reset"]),
        ("gpufn deploy --max", ["--max-batch", "--max"]),
        ("gpufn logs ", ["f", "g"]),
        ("gpufn logs g", ["g"]),
        ("gpufn invoke ", ["f", "g.up", "g.down"]),
        ("gpufn calls --state q", ["queued"]),
        ("gpufn frobnicate --", ["--url", "--version", "--help"]),
    ],
)
def test_commands_options_and_functions_are_completed(
    words: str, completed: list[str], gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.on("GET /v1/functions", {"functions": [VIEW, _CLASS]})
    assert _completed(words, monkeypatch) == completed


def test_without_a_gateway_no_function_is_completed_and_nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFN_URL", "http://127.0.0.1:1")
    assert _completed("gpufn logs ", monkeypatch) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_accepts_the_printed_completion(shell: str) -> None:
    script = command("completion", shell).stdout
    assert COMPLETE in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, timeout=60, check=True)
