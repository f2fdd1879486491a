"""`gpufn logs NAME`."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import msgspec
import typer

from gpufn.cli._render import Json, say


def logs(
    name: Annotated[str, typer.Argument(help="The function's name.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes; Ctrl-C ends it.")] = False,
    tail: Annotated[int, typer.Option("--tail", "-n", min=0, help="So many of the last lines.")] = 100,
    json: Json = False,
) -> None:
    """Show what a function's workers wrote."""
    from gpufn._client import Client  # noqa: PLC0415

    with Client() as client, contextlib.suppress(KeyboardInterrupt):
        for line in client.logs(name, tail=tail, follow=follow):
            if json:
                say(msgspec.json.encode(line).decode())
            else:
                when = time.strftime("%H:%M:%S", time.localtime(line.at))
                mark = {"stderr": "! ", "platform": "# "}.get(line.stream, "")
                say(f"{when}  {line.worker}  {mark}{line.text}")
