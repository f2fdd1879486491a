from __future__ import annotations

import pytest

from gpufn_platform.process.pause_detector import PauseDetector


@pytest.mark.parametrize(
    ("at", "numbers"),
    [
        ([0.1, 0.2, 0.3], [1, 2, 3]),
        ([0.1, 1.9, 3.8], [1, 2, 3]),
        ([0.1, 30.0, 30.1, 30.2], [1, None, 2, 3]),
        ([30.0, 30.1, 60.0, 60.1], [None, 1, None, 2]),
        ([3.0, 6.0, 9.0, 12.0], [None, 1, None, 2]),
    ],
)
def test_the_first_beat_after_a_pause_is_left_out(at: list[float], numbers: list[int | None]) -> None:
    """Messages that arrived during our own pause must be read before a peer is considered silent."""
    beats = PauseDetector(now=0.0)
    assert [beats.next(now) for now in at] == numbers
