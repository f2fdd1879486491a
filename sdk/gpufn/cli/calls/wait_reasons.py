"""Report the reason for a call's wait while it waits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from gpufn.cli.terminal.output import is_animated, say
from gpufn.client.wait_reports import ReasonLines, Subject, WaitReports

if TYPE_CHECKING:
    from gpufn.client.client import Client
    from gpufn_core.protocol.reports import Waiting

_POLL_S: Final = 1.0


@contextlib.contextmanager
def report_waits(client: Client, function: str, show: Callable[[str], None], *, json: bool = False) -> Iterator[None]:
    """Poll the gateway once a second for the reason why the function's calls wait.

    With a spinner each reason goes to `show`, the text beside the spinner. Otherwise each new reason is a line on
    standard error, unless `json`: then standard error is reserved for an error in JSON.
    """
    has_spinner = is_animated()
    if json and not has_spinner:
        yield
        return

    def beside_the_spinner(_: str, waiting: Waiting | None) -> None:
        show(waiting.detail if waiting else "running")

    lines = ReasonLines(functools.partial(say, err=True))
    report = beside_the_spinner if has_spinner else lines
    reports = WaitReports(lambda: client, report, first_s=_POLL_S, longest_s=_POLL_S)
    try:
        with reports.watching(Subject("function", function)):
            yield
    finally:
        reports.close()
