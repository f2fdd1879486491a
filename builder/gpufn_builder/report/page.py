"""Rendering of a BuildReport as a self-contained HTML page: no scripts, fonts or external links.

All texts of a report come from an untrusted model; the template escapes them.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Final

import jinja2

from gpufn_builder.backend_choice import MARGIN
from gpufn_builder.report.numbers import number, small
from gpufn_builder.report.plot import Plot
from gpufn_builder.report.report import BuildReport, CandidateRow
from gpufn_core.spec.model_spec import Tolerance
from gpufn_core.spec.units import format_bytes, format_duration

_MAX_OUTPUTS: Final = 24
_MAX_OPERATORS: Final = 24


def render(report: BuildReport) -> str:
    """Return the complete page."""
    passed = [row for row in report.candidates if row.passed]
    measured = [row for row in passed if row.latency]
    outputs = [(row, output) for row in passed for output in row.outputs]
    outputs.sort(key=lambda each: each[1].rel_l2, reverse=True)
    return _TEMPLATES.get_template("page.html.jinja").render(
        report=report,
        began=datetime.datetime.fromtimestamp(report.started_at, datetime.UTC),
        passed=passed,
        measured_on_gpu=sum(row.backend.on_gpu for row in measured),
        plot=Plot(measured) if measured else None,
        outputs=outputs,
        max_outputs=_MAX_OUTPUTS,
        tolerance=_tolerance(report.tolerance),
        details=_details,
        margin=MARGIN,
    )


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


def _details(row: CandidateRow) -> list[tuple[str, str]]:
    texts = {
        "session": ", ".join(f"{key} {value}" for key, value in row.settings.items()),
        "compiler": ", ".join(f"{key} {value}" for key, value in row.flags.items()),
        "versions": ", ".join(row.versions.values()),
        "tried": "; ".join(row.notes),
    }
    return [(kind, text) for kind, text in texts.items() if text]


def _tolerance(tolerance: Tolerance) -> str:
    limits = (("max abs ≤", tolerance.max_abs), ("rel. L2 ≤", tolerance.rel_l2), ("cosine ≥", tolerance.cosine))
    texts = [f"{words} {limit:g}" for words, limit in limits if limit is not None]
    if tolerance.limits_elements:
        texts.append(f"each element ≤ {tolerance.atol or 0:g} + {tolerance.rtol or 0:g} · |reference| or the floor")
    return ", ".join(texts) or "anything"


_TEMPLATES: Final = jinja2.Environment(
    loader=jinja2.PackageLoader("gpufn_builder", "report"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "duration": format_duration,
    "number": number,
    "operators": _operators,
    "size": format_bytes,
    "small": small,
}
