"""What workers print, on its way to the log stream; bounded, because a worker may print without end."""

from __future__ import annotations

import contextlib

import msgspec

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import LogLine
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock
from gpufn_runtime.runner.workers.worker_link import WorkerLink

# A worker limits itself to less; this bound is for one that does not.
_BYTES_PER_S = 4 << 20
_COST_OF_A_LINE = 64  # bytes, on top of its text
_LONGEST_TEXT = 64 << 10


class _Allowance(msgspec.Struct):
    bytes_left: float
    at: float


class Output:
    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._allowances: dict[str, _Allowance] = {}

    def publish(self, link: WorkerLink, invocation: str, stream: str, text: bytes) -> None:
        now = self._clock.monotonic()
        allowance = self._allowances.setdefault(link.worker, _Allowance(_BYTES_PER_S, now))
        left = min(_BYTES_PER_S, allowance.bytes_left + (now - allowance.at) * _BYTES_PER_S)
        cost = len(text) + _COST_OF_A_LINE
        allowance.bytes_left, allowance.at = left - cost, now
        if left < cost:
            allowance.bytes_left = left
            return
        line = LogLine(
            at=self._clock.time(),
            function=link.revision.function,
            revision=link.revision.number,
            worker=link.worker,
            stream=stream[:16],
            text=text[:_LONGEST_TEXT].decode(errors="replace"),
            invocation=invocation,
        )
        with contextlib.suppress(BusUnavailable):
            self._bus.publish(subjects.logs(line.function), encode(line))

    def forget(self, worker: str) -> None:
        self._allowances.pop(worker, None)
