"""Rate limit of workers' output, even if a worker does not limit itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec

from gpufn_core.protocol.messages import LogLine
from gpufn_runtime.runner.workers.output import Output
from tests.runtime.runner.core.bench import message_of


def test_lines_without_text_are_bounded_as_well() -> None:
    """A well-behaved worker counts short lines, too: each one is a log message."""
    sent: list[bytes] = []
    bus = SimpleNamespace(publish=lambda subject, payload: sent.append(payload))
    clock = SimpleNamespace(monotonic=lambda: 1.0, time=lambda: 1.0)
    output = Output(cast("Any", bus), cast("Any", clock))
    link = cast("Any", SimpleNamespace(id="w-1", revision=SimpleNamespace(function="f", number=1)))
    for _ in range(70_000):
        output.publish(link, None, "stdout", b"")
    assert 10_000 < len(sent) < 66_000


def test_a_line_of_a_call_names_its_attempt_node_and_trace() -> None:
    sent: list[bytes] = []
    bus = SimpleNamespace(publish=lambda subject, payload: sent.append(payload))
    clock = SimpleNamespace(monotonic=lambda: 1.0, time=lambda: 1.0)
    output = Output(cast("Any", bus), cast("Any", clock), "gpu-1")
    link = cast("Any", SimpleNamespace(id="w-1", revision=SimpleNamespace(function="f", number=1)))
    trace = "0af7651916cd43dd8448eb211c80319c"
    output.publish(link, message_of("i-7", attempt=2, trace=f"00-{trace}-b7ad6b7169203331-01"), "stdout", b"hello")
    output.publish(link, message_of("i-8"), "stdout", b"hello")
    output.publish(link, None, "stdout", b"hello")
    lines = [msgspec.msgpack.decode(each, type=LogLine) for each in sent]
    assert [(line.invocation, line.attempt, line.node, line.trace) for line in lines] == [
        ("i-7", 2, "gpu-1", trace),
        ("i-8", 1, "gpu-1", ""),
        ("", 0, "gpu-1", ""),
    ]
