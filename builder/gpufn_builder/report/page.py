"""Rendering of a BuildReport as a self-contained HTML page: no scripts, fonts or external links.

All texts of a report come from an untrusted model; `markup.tag` escapes them.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gpufn_builder.report.markup import Html, duration, number, size, small, tag
from gpufn_builder.report.plot import plot
from gpufn_builder.report.report import BuildReport, CandidateRow
from gpufn_core.domain.engine import Backend, BuildState
from gpufn_core.errors import ErrorInfo
from gpufn_core.spec.model_spec import TensorSpec, Tolerance

_MAX_OUTPUTS: Final = 24
_MAX_OPERATORS: Final = 24
_COLOURS: Final = {Backend.TENSORRT: "var(--c0)", Backend.ORT_CUDA: "var(--c1)", Backend.ORT_CPU: "var(--c2)"}

_STYLE: Final = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #ffffff; --ink: #1c2430; --soft: #5b6675; --line: #e3e7ec;
  --good: #15803d; --bad: #b42318; --c0: #2563eb; --c1: #d97706; --c2: #0d9488; --fill: #eef2f7; }
@media (prefers-color-scheme: dark) { :root { --bg: #11151b; --card: #191f28; --ink: #e6eaf0; --soft: #94a0b0;
  --line: #2a323d; --good: #4ade80; --bad: #f87171; --c0: #60a5fa; --c1: #fbbf24; --c2: #2dd4bf; --fill: #222a35; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 13px; letter-spacing: .06em; text-transform: uppercase; color: var(--soft); margin: 0 0 14px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 20px 22px;
  margin-top: 18px; overflow-x: auto; }
header p { color: var(--soft); margin: 6px 0 0; }
.title { display: flex; gap: 12px; align-items: center; flex-wrap: wrap; }
.badge { font-size: 12px; font-weight: 600; border-radius: 999px; padding: 3px 11px; border: 1px solid currentColor; }
.good { color: var(--good); } .bad { color: var(--bad); } .soft { color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(155px, 1fr)); gap: 12px; margin-top: 20px; }
.figure { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px; }
.figure b { display: block; font-size: 22px; font-weight: 650; font-variant-numeric: tabular-nums; }
.figure span { color: var(--soft); font-size: 13px; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; font-size: 13px; color: var(--soft); }
th, td { padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child > td { border-bottom: 0; }
td.n, th.n { text-align: right; white-space: nowrap; }
td.wide { width: 40%; }
code, pre { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { background: var(--fill); border-radius: 8px; padding: 12px 14px; margin: 12px 0 0; white-space: pre-wrap; }
.bar { height: 8px; border-radius: 4px; background: var(--fill); overflow: hidden; min-width: 80px; margin-top: 8px; }
.bar i { display: block; height: 100%; background: var(--c0); border-radius: 4px; }
.name { white-space: nowrap; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
svg { display: block; width: 100%; min-width: 480px; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.legend { display: flex; gap: 20px; flex-wrap: wrap; color: var(--soft); font-size: 13px; margin-top: 6px; }
"""


def render(report: BuildReport) -> str:
    """Return the complete page."""
    passed = [row for row in report.candidates if row.passed]
    parts = [
        _header(report),
        _figures(report, passed),
        *([_failure(report.error)] if report.error else []),
        _section("Candidates", _candidates(report)),
        *([_section("Latency of one run", *_latency(passed))] if any(row.latency for row in passed) else []),
        *_accuracy(report, passed),
        *([_section("Stages", _stages(report))] if report.stages else []),
        *_nodes(passed),
        _section("Inputs and outputs", _tensors(report)),
        _section("Settings", _settings(report, passed)),
    ]
    head = tag("meta", charset="utf-8") + tag("meta", name="viewport", content="width=device-width")
    head = Html(head + tag("title", f"{report.model}: build {report.state}") + tag("style", Html(_STYLE)))
    page = tag("html", tag("head", head), tag("body", tag("main", *parts)), lang="en")
    return f"<!doctype html>\n{page}\n"


# --- sections ---------------------------------------------------------------------------------------------------------


def _header(report: BuildReport) -> Html:
    state = "good" if report.state is BuildState.SUCCEEDED else "bad"
    began = datetime.datetime.fromtimestamp(report.started_at, datetime.UTC)
    device = " · ".join(filter(None, (report.device, report.compute_capability if report.device != "cpu" else "")))
    return tag(
        "header",
        tag("div", tag("h1", report.model), tag("span", str(report.state), cls=f"badge {state}"), cls="title"),
        tag("p", f"{report.precision} on {device} · {began:%Y-%m-%d %H:%M} UTC · build {report.build}"),
    )


def _figures(report: BuildReport, passed: Sequence[CandidateRow]) -> Html:
    best = passed[0] if passed else None
    figures = [("build time", duration(report.seconds))]
    if best is not None and best.latency is not None:
        figures = [
            ("median of a run", duration(best.latency.p50_s)),
            ("99th percentile", duration(best.latency.p99_s)),
            ("runs per second", number(best.latency.per_s)),
            *figures,
        ]
    if best is not None:
        figures.append(("engine", size(best.size)))
    boxes = (tag("div", tag("b", value), tag("span", name), cls="figure") for name, value in figures)
    return tag("div", *boxes, cls="figures")


def _failure(error: ErrorInfo) -> Html:
    where = " · ".join(filter(None, (error.stage, f"node {error.node}" if error.node else "")))
    log = [tag("pre", error.traceback)] if error.traceback else []
    return _section(
        "Why it failed", tag("div", tag("b", error.message, cls="bad"), tag("div", where, cls="soft")), *log
    )


def _candidates(report: BuildReport) -> Html:
    if not report.candidates:
        return tag("p", "No candidates were tried.", cls="soft")
    head = ("", "Median", "90 %", "99 %", "Runs/s", "rel. L2", "Size", "Build")
    shown_log = report.error.traceback if report.error else None
    return _table(head, [_candidate(row, shown_log) for row in report.candidates], numbers=range(1, 8))


def _candidate(row: CandidateRow, shown_log: str | None) -> Sequence[str]:
    """`shown_log` is a log that the page already shows."""
    if not row.passed:
        log = [tag("pre", row.log)] if row.log and row.log != shown_log else []
        reason = tag("div", row.reason, cls="soft" if "installed" in row.reason else "bad")
        return (Html("".join((_name(row), reason, *log))), *[""] * 7)
    key = f"{row.key[:16]}{' · reused' if row.found else ''}"
    if row.latency is not None and not row.latency.settled:
        key += " · its timings did not settle"
    latency = row.latency
    return (
        Html(_name(row) + tag("div", tag("code", key), cls="soft")),
        *([duration(value) for value in (latency.p50_s, latency.p90_s, latency.p99_s)] if latency else [""] * 3),
        number(latency.per_s) if latency else "",
        small(row.accuracy.rel_l2) if row.accuracy else "",
        size(row.size),
        duration(sum(row.seconds.values())) if row.seconds else "",
    )


def _latency(passed: Sequence[CandidateRow]) -> tuple[Html, Html]:
    legend = (tag("span", _name(row)) for row in passed if row.latency)
    caption = tag("span", "x axis: percentile of all runs")
    return plot(passed, _COLOURS), tag("div", *legend, caption, cls="legend")


def _accuracy(report: BuildReport, passed: Sequence[CandidateRow]) -> list[Html]:
    rows = [(row, output) for row in passed for output in row.outputs]
    if not rows:
        return []
    rows.sort(key=lambda each: -_or_infinite(each[1].rel_l2))
    head = ("Engine", "Output", "Case", "Type", "max abs", "99.9 %", "rel. L2", "cosine", "arg max")
    lines = [
        (
            _name(row),
            output.name,
            output.case,
            f"{output.dtype}{list(output.shape)}{f', {output.nans} NaNs' if output.nans else ''}",
            *(small(value) for value in (output.max_abs, output.p999_abs, output.rel_l2)),
            f"{output.cosine:.6f}",
            f"{output.argmax:.1%}",
        )
        for row, output in rows[:_MAX_OUTPUTS]
    ]
    more = len(rows) - len(lines)
    caption = f"Against the original model, in fp32 on the CPU. Allowed: {_tolerance(report.tolerance)}."
    rest = [tag("p", f"{more} more were closer.", cls="soft")] if more > 0 else []
    return [_section("Accuracy", tag("p", caption, cls="soft"), _table(head, lines, numbers=range(4, 9)), *rest)]


def _stages(report: BuildReport) -> Html:
    longest = max((row.seconds for row in report.stages), default=0.0) or 1.0
    lines = [
        (
            tag("b", str(row.stage)),
            tag("div", tag("i", style=f"width:{100 * row.seconds / longest:.1f}%"), cls="bar"),
            duration(row.seconds),
            row.found,
        )
        for row in report.stages
    ]
    return _table(("Stage", "", "Time", "Result"), lines, numbers=(2,))


def _nodes(passed: Sequence[CandidateRow]) -> list[Html]:
    rows = [row for row in passed if row.gpu_nodes or row.cpu_nodes]
    if not rows:
        return []
    lines = [(_name(row), str(row.gpu_nodes), str(row.cpu_nodes), _operators(row.nodes)) for row in rows]
    return [_section("Where nodes run", _table(("", "on the GPU", "on the CPU", "Operators"), lines, numbers=(1, 2)))]


def _operators(nodes: Mapping[str, int]) -> str:
    """
    >>> _operators({"Conv on A": 2, "Relu on A": 3, "Loop on B": 1})
    'A: 3 Relu, 2 Conv; B: 1 Loop'
    """
    operators = sorted(nodes.items(), key=lambda item: (-item[1], item[0]))
    providers: dict[str, list[str]] = {}
    for name, count in operators[:_MAX_OPERATORS]:
        operator, _, provider = name.rpartition(" on ")
        providers.setdefault(provider, []).append(f"{count} {operator}")
    listed = "; ".join(f"{provider}: {', '.join(each)}" for provider, each in providers.items())
    more = len(operators) - _MAX_OPERATORS
    return listed + (f"; {more} more kinds" if more > 0 else "")


def _tensors(report: BuildReport) -> Html:
    if not report.inputs and not report.outputs:
        return tag("p", "Unknown: the build did not get this far.", cls="soft")
    lines = [(tag("b", each.name), "input", _type(each), _ranges(report, each.name)) for each in report.inputs]
    lines += [(tag("b", each.name), "output", _type(each), "") for each in report.outputs]
    rows = (
        f"rows are independent; calls share runs of up to {report.max_batch}"
        if report.batched
        else f"each call has its own run: {report.why_alone or 'rows stay together'}"
    )
    return Html(_table(("Name", "", "Type", "Shapes"), lines) + tag("p", f"Batches: {rows}.", cls="soft"))


def _ranges(report: BuildReport, name: str) -> str:
    """Return the shapes of an input in every profile."""
    return "; ".join(str(each.inputs[name]) for each in report.profiles if name in each.inputs) or "fixed"


def _settings(report: BuildReport, passed: Sequence[CandidateRow]) -> Html:
    lines: list[Sequence[str]] = []
    for row in passed:
        name = _name(row)
        settings = {
            "session": [f"{key} {value}" for key, value in row.settings.items()],
            "compiler": [f"{key} {value}" for key, value in row.flags.items()],
            "versions": row.versions.values(),
        }
        for what, values in settings.items():
            if values:
                lines.append((name, what, ", ".join(values)))
                name = Html("")
        if row.notes:
            lines.append((name, "tried", "; ".join(row.notes)))
    hardware = ", ".join(filter(None, (report.device, report.compute_capability, report.driver)))
    lines.append((tag("b", "machine"), "", hardware))
    lines.extend((tag("b", file.name), size(file.size), tag("code", file.digest)) for file in report.files)
    return _table(("", "", ""), lines)


# --- pieces -----------------------------------------------------------------------------------------------------------


def _section(title: str, *content: Html) -> Html:
    return tag("section", tag("h2", title), *content)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = ()) -> Html:
    right = set(numbers)

    def cells(kind: str, row: Sequence[str]) -> Html:
        return tag("tr", *(tag(kind, text, cls="n" if index in right else "") for index, text in enumerate(row)))

    titles = [cells("th", head)] if any(head) else []
    return tag("table", *titles, *(cells("td", row) for row in rows))


def _name(row: CandidateRow) -> Html:
    dot = tag("i", cls="dot", style=f"background:{_COLOURS[row.backend]}")
    return tag("span", dot, tag("b", str(row.backend)), cls="name")


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


def _type(tensor: TensorSpec) -> str:
    return f"{tensor.datatype}[{', '.join('any' if size < 0 else str(size) for size in tensor.shape)}]"


def _tolerance(tolerance: Tolerance) -> str:
    limits = (("max abs ≤", tolerance.max_abs), ("rel. L2 ≤", tolerance.rel_l2), ("cosine ≥", tolerance.cosine))
    return ", ".join(f"{words} {limit:g}" for words, limit in limits if limit is not None) or "anything"
