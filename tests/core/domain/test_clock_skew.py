"""The measurement of a node's clock skew, and its limit."""

from __future__ import annotations

import pytest

from gpufn_core.domain.clock_skew import is_skewed, measure


@pytest.mark.parametrize(
    ("sent_at", "server_at", "received_at", "skew_s", "skewed"),
    [
        (100.0, 100.25, 100.5, 0.0, False),
        (102.0, 100.25, 102.5, 2.0, True),
        (101.5, 100.25, 102.0, 1.5, False),
        (97.0, 100.25, 97.5, -3.0, True),
        (200.0, 100.0, 201.0, 100.5, True),
        (200.0, 100.0, 201.25, None, False),  # slow: the error may exceed half a second
        (200.0, 100.0, 199.0, None, False),  # the clock was set back in between
    ],
)
def test_the_skew_is_the_nodes_time_minus_the_servers_in_the_middle_of_the_request(
    sent_at: float, server_at: float, received_at: float, skew_s: float | None, skewed: bool
) -> None:
    assert measure(sent_at, server_at, received_at) == skew_s
    assert is_skewed(skew_s) is skewed
