"""`gpufn dlq`: submitted calls that failed permanently."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpufn.cli import new_app
from gpufn.cli.terminal.name_completion import FunctionName
from gpufn.cli.terminal.output import Json, WrongUsage, ago, print_json, print_table, say

app = new_app(help="List, show, replay and drop dead letters (submitted calls that failed permanently).")

Id = Annotated[str, typer.Argument(help="Id of the call, as `gpufn dlq ls` prints it.")]
OptionalId = Annotated[str | None, typer.Argument(help="Id of the call, as `gpufn dlq ls` prints it.")]
All = Annotated[bool, typer.Option("--all", help="All dead letters of the function.")]


@app.callback(invoke_without_command=True)
def _list_by_default(context: typer.Context, json: Json = False) -> None:
    """List, show, replay and drop dead letters (submitted calls that failed permanently)."""
    if context.invoked_subcommand is None:
        ls(json=json)


@app.command()
def ls(
    name: Annotated[str | None, typer.Argument(help="Name of the function. Default: all functions.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Maximum number of rows.")] = 20,
    json: Json = False,
) -> None:
    """List dead letters, newest first. They are deleted after 14 days."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        letters = client.dead_letters(name, limit=limit)
    if json:
        print_json(letters)
        return
    rows = [
        (each.id, each.function, each.state.value, ago(each.died_at), str(len(each.attempts)), each.cause)
        for each in letters
    ]
    print_table(("id", "function", "state", "died", "attempts", "cause"), rows, empty="no dead letters")


@app.command()
def show(
    name: FunctionName,
    id: Id,  # noqa: A002
    payload: Annotated[Path | None, typer.Option(help="File for the call's arguments.")] = None,
    json: Json = False,
) -> None:
    """Show the attempts and the error of a dead letter."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        letter = client.dead_letter(name, id)
        if payload is not None:
            payload.write_bytes(client.dead_letter_payload(name, id))
    if json:
        print_json(letter)
        return
    say(f"{letter.function}@{letter.revision}  {letter.state.value} {ago(letter.died_at)}: {letter.cause}")
    rows = [
        (str(each.number), each.outcome.value, ago(each.ended_at), each.worker, each.message or each.code)
        for each in letter.attempts
    ]
    print_table(("attempt", "outcome", "ended", "worker", "error"), rows, empty="the call never ran")
    if traceback := (letter.error or {}).get("traceback"):
        say(str(traceback).rstrip())
    if payload is not None:
        say(f"wrote the arguments to {payload}", err=True)


@app.command()
def replay(name: FunctionName, id: OptionalId = None, every: All = False, json: Json = False) -> None:  # noqa: A002
    """Submit a dead letter again, as a new call of the revision that serves now."""
    from gpufn.client.client import Client  # noqa: PLC0415

    _check_one_or_all(id, every)
    with Client() as client:
        replays = client.replay_all(name) if id is None else [client.replay(name, id)]
    if json:
        print_json(replays)
        return
    for each in replays:
        say(each.invocation)
    if not replays:
        say(f"{name} has no dead letters", err=True)


@app.command()
def drop(name: FunctionName, id: OptionalId = None, every: All = False, json: Json = False) -> None:  # noqa: A002
    """Remove a dead letter and its payload."""
    from gpufn.client.client import Client  # noqa: PLC0415

    _check_one_or_all(id, every)
    with Client() as client:
        dropped = client.drop_dead_letters(name) if id is None else client.drop_dead_letter(name, id)
    if json:
        print_json({"dropped": dropped})
    else:
        say(f"dropped {dropped}")


def _check_one_or_all(id: str | None, every: bool) -> None:  # noqa: A002
    if (id is None) is not every:
        raise WrongUsage("pass either an id or --all")
