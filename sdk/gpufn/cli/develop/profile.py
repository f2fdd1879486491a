"""`gpufn profile NAME`."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import click
import msgspec

from gpufn.cli.calls.history import parse_span_s
from gpufn.cli.terminal.command import PATH, Command, FloatRange, connect, json_option
from gpufn.cli.terminal.name_completion import function_name
from gpufn.cli.terminal.output import WrongUsage, duration, print_json, print_table, say, step
from gpufn_core.domain.profiles import chrome_trace
from gpufn_core.domain.profiles.stacks import PLATFORM, Stack, speedscope, top
from gpufn_core.protocol.profiles import LONGEST_PROFILE_S, RATE
from gpufn_core.spec.units import format_bytes

_ROWS = 20
_SECONDS, _GPU_S = 10.0, 2.0  # traces of a GPU are large
_SPEEDSCOPE, _FOLDED = "speedscope", "folded"
_MICROSECONDS = 1_000_000


class _Which(TypedDict):
    """The choice of the worker."""

    worker: str
    call: str
    slower_than_s: float
    wait_s: float


@click.command(cls=Command)
@function_name
@click.option(
    "--seconds", type=FloatRange(1, LONGEST_PROFILE_S), help="Length of the profile. Default: 10 s; with --gpu 2 s."
)
@click.option("--call", default="", help="Id of a submitted call: profile the worker that runs it.")
@click.option("--slower-than", default="", help="Profile the next call that runs this long, such as 2s, from then on.")
@click.option("--wait", default="60s", help="Longest wait for such a call.")
@click.option("--worker", default="", help="Id of the worker. Default: one that runs a call, or else any.")
@click.option("--memory", is_flag=True, help="Show which lines allocate memory, instead of the time.")
@click.option("--gpu", is_flag=True, help="Record kernels and operators by torch's profiler, instead of the time.")
@click.option("--idle", is_flag=True, help="Also sample threads that wait.")
@click.option("--out", type=PATH, help="File for the profile. Default: only the table.")
@click.option(
    "--format",
    "form",
    type=click.Choice([_SPEEDSCOPE, _FOLDED]),
    help="Format of the file: JSON for speedscope.app, the default, or folded stacks for flame graphs. With --gpu the "
    "default is Chrome's JSON.",
)
@json_option
def profile(
    *,
    name: str,
    seconds: float | None,
    call: str,
    slower_than: str,
    wait: str,
    worker: str,
    memory: bool,
    gpu: bool,
    idle: bool,
    out: Path | None,
    form: str | None,
    json: bool,
) -> None:
    """Show where a worker spends its time or memory.

    py-spy samples the stacks of a running worker from outside, 100 times a second, without stopping it. Each node needs
    it: pip install 'gpufn[profile]'. The table has the functions that ran longest themselves.

    With --memory the worker traces what Python allocates in that time and keeps. Its code is slower meanwhile.

    With --gpu torch's profiler records the kernels and operators of a worker that uses torch, in a file for Perfetto or
    TensorBoard. Its code is slower meanwhile.
    """
    if gpu and memory:
        raise WrongUsage("choose --gpu or --memory: each is a profile of its own", field="--gpu")
    seconds = seconds or (_GPU_S if gpu else _SECONDS)
    slower_than_s = parse_span_s(slower_than, "--slower-than") if slower_than else 0.0
    which = _Which(worker=worker, call=call, slower_than_s=slower_than_s, wait_s=parse_span_s(wait, "--wait"))
    if gpu:
        _profile_gpu(name, seconds, which, out, form, as_json=json)
        return
    with connect() as client, step(f"Profiling {name} for {seconds:g} s"):
        profiled, stacks = client.profile(name, seconds=seconds, idle=idle, memory=memory, **which)
    if out is not None:
        out.write_text(_file(stacks, f"{name}, {profiled}", form or _SPEEDSCOPE, None if memory else RATE))
    own = [stack for stack in stacks if stack.frames != (PLATFORM,)]
    rows = top(own, _ROWS)
    samples = sum(stack.samples for stack in own)
    platform_bytes = sum(stack.samples for stack in stacks) - samples
    if json:
        total = {"bytes": samples, "platform_bytes": platform_bytes} if memory else {"samples": samples, "rate": RATE}
        print_json({"worker": profiled, **total, "top": [row._asdict() for row in rows]})
        return
    what = f"{format_bytes(samples)} allocated and kept" if memory else f"{samples:,} samples"
    besides = f"; besides, {format_bytes(platform_bytes)} of gpufn itself" if platform_bytes else ""
    say(f"{profiled}: {what} in {seconds:g} s{besides}")
    print_table(
        ("self", "total", "line" if memory else "function"),
        [(f"{row.own:.1%}", f"{row.total:.1%}", row.frame) for row in rows],
        empty="nothing was allocated" if memory else "no thread ran; --idle also shows those that wait",
    )
    if out is not None and form != _FOLDED:
        _say_speedscope(out)


def _profile_gpu(
    name: str, seconds: float, which: _Which, out: Path | None, form: str | None, *, as_json: bool
) -> None:
    ending = {None: "pt.trace.json.gz", _SPEEDSCOPE: "speedscope.json", _FOLDED: "folded.txt"}[form]
    out = out or Path(f"{name.rpartition('/')[2]}.{ending}")  # TensorBoard looks for the first one
    with connect() as client, step(f"Profiling the GPU of {name} for {seconds:g} s"):
        profiled, trace = client.gpu_profile(name, seconds=seconds, **which)
    if form is None:
        out.write_bytes(trace)
    else:
        out.write_text(_file(chrome_trace.flame_graph(trace) or [], f"{name}, {profiled}", form, _MICROSECONDS))
    summary = chrome_trace.summary(trace, _ROWS)
    rows = [] if summary is None else summary.events
    kind = "event" if summary is None else {"kernel": "kernel", "cpu_op": "operator"}[summary.kind]
    if as_json:
        print_json({"worker": profiled, "file": str(out), "kind": kind, "top": [row._asdict() for row in rows]})
        return
    say(f"{profiled}: {format_bytes(len(trace))} in {seconds:g} s")
    print_table(
        ("total", "count", kind), [(duration(row.seconds), row.events, row.name) for row in rows], empty="nothing ran"
    )
    if form is None:
        say(f"{out}: open it in https://ui.perfetto.dev, which reads it in the browser, or in TensorBoard", err=True)
    elif form == _SPEEDSCOPE:
        _say_speedscope(out)


def _say_speedscope(out: Path) -> None:
    say(f"{out}: open it in https://www.speedscope.app, which reads it in the browser", err=True)


def _file(stacks: list[Stack], title: str, form: str, rate: int | None) -> str:
    if form == _FOLDED:
        return "".join(f"{';'.join(stack.frames)} {stack.samples}\n" for stack in stacks)
    return msgspec.json.encode(speedscope(stacks, title, rate=rate)).decode()
