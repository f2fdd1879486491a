"""How commands speak: results on standard output, everything else on standard error.

For a person at a terminal tables and progress are drawn by Rich; a pipe gets plain aligned text, never cut to a width.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import typer

from gpufn.errors import (
    CapacityError,
    Forbidden,
    FunctionNotFound,
    FunctionRaised,
    GatewayUnavailable,
    GpufnError,
    InvalidInput,
    InvocationNotFound,
    RevisionNotFound,
    Unauthorized,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

_EXIT_CODES: tuple[tuple[type[GpufnError] | tuple[type[GpufnError], ...], int], ...] = (
    (GatewayUnavailable, 3),
    ((FunctionNotFound, RevisionNotFound, InvocationNotFound), 4),
    ((Unauthorized, Forbidden), 5),
    (CapacityError, 6),
    (FunctionRaised, 7),
)


def report(error: Exception) -> int | None:
    """Say on one line what is wrong and what to do, and return the exit code; None for what is not ours."""
    if isinstance(error, TimeoutError):
        say(f"gpufn: {error}", err=True)
        return 1
    if not isinstance(error, GpufnError):
        return None
    if isinstance(error, FunctionRaised) and error.traceback:
        say(error.traceback.rstrip(), err=True)  # of the user's own code
    lead = ""
    if isinstance(error, FunctionRaised):
        lead = f"{error.error_type}: "
    elif isinstance(error, InvalidInput) and error.field:
        lead = f"{error.field}: "
    message = error.message if error.message.startswith(lead) else lead + error.message
    if isinstance(error, CapacityError) and error.retry_after_s:
        message += f" (try again in {duration(error.retry_after_s)})"
    say(f"gpufn: {message}", err=True)
    return next((code for kinds, code in _EXIT_CODES if isinstance(error, kinds)), 1)


def say(text: str, *, err: bool = False) -> None:
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{text}\n")
    stream.flush()


def print_json(value: Any) -> None:
    say(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str) -> None:
    """`empty` is said, on standard error, when there are no rows."""
    if not rows:
        say(empty, err=True)
        return
    texts = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for row in texts:
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        Console().print(table)
        return
    header = [column.upper() for column in columns]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    for row in (header, *texts):
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_fields(fields: Sequence[tuple[str, Any]]) -> None:
    shown = [(name, value) for name, value in fields if value not in (None, "", (), [], {})]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        say(f"{name:<{width}}  {value}")


@contextlib.contextmanager
def step(text: str) -> Iterator[Callable[[str], None]]:
    """Long work: a spinner at a terminal, silence in a pipe. What it yields adds to the text why it takes long."""
    if not sys.stderr.isatty():
        yield lambda reason: None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    with Console(stderr=True).status(Text(f"{text} …")) as status:
        yield lambda reason: status.update(Text(f"{text}: {reason} …"))


def duration(seconds: float | None) -> str:
    """`0.4 ms`, `3.2 s`, `5 min`, `2.5 h`."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def ago(then: float | None) -> str:
    return "-" if not then else f"{duration(max(time.time() - then, 0))} ago"


def size(count: int | None) -> str:
    if count is None:
        return "-"
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"
