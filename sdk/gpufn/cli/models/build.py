"""`gpufn build MODEL`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from gpufn.cli.calls.arguments import check_output
from gpufn.cli.models.options import (
    MaxBatch,
    ModelOptions,
    PrecisionOption,
    RequireGpu,
    Samples,
    ShapeOption,
    ToleranceOption,
    is_model,
    onnx_of,
)
from gpufn.cli.terminal.output import Json, WrongUsage, as_typed, duration, print_json, print_table, say, size, step
from gpufn_core.domain.engine import Accuracy, Latency
from gpufn_core.errors import BuildFailed, GpufnError

if TYPE_CHECKING:
    from gpufn.client.client import Client
    from gpufn.client.views import BuildView


def build(  # noqa: PLR0917  Typer passes them by name
    model: Annotated[str, typer.Argument(help="MODEL.onnx, or FILE.py:FACTORY for a torch module.")],
    precision: PrecisionOption = None,
    max_batch: MaxBatch = None,
    shape: ShapeOption = None,
    samples: Samples = None,
    tolerance: ToleranceOption = None,
    require_gpu: RequireGpu = False,
    device: Annotated[
        str | None, typer.Option(help="For this kind of device, as `gpufn nodes` names it; else for the CPU.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the report to this file: a page when it ends in .html, else JSON.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it is built, or at once.")] = True,
    json: Json = False,
) -> None:
    """Build a model's engines without deploying it.

    They are compiled, checked against a reference, and measured. What was built before is found and not built again.
    The table has one line for each candidate, the best first.
    """
    from gpufn.cli.models.build_progress import watched  # noqa: PLC0415
    from gpufn.client.client import Client  # noqa: PLC0415
    from gpufn.deploy.build_wait import upload, wait_until_ended  # noqa: PLC0415
    from gpufn.deploy.model_files import prepare  # noqa: PLC0415

    if not is_model(model):
        raise WrongUsage(f"{model} is neither an ONNX file (.onnx) nor FILE.py:FACTORY")
    if report is not None and not wait:
        raise WrongUsage("--report is written when the build has ended: not with --no-wait")
    check_output(report)
    options = ModelOptions(precision, max_batch, shape, samples, tolerance, require_gpu)
    with onnx_of(model) as onnx, Client() as client:
        with step(f"Reading {model}"), as_typed():
            spec, paths = prepare("model", options.model(onnx), Path.cwd())
        with step(f"Uploading {size(sum(path.stat().st_size for path in paths.values()))}") as tell:
            upload(client, paths, tell)
        begun = client.create_build(spec, device)
        if not wait:
            print_json(begun) if json else say(begun.id)
            return
        try:
            with watched([begun.id]) as seen:
                ended = wait_until_ended(client, begun, on_change=lambda each: seen([each]))
        except BuildFailed:
            _write(client, begun.id, report, may_lack=True)
            raise
        _write(client, begun.id, report)
        if json:
            print_json(ended)
        else:
            _say(ended, client.build_report(ended.id))


def _write(client: Client, build_id: str, report: Path | None, *, may_lack: bool = False) -> None:
    if report is None:
        return
    try:
        data = client.build_report(build_id, page=report.suffix.lower() in (".html", ".htm"))
    except GpufnError:
        if may_lack:
            return
        raise
    report.write_bytes(data)
    say(f"the report is in {report}", err=True)


class Candidate(msgspec.Struct):
    backend: str
    key: str = ""
    found: bool = False
    reason: str = ""
    size: int = 0
    accuracy: Accuracy | None = None
    latency: Latency | None = None


class Report(msgspec.Struct):
    """As much of it as is shown here."""

    candidates: list[Candidate] = []


def _say(ended: BuildView, report: bytes) -> None:
    took = "" if None in (ended.started_at, ended.ended_at) else f" in {duration(_took(ended))}"
    say(f"{ended.label}: {'built before, found' if ended.cached else 'built'}{took}  (build {ended.id})", err=True)
    candidates = msgspec.json.decode(report, type=Report).candidates
    print_table(
        ("engine", "backend", "size", "p50", "rel. L2", "note"),
        [_row(candidate) for candidate in candidates],
        empty="the report names no candidate",
    )


def _row(candidate: Candidate) -> tuple[Any, ...]:
    note = "no engine: " + candidate.reason if candidate.reason else "built before" if candidate.found else ""
    return (
        candidate.key[:12] or None,
        candidate.backend,
        size(candidate.size) if candidate.size else None,
        candidate.latency and duration(candidate.latency.p50_s),
        candidate.accuracy and f"{candidate.accuracy.rel_l2:.1e}",
        note,
    )


def _took(build: BuildView) -> float:
    return (build.ended_at or 0.0) - (build.started_at or 0.0)
