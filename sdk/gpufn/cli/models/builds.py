"""`gpufn builds`, `gpufn builds cancel`, `gpufn builds report`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from gpufn.cli.terminal.command import PATH, Argument, Group, connect, json_option
from gpufn.cli.terminal.output import ago, duration, print_json, print_table, say, say_or_json

app = Group("builds", help="List and cancel model builds, and read their reports.")

_id_argument = click.argument("id", cls=Argument, help="Id of the build.")


@app.command("ls")
@json_option
def list_builds(json: bool) -> None:
    """List the builds, newest first."""
    from gpufn.cli.models.build_progress import describe_progress  # noqa: PLC0415
    from gpufn.deploy.build_wait import build_error  # noqa: PLC0415

    with connect() as client:
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
@_id_argument
@json_option
def cancel(id: str, json: bool) -> None:  # noqa: A002
    """Cancel a build. A revision that waits for it fails; the old revision keeps serving."""
    with connect() as client:
        before = client.build(id)
        build = client.cancel_build(id)
    say_or_json(f"{id} had already ended" if before.state.ended else f"{id} is being cancelled", build, json=json)


@app.command()
@_id_argument
@click.option("--output", "-o", type=PATH, help="File for the report: HTML if its name ends in .html, else JSON.")
def report(id: str, output: Path | None) -> None:  # noqa: A002
    """Print a build's report as JSON, or write it to a file."""
    with connect() as client:
        data = client.build_report(id, page=output is not None and output.suffix.lower() in (".html", ".htm"))
    if output is None:
        print_json(msgspec.Raw(data))
    else:
        output.write_bytes(data)
        say(f"wrote the report to {output}", err=True)
