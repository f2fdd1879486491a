from __future__ import annotations

import pytest

from gpufn_gateway.webhooks.tries import MOST, Verdict, delay_after, verdict


@pytest.mark.parametrize(
    ("status", "means"),
    [
        (200, Verdict.DELIVERED),
        (204, Verdict.DELIVERED),
        (299, Verdict.DELIVERED),
        (302, Verdict.TRY_AGAIN),
        (307, Verdict.TRY_AGAIN),
        (400, Verdict.TRY_AGAIN),
        (404, Verdict.TRY_AGAIN),
        (410, Verdict.GIVE_UP),
        (429, Verdict.TRY_AGAIN),
        (503, Verdict.TRY_AGAIN),
    ],
)
def test_what_an_answer_means(status: int, means: Verdict) -> None:
    assert verdict(status) is means


def test_tries_get_rarer_and_end_within_a_day() -> None:
    delays = [delay_after(tried) for tried in range(1, MOST)]
    assert all(delay is not None for delay in delays)
    known = [delay for delay in delays if delay is not None]
    assert known == sorted(known)
    assert (known[0], delay_after(MOST), delay_after(MOST + 7)) == (5.0, None, None)
    assert 12 * 3600 < sum(known) < 24 * 3600
