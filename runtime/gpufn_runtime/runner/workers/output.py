"""Output of workers, published to the log stream. Rate-limited, because a worker may print without end."""

from __future__ import annotations

import msgspec

from gpufn_core.domain import trace_context
from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import InvocationMessage, LogLine
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock
from gpufn_runtime.runner.workers.worker_link import WorkerLink

# Workers limit themselves to less; this limit is for a worker that does not.
_BYTES_PER_S = 4 << 20
_LINE_COST_BYTES = 64  # overhead per line
_MAX_TEXT_BYTES = 64 << 10


class _Allowance(msgspec.Struct):
    remaining_bytes: float
    at: float


class Output:
    def __init__(self, bus: Bus, clock: Clock, node: str = "") -> None:
        self._bus = bus
        self._node = node
        self._clock = clock
        self._allowances: dict[str, _Allowance] = {}
        self.dropped_lines = 0  # beyond the rate, or while the bus was away

    def publish(self, link: WorkerLink, call: InvocationMessage | None, stream: str, text: bytes) -> None:
        """Publish output of a worker, or of a call that runs there."""
        now = self._clock.monotonic()
        allowance = self._allowances.setdefault(link.id, _Allowance(_BYTES_PER_S, now))
        remaining_bytes = min(_BYTES_PER_S, allowance.remaining_bytes + (now - allowance.at) * _BYTES_PER_S)
        cost = len(text) + _LINE_COST_BYTES
        allowance.remaining_bytes, allowance.at = remaining_bytes - cost, now
        if remaining_bytes < cost:
            allowance.remaining_bytes = remaining_bytes
            self.dropped_lines += 1
            return
        line = LogLine(
            at=self._clock.time(),
            function=link.revision.function,
            revision=link.revision.number,
            worker=link.id,
            stream=stream[:16],
            text=text[:_MAX_TEXT_BYTES].decode(errors="replace"),
            invocation="" if call is None else call.id,
            attempt=0 if call is None else call.attempt,
            node=self._node,
            trace="" if call is None else trace_context.traceparent(call.id, call.trace)[3:35],
        )
        try:
            self._bus.publish(subjects.logs(line.function), encode(line))
        except BusUnavailable:
            self.dropped_lines += 1

    def forget(self, worker: str) -> None:
        self._allowances.pop(worker, None)
