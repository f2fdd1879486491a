"""`gpufn map NAME`: map a function over the lines of a file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gpufn.cli.calls.arguments import priority_option
from gpufn.cli.terminal.command import Command, FloatRange, IntRange, connect, json_option
from gpufn.cli.terminal.name_completion import callable_name
from gpufn.cli.terminal.output import WrongUsage, print_json_line, say
from gpufn.client.may_read import may_read
from gpufn_core.encoding import media
from gpufn_core.errors import Forbidden, GpufnError, RateLimited
from gpufn_core.spec.naming.variant_names import split
from gpufn_core.spec.priority import Priority

if TYPE_CHECKING:
    from gpufn.call.transport_protocol import MapTransport, Target
    from gpufn.client.client import Client
    from gpufn.client.views.calls import MapView
    from gpufn.maps.platform_map import PlatformMap
    from gpufn.maps.reader import ItemOutcome

_FAILED_ITEMS = 7  # exit code, the same as for a call that raised


@click.command("map", cls=Command)
@callable_name
@click.option(
    "--data", "-d", required=True, help="Items: @FILE, or @- for standard input, with a JSON object per line."
)
@click.option("--as-they-come", is_flag=True, help="Print results as they arrive, not in the order of the lines.")
@click.option(
    "--window", type=IntRange(min=1), help="Maximum number of lines read ahead of the output. Default: 10,000."
)
@click.option("--id", help="Id of a map to continue. Accepted lines are not sent again.")
@priority_option
@click.option(
    "--max-wait", type=FloatRange(min=0), help="Maximum wait for a limit of the key, in seconds. Default: 60."
)
@json_option
def map_(
    *,
    name: str,
    data: str,
    as_they_come: bool,
    window: int | None,
    id: str | None,  # noqa: A002
    priority: Priority | None,
    max_wait: float | None,
    json: bool,
) -> None:
    """Call a function for each line of a file, and print one result per line.

    Errors of items go to standard error, and the command exits with code 7. With --json each line has the item's index
    and its result or error. An interrupt leaves the map running: --id continues it, and `gpufn cancel ID` cancels it.
    """
    from gpufn.call.transport_protocol import Target  # noqa: PLC0415
    from gpufn.maps.platform_map import MapOptions, PlatformMap  # noqa: PLC0415
    from gpufn.maps.progress_bar import Bar  # noqa: PLC0415
    from gpufn_core.ids import new_map_id  # noqa: PLC0415

    function, selector, method = split(name)
    pool = function if selector is None else f"{function}({selector})"
    options = MapOptions(ordered=not as_they_come, window=window, id=id, max_wait=max_wait).checked()
    lines, total = _lines(data)
    failed = 0
    with connect() as client:
        if id is None and may_read(client):
            with contextlib.suppress(Forbidden):  # the key may read other functions
                client.function(function)  # fail at once for a wrong name: a map would retry for minutes
        platform_map = PlatformMap(_json_transport(client), id or new_map_id(), options)
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(Bar(name, total)) if sys.stderr.isatty() else None
            platform_map.wait_display.bar = bar
            try:
                platform_map.begin(Target(pool, method, priority), lines, _check_line, total=total)
                for outcome in platform_map.outcomes():
                    failed += not _print(platform_map, outcome, json=json)
                    if bar is not None:
                        bar.advance()
            except (KeyboardInterrupt, RateLimited):
                resume = f"gpufn map {name} -d {data} --id {platform_map.id}"
                cancel = f"gpufn cancel {platform_map.id}"
                say(
                    f"gpufn: the map keeps running; continue it with `{resume}`, or cancel it with `{cancel}`", err=True
                )
                raise
    if failed:
        say(f"gpufn: {failed:,} {'item' if failed == 1 else 'items'} failed", err=True)
        raise click.exceptions.Exit(_FAILED_ITEMS)


def _json_transport(client: Client) -> MapTransport:
    """Return the transport of a PlatformMap with JSON arguments, and JSON results where possible."""
    from gpufn.client.http_transport import HttpTransport  # noqa: PLC0415

    class JsonTransport(HttpTransport):
        def send_items(
            self, target: Target, map_id: str, first: int, items: Sequence[bytes], *, is_last: bool
        ) -> MapView:
            return client.send_items(target.path, map_id, first, items, last=is_last, priority=target.priority)

        def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
            raw = client.result_raw(invocation, timeout_s=timeout_s, accept=media.JSON)
            return raw.content_type, raw.body

    return JsonTransport(lambda: client)


def _lines(data: str) -> tuple[Iterable[tuple[int, bytes]], int | None]:
    """Return the items with their line numbers, and the number of items (None for standard input)."""
    if not data.startswith("@"):
        raise WrongUsage(
            "pass the items as @FILE, or @- for standard input, with a JSON object per line", field="--data"
        )
    if data == "@-":
        return _numbered(sys.stdin.buffer), None
    path = Path(data[1:])
    try:
        with path.open("rb") as file:
            total = sum(1 for line in file if line.strip())
    except OSError as error:
        raise WrongUsage(f"cannot read {path}: {error.strerror}", field="--data") from error
    return _lines_of(path), total


def _lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        yield from _numbered(file)


def _numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _check_line(numbered: tuple[int, bytes]) -> bytes:
    number, line = numbered
    try:
        msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        shown = line[:60].decode(errors="replace").strip()
        message = f"""line {number}: write a JSON object such as '{{"x": 1}}', not {shown!r}: {error}"""
        raise WrongUsage(message, field="--data") from error
    return line.strip()


def _print(platform_map: PlatformMap, outcome: ItemOutcome, *, json: bool) -> bool:
    """Print the outcome of an item. Return False if the item failed."""
    try:
        content_type, body = platform_map.result_of(outcome)
    except GpufnError as error:
        if json:
            print_json_line({"index": outcome.item, "error": error.info()})
        else:
            info = error.info()
            say(f"gpufn: item {outcome.item}: {info.error_type or info.code}: {info.message}", err=True)
        return False
    value: Any = msgspec.Raw(body or b"null") if content_type == media.JSON else body  # bytes become base64
    print_json_line({"index": outcome.item, "result": value} if json else value)
    return True
