"""How commands speak: results on standard output, everything else on standard error: with --json errors too are
JSON there.

A table is aligned text; at a terminal its heading is bold and its last column is wrapped. Progress is for terminals.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TextIO

import msgspec
import typer

from gpufn.cli.terminal.escape import in_one_line, visible, visible_json
from gpufn_core.errors import (
    BuildFailed,
    BuildNotFound,
    CapacityError,
    DeadLetterNotFound,
    ErrorInfo,
    Forbidden,
    FunctionNotFound,
    FunctionRaised,
    GatewayUnavailable,
    GpufnError,
    InvalidBundle,
    InvalidInput,
    InvalidSpec,
    InvocationNotFound,
    MapNotFound,
    RevisionNotFound,
    ScheduleNotFound,
    Unauthorized,
)

_LEAST_ROOM = 20  # columns, to wrap text in
_PROBLEM = ("retry_after_s", "field", "error_type", "traceback", "stage", "node")  # members beside those of all
_PROPER_NAMES = {"Python", "Docker", "Uvicorn"}

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs; what fails too, on standard error.")]


class WrongUsage(InvalidInput):
    """What was typed does not fit the command. The exit code is 2, as of what Typer or the gateway refuses."""


@contextlib.contextmanager
def as_typed(field: str | None = None) -> Iterator[None]:
    """What is refused in here is what was typed, in the option `field` if it has one: wrong usage."""
    try:
        yield
    except (InvalidInput, InvalidSpec, InvalidBundle) as error:
        named = getattr(error, "field", None)
        raise WrongUsage(error.message, field=field or named) from error


_EXIT_CODES: tuple[tuple[type[GpufnError] | tuple[type[GpufnError], ...], int], ...] = (
    (InvalidInput, 2),
    (GatewayUnavailable, 3),
    (
        (
            FunctionNotFound,
            RevisionNotFound,
            InvocationNotFound,
            MapNotFound,
            BuildNotFound,
            ScheduleNotFound,
            DeadLetterNotFound,
        ),
        4,
    ),
    ((Unauthorized, Forbidden), 5),
    (CapacityError, 6),
    (FunctionRaised, 7),
    (BuildFailed, 8),
)


def exit_code(error: Exception) -> int | None:
    """None for what is not ours."""
    if not isinstance(error, GpufnError):
        return 1 if isinstance(error, OSError) else None  # a TimeoutError is one
    otherwise = 4 if getattr(error, "status", None) == 404 else 1  # not all that can be missing has its own class
    return next((code for kinds, code in _EXIT_CODES if isinstance(error, kinds)), otherwise)


def report(error: Exception, *, json: bool = False) -> None:
    """Say on one line what is wrong and what to do; as `json` in an object with the members of a gateway's problem."""
    if json:
        report_problem(error.info() if isinstance(error, GpufnError) else ErrorInfo(GpufnError.code, ""), _what(error))
        return
    if isinstance(error, FunctionRaised) and error.traceback:
        say(error.traceback.rstrip(), err=True)  # of the user's own code
    say(f"gpufn: {_what(error)}", err=True)


def report_problem(info: ErrorInfo, detail: str) -> None:
    fields = {name: getattr(info, name) for name in _PROBLEM if getattr(info, name) is not None}
    line = msgspec.json.encode({"code": info.code, "detail": detail, "retryable": info.retryable} | fields)
    _write(visible_json(line.decode()), sys.stderr)


def _what(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    if not isinstance(error, GpufnError):
        return str(error)
    lead = ""
    if isinstance(error, InvalidInput) and error.field and not error.message.startswith(f"{error.field} "):
        lead = f"{error.field}: "
    message = str(error)  # of what a function raised with its type
    if not message.startswith(lead):
        message = lead + message
    if isinstance(error, CapacityError) and error.retry_after_s:
        message = message.rstrip(".") + f" (try again in {duration(error.retry_after_s)})"
    if isinstance(error, FunctionNotFound):
        message = message.rstrip(".") + _near(error.message)
    return message if isinstance(error, FunctionRaised) else voiced(message)


def voiced(message: str) -> str:
    """As every line after `gpufn: ` is: a small letter first, no full stop last.

    >>> voiced("There is no function 'f'."), voiced("GPUFN_PORT: 'x' is no port"), voiced("ImportError: no y")
    ("there is no function 'f'", "GPUFN_PORT: 'x' is no port", 'ImportError: no y')
    """
    first = message.partition(" ")[0]
    if first.istitle() and first.isalpha() and first not in _PROPER_NAMES:
        message = message[0].lower() + message[1:]
    return message if message.endswith("..") else message.removesuffix(".")


def _near(message: str) -> str:
    """What a function that is not there may have been meant to be; the gateway knows the names."""
    from gpufn.client.client import Client  # noqa: PLC0415

    asked = re.search(r"no function '([^']+)'", message)
    if asked is None:
        return ""
    try:
        with Client() as client:
            names = [view.name for view in client.functions()]
    except GpufnError:
        return ""
    near = difflib.get_close_matches(asked[1], names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def say(text: str, *, err: bool = False, lead: str = "") -> None:
    """`lead` is ours and may be coloured; of `text` a terminal obeys nothing."""
    _write(lead + visible(text), sys.stderr if err else sys.stdout)


def ask(question: str) -> None:
    """Go on if the answer is yes. InvalidInput when nobody answers, as in a script."""
    try:
        agreed = typer.confirm(visible(question), err=True)
    except typer.Abort:
        typer.echo(err=True)
        raise InvalidInput("not deleted, for nobody answered: --yes deletes without asking") from None
    if not agreed:
        raise typer.Exit(1)


def print_json(value: Any) -> None:
    """Indented."""
    _write(visible_json(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()), sys.stdout)


def print_json_line(value: Any) -> None:
    _write(visible_json(msgspec.json.encode(value).decode()), sys.stdout)


def _write(text: str, stream: TextIO) -> None:
    stream.write(f"{text}\n")
    stream.flush()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str) -> None:
    """`empty` is said, on standard error, when there are no rows."""
    if not rows:
        say(empty, err=True)
        return
    texts = [["-" if cell is None else in_one_line(str(cell)) for cell in row] for row in rows]
    header = [column.upper() for column in columns]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    is_terminal = sys.stdout.isatty()
    indent = sum(widths[:-1]) + 2 * len(widths[:-1])
    room = shutil.get_terminal_size().columns - indent if is_terminal else 0
    for number, row in enumerate((header, *texts)):
        *first, last = row
        lines = textwrap.wrap(last, room) if room >= _LEAST_ROOM else []
        lead = "".join(f"{cell:<{width}}  " for cell, width in zip(first, widths, strict=False))
        line = f"\n{'':<{indent}}".join([lead + (lines[0] if lines else last), *lines[1:]]).rstrip()
        _write(f"\x1b[1m{line}\x1b[0m" if is_terminal and number == 0 else line, sys.stdout)


def print_fields(fields: Sequence[tuple[str, Any]]) -> None:
    shown = [(name, value) for name, value in fields if value not in (None, "", (), [], {})]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        say(f"{name:<{width}}  {value}".replace("\n", f"\n{'':<{width}}  "))


@contextlib.contextmanager
def step(text: str) -> Iterator[Callable[[str], None]]:
    """Long work: a spinner at a terminal, silence in a pipe. What it yields adds to the text why it takes long; ""
    removes that."""
    if not sys.stderr.isatty():
        yield lambda reason: None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    with Console(stderr=True).status(Text(visible(f"{text} …"))) as status:
        yield lambda reason: status.update(Text(visible(f"{text}: {reason} …" if reason else f"{text} …")))


def duration(seconds: float | None) -> str:
    """
    >>> [duration(each) for each in (0.0004, 0.9996, 3.25, 119.96, 139.0, 9000.0, 200_000.0)]
    ['0.4 ms', '1 s', '3.25 s', '2 min', '2 min', '2.5 h', '2.3 days']
    """
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 119.5:
        return f"{seconds:.3g} s"
    if seconds < 7170:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.3g} h" if seconds < 172_800 else f"{seconds / 86_400:.2g} days"


def ago(then: float | None) -> str:
    """
    >>> ago(None), ago(time.time()), ago(time.time() - 300)
    ('-', 'now', '5 min ago')
    """
    if not then:
        return "-"
    passed = round(time.time() - then)
    return f"{duration(passed)} ago" if passed > 0 else "now"


def size(count: int | None) -> str:
    if count is None:
        return "-"
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"
