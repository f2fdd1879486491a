"""`gpufn build MODEL`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gpufn.cli.calls.arguments import check_output
from gpufn.cli.models.options import ModelOptions, model_options, onnx_of
from gpufn.cli.terminal.command import PATH, Argument, Command, connect, json_option
from gpufn.cli.terminal.output import (
    WrongUsage,
    as_usage_error,
    duration,
    print_json,
    print_table,
    say,
    say_or_json,
    size,
    step,
)
from gpufn.deploy.convert.formats import NAMES, format_of
from gpufn_core.domain.devices.engine import Accuracy, Latency
from gpufn_core.errors import BuildFailed, GpufnError

if TYPE_CHECKING:
    from gpufn.client.client import Client
    from gpufn.client.views.models import BuildView


@click.command(cls=Command)
@click.argument(
    "model",
    cls=Argument,
    type=click.Path(readable=False),  # for completion; it is a path, or FILE.py:FACTORY
    help="ONNX file, a file of torch or scikit-learn, or FILE.py:FACTORY for a torch module.",
)
@model_options
@click.option("--device", help="Device kind, as in `gpufn nodes`. Default: the CPU.")
@click.option("--report", type=PATH, help="File for the report: HTML if its name ends in .html, else JSON.")
@click.option("--wait/--no-wait", default=True, help="Wait until the build ends, or return at once.")
@json_option
def build(*, model: str, device: str | None, report: Path | None, wait: bool, json: bool, **options: Any) -> None:
    """Build a model's engines without deploying it.

    The build compiles engines, checks them against a reference, and measures them. Existing engines are reused. The
    table has one row per candidate, best first.
    """
    from gpufn.cli.models.build_progress import build_progress  # noqa: PLC0415
    from gpufn.deploy.build_wait import upload, wait_until_ended  # noqa: PLC0415
    from gpufn.deploy.model_files import prepare  # noqa: PLC0415

    if format_of(model) is None:
        raise WrongUsage(f"{model} is no model: pass {NAMES}")
    model_of = ModelOptions(**options)
    if report is not None and not wait:
        raise WrongUsage("--report needs the end of the build: omit --no-wait")
    check_output(report)
    with onnx_of(model, model_of) as onnx, connect() as client:
        with step(f"Reading {model}"), as_usage_error():
            spec, paths = prepare("model", model_of.model(onnx), Path.cwd())
        with step(f"Uploading {size(sum(path.stat().st_size for path in paths.values()))}") as update:
            upload(client, paths, update)
        started = client.create_build(spec, device)
        if not wait:
            say_or_json(started.id, started, json=json)
            return
        try:
            with build_progress([started.id]) as show:
                ended = wait_until_ended(client, started, on_change=lambda each: show([each]))
        except BuildFailed:
            _write_report(client, started.id, report, may_be_missing=True)
            raise
        _write_report(client, started.id, report)
        if json:
            print_json(ended)
        else:
            _print_result(ended, client.build_report(ended.id))


def _write_report(client: Client, build_id: str, report: Path | None, *, may_be_missing: bool = False) -> None:
    if report is None:
        return
    try:
        data = client.build_report(build_id, page=report.suffix.lower() in (".html", ".htm"))
    except GpufnError:
        if may_be_missing:
            return
        raise
    report.write_bytes(data)
    say(f"wrote the report to {report}", err=True)


class Candidate(msgspec.Struct):
    backend: str
    key: str = ""
    found: bool = False
    reason: str = ""
    size: int = 0
    accuracy: Accuracy | None = None
    latency: Latency | None = None
    remarks: tuple[str, ...] = ()


class Report(msgspec.Struct):
    """The part of a build report that the command shows."""

    candidates: list[Candidate] = []


def _print_result(build: BuildView, report: bytes) -> None:
    time = "" if None in (build.started_at, build.ended_at) else f" in {duration(_build_s(build))}"
    say(f"{build.label}: {'reused an earlier build' if build.cached else 'built'}{time}  (build {build.id})", err=True)
    candidates = msgspec.json.decode(report, type=Report).candidates
    print_table(
        ("engine", "backend", "size", "p50", "rel. L2", "note"),
        [_row(candidate) for candidate in candidates],
        empty="the report has no candidates",
    )


def _row(candidate: Candidate) -> tuple[Any, ...]:
    notes = ["no engine: " + candidate.reason] if candidate.reason else ["reused"] if candidate.found else []
    return (
        candidate.key[:12] or None,
        candidate.backend,
        size(candidate.size) if candidate.size else None,
        candidate.latency and duration(candidate.latency.p50_s),
        candidate.accuracy and f"{candidate.accuracy.rel_l2:.1e}",
        "; ".join([*notes, *candidate.remarks]),
    )


def _build_s(build: BuildView) -> float:
    return (build.ended_at or 0.0) - (build.started_at or 0.0)
