"""Report the reason for a call's wait while it waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from gpufn.cli.terminal.may_read import may_read
from gpufn.cli.terminal.output import is_animated, say
from gpufn_core.errors import GpufnError

if TYPE_CHECKING:
    from gpufn.client.client import Client

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
    ended = threading.Event()

    def poll() -> None:
        last = may_ask = None
        while not ended.wait(_POLL_S):
            try:
                may_ask = may_ask or may_read(client)
                if not may_ask:
                    return
                waiting = client.why(function).waiting
            except GpufnError:  # the key may read other functions, or the call itself will report the fault
                return
            if has_spinner:
                show(waiting.detail if waiting else "running")
            elif waiting and waiting.reason != last:
                last = waiting.reason
                say(f"{function} is waiting: {waiting.detail}", err=True)

    thread = threading.Thread(target=poll, name="why", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
