"""`gpufn profile NAME`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from gpufn.cli.terminal.command import PATH, Command, FloatRange, connect, json_option
from gpufn.cli.terminal.name_completion import function_name
from gpufn.cli.terminal.output import print_json, print_table, say, step
from gpufn_core.domain.profile import Stack, speedscope, top
from gpufn_core.protocol.profiles import LONGEST_PROFILE_S, RATE
from gpufn_core.spec.units import format_bytes

_ROWS = 20


@click.command(cls=Command)
@function_name
@click.option(
    "--seconds", type=FloatRange(1, LONGEST_PROFILE_S), default=10.0, help="Length of the profile in seconds."
)
@click.option("--call", default="", help="Id of a submitted call: profile the worker that runs it.")
@click.option("--worker", default="", help="Id of the worker. Default: one that runs a call, or else any.")
@click.option("--memory", is_flag=True, help="Show which lines allocate memory, instead of the time.")
@click.option("--idle", is_flag=True, help="Also sample threads that wait.")
@click.option("--out", type=PATH, help="File for the profile. Default: only the table.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["speedscope", "folded"]),
    default="speedscope",
    help="Format of the file: JSON for speedscope.app, or folded stacks for flame graphs.",
)
@json_option
def profile(
    *,
    name: str,
    seconds: float,
    call: str,
    worker: str,
    memory: bool,
    idle: bool,
    out: Path | None,
    form: str,
    json: bool,
) -> None:
    """Show where a worker spends its time or memory.

    py-spy samples the stacks of a running worker from outside, 100 times a second, without stopping it. Each node needs
    it: pip install 'gpufn[profile]'. The table has the functions that ran longest themselves.

    With --memory the worker traces what Python allocates in that time and keeps. Its code is slower meanwhile.
    """
    with connect() as client, step(f"Profiling {name} for {seconds:g} s"):
        profiled, stacks = client.profile(name, seconds=seconds, worker=worker, call=call, idle=idle, memory=memory)
    if out is not None:
        out.write_text(_file(stacks, f"{name}, {profiled}", form, None if memory else RATE))
    rows = top(stacks, _ROWS)
    samples = sum(stack.samples for stack in stacks)
    if json:
        total = {"bytes": samples} if memory else {"samples": samples, "rate": RATE}
        print_json({"worker": profiled, **total, "top": [row._asdict() for row in rows]})
        return
    what = f"{format_bytes(samples)} allocated and kept" if memory else f"{samples:,} samples"
    say(f"{profiled}: {what} in {seconds:g} s")
    print_table(
        ("self", "total", "line" if memory else "function"),
        [(f"{row.own:.1%}", f"{row.total:.1%}", row.frame) for row in rows],
        empty="nothing was allocated" if memory else "no thread ran; --idle also shows those that wait",
    )
    if out is not None and form == "speedscope":
        say(f"{out}: open it in https://www.speedscope.app, which reads it in the browser", err=True)


def _file(stacks: list[Stack], title: str, form: str, rate: int | None) -> str:
    if form == "folded":
        return "".join(f"{';'.join(stack.frames)} {stack.samples}\n" for stack in stacks)
    return msgspec.json.encode(speedscope(stacks, title, rate=rate)).decode()
