"""`gpufn builds`, `gpufn builds cancel`, `gpufn builds report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpufn.cli import new_app
from gpufn.cli.terminal.output import Json, ago, duration, print_json, print_table, say

app = new_app(help="List and cancel model builds, and read their reports.")

Id = Annotated[str, typer.Argument(help="Id of the build.")]


@app.callback(invoke_without_command=True)
def _list_by_default(context: typer.Context, json: Json = False) -> None:
    """List and cancel model builds, and read their reports."""
    if context.invoked_subcommand is None:
        list_builds(json=json)


@app.command("ls")
def list_builds(json: Json = False) -> None:
    """List the builds, newest first."""
    from gpufn.cli.models.build_progress import describe_progress  # noqa: PLC0415
    from gpufn.client.client import Client  # noqa: PLC0415
    from gpufn.deploy.build_wait import build_error  # noqa: PLC0415

    with Client() as client:
        builds = client.builds()
    if json:
        print_json(builds)
        return
    rows = []
    for build in builds:
        time_s = None if build.ended_at is None or build.started_at is None else build.ended_at - build.started_at
        state = describe_progress(build)
        if build.error:
            state += f": {build_error(build.error).message}"
        rows.append((build.id, build.label, ago(build.created_at), time_s and duration(time_s), state))
    print_table(("id", "model", "created", "duration", "state"), rows, empty="no builds: `gpufn build MODEL.onnx`")


@app.command()
def cancel(id: Id, json: Json = False) -> None:  # noqa: A002
    """Cancel a build. A revision that waits for it fails; the old revision keeps serving."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        before = client.build(id)
        build = client.cancel_build(id)
    if json:
        print_json(build)
    else:
        say(f"{id} had already ended" if before.state.ended else f"{id} is being cancelled")


@app.command()
def report(
    id: Id,  # noqa: A002
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File for the report: HTML if its name ends in .html, else JSON."),
    ] = None,
) -> None:
    """Print a build's report as JSON, or write it to a file."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        data = client.build_report(id, page=output is not None and output.suffix.lower() in (".html", ".htm"))
    if output is None:
        print_json(msgspec.Raw(data))
    else:
        output.write_bytes(data)
        say(f"wrote the report to {output}", err=True)
