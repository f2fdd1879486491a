"""Duration of the pure placement code for 1,000 workers on 100 nodes of 8 GPUs.

    python benchmarks/placement.py [--rounds 5]

Placement is slow when workers differ: workers that differ only in sizes and trust domains share cached results. The
explanation why no node has room is computed once per function and step, so it is measured separately.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import measure
from gpufn_core.domain.devices.device import Device, DeviceShare, DeviceType, MpsLevel, NodeFacts, Share
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.node_choice import NoRoom, Placement, explain, place
from gpufn_gateway.controller.placement.request import Requirements
from gpufn_gateway.controller.state.leases import LeaseBook

_GIB = 1 << 30
_LIMITS = Limits()
_WORKERS, _NODES, _GPUS = 1000, 100, 8
_SIZES = (2, 4, 6, 10)
_WHOLE = Resources(gpu=("A100", "L4"))


def _alike(number: int) -> Resources:
    """Requests of five functions, one of which wants a whole GPU and finds its second choice."""
    if number % 10 == 9:
        return _WHOLE
    return Resources(gpu=("any",), share=Share.MPS, vram_bytes=_SIZES[number % 4] * _GIB, sm_percent=25)


def _sizes_differ(number: int) -> Resources:
    if number % 10 == 9:
        return Resources(gpu=("A100", "L4"), memory_bytes=_GIB + number)
    return Resources(gpu=("any",), share=Share.MPS, vram_bytes=_SIZES[number % 4] * _GIB + number, sm_percent=25)


def _domains_differ(number: int) -> Resources:
    """No two workers share a GPU, so the number of placed workers is the number of GPUs."""
    return Resources(gpu=("any",), share=Share.MPS, vram_bytes=_GIB + number, trust_domain=f"d{number}")


def _cpu_only(number: int) -> Resources:
    return Resources(cpu=0.1 + number / 1000, memory_bytes=_GIB + number)


_REQUESTS: dict[str, Callable[[int], Resources]] = {
    "of five functions": _alike,
    "all of different sizes": _sizes_differ,
    "all of different trust domains": _domains_differ,
    "without a GPU, all of different sizes": _cpu_only,
}


def main() -> None:
    options = measure.arguments("Placement.", rounds=5)
    about = measure.machine()
    nodes = [_node(f"n{number}") for number in range(_NODES)]
    rounds = {name: [_place(make, nodes) for _ in range(options.rounds)] for name, make in _REQUESTS.items()}
    result = {
        name: {"placed": runs[0][0], "seconds": [round(seconds, 4) for _, seconds in runs]}
        for name, runs in rounds.items()
    }
    words = [_words(nodes) for _ in range(options.rounds)]
    result["no room, in words"] = {"seconds": [round(seconds, 4) for seconds in words]}
    rows = [
        [name, runs[0][0], f"{statistics.median(each for _, each in runs):.3f}", f"{max(e for _, e in runs):.3f}"]
        for name, runs in rounds.items()
    ]
    tables = measure.table(["1,000 workers", "placed", "s, median", "s, max"], rows)
    tables += f"\nThe explanation why one more finds no room takes {statistics.median(words) * 1000:.1f} ms.\n"
    measure.write("placement", result, tables, about)


def _node(name: str) -> NodeReport:
    pool = Device("cpu", DeviceType.CPU, "x86", 512 * _GIB, 64.0)
    gpus = (Device(f"{name}-{number}", DeviceType.GPU, "NVIDIA L4", 24 * _GIB) for number in range(_GPUS))
    return NodeReport(name, 0.0, (pool, *gpus), facts=NodeFacts(mps=MpsLevel.V2))


def _place(make: Callable[[int], Resources], nodes: list[NodeReport]) -> tuple[int, float]:
    """Return the number of placed workers, and the seconds that it took."""
    requests = [make(number) for number in range(_WORKERS)]
    book, placed = LeaseBook(), 0
    started = time.perf_counter()
    for number, wants in enumerate(requests):
        result = place(Requirements(wants), nodes, book, _LIMITS)
        if isinstance(result, Placement):
            placed += 1
            book.grant(f"w{number}", result.node, result.share)
    return placed, time.perf_counter() - started


def _words(nodes: list[NodeReport]) -> float:
    """Return the seconds to explain why a worker finds no room."""
    full = LeaseBook()
    for node in nodes:
        uuids = tuple(device.uuid for device in node.devices[1:])
        full.grant(node.node, node.node, DeviceShare("cpu", 1.0, _GIB, uuids))
    started = time.perf_counter()
    result = place(Requirements(_WHOLE), nodes, full, _LIMITS)
    assert isinstance(result, NoRoom)
    explain(Requirements(_WHOLE), nodes, full, _LIMITS, at_any_size=result.at_any_size)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
