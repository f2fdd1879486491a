"""`gpufn logs NAME`."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import typer

from gpufn.cli.terminal.name_completion import FunctionName
from gpufn.cli.terminal.output import Json, print_json_line, say

_MARKS = {"stderr": "! ", "error": "# "}


def logs(
    name: FunctionName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes; Ctrl-C ends it.")] = False,
    tail: Annotated[int, typer.Option("--tail", "-n", min=0, help="So many of the last lines.")] = 100,
    json: Json = False,
) -> None:
    """Show what a function's workers wrote.

    `!` marks standard error, and all that programs print which a function starts; `#` how a call or a start failed. A
    line of its own says where another day or another revision begins.
    """
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client, contextlib.suppress(KeyboardInterrupt):
        last = ""
        for line in client.logs(name, tail=tail, follow=follow):
            if json:
                print_json_line(line)
                continue
            when = time.localtime(line.at)
            heading = f"--- {time.strftime('%Y-%m-%d', when)}  {line.function}@{line.revision}"
            if heading != last:
                last = heading
                say(heading)
            say(f"{time.strftime('%H:%M:%S', when)}  {line.worker}  {_MARKS.get(line.stream, '')}{line.text.rstrip()}")
        if not last and tail and not json and not follow:
            say(f"{name} has written nothing", err=True)
