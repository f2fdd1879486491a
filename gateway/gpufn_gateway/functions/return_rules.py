"""When a split returns to the one before: a revision breaks a rule, or its workers do not start. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpufn_core.domain.traffic import Measure, ReturnRule, Split
from gpufn_core.protocol.reports import CallCounts, RevisionStatus
from gpufn_core.spec.units import format_duration


def breach(split: Split, serving: int, revisions: Sequence[RevisionStatus]) -> tuple[int, str] | None:
    """Return the first revision beside the serving one that must lose its calls, and why."""
    baseline = next((each.recent for each in revisions if each.revision == serving), CallCounts())
    for each in revisions:
        if each.revision == serving:
            continue
        if each.start_error is not None:
            summary, _, _ = each.start_error.summary.partition("\n")
            return each.revision, f"its workers do not start: {summary}"
        if each.recent.calls < split.min_calls:
            continue
        for rule in split.return_if:
            if why := _why_broken(rule, split, each.recent, baseline):
                return each.revision, f"{rule}: {why}"
    return None


def _why_broken(rule: ReturnRule, split: Split, recent: CallCounts, baseline: CallCounts) -> str:
    within = f"of {recent.calls:,} calls in {split.window_s:g} s"
    if rule.measure is Measure.ERRORS:
        share = recent.errors / recent.calls
        return f"{share:.1%} {within} failed" if share > rule.limit else ""
    if baseline.calls < split.min_calls:
        return ""
    is_p50 = rule.measure is Measure.P50
    took_s, usual_s = (each.p50_s if is_p50 else each.p99_s for each in (recent, baseline))
    if took_s is None or usual_s is None or took_s <= rule.limit * usual_s:
        return ""
    took, usual = format_duration(took_s), format_duration(usual_s)
    return f"{rule.measure} {within} was {took}, and {usual} for the serving revision"
