"""The wait for a deploy's check, and the line of user code in its error."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from gpufn.client.views.functions import FunctionView, RevisionProgress
from gpufn.deploy.check_wait import _start_failed, wait_until_checked
from gpufn.deploy.deployment import finish_check
from gpufn_core.domain.circuit_errors import user_line
from gpufn_core.domain.revision import Check, CheckState, RevisionState
from gpufn_core.errors import Conflict, ErrorInfo, FunctionStartFailed, RevisionNotFound
from gpufn_core.protocol.messages import LogLine

_PENDING = Check(CheckState.PENDING)
_TRACEBACK = """Traceback (most recent call last):
  File "app.py", line 7, in __enter__
    self.model = load()
                 ^^^^^^
  File "lib/models.py", line 3, in load
    return json.loads("{")
           ^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/json/__init__.py", line 346, in loads
    return _default_decoder.decode(s)
json.decoder.JSONDecodeError: Expecting property name
"""
_SYNTAX = """  File "app.py", line 2
    x = = 1
        ^
SyntaxError: invalid syntax
"""


@pytest.mark.parametrize(
    ("traceback", "line"),
    [
        (None, ""),
        (_TRACEBACK, 'lib/models.py, line 3: return json.loads("{")'),
        (_SYNTAX, "app.py, line 2: x = = 1"),
        ('  File "/usr/lib/x.py", line 3, in f\n    g()\nOSError: no', "/usr/lib/x.py, line 3: g()"),
        ('  File "app.py", line 3, in f\nOSError: no', "app.py, line 3"),
        ("OSError: no", ""),
    ],
)
def test_the_line_of_the_users_code_is_the_last_one_of_the_bundle(traceback: str | None, line: str) -> None:
    assert user_line(ErrorInfo("function_start_failed", "no", traceback=traceback)) == line


class _Api:
    """Answers with one revision after the other, and stays with the last; None: it is not known."""

    def __init__(self, *revisions: RevisionProgress | None) -> None:
        self._revisions = list(revisions)

    def revision(self, name: str, number: int) -> RevisionProgress:
        revision = self._revisions.pop(0) if len(self._revisions) > 1 else self._revisions[0]
        if revision is None:
            raise RevisionNotFound
        return revision


def _revision(check: Check, *, active: bool = True, error: ErrorInfo | None = None) -> RevisionProgress:
    state = RevisionState.READY if error is None else RevisionState.FAILED
    return RevisionProgress(number=2, state=state, active=active, check=check, error=error)


def _wait(*revisions: RevisionProgress | None, serving: int = 1, check: Check | None = _PENDING) -> Check | None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    view = FunctionView(name="f", active=2, serving=serving, latest=2, check=check)
    return wait_until_checked(_Api(*revisions), view, 60.0, clock=lambda: now[0], sleep=sleep)


def test_the_wait_ends_with_the_check() -> None:
    passed, full = Check(CheckState.PASSED), Check(CheckState.UNCHECKED, "no node is up")
    assert _wait(None, _revision(_PENDING, active=False), _revision(_PENDING), _revision(passed)) == passed
    assert _wait(_revision(full, active=False)) == full
    assert _wait(check=None) is None


_RAISED = ErrorInfo("function_start_failed", "'x'", error_type="KeyError", traceback=_SYNTAX)
_FAILED = Check(CheckState.FAILED)


@pytest.mark.parametrize(
    ("revision", "serving", "kind", "message"),
    [
        (
            _revision(_FAILED, error=_RAISED),
            1,
            FunctionStartFailed,
            "f@2 does not start, f@1 still serves: KeyError: 'x'\n  app.py, line 2: x = = 1",
        ),
        (
            _revision(_FAILED, error=ErrorInfo("worker_lost", "exited with code 3")),
            2,
            FunctionStartFailed,
            "f@2 does not start: exited with code 3",
        ),
        (_revision(_PENDING, active=False), 1, Conflict, "f@2 was replaced before it was checked"),
        (None, 1, Conflict, "f@2 was replaced before it was checked"),
        (_revision(_PENDING), 1, TimeoutError, "no worker of f@2 is ready after 90 s; see `gpufn why f`"),
    ],
)
def test_the_wait_ends_with_the_reason(
    revision: RevisionProgress | None, serving: int, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        _wait(revision, serving=serving)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("spec", "limit_s", "reasons"),
    [
        ({}, 90, []),
        ({"weights": [{}]}, 210, ["1 of 2 GiB"]),
        ({"image": {"python": "3.12"}}, 210, ["packages: compile"]),
    ],
)
def test_a_function_with_weights_or_an_image_gets_longer_and_its_deploy_shows_their_progress(
    spec: dict[str, Any], limit_s: float, reasons: list[str]
) -> None:
    now, shown = [0.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    view = FunctionView(name="f", active=2, serving=1, latest=2, check=_PENDING, spec=spec)
    with pytest.raises(TimeoutError, match=f"after {limit_s} s"):
        wait_until_checked(
            _Api(_revision(_PENDING)),
            view,
            60.0,
            on_poll=lambda: shown.append(now[0]),
            clock=lambda: now[0],
            sleep=sleep,
        )
    assert shown

    api: Any = Mock()
    api.revision.side_effect = [_revision(_PENDING), _revision(Check(CheckState.PASSED))]
    api.function.return_value = FunctionView(name="f", active=2, serving=1, latest=2, reason="1 of 2 GiB")
    api.logs.return_value = [
        LogLine(0.0, "f", revision, worker, "stderr", text)
        for revision, worker, text in [(1, "", "old"), (2, "w1", "own"), (2, "", "packages: compile")]
    ]
    received: list[str] = []
    finish_check(api, view, 60.0, on_reason=received.append)
    assert received == reasons


@pytest.mark.parametrize(
    ("error_type", "message", "package"),
    [("ModuleNotFoundError", "No module named 'fastapi.responses'", "fastapi"), ("ValueError", "no", None)],
)
def test_a_missing_package_names_the_place_to_add_it(error_type: str, message: str, package: str | None) -> None:
    error = ErrorInfo("function_start_failed", message, error_type=error_type)
    view = FunctionView(name="f", active=2, serving=2, latest=2)
    text = _start_failed(view, RevisionProgress(number=2, state=RevisionState.FAILED, error=error)).message
    assert (f"add {package} to the image" in text) is (package is not None)
