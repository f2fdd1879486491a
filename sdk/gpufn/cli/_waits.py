"""Why a call takes long, told beside the spinner while it does."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from gpufn.errors import GpufnError

if TYPE_CHECKING:
    from gpufn._client import Client

_EVERY_S: Final = 1.0


@contextlib.contextmanager
def told_why(client: Client, function: str, tell: Callable[[str], None]) -> Iterator[None]:
    """At a terminal: `tell` what the function's calls wait for, asked once a second by a thread of its own."""
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(_EVERY_S):
            try:
                waiting = client.why(function).waiting
            except GpufnError:  # a key that may only invoke; what is wrong is the call's to tell
                return
            tell(waiting.detail if waiting else "it runs")

    asking = threading.Thread(target=ask, name="why", daemon=True)
    asking.start()
    try:
        yield
    finally:
        ended.set()
        asking.join()
