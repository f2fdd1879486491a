"""The cost of traces: the throughput of an echo with tracing off, and at several sampling ratios.

    python benchmarks/traces.py [--seconds 3] [--rounds 10]

One platform per setting, all up at the same time, measured in turns. Each round compares a setting with `off` of the
same round, and the table has the median of these ratios: other work on the machine changes in the meantime. `off again`
shows what remains of that. The CPU time of a call depends on other work less than its rate does. Last, the CPU time of
the code that a call runs if it is traced and not recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import measure
from gpufn_core.domain.invocation import Outcome, OutcomeKind
from gpufn_core.protocol.messages import ResultReply
from gpufn_gateway.traces.tracing import Sampling, Tracing
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.traces.reporter import SpanReporter
from gpufn_runtime.runner.attempts.tracing import Tracing as RunnerTracing

SETTINGS = {
    "off": {},
    "off again": {},
    "1 %": {"GPUFN_TRACES_RATIO": "0.01", "GPUFN_TRACES_SLOW_S": "1"},
    "100 %": {"GPUFN_TRACES_RATIO": "1"},
}
_CONNECTIONS = (1, 64)


def main() -> None:
    options = measure.arguments("The cost of traces.", seconds=3.0, rounds=10)
    about = measure.machine()
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        platforms = {}
        for setting, environ in SETTINGS.items():
            platforms[setting] = stack.enter_context(measure.gpufn_up(**environ))
            measure.deploy(platforms[setting], "echo")
        order = list(platforms)
        for _ in range(options.rounds):
            order.append(order.pop(0))  # no setting is always the first
            for connections in _CONNECTIONS:
                for setting in order:
                    server = platforms[setting]
                    url = f"{server.url}/v1/functions/echo/invoke"
                    target = measure.Server(setting, url, server.process, post=measure.ECHO)
                    before = _cpu_s(server)
                    load = measure.wrk(target, connections, options.seconds)
                    cpu_us = (_cpu_s(server) - before) / (load.per_second * options.seconds) * 1e6
                    runs[f"{connections}, {setting}"].append({**dataclasses.asdict(load), "cpu_us": cpu_us})
    own_us = statistics.median(_unrecorded_us() for _ in range(5))
    text = f"{_table(runs)}\n\nA call that is traced and not recorded costs {own_us:.1f} us of CPU time.\n"
    measure.write("traces", {"rounds": options.rounds, "runs": runs, "unrecorded_us": own_us}, text, about)


def _unrecorded_us(calls: int = 20_000) -> float:
    """Return what such a call costs in gateway and runner together, in microseconds of CPU time."""
    clock = SystemClock()
    tracing = Tracing(Sampling(0.0, 1.0), SpanReporter(cast("Any", None), "benchmark"), clock)
    recorder = RunnerTracing(SpanReporter(cast("Any", None), "benchmark"), "node", clock)
    now, reply = clock.time(), ResultReply("", OutcomeKind.SUCCEEDED, None, "", 1, 1, 0.0, 0.0)
    call: Any = SimpleNamespace(trace=tracing.begin(), now=now)
    message = SimpleNamespace(trace=call.trace, submitted_at=now)
    attempt = SimpleNamespace(message=message, run=SimpleNamespace(started_at=now, elapsed_s=0.001))
    settle: Any = SimpleNamespace(attempt=attempt, outcome=Outcome(OutcomeKind.SUCCEEDED))
    started = time.process_time()
    for _ in range(calls):
        tracing.begin()
        tracing.ended(call, reply, now)
        recorder.end(settle)
    return (time.process_time() - started) / calls * 1e6


def _cpu_s(server: measure.Server) -> float:
    """Return the CPU time of all processes of a platform so far."""
    return sum(each.cpu_s for each in measure.usage(server.process.pid).values())


def _table(runs: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for name, loads in runs.items():
        base = runs[f"{name.partition(',')[0]}, off"]
        row: list[Any] = [name]
        for field in ("per_second", "cpu_us"):
            shares = sorted(one[field] / off[field] for one, off in zip(loads, base, strict=True))
            spread = f"{shares[len(shares) // 4]:.2f} to {shares[-1 - len(shares) // 4]:.2f}"
            row += [round(statistics.median(one[field] for one in loads)), round(statistics.median(shares), 3), spread]
        rows.append(row)
    columns = ["connections, setting", "calls/s", "of off's, median of pairs", "middle half"]
    columns += ["CPU us per call", "of off's, median of pairs", "middle half"]
    return measure.table(columns, rows)


if __name__ == "__main__":
    main()
