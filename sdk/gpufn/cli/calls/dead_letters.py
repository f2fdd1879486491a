"""`gpufn dlq`: submitted calls that failed permanently."""

from __future__ import annotations

from pathlib import Path

import click

from gpufn.cli.terminal.command import PATH, Argument, Group, connect, json_option, limit_option, yes_option
from gpufn.cli.terminal.name_completion import function_name
from gpufn.cli.terminal.output import WrongUsage, ago, confirm, print_json, print_table, say, say_or_json

app = Group("dlq", help="List, show, replay and drop dead letters (submitted calls that failed permanently).")

_ID_HELP = "Id of the call, as `gpufn dlq ls` prints it."
_optional_id = click.argument("id", cls=Argument, required=False, help=_ID_HELP)
_all_option = click.option("--all", "every", is_flag=True, help="All dead letters of the function.")


@app.command()
@click.argument("name", cls=Argument, required=False, help="Name of the function. Default: all functions.")
@limit_option
@json_option
def ls(name: str | None, limit: int, json: bool) -> None:
    """List dead letters, newest first. They are deleted after 14 days."""
    with connect() as client:
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
@function_name
@click.argument("id", cls=Argument, help=_ID_HELP)
@click.option("--payload", type=PATH, help="File for the call's arguments.")
@json_option
def show(name: str, id: str, payload: Path | None, json: bool) -> None:  # noqa: A002
    """Show the attempts and the error of a dead letter."""
    with connect() as client:
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
@function_name
@_optional_id
@_all_option
@json_option
def replay(name: str, id: str | None, every: bool, json: bool) -> None:  # noqa: A002
    """Submit a dead letter again, as a new call of the revision that serves now."""
    _check_one_or_all(id, every)
    with connect() as client:
        replays = client.replay_all(name) if id is None else [client.replay(name, id)]
    if json:
        print_json(replays)
        return
    for each in replays:
        say(each.invocation)
    if not replays:
        say(f"{name} has no dead letters", err=True)


@app.command()
@function_name
@_optional_id
@_all_option
@yes_option
@json_option
def drop(name: str, id: str | None, every: bool, yes: bool, json: bool) -> None:  # noqa: A002
    """Remove a dead letter and its payload."""
    _check_one_or_all(id, every)
    confirm(f"Remove {f'the dead letter {id}' if id else f'all dead letters of {name}'}?", yes=yes)
    with connect() as client:
        dropped = client.drop_dead_letters(name) if id is None else client.drop_dead_letter(name, id)
    say_or_json(f"dropped {dropped}", {"dropped": dropped}, json=json)


def _check_one_or_all(id: str | None, every: bool) -> None:  # noqa: A002
    if (id is None) is not every:
        raise WrongUsage("pass either an id or --all")
