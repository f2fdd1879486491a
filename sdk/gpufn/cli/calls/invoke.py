"""`gpufn invoke NAME`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gpufn.cli.calls.arguments import body_of, body_options, check_output, output_option, priority_option, show
from gpufn.cli.calls.wait_reasons import report_waits
from gpufn.cli.terminal.command import Command, FloatRange, connect, json_option
from gpufn.cli.terminal.name_completion import callable_name
from gpufn.cli.terminal.output import print_json_line, say, step
from gpufn.client.may_read import may_read
from gpufn_core.errors import Forbidden
from gpufn_core.protocol.limits import LONGEST_TIMEOUT_S
from gpufn_core.spec.function_spec import FunctionSpec, spec_from_json
from gpufn_core.spec.naming.variant_names import split
from gpufn_core.spec.priority import Priority

if TYPE_CHECKING:
    from gpufn.client.client import Client


@click.command(cls=Command)
@callable_name
@body_options
@output_option
@click.option(
    "--timeout",
    type=FloatRange(0.001, LONGEST_TIMEOUT_S),
    help="Timeout of the call in seconds. Default: the function's timeout.",
)
@priority_option
@json_option
def invoke(
    *, name: str, output: Path | None, timeout: float | None, priority: Priority | None, json: bool, **body_values: Any
) -> None:
    """Call a function and print its result.

    The items of a generator are printed as they arrive, one per line. With --json the result is printed at the end,
    with the call's id and timings; a generator's items are one list. With --output the result is only in the file. With
    a key that may only invoke, a generator's items are one list. Ctrl-C cancels the call.
    """
    body, content_type, query = body_of(**body_values)
    options: dict[str, Any] = {"timeout_s": timeout, "priority": priority, "query": query}
    check_output(output)
    with connect() as client, _reporting_cancellation(name, json=json):
        if not json and _streams(client, name):
            print_items(client.stream_json(name, body, content_type, **options), output)
            return
        with step(f"Calling {name}") as update, report_waits(client, _waited_for(name), update, json=json):
            result = client.invoke_raw(name, body, content_type, **options)
    show(result, output, json=json)


@contextlib.contextmanager
def _reporting_cancellation(name: str, *, json: bool) -> Iterator[None]:
    """Report at Ctrl-C that the call ends with its caller."""
    try:
        yield
    except KeyboardInterrupt:
        if not json:
            say(f"gpufn: the call is cancelled; one from `gpufn submit {name}` would continue", err=True)
        raise


def print_items(items: Iterable[Any], output: Path | None) -> None:
    """Print the items of a generator as they arrive, one per line, or write them to a file."""
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(output.open("wb")) if output else None
        for item in items:
            if out is None:
                print_json_line(item)
            else:
                out.write(msgspec.json.encode(item) + b"\n")
                out.flush()


def _waited_for(name: str) -> str:
    """Return the function or the variant whose workers a call waits for."""
    function, selector, _ = split(name)
    return function if selector is None else f"{function}({selector})"


def _streams(client: Client, name: str) -> bool:
    function, _, method = split(name)
    if not may_read(client):
        return False
    try:
        spec: FunctionSpec = spec_from_json(client.function(function).spec)
    except Forbidden:  # the key may read other functions
        return False
    method_spec = spec.method(method)
    return method_spec is not None and method_spec.kind.streams
