"""`gpufn diff [FILE]`."""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING

import click
import msgspec

from gpufn.cli.develop.spec_diff import OptionChange, file_changes, option_changes
from gpufn.cli.functions.deploy import home_of_deploy, read_functions
from gpufn.cli.terminal.command import Argument, Command, connect, json_option
from gpufn.cli.terminal.output import print_json, say
from gpufn_core.errors import ArtifactUnavailable, Forbidden
from gpufn_core.spec.function_spec import spec_from_json

if TYPE_CHECKING:
    from gpufn.client.client import Client
    from gpufn.client.views.functions import FunctionView
    from gpufn.deploy.deployables import Deployable


class FunctionChange(msgspec.Struct):
    """The differences of one function. `code` has the digests of both bundles if the code differs."""

    function: str
    revision: int
    options: list[OptionChange] = []
    arguments: list[str] = []
    code: tuple[str, str] | None = None


class Difference(msgspec.Struct):
    """`files` has the lines of a unified diff; it is empty if the key may not read the deployed code."""

    added: list[str]
    removed: list[str]
    changed: list[FunctionChange]
    files: list[str] = []


@click.command(cls=Command)
@click.argument("file", cls=Argument, default="app.py", type=click.Path(readable=False), help="Default: app.py.")
@click.option("--include", multiple=True, help="Glob of more files, as for `gpufn deploy`. Repeatable.")
@click.option("--app", help="App of the functions that declare none. Default: `default`.")
@click.option("--env", help="Environment to compare with. Default: GPUFN_ENV, else `default`.")
@json_option
@click.pass_context
def diff(
    context: click.Context, *, file: str, include: tuple[str, ...], app: str | None, env: str | None, json: bool
) -> None:
    """Show what a deploy of a file would change.

    The command compares functions, options, arguments and code. The exit code is 0 if nothing differs, and 1 if
    something does. Code is compared line by line with the scope deploy, which may read it, otherwise by digest.
    """
    deployables = read_functions(file, [], list(include), home_of_deploy(app, env))
    with connect() as client:
        difference = _difference(client, deployables)
    if json:
        print_json(difference)
    else:
        _print(difference)
    if difference.added or difference.removed or difference.changed:
        context.exit(1)


def _difference(client: Client, deployables: list[Deployable]) -> Difference:
    from gpufn.deploy.leftovers import leftovers  # noqa: PLC0415

    views = {view.name: view for view in client.functions()}
    added = [each.spec.name for each in deployables if each.spec.name not in views]
    difference = Difference(added, leftovers(views.values(), deployables), [])
    compared: set[tuple[str, str]] = set()
    for each in deployables:
        if (view := views.get(each.spec.name)) is None or not view.spec:
            continue
        change = _change(client, view, each)
        if change.code is not None and change.code not in compared:
            compared.add(change.code)
            difference.files += _file_changes(client, view, each)
        if change.options or change.arguments or change.code:
            difference.changed.append(change)
    return difference


def _change(client: Client, view: FunctionView, local: Deployable) -> FunctionChange:
    from gpufn.deploy.signature_changes import signature_changes  # noqa: PLC0415

    knows_env = True
    try:
        view = client.function(view.name, env_values=True)
    except Forbidden:
        knows_env = False
    before, after = spec_from_json(view.spec), spec_from_json(msgspec.json.encode(local.spec))
    active = next((each for each in client.revisions(view.name) if each.number == view.active), None)
    is_same = active is None or active.bundle == local.bundle or (local.code != "" and active.code == local.code)
    return FunctionChange(
        view.name,
        view.active,
        option_changes(before, after, knows_env=knows_env),
        signature_changes(before.methods, after.methods),
        None if is_same or active is None else (active.bundle, local.bundle),
    )


def _file_changes(client: Client, view: FunctionView, local: Deployable) -> list[str]:
    try:
        before = client.bundle(view.name, view.active)
    except (Forbidden, ArtifactUnavailable):
        return []
    return list(file_changes(_contents(before), _contents(local.data), f"{view.name}@{view.active}"))


def _contents(bundle: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _print(difference: Difference) -> None:
    for name in difference.added:
        say(f"+ {name}")
    for name in difference.removed:
        say(f"- {name}")
    for each in difference.changed:
        say(f"~ {each.function}@{each.revision}")
        for line in (*map(str, each.options), *each.arguments):
            say(f"    {line}")
        if each.code is not None:
            before, after = (digest[:12] for digest in each.code)
            say(f"    code  {before} → {after}")
    for line in difference.files:
        say(line)
