"""Scaling policy: how many workers a revision should have, and why. Pure.

`decide(policy, demand, workers, peak=..., last=...)` computes:

    L     = queued + running
    base  = ceil(average in flight of 60 s / (target · slots))
            at most ceil(most calls at once in 60 s / slots)
    burst = ceil(λ · S / (target · slots) + (L - ready · slots) · min(S, max(C, D)) / (slots · max(C, D)))
            at most ceil(most calls at once in 6 s / slots)
    want  = clamp(max(base, burst, 1 if L > 0), min_workers, max_workers), plus the buffer while traffic flows
    keep  = want as if no worker were READY: want falls as workers are added and rises again when they leave, so it
            cannot decide whether they leave
    down  to the highest keep of the scale-down window; idle workers only, at most half of all at a time
    stuck workers whose slots all run abandoned calls (a cancelled call that has not stopped yet) are added to these,
          while there are calls
    zero  when L == 0 and no worker had a call for idle_timeout
    one   with `prewarm`, while a call is expected

λ is arrivals per second, S service seconds, C the cold-start p50, D the target delay, and slots the calls that one
worker runs at a time. Calls that gather for a batch count as queued. The bounds keep estimates from inventing work.
One call of 10 s is work for one worker, not for ten of one second each, hence min(S, max(C, D)). The λ · S of a single
call would start three workers where one call can occupy one. A client that calls again after each answer is
1 / 0.7 workers on average and never needs a second worker.
"""

from __future__ import annotations

import math

import msgspec

from gpufn_core.domain.revision import Function
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_core.spec.units import format_duration

_ROUNDING = 1e-9  # 0.7 · 10 / 0.7 is ten workers, not eleven


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The demand for a revision. No Demand means unknown, which is not the same as no calls.

    `stuck` slots run abandoned calls. `idle_s` is how long no worker has had a call; None when a worker has one, or
    when it is unknown. `expected` is why a call is expected soon, "" if none is (`prewarm`).
    """

    queued: int
    running: int
    stuck: int = 0
    average_in_flight: float | None = None  # over 60 s
    arrivals_per_s: float | None = None  # over 6 s
    peak_calls_60s: int | None = None  # highest L in 60 s
    peak_calls_6s: int | None = None  # highest L in 6 s
    service_s: float | None = None
    cold_start_s: float | None = None
    idle_s: float | None = None
    expected: str = ""

    @property
    def calls(self) -> int:
        return self.queued + self.running


class Workers(msgspec.Struct, frozen=True):
    """The workers of a revision. `idle` counts READY workers without a call, the only ones that may be removed."""

    ready: int = 0
    starting: int = 0
    idle: int = 0
    slots: int = 1  # calls that one worker runs at a time

    @property
    def held(self) -> int:
        """Ready and starting workers. Knative did not count STARTING, and started hundreds while the first loaded."""
        return self.ready + self.starting


class ScaleDecision(msgspec.Struct, frozen=True):
    """`count` workers now, on the way to `want`, with the terms behind the decision and a reason for people.

    `limited`: max_workers prevents more.
    """

    count: int
    reason: str
    want: int | None = None  # None: unknown, nothing was decided
    keep: int | None = None
    terms: dict[str, float] = {}
    limited: bool = False


def effective(policy: ScalingPolicy, function: Function) -> ScalingPolicy:
    """Return the revision's policy with the bounds that were set on the Function (`gpufn scale`)."""
    if function.min_workers is None and function.max_workers is None:
        return policy
    highest = policy.max_workers if function.max_workers is None else function.max_workers
    lowest = policy.min_workers if function.min_workers is None else function.min_workers
    if function.max_workers is None:
        highest = max(highest, lowest)  # min_workers above the bound in the code raises that bound
    return msgspec.structs.replace(policy, min_workers=min(lowest, highest), max_workers=highest)


def decide(
    policy: ScalingPolicy,
    demand: Demand | None,
    workers: Workers,
    *,
    peak: int | None = None,
    last: ScaleDecision | None = None,
) -> ScaleDecision:
    """Decide on the count. `peak` is the highest `keep` of the scale-down window, `last` the previous decision."""
    if demand is None:
        return _unknown(policy, workers, last)
    terms = _terms(policy, demand, workers)
    is_idle = demand.calls == 0 and demand.idle_s is not None and demand.idle_s >= policy.idle_timeout_s
    if demand.calls > 0:
        need = max(int(terms["base"]), int(terms["burst"]), 1) + demand.stuck // workers.slots
    elif workers.held == 0 or is_idle:
        need = 0  # an average of the last minute must not bring back workers that were removed for being idle
    else:
        need = max(int(terms["base"]), int(terms["burst"]), 1)
    want = _bounded(policy, need)
    expected = demand.expected if policy.prewarm and demand.calls == 0 else ""
    if expected:
        want = max(want, min(1, policy.max_workers))
    keep = max(want, _bounded(policy, int(terms["keep"]))) if demand.calls > 0 else want
    terms |= {"want": want, "keep": keep}
    count = want
    if want < workers.held:
        # A whole idle timeout outweighs the window.
        target = want if is_idle else min(max(keep, peak or 0), policy.max_workers)
        count = _down(target, workers)
        terms["peak"] = target
    return ScaleDecision(
        count,
        _reason(policy, demand, workers, want, count=count, is_idle=is_idle, expected=expected),
        want=want,
        keep=keep,
        terms=terms,
        limited=need > policy.max_workers,
    )


def _bounded(policy: ScalingPolicy, need: int) -> int:
    bounded = min(max(need, policy.min_workers), policy.max_workers)
    return min(bounded + policy.buffer_workers, policy.max_workers) if need > 0 else bounded


def _unknown(policy: ScalingPolicy, workers: Workers, last: ScaleDecision | None) -> ScaleDecision:
    # KEDA mistook a missing number for a large one and scaled to the maximum.
    count = workers.held if last is None else max(last.count, min(workers.held, policy.max_workers))
    return ScaleDecision(count, f"demand unknown: keep {_workers(count)}", terms=last.terms if last else {})


def _terms(policy: ScalingPolicy, demand: Demand, workers: Workers) -> dict[str, float]:
    """Return every term by name. An unknown term is absent and does not add workers."""
    slots = workers.slots
    planned = policy.target * slots
    terms: dict[str, float] = {
        "calls": demand.calls,
        "queued": demand.queued,
        "running": demand.running,
        "stuck": demand.stuck,
        "ready": workers.ready,
        "starting": workers.starting,
        "slots": slots,
    }
    known = {
        "average_in_flight": demand.average_in_flight,
        "arrivals_per_s": demand.arrivals_per_s,
        "service_s": demand.service_s,
        "cold_start_s": demand.cold_start_s,
        "idle_s": demand.idle_s,
    }
    terms |= {name: value for name, value in known.items() if value is not None}
    base = _ceil((demand.average_in_flight or 0.0) / planned)
    terms["base"] = min(base, _ceil(max(demand.calls, demand.peak_calls_60s or 0) / slots))
    burst = keep = 0
    if demand.service_s is not None:
        retry_for_s = max(demand.cold_start_s or 0.0, policy.target_delay_s)
        backlog = max(0, demand.calls - workers.ready * slots)
        flow = (demand.arrivals_per_s or 0.0) * demand.service_s / planned
        per_call = min(demand.service_s, retry_for_s) / (slots * retry_for_s)
        drain = backlog * per_call
        bound = _ceil(max(demand.calls, demand.peak_calls_6s or 0) / slots)
        burst = min(_ceil(flow + drain), bound)
        keep = min(_ceil(flow + demand.calls * per_call), bound)
        terms |= {"backlog": backlog, "flow": flow, "drain": drain}
    terms |= {"burst": burst, "keep": keep}
    return terms


def _down(target: int, workers: Workers) -> int:
    if target >= workers.held:
        return workers.held
    # At least one: an eighth of three workers is none, and a multiplied floor would never shrink.
    step = min(max(1, workers.held // 2), workers.held - target, workers.idle)
    return workers.held - step


def _reason(
    policy: ScalingPolicy, demand: Demand, workers: Workers, want: int, *, count: int, is_idle: bool, expected: str
) -> str:
    if demand.calls:
        each = "" if demand.service_s is None else f", {format_duration(demand.service_s)} each"
        stuck = f", {demand.stuck} abandoned" if demand.stuck else ""
        why = f"{demand.queued} queued, {demand.running} running{each}{stuck}"
    elif expected:
        why = expected
    elif is_idle:
        why = f"idle for {format_duration(demand.idle_s or 0.0)} of {format_duration(policy.idle_timeout_s)}"
    elif demand.idle_s is not None and workers.held:
        why = f"nothing to do for {format_duration(demand.idle_s)} of {format_duration(policy.idle_timeout_s)}"
    else:
        why = "no calls"
    why += f": {_workers(want)}"
    if want == policy.max_workers and demand.calls:
        why += " (max_workers)"
    elif want == policy.min_workers > 0:
        why += " (min_workers)"
    if count > want:
        why += f", {count} for now"
    return why


def _ceil(value: float) -> int:
    return math.ceil(value - _ROUNDING)


def _workers(count: int) -> str:
    return "no workers" if count == 0 else f"{count} worker{'s' if count != 1 else ''}"
