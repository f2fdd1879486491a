"""`gpufn builds`, and `gpufn builds cancel`, `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpufn.cli import new_app
from gpufn.cli.terminal.output import Json, ago, duration, print_json, print_table, say

app = new_app(help="List the builds of models, cancel one, or read its report.")

Id = Annotated[str, typer.Argument(help="The build's id.")]


@app.callback(invoke_without_command=True)
def _alone(context: typer.Context, json: Json = False) -> None:
    """List the builds of models, cancel one, or read its report."""
    if context.invoked_subcommand is None:
        list_builds(json=json)


@app.command("ls")
def list_builds(json: Json = False) -> None:
    """List the builds, the newest first."""
    from gpufn.cli.models.build_progress import phrase  # noqa: PLC0415
    from gpufn.client.client import Client  # noqa: PLC0415
    from gpufn.deploy.build_wait import build_error  # noqa: PLC0415

    with Client() as client:
        builds = client.builds()
    if json:
        print_json(builds)
        return
    rows = []
    for build in builds:
        took = None if build.ended_at is None or build.started_at is None else build.ended_at - build.started_at
        why = f"{phrase(build)}: {build_error(build.error).message}" if build.error else phrase(build)
        rows.append((build.id, build.label, ago(build.created_at), took and duration(took), why))
    print_table(("id", "model", "begun", "took", "state"), rows, empty="no builds: `gpufn build MODEL.onnx`")


@app.command()
def cancel(id: Id, json: Json = False) -> None:  # noqa: A002
    """Cancel a build; a revision that waits for it fails, and what served goes on serving."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        before = client.build(id)
        build = client.cancel_build(id)
    if json:
        print_json(build)
    else:
        say(f"{id} had ended already" if before.state.ended else f"{id} is being cancelled")


@app.command()
def report(
    id: Id,  # noqa: A002
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file: a page when it ends in .html.")
    ] = None,
) -> None:
    """Print the report of a build as JSON, or write it to a file."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        data = client.build_report(id, page=output is not None and output.suffix.lower() in (".html", ".htm"))
    if output is None:
        print_json(msgspec.Raw(data))
    else:
        output.write_bytes(data)
        say(f"the report is in {output}", err=True)
