"""Parsing of Docker's build output."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpufn_runtime.agent.cache.image_build_output import BuildOutput, failing_line, lines_of

COMMAND_FAILED = "The command 'python3 -m pip install nosuch' returned a non-zero code: 1"


def said(output: BuildOutput, *parts: dict[str, Any]) -> list[str]:
    return [line for part in parts for line in output.lines(part)]


def test_a_failed_command_shows_its_own_output_and_keeps_the_output_of_its_step() -> None:
    output = BuildOutput()
    said(output, {"stream": "Step 3/5 : RUN x\n"}, {"stream": "of another step\n"})
    said(output, {"stream": "Step 4/5 : RUN pip\n"}, {"stream": "Step by step\n"}, {"stream": "ERROR: no nosuch\n"})
    failure = output.failure(COMMAND_FAILED)
    assert failure.message.endswith(": ERROR: no nosuch (in: RUN pip)")
    assert failure.log == "Step by step\nERROR: no nosuch"


def test_where_no_command_ran_the_reason_is_the_builder_s() -> None:
    output = BuildOutput()
    said(output, {"stream": "Step 1/5 : FROM python:3.12-slim"}, {"status": "Pulling fs layer", "progressDetail": {}})
    failure = output.failure("toomanyrequests: You have reached your pull rate limit.")
    assert re.search(r": toomanyrequests: .*limit\. \(in: FROM python:3\.12-slim\)$", failure.message)


def test_for_a_silent_command_the_message_of_the_builder_is_shown() -> None:
    output = BuildOutput()
    said(output, {"stream": "Step 4/5 : RUN pip\n"})
    assert COMMAND_FAILED in output.failure(COMMAND_FAILED).message


def test_the_progress_of_a_layer_is_not_a_line() -> None:
    progress = {"status": "Downloading", "progressDetail": {"current": 5, "total": 9}, "progress": "[==>  ]", "id": "a"}
    layer = {"status": "Pull complete", "progressDetail": {}, "id": "a"}
    assert said(BuildOutput(), progress, progress, layer, progress) == ["Pull complete"]


def test_a_failure_is_bounded_for_any_amount_of_output() -> None:
    output = BuildOutput()
    said(output, {"stream": "Step 4/5 : RUN pip\n"}, *[{"stream": "x" * 100_000 + "\n"}] * 1_000)
    failure = output.failure(COMMAND_FAILED)
    assert len(failure.message) + len(failure.log) < 1_000_000


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (
            ["Collecting nosuch", "ERROR: No matching distribution found for nosuch", "[notice] pip"],
            "ERROR: No matching",
        ),
        (["Reading lists", "E: Unable to locate package nosuch"], "E: Unable to locate package nosuch"),
        (
            [
                "ERROR: Cannot install x==1 and x==2 because these package versions have conflicting dependencies.",
                "2. remove package versions to allow pip attempt to solve the dependency conflict",
                "ERROR: ResolutionImpossible: for help visit https://pip.pypa.io/en/latest/topics",
            ],
            "ERROR: Cannot install x==1 and x==2",
        ),
        (["sh: 1: nosuch: not found"], "sh: 1: nosuch: not found"),
        ([], "no output"),
    ],
)
def test_of_a_step_that_fails_the_reason_is_shown(output: list[str], line: str) -> None:
    assert failing_line(output).startswith(line)


def test_colours_and_the_builder_s_notes_are_left_out() -> None:
    text = " ---> Running in 7c2\n\x1b[91mERROR: no\x1b[0m\n\nRemoving intermediate container 7c2\n"
    assert lines_of(text) == ["ERROR: no"]
