"""`gpufn logs NAME`."""

from __future__ import annotations

import contextlib
import time

import click

from gpufn.cli.terminal.command import Command, IntRange, connect, json_option
from gpufn.cli.terminal.name_completion import function_name
from gpufn.cli.terminal.output import print_json_line, say

_STREAM_MARKS = {"stderr": "! ", "error": "# "}


@click.command(cls=Command)
@function_name
@click.option("--follow", "-f", is_flag=True, help="Also print new lines as they arrive, until Ctrl-C.")
@click.option("--tail", "-n", type=IntRange(min=0), default=100, help="Number of last lines.")
@json_option
def logs(name: str, follow: bool, tail: int, json: bool) -> None:
    """Show the logs of a function's workers.

    `!` marks standard error, and the output of subprocesses. `#` marks errors of calls and worker starts. A heading
    marks each change of the day or the revision.
    """
    with connect() as client, contextlib.suppress(KeyboardInterrupt):
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
            mark = _STREAM_MARKS.get(line.stream, "")
            # Indented, so that no function can print what looks like a line of another worker or of the platform.
            text = line.text.rstrip().replace("\n", "\n    ")
            say(f"{time.strftime('%H:%M:%S', when)}  {line.worker}  {mark}{text}")
        if not last and tail and not json and not follow:
            say(f"{name} has no log lines", err=True)
