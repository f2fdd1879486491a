"""CPU time of the console's pages and counters in the gateway, with 10,000 functions.

    python -m benchmarks.console_pages

The registry is a stand-in that holds its dicts only. 2,000 functions were called in the last minute.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from gpufn_core.domain.revision import Function, Revision
from gpufn_core.protocol.reports import FunctionStatus, NodeReport, RunnerReport, WorkerCounts
from gpufn_gateway.auth.access import LOCAL, Principal, principal_with
from gpufn_gateway.console.live.function_order import Query, Sort
from gpufn_gateway.console.live.pages import Pages
from gpufn_gateway.console.live.window import Window
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.metrics.telemetry import Telemetry

_APPS = 200
_REPEATS = 10


@dataclass
class _Registry:
    functions: dict[str, Function] = field(default_factory=dict)
    revisions: dict[str, dict[int, Revision]] = field(default_factory=dict)
    statuses: dict[str, FunctionStatus] = field(default_factory=dict)

    def status_for(self, principal: Principal, name: str) -> FunctionStatus:
        return self.statuses[name]

    def live_nodes(self) -> list[NodeReport]:
        return []

    def live_runners(self) -> list[RunnerReport]:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", type=int, default=10_000)
    count = parser.parse_args().functions
    registry, telemetry = _Registry(), Telemetry(lambda: 0)
    for number in range(count):
        name = f"prod/app-{number % _APPS}/fn-{number}"
        registry.functions[name] = Function(name=name, active=1, serving=1, latest=1, updated_at=0.0)
        workers = WorkerCounts(ready=number % 3)
        registry.statuses[name] = FunctionStatus(function=name, serving=1, workers=workers, queued=0, running=0)
        telemetry.of(name).latency.observe(random.random())
    window = Window(telemetry, list)
    window.sample(0.0)
    for name in list(registry.functions)[: count // 5]:
        telemetry.of(name).latency.observe(0.1)
    print(f"counters: {_ms(lambda: window.sample(2.0), 1):.1f} ms")
    pages = Pages(registry=cast("Registry", registry), window=window, why_not_ready=lambda: None)
    for who, principal in (("everything", LOCAL), ("a pattern", principal_with("k", ["read:prod/*"], None))):
        print(f"overview, {who}: {_ms(lambda: pages.overview(principal)):.1f} ms")  # noqa: B023  called at once
        query = Query(sort=Sort.CALLS)
        print(f"functions, {who}: {_ms(lambda: pages.functions(principal, query)):.1f} ms")  # noqa: B023


def _ms(make: Callable[[], Any], repeats: int = _REPEATS) -> float:
    """Return the mean CPU time of a page as values of JSON."""
    since = time.process_time()
    for _ in range(repeats):
        msgspec.to_builtins(make())
    return (time.process_time() - since) / repeats * 1e3


if __name__ == "__main__":
    main()
