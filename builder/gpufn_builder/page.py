"""A BuildReport as one HTML page that needs nothing else: no script, no font, no address of anything outside.

Every text of a report comes from somebody's model, so `_tag` escapes all that is not made here.
"""

from __future__ import annotations

import datetime
import html
import math
from collections.abc import Iterable, Sequence
from typing import Final

from gpufn.engine import Backend, BuildState
from gpufn.errors import ErrorInfo
from gpufn.model import TensorSpec, Tolerance
from gpufn_builder.report import BuildReport, CandidateRow

_MOST_OUTPUTS: Final = 60
_MOST_OPERATORS: Final = 24
_WIDTH, _HEIGHT = 720, 260  # of the plot
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 14, 34
_MARKS: Final = (50, 90, 99)
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
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 12px; margin-top: 20px; }
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
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.legend { display: flex; gap: 20px; flex-wrap: wrap; color: var(--soft); font-size: 13px; margin-top: 6px; }
"""


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def render(report: BuildReport) -> str:
    """The page, whole."""
    passed = [row for row in report.candidates if row.passed]
    parts = [
        _header(report),
        _figures(report, passed),
        *([_failure(report.error)] if report.error else []),
        _section("Candidates", _candidates(report)),
        *([_section("Latency of one run", _plot(passed))] if any(row.latency for row in passed) else []),
        *_accuracy(report, passed),
        *([_section("Stages", _stages(report))] if report.stages else []),
        *_nodes(passed),
        _section("Inputs and outputs", _tensors(report)),
        _section("Settings", _settings(report, passed)),
    ]
    head = _tag("meta", charset="utf-8") + _tag("meta", name="viewport", content="width=device-width")
    head = Html(head + _tag("title", f"{report.model}: build {report.state}") + _tag("style", Html(_STYLE)))
    page = _tag("html", _tag("head", head), _tag("body", _tag("main", *parts)), lang="en")
    return f"<!doctype html>\n{page}\n"


# --- sections ---------------------------------------------------------------------------------------------------------


def _header(report: BuildReport) -> Html:
    state = "good" if report.state is BuildState.SUCCEEDED else "bad"
    began = datetime.datetime.fromtimestamp(report.started_at, datetime.UTC)
    device = " · ".join(filter(None, (report.device, report.compute_capability if report.device != "cpu" else "")))
    return _tag(
        "header",
        _tag("div", _tag("h1", report.model), _tag("span", str(report.state), cls=f"badge {state}"), cls="title"),
        _tag("p", f"{report.precision} on {device} · {began:%Y-%m-%d %H:%M} UTC · build {report.build}"),
    )


def _figures(report: BuildReport, passed: Sequence[CandidateRow]) -> Html:
    best = passed[0] if passed else None
    figures = [("build time", _seconds(report.seconds))]
    if best is not None and best.latency is not None:
        figures = [
            ("median of a run", _seconds(best.latency.p50_s)),
            ("99th percentile", _seconds(best.latency.p99_s)),
            ("runs per second", _number(best.latency.per_s)),
            *figures,
        ]
    if best is not None:
        figures.append(("engine", _bytes(best.size)))
    boxes = (_tag("div", _tag("b", value), _tag("span", name), cls="figure") for name, value in figures)
    return _tag("div", *boxes, cls="figures")


def _failure(error: ErrorInfo) -> Html:
    where = " · ".join(filter(None, (error.stage, f"node {error.node}" if error.node else "")))
    log = [_tag("pre", error.traceback)] if error.traceback else []
    return _section(
        "Why it failed", _tag("div", _tag("b", error.message, cls="bad"), _tag("div", where, cls="soft")), *log
    )


def _candidates(report: BuildReport) -> Html:
    if not report.candidates:
        return _tag("p", "None was tried.", cls="soft")
    head = ("", "Median", "90 %", "99 %", "Runs/s", "rel. L2", "Size", "Build")
    told = report.error.traceback if report.error else None
    return _table(head, [_candidate(row, told) for row in report.candidates], numbers=range(1, 8))


def _candidate(row: CandidateRow, told: str | None) -> Sequence[str]:
    """`told` is a log that the page has already."""
    if not row.passed:
        log = [_tag("pre", row.log)] if row.log and row.log != told else []
        reason = _tag("div", row.reason, cls="soft" if "installed" in row.reason else "bad")
        return (Html("".join((_name(row), reason, *log))), *[""] * 7)
    key = f"{row.key[:16]}{' · built before' if row.found else ''}"
    if row.latency is not None and not row.latency.settled:
        key += " · its timings did not settle"
    latency = row.latency
    return (
        Html(_name(row) + _tag("div", _tag("code", key), cls="soft")),
        *([_seconds(value) for value in (latency.p50_s, latency.p90_s, latency.p99_s)] if latency else [""] * 3),
        _number(latency.per_s) if latency else "",
        _small(row.accuracy.rel_l2) if row.accuracy else "",
        _bytes(row.size),
        _seconds(sum(row.seconds.values())) if row.seconds else "",
    )


def _plot(rows: Sequence[CandidateRow]) -> Html:
    """Latency over the share of runs that were at least so fast. Where only percentiles are known, these."""
    curves = [(row, _curve(row)) for row in rows if row.latency]
    highest = max(value for _, curve in curves for share, value in curve if share <= _MARKS[-1]) * 1.15 or 1.0
    step = _round_step(highest / 4)
    lines = []
    for tick in range(int(highest / step) + 1):
        y = _y(tick * step, highest)
        lines.append(_tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, stroke="var(--line)"))
        lines.append(_tag("text", _seconds(tick * step), x=_LEFT - 8, y=y + 4, text_anchor="end"))
    for mark in _MARKS:
        x = _x(mark)
        dashes = {"stroke": "var(--soft)", "stroke_dasharray": "2 5", "stroke_opacity": ".6"}
        lines.append(_tag("line", x1=x, x2=x, y1=_TOP, y2=_HEIGHT - _BOTTOM, **dashes))
        lines.append(_tag("text", f"{mark} %", x=x, y=_HEIGHT - 12, text_anchor="middle"))
    for row, curve in curves:
        points = " ".join(f"{_x(share):.1f},{_y(min(value, highest), highest):.1f}" for share, value in curve)
        colour = _COLOURS[row.backend]
        lines.append(_tag("polyline", points=points, fill="none", stroke=colour, stroke_width="2.5"))
        lines.extend(
            _tag("circle", cx=_x(share), cy=_y(value, highest), r="4", fill=colour) for share, value in _marked(row)
        )
    legend = (_tag("span", _name(row)) for row, _ in curves)
    return Html(
        _tag("svg", *lines, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img")
        + _tag("div", *legend, _tag("span", "along: how many of all runs took no longer"), cls="legend")
    )


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
            *(_small(value) for value in (output.max_abs, output.p999_abs, output.rel_l2)),
            f"{output.cosine:.6f}",
            f"{output.argmax:.1%}",
        )
        for row, output in rows[:_MOST_OUTPUTS]
    ]
    more = len(rows) - len(lines)
    said = f"Against the model as it came, in fp32 on the CPU. Allowed: {_tolerance(report.tolerance)}."
    rest = [_tag("p", f"{more} more were nearer.", cls="soft")] if more > 0 else []
    return [_section("Accuracy", _tag("p", said, cls="soft"), _table(head, lines, numbers=range(4, 9)), *rest)]


def _stages(report: BuildReport) -> Html:
    longest = max((row.seconds for row in report.stages), default=0.0) or 1.0
    lines = [
        (
            _tag("b", str(row.stage)),
            _tag("div", _tag("i", style=f"width:{100 * row.seconds / longest:.1f}%"), cls="bar"),
            _seconds(row.seconds),
            row.found,
        )
        for row in report.stages
    ]
    return _table(("Stage", "", "Time", "What it found"), lines, numbers=(2,))


def _nodes(passed: Sequence[CandidateRow]) -> list[Html]:
    rows = [row for row in passed if row.gpu_nodes or row.cpu_nodes]
    if not rows:
        return []
    lines = []
    for row in rows:
        operators = sorted(row.nodes.items(), key=lambda item: (-item[1], item[0]))
        listed = ", ".join(f"{count} {name}" for name, count in operators[:_MOST_OPERATORS])
        more = len(operators) - _MOST_OPERATORS
        lines.append(
            (
                _name(row),
                str(row.gpu_nodes),
                str(row.cpu_nodes),
                listed + (f", {more} more kinds" if more > 0 else ""),
            )
        )
    return [_section("Where nodes run", _table(("", "on the GPU", "on the CPU", "Operators"), lines, numbers=(1, 2)))]


def _tensors(report: BuildReport) -> Html:
    if not report.inputs and not report.outputs:
        return _tag("p", "Not known: the build did not get so far.", cls="soft")
    ranges = {name: str(ranged) for profile in report.profiles for name, ranged in profile.inputs.items()}
    lines = [(_tag("b", each.name), "input", _type(each), ranges.get(each.name, "fixed")) for each in report.inputs]
    lines += [(_tag("b", each.name), "output", _type(each), "") for each in report.outputs]
    rows = (
        f"rows are independent; calls share runs of up to {report.max_batch}"
        if report.batched
        else "rows stay together"
    )
    return Html(_table(("Name", "", "Type", "Shapes"), lines) + _tag("p", f"Batches: {rows}.", cls="soft"))


def _settings(report: BuildReport, passed: Sequence[CandidateRow]) -> Html:
    lines: list[Sequence[str]] = []
    for row in passed:
        name = _name(row)
        told = {
            "session": [f"{key} {value}" for key, value in row.settings.items()],
            "compiler": [f"{key} {value}" for key, value in row.flags.items()],
            "versions": row.versions.values(),
        }
        for what, values in told.items():
            if values:
                lines.append((name, what, ", ".join(values)))
                name = Html("")
        if row.notes:
            lines.append((name, "tried", "; ".join(row.notes)))
    hardware = ", ".join(filter(None, (report.device, report.compute_capability, report.driver)))
    lines.append((_tag("b", "machine"), "", hardware))
    lines.extend((_tag("b", file.name), _bytes(file.size), _tag("code", file.digest)) for file in report.files)
    return _table(("", "", ""), lines)


# --- pieces -----------------------------------------------------------------------------------------------------------


def _tag(element: str, /, *content: str, cls: str = "", **attributes: object) -> Html:
    """An element. Content that is not Html is escaped, as attributes are; `_` in their names stands for `-`."""
    given = ({"class": cls} if cls else {}) | {key.replace("_", "-"): value for key, value in attributes.items()}
    inside = "".join(part if isinstance(part, Html) else html.escape(part) for part in content)
    told = "".join(f' {key}="{html.escape(str(value))}"' for key, value in given.items())
    return Html(f"<{element}{told}>" if element == "meta" else f"<{element}{told}>{inside}</{element}>")


def _section(title: str, *content: Html) -> Html:
    return _tag("section", _tag("h2", title), *content)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = ()) -> Html:
    right = set(numbers)

    def cells(kind: str, row: Sequence[str]) -> Html:
        return _tag("tr", *(_tag(kind, text, cls="n" if index in right else "") for index, text in enumerate(row)))

    titles = [cells("th", head)] if any(head) else []
    return _tag("table", *titles, *(cells("td", row) for row in rows))


def _name(row: CandidateRow) -> Html:
    dot = _tag("i", cls="dot", style=f"background:{_COLOURS[row.backend]}")
    return _tag("span", dot, _tag("b", str(row.backend)), cls="name")


def _curve(row: CandidateRow) -> list[tuple[float, float]]:
    if not row.quantiles_s:
        return _marked(row)
    last = len(row.quantiles_s) - 1
    return [(100 * index / last, seconds) for index, seconds in enumerate(row.quantiles_s)]


def _marked(row: CandidateRow) -> list[tuple[float, float]]:
    if row.latency is None:
        return []
    return list(zip(_MARKS, (row.latency.p50_s, row.latency.p90_s, row.latency.p99_s), strict=True))


def _x(share: float) -> float:
    return _LEFT + share / 100 * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, highest: float) -> float:
    return _HEIGHT - _BOTTOM - value / highest * (_HEIGHT - _TOP - _BOTTOM)


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, and no less than `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def _seconds(value: float) -> str:
    """
    >>> _seconds(0.00123), _seconds(90.0), _seconds(0.0)
    ('1.23 ms', '90 s', '0')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{_number(value / size)} {unit}"
    return f"{value * 1e9:.0f} ns" if value else "0"


def _bytes(size: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{_number(size / factor)} {unit}"
    return f"{size} B"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _small(value: float | None) -> str:
    return "∞" if value is None or not math.isfinite(value) else f"{value:.2g}"


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


def _type(tensor: TensorSpec) -> str:
    return f"{tensor.datatype}[{', '.join('any' if size < 0 else str(size) for size in tensor.shape)}]"


def _tolerance(tolerance: Tolerance) -> str:
    limits = (("max abs ≤", tolerance.max_abs), ("rel. L2 ≤", tolerance.rel_l2), ("cosine ≥", tolerance.cosine))
    return ", ".join(f"{words} {limit:g}" for words, limit in limits if limit is not None) or "anything"
