"""What a worker prints is passed on within bounds, whatever it says of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

from gpufn_runtime.runner.output import Output


def test_lines_without_text_are_bounded_as_well() -> None:
    """A worker that limits itself as it should counts them, too: each is a message of the log."""
    bus, clock = Mock(), Mock(**{"monotonic.return_value": 1.0, "time.return_value": 1.0})
    output = Output(bus, clock)
    link = cast("Any", SimpleNamespace(worker="w-1", revision=SimpleNamespace(function="f", number=1)))
    for _ in range(100_000):
        output.publish(link, "", "stdout", b"")
    assert 10_000 < bus.publish.call_count < 70_000
