"""`gpufn exec NAME -- COMMAND` and `gpufn shell NAME`."""

from __future__ import annotations

import os
import sys

import click

from gpufn.cli.develop.local_terminal import LocalTerminal
from gpufn.cli.terminal.command import Argument, Command, connect
from gpufn.cli.terminal.name_completion import function_name
from gpufn.cli.terminal.output import step
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.streams.terminal import Start


@click.command("exec", cls=Command)
@function_name
@click.argument(
    "command", cls=Argument, nargs=-1, required=True, type=click.UNPROCESSED, help="The program and its arguments."
)
@click.option(
    "--tty/--no-tty",
    "-t/-T",
    default=None,
    help="With a terminal, or with pipes. Default: a terminal if standard input and output are one.",
)
def exec_(name: str, command: tuple[str, ...], tty: bool | None) -> None:
    """Run a command in a worker of its own, where a function runs.

    The worker has the function's files, packages, variables, secrets, sandbox and GPU, and runs nothing else. It ends
    with the command, whose exit code is that of `gpufn exec`. Options of the command follow `--`:

        gpufn exec clf -- nvidia-smi --list-gpus

    In a terminal, Enter ~ . closes the connection, and ends the command.
    """
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if tty and not has_terminal:
        raise InvalidInput("--tty: standard input and output are no terminal")
    _run(name, command, tty=has_terminal if tty is None else tty)


@click.command(cls=Command)
@function_name
def shell(name: str) -> None:
    """Open a shell in a worker of its own, where a function runs.

    It is bash if the worker has it, or else sh. Enter ~ . closes the connection, and ends the shell.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidInput("a shell needs a terminal: use `gpufn exec NAME -- COMMAND` in a script")
    _run(name, (), tty=True)


def _run(name: str, command: tuple[str, ...], *, tty: bool) -> None:
    local = LocalTerminal(is_raw=tty)
    start = Start(command, tty, local.size(), os.environ.get("TERM", "xterm") if tty else "xterm")
    with connect() as client, client.exec(name, start) as remote:
        with step(f"Starting a worker for {name}"):
            remote.wait_until_started()
        with local.connected(remote):
            for channel, data in remote.output():
                local.write(channel, data)
    raise click.exceptions.Exit(remote.exit_code or 0)
