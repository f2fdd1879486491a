from __future__ import annotations

import itertools

import pytest

from gpufn_gateway.webhooks.retry_policy import Verdict, delay_after, verdict


@pytest.mark.parametrize(
    ("status", "means"),
    [
        (200, Verdict.DELIVERED),
        (204, Verdict.DELIVERED),
        (299, Verdict.DELIVERED),
        (302, Verdict.RETRY),
        (307, Verdict.RETRY),
        (400, Verdict.RETRY),
        (404, Verdict.RETRY),
        (410, Verdict.GIVE_UP),
        (429, Verdict.RETRY),
        (503, Verdict.RETRY),
    ],
)
def test_the_meaning_of_a_response(status: int, means: Verdict) -> None:
    assert verdict(status) is means


def test_tries_get_rarer_and_end_within_a_day() -> None:
    tried_at = [0.0]
    while (delay := delay_after(tried_at[-1])) is not None:
        tried_at.append(tried_at[-1] + delay)
    delays = [after - before for before, after in itertools.pairwise(tried_at)]
    assert (delays[0], delays) == (5.0, sorted(delays))
    assert len(tried_at) == 9
    assert 12 * 3600 < tried_at[-1] < 24 * 3600


def test_two_tries_are_never_close_together() -> None:
    assert [delay_after(age_s) for age_s in (4.9, 5.0, 34.0)] == [5.0, 30.0, 5.0]
