"""Output of commands: results on standard output, everything else on standard error. With --json, errors are JSON too.

Tables are aligned text; at a terminal their heading is bold and their last column is wrapped. Progress is a spinner at
a terminal, and lines elsewhere.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import click
import msgspec

from gpufn.cli.terminal.escape import in_one_line, visible, visible_json
from gpufn.cli.terminal.similar_names import with_similar_name
from gpufn_core.errors import (
    AmbiguousFunction,
    BuildFailed,
    BuildNotFound,
    CapacityError,
    DataNotFound,
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
    TraceNotFound,
    Unauthorized,
    UntrustedDeploy,
)
from gpufn_core.spec.units import format_bytes, format_duration

_NUMBERS = re.compile(r"\d[\d.,]*( ?[KMGT]?i?B\b| ?%)?")
_MIN_WRAP_COLUMNS = 20
_BOLD = 1
_OPTIONAL_MEMBERS = ("retry_after_s", "field", "error_type", "traceback", "stage", "node")  # members of a JSON error
_PROPER_NAMES = {"Python", "Docker", "Uvicorn"}


class WrongUsage(InvalidInput):
    """The command line is invalid. The exit code is 2, as for errors that click or the gateway detects."""


@contextlib.contextmanager
def as_usage_error(field: str | None = None) -> Iterator[None]:
    """Raise WrongUsage for invalid input detected inside the `with`. `field` is the option with the input, if any."""
    try:
        yield
    except (InvalidInput, InvalidSpec, InvalidBundle) as error:
        error_field = getattr(error, "field", None)
        raise WrongUsage(error.message, field=field or error_field) from error


_EXIT_CODES: tuple[tuple[type[GpufnError] | tuple[type[GpufnError], ...], int], ...] = (
    (InvalidInput, 2),
    (GatewayUnavailable, 3),
    (
        (
            FunctionNotFound,
            AmbiguousFunction,
            RevisionNotFound,
            InvocationNotFound,
            MapNotFound,
            TraceNotFound,
            BuildNotFound,
            ScheduleNotFound,
            DataNotFound,
            DeadLetterNotFound,
        ),
        4,
    ),
    ((Unauthorized, Forbidden, UntrustedDeploy), 5),
    (CapacityError, 6),
    (FunctionRaised, 7),
    (BuildFailed, 8),
)


def exit_code(error: Exception) -> int | None:
    """Return the exit code of an error, or None for an unexpected exception."""
    if not isinstance(error, GpufnError):
        return 1 if isinstance(error, OSError) else None  # OSError includes TimeoutError
    default = 4 if getattr(error, "status", None) == 404 else 1  # some missing objects have no error class of their own
    return next((code for kinds, code in _EXIT_CODES if isinstance(error, kinds)), default)


def report(error: Exception, *, json: bool = False) -> None:
    """Print an error on one line; with `json`, as an object with the members of the gateway's problems."""
    if json:
        info = error.info() if isinstance(error, GpufnError) else ErrorInfo(GpufnError.code, "")
        report_problem(info, _message_of(error))
        return
    if isinstance(error, FunctionRaised) and error.traceback:
        say(error.traceback.rstrip(), err=True)  # of the user's own code
    say(f"gpufn: {_message_of(error)}", err=True)


def report_problem(info: ErrorInfo, detail: str) -> None:
    members = {name: getattr(info, name) for name in _OPTIONAL_MEMBERS if getattr(info, name) is not None}
    line = msgspec.json.encode({"code": info.code, "detail": detail, "retryable": info.retryable} | members)
    _write(visible_json(line.decode()), sys.stderr)


def _message_of(error: Exception) -> str:
    if isinstance(error, OSError):
        file = f"{error.filename}: " if error.filename else ""
        return f"{file}{error.strerror or error}"
    if not isinstance(error, GpufnError):
        return str(error)
    prefix = ""
    if isinstance(error, InvalidInput) and error.field and not error.message.startswith(f"{error.field} "):
        prefix = f"{error.field}: "
    message = str(error)  # a FunctionRaised includes the type of the function's exception
    if not message.startswith(prefix):
        message = prefix + message
    if isinstance(error, CapacityError) and error.retry_after_s:
        message = message.rstrip(".") + f" (try again in {duration(error.retry_after_s)})"
    message = with_similar_name(error, message)
    return message if isinstance(error, FunctionRaised) else as_line(message)


def as_line(message: str) -> str:
    """Format a message for a `gpufn: ` line: first letter in lower case, no full stop.

    >>> as_line("There is no function 'f'."), as_line("GPUFN_PORT: 'x' is no port"), as_line("ImportError: no y")
    ("there is no function 'f'", "GPUFN_PORT: 'x' is no port", 'ImportError: no y')
    """
    first = message.partition(" ")[0]
    if first.istitle() and first.isalpha() and first not in _PROPER_NAMES:
        message = message[0].lower() + message[1:]
    return message if message.endswith("..") else message.removesuffix(".")


def say(text: str, *, err: bool = False, lead: str = "") -> None:
    """Print a line. `text` is escaped for the terminal; `lead` is trusted and may have colors."""
    _write(lead + visible(text), sys.stderr if err else sys.stdout)


def say_or_json(text: str, value: Any, *, json: bool) -> None:
    """Print a line, or with `json` the value as JSON."""
    if json:
        print_json(value)
    else:
        say(text)


def confirm(question: str, *, yes: bool) -> None:
    """Ask before a deletion, unless `yes`. Exit with code 1 if the answer is no. Raises InvalidInput if there is no
    answer, as in a script."""
    if yes:
        return
    try:
        is_confirmed = click.confirm(visible(question), err=True)
    except click.Abort:
        click.echo(err=True)
        raise InvalidInput("nothing was done, because the question was not answered: --yes answers it") from None
    if not is_confirmed:
        raise click.exceptions.Exit(1)


def print_json(value: Any) -> None:
    """Print indented JSON."""
    _write(visible_json(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()), sys.stdout)


def print_json_line(value: Any) -> None:
    _write(visible_json(msgspec.json.encode(value).decode()), sys.stdout)


def _write(text: str, stream: TextIO) -> None:
    stream.write(f"{text}\n")
    stream.flush()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str) -> None:
    """Print a table, or `empty` on standard error if there are no rows."""
    if not rows:
        say(empty, err=True)
        return
    texts = [["-" if cell is None else in_one_line(str(cell)) for cell in row] for row in rows]
    header = [column.upper() for column in columns]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    is_terminal = sys.stdout.isatty()
    indent = sum(widths[:-1]) + 2 * len(widths[:-1])
    wrap_columns = shutil.get_terminal_size().columns - indent if is_terminal else 0
    for number, row in enumerate((header, *texts)):
        *first, last = row
        lines = textwrap.wrap(last, wrap_columns) if wrap_columns >= _MIN_WRAP_COLUMNS else []
        lead = "".join(f"{cell:<{width}}  " for cell, width in zip(first, widths, strict=False))
        line = f"\n{'':<{indent}}".join([lead + (lines[0] if lines else last), *lines[1:]]).rstrip()
        _write(line if number else styled(line, _BOLD), sys.stdout)


def styled(text: str, code: int) -> str:
    """Return the text in a style, if standard output is a terminal with styles, and NO_COLOR is not set."""
    has_styles = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return f"\x1b[{code}m{text}\x1b[0m" if has_styles else text


def print_fields(fields: Sequence[tuple[str, Any]]) -> None:
    shown = [(name, value) for name, value in fields if value not in (None, "", (), [], {})]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        say(f"{name:<{width}}  {value}".replace("\n", f"\n{'':<{width}}  "))


def is_animated() -> bool:
    """Return whether standard error is a terminal that can move its cursor, and rich is installed, which draws spinners
    and bars."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and importlib.util.find_spec("rich") is not None


class _Lines:
    def __init__(self, text: str) -> None:
        self._text = text
        self._last = ""

    def __call__(self, reason: str) -> None:
        if reason and (phase := _NUMBERS.sub("", reason)) != self._last:
            self._last = phase
            say(f"{self._text}: {reason}", err=True)


@contextlib.contextmanager
def step(text: str, *, has_lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a spinner during a long step, at a terminal and only if rich is installed.

    Yields a function that adds a reason to the text; "" removes it. Without a spinner and with `has_lines`, each reason
    is a line, as a log of CI needs, unless it differs from the last one only in its numbers.
    """
    if not is_animated():
        yield _Lines(text) if has_lines else lambda reason: None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    with Console(stderr=True).status(Text(visible(f"{text} …"))) as status:
        yield lambda reason: status.update(Text(visible(f"{text}: {reason} …" if reason else f"{text} …")))


def duration(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)


def ago(then: float | None) -> str:
    """
    >>> ago(None), ago(time.time()), ago(time.time() - 300)
    ('-', 'now', '5 min ago')
    """
    if not then:
        return "-"
    elapsed_s = round(time.time() - then)
    return f"{duration(elapsed_s)} ago" if elapsed_s > 0 else "now"


def size(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)
