"""The reason why a call waits, below the cell that waits for its result."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from gpufn.notebook import html
from gpufn.notebook.cell_output import CellOutput
from gpufn_core.errors import GpufnError

if TYPE_CHECKING:
    from gpufn_core.protocol.reports import Waiting

_POLL_S: Final = 1.0
_JOIN_S: Final = 2.0
_one = threading.Lock()  # only one of several simultaneous calls shows its reason


@contextlib.contextmanager
def waits_shown(
    name: str,
    why: Callable[[], Waiting | None],
    *,
    display: Callable[..., Any] | None = None,
    period_s: float = _POLL_S,
) -> Iterator[None]:
    """Query `why` after each period, and show the reason until the block ends."""
    if not _one.acquire(blocking=False):
        yield
        return
    ended = threading.Event()
    context = contextvars.copy_context()  # the kernel finds the cell in it
    thread = threading.Thread(
        target=context.run, args=(_poll, name, why, CellOutput(display), ended, period_s), name="why", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_JOIN_S)
        _one.release()


def _poll(
    name: str, why: Callable[[], Waiting | None], output: CellOutput, ended: threading.Event, period_s: float
) -> None:
    last = ""
    while not ended.wait(period_s):
        try:
            waiting = why()
        except GpufnError:  # the call itself reports the fault
            break
        text = f"{name} is running" if waiting is None else f"{name} waits: {waiting.detail}"
        if text != last and not ended.is_set():
            last = text
            output.show(html.line(text), text)
    if output.is_shown:
        ended.wait()
        output.show("", "")
