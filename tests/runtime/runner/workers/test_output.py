"""Rate limit of workers' output, even if a worker does not limit itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from gpufn_runtime.runner.workers.output import Output


def test_lines_without_text_are_bounded_as_well() -> None:
    """A well-behaved worker counts short lines, too: each one is a log message."""
    sent: list[bytes] = []
    bus = SimpleNamespace(publish=lambda subject, payload: sent.append(payload))
    clock = SimpleNamespace(monotonic=lambda: 1.0, time=lambda: 1.0)
    output = Output(cast("Any", bus), cast("Any", clock))
    link = cast("Any", SimpleNamespace(id="w-1", revision=SimpleNamespace(function="f", number=1)))
    for _ in range(70_000):
        output.publish(link, "", "stdout", b"")
    assert 10_000 < len(sent) < 66_000
