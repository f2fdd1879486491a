"""The report as text: a line for each step, a Markdown page, and the written files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

import measure
from gpu_check import page
from gpu_check.findings import Plot, Report, Result, State, Table

_MARKS = {State.PASSED: "ok", State.SKIPPED: "skipped", State.FAILED: "FAILED", State.TIMED_OUT: "TIMED OUT"}


def write(report: Report, titles: dict[str, str], folder: Path) -> Path:
    """Write `gpu-check-<date>.json`, `.md` and `.html`; return the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-check-{report.date}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    path.with_suffix(".md").write_text(markdown(report, titles))
    path.with_suffix(".html").write_text(page.render(report, titles, merged(report.results)))
    return path


def exit_code(results: Iterable[Result]) -> int:
    """Return 0 if nothing failed; a skipped step is no failure."""
    return int(any(result.state in (State.FAILED, State.TIMED_OUT) for result in results))


def remaining(results: Iterable[Result]) -> list[str]:
    """Return the steps that had no time, or too little of it."""
    return [result.step for result in results if result.is_left]


def line(result: Result, width: int = 0) -> str:
    """Return a step's line for the terminal."""
    return f"{_MARKS[result.state]:<9} {result.step:<{width}} {result.seconds:6.1f} s  {result.line}"


def markdown(report: Report, titles: dict[str, str]) -> str:
    rows = [
        (result.step, _MARKS[result.state], f"{result.seconds:.1f} s", _in_cell(result.line))
        for result in report.results
    ]
    parts = [f"# gpu-check, {report.date}\n", f"{where(report)}\n"]
    if report.pretended:
        parts.append("**The GPU was pretended: this run tested the check itself, and no figure counts.**\n")
    parts.append(measure.table(("step", "", "time", ""), rows))
    parts += [_section(result, titles.get(result.step, result.step)) for result in report.results if _has_more(result)]
    return "\n".join(parts)


def where(report: Report) -> str:
    """Return the device, the driver and the machine, in one line."""
    about = report.machine
    driver = f"driver {report.driver}, " if report.driver else ""
    return (
        f"{report.device}; {driver}{about['cores']} cores of {about['cpu']}, {about['memory_gib']} GiB, "
        f"Linux {about['kernel']}, Python {about['python']}"
    )


def merged(results: Iterable[Result]) -> list[Plot]:
    """Merge plots of the same title, with the labels and series of all."""
    plots: dict[str, list[Plot]] = {}
    for result in results:
        for plot in result.finding.plots if result.finding else ():
            plots.setdefault(plot.title, []).append(plot)
    return [_merged(parts) for parts in plots.values()]


def _merged(parts: Sequence[Plot]) -> Plot:
    labels = list(dict.fromkeys(label for part in parts for label in part.labels))
    values: dict[str, dict[str, float | None]] = {}
    for part in parts:
        for name, series in part.series.items():
            values.setdefault(name, {}).update(zip(part.labels, series, strict=True))
    gapped = {name: [by_label.get(label) for label in labels] for name, by_label in values.items()}
    return msgspec.structs.replace(parts[0], labels=labels, series=gapped)


def _has_more(result: Result) -> bool:
    return bool(result.detail or (result.finding and (result.finding.tables or result.finding.said)))


def _section(result: Result, title: str) -> str:
    parts = [f"\n## {title}\n"]
    if result.finding:
        parts += [_table(table) for table in result.finding.tables]
        parts += [f"`{command}`:\n\n{_verbatim(answer)}" for command, answer in result.finding.said.items()]
    if result.detail:
        parts.append(_verbatim(result.detail))
    return "\n".join(parts)


def _table(table: Table) -> str:
    caption = f"{table.title}:\n\n" if table.title else ""
    text: str = measure.table(table.headers, [[_in_cell(cell) for cell in row] for row in table.rows])
    return caption + text


def _verbatim(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


def _in_cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
