"""The rate limit as a table."""

from __future__ import annotations

import pytest

from gpufn_runtime.worker.platform_calls.output_limit import OutputLimit


@pytest.mark.parametrize(
    ("writes", "admitted", "dropped"),
    [
        ([(0.0, 10), (0.0, 10)], [True, True], (0, 0)),
        ([(0.0, 20), (0.0, 1)], [True, False], (1, 1)),
        ([(0.0, 20), (0.5, 5), (0.5, 1)], [True, True, False], (1, 1)),
        ([(0.0, 21)], [False], (1, 21)),
        ([(100.0, 20), (100.0, 1)], [True, False], (1, 1)),
        ([(0.0, 20), (0.0, 7), (0.0, 8), (1.0, 10)], [True, False, False, True], (2, 15)),
    ],
)
def test_ten_bytes_a_second_and_twenty_at_once(
    writes: list[tuple[float, int]], admitted: list[bool], dropped: tuple[int, int]
) -> None:
    limit = OutputLimit(rate=10, burst=20, now=0.0)
    assert [limit.admits(size, now) for now, size in writes] == admitted
    assert limit.take_dropped() == dropped
    assert limit.take_dropped() == (0, 0)
