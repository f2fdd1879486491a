"""`gpufn apps ls`, `rollback`."""

from __future__ import annotations

import click

from gpufn.cli.terminal.command import Argument, Group, connect, json_option
from gpufn.cli.terminal.output import ago, print_json, print_table, say
from gpufn_core.spec.naming.names import DEFAULT

app = Group("apps", help="List the apps, and roll one back.")


@app.command("ls")
@json_option
def list_apps(json: bool) -> None:
    """List the apps of all environments, with their functions."""
    with connect() as client:
        views = client.apps()
    if json:
        print_json(views)
        return
    rows = [
        (
            f"{view.environment}/{view.app}",
            ago(view.deployed_at) if view.deployed_at else "",
            ", ".join(name.rpartition("/")[2] for name in view.functions),
        )
        for view in views
    ]
    print_table(("app", "deployed", "functions"), rows, empty="no apps: deploy functions with `gpufn deploy FILE`")


@app.command()
@click.argument("name", cls=Argument, help="Name of the app: APP, or ENV/APP. The environment defaults to GPUFN_ENV.")
@json_option
def rollback(name: str, json: bool) -> None:
    """Undo the last deploy of an app.

    Each function that the deploy changed goes back to the revision before it. Functions that the deploy created stay.
    """
    environment, _, app_name = name.rpartition("/")
    with connect() as client:
        functions = client.rollback_app(app_name, environment or client.environment or DEFAULT)
    if json:
        print_json(functions)
        return
    for each in functions:
        say(f"{each.name}@{each.active} {'serves' if each.active == each.serving else 'is active'}")
