"""The quota of a key, as tables and as properties; time is an argument."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufn_core.domain.usage import Usage
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.records import KeyLimits
from gpufn_core.protocol.reports import KeyUse
from gpufn_gateway.auth.quotas import Bucket, KeyQuota, check, recount_at


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        (KeyLimits(rate=0), "limits.rate"),
        (KeyLimits(rate=-1), "limits.rate"),
        (KeyLimits(rate=math.nan), "limits.rate"),
        (KeyLimits(rate=math.inf), "limits.rate"),
        (KeyLimits(rate=1e-310), "limits.rate"),
        (KeyLimits(rate=1, burst=0), "limits.burst"),
        (KeyLimits(burst=5), "limits.burst"),
        (KeyLimits(concurrency=-3), "limits.concurrency"),
        (KeyLimits(queued=0), "limits.queued"),
        (KeyLimits(queued=10**7), "limits.queued"),
        (KeyLimits(gpu_s=0), "limits.gpu_s"),
        (KeyLimits(run_s=-math.inf), "limits.run_s"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: KeyLimits, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check(limits)
    assert caught.value.field == field


def test_limits_that_do_are_not() -> None:
    check(KeyLimits())
    check(KeyLimits(rate=0.01, burst=1, concurrency=1, queued=1_000_000))


def test_the_least_accepted_rate_is_shown_and_enforced() -> None:
    limits = KeyLimits(rate=1e-6, burst=1_000_000)
    check(limits)
    quota = KeyQuota("k", limits, 0.0)
    assert quota.admit(0.0) is None
    assert quota.headers(0.0) == [
        (b"ratelimit-policy", b'"rate";q=1000000;w=1000000000000'),
        (b"ratelimit", b'"rate";r=999999;t=1000000'),
    ]


@given(
    st.floats(0.1, 100.0),
    st.integers(1, 50),
    st.lists(st.floats(0.0, 2.0), min_size=1, max_size=100),
)
def test_a_bucket_admits_only_its_burst_and_its_rate(rate: float, burst: int, pauses: list[float]) -> None:
    bucket = Bucket(rate, burst, 0.0)
    now, passed = 0.0, 0
    for pause in pauses:
        now += pause
        while bucket.take(now):
            passed += 1
        assert passed <= burst + rate * now + 1e-6
        wait_s = bucket.wait_s(now)
        assert 0 < wait_s <= 1 / rate + 1e-9
        assert not bucket.take(now + wait_s * 0.99 - 1e-6)
    assert passed >= min(burst, 1) + math.floor(min(rate * now, burst - 1))


def test_the_refusal_of_a_call_has_the_time_of_the_next_one() -> None:
    quota = KeyQuota("k", KeyLimits(rate=0.5), 10.0)
    assert quota.admit(10.0) is None
    refusal = quota.admit(11.0)
    assert refusal is not None
    assert ("in 2 s" in refusal.message, refusal.retry_after_s) == (True, 1.0)
    assert quota.admit(12.0) is None


def test_calls_admitted_by_other_gateways_are_subtracted() -> None:
    quota = KeyQuota("k", KeyLimits(rate=10, concurrency=3), 0.0)
    quota.add_report("gw2", KeyUse("k", admitted=25, running=2), 0.0)
    refusal = quota.admit(0.0)
    assert refusal is not None
    assert math.isclose(refusal.retry_after_s, 1.6)
    assert quota.admit(1.6) is None
    assert quota.begin(1.6) is None
    assert quota.begin(1.6) is not None
    assert quota.begin(5.0) is None  # the other gateway has not reported for long: its calls no longer count


def test_calls_at_a_time_are_counted_until_they_end() -> None:
    quota = KeyQuota("k", KeyLimits(concurrency=2), 0.0)
    assert (quota.begin(0.0), quota.begin(0.0)) == (None, None)
    refusal = quota.begin(0.0)
    assert refusal is not None
    assert ("2 calls" in refusal.message, refusal.retry_after_s) == (True, 1.0)
    for _ in range(50):
        quota.end(40.0)
        assert quota.begin(0.0) is None
    later = quota.begin(0.0)
    assert later is not None
    assert 19 < later.retry_after_s <= 20  # two slots, for calls that take 40 s each


def test_submitted_calls_are_never_more_than_counted() -> None:
    quota = KeyQuota("k", KeyLimits(queued=3), 0.0)
    assert quota.needs_count(-1.0)
    quota.set_queued(1, 0, 0.0)
    assert not quota.needs_count(-0.5)
    assert (quota.start_storing(1), quota.start_storing(1)) == (None, None)
    assert re.findall(r"\d+", quota.start_storing(1) or "") == ["3", "3"], "the limit and the number"
    assert quota.is_full
    assert quota.needs_count(recount_at(0.0))
    quota.finish_storing(1)
    quota.set_queued(1, quota.storing, 0.1)  # the call being stored may or may not be in the count
    assert quota.start_storing(10) is None  # a chunk is not split
    assert quota.start_storing(1) is not None
    assert not KeyQuota("k", KeyLimits(rate=1), 0.0).needs_count(0.0)


def test_the_seconds_of_a_day_are_there_again_on_the_next() -> None:
    quota = KeyQuota("k", KeyLimits(run_s=100, gpu_s=10), 0.0)
    assert quota.admit(0.0) is None  # the usage is not known yet
    quota.set_usage(Usage(calls=3, run_s=99.0, gpu_s=9.0), day_ends=50.0)
    assert quota.admit(1.0) is None
    quota.set_usage(Usage(calls=4, run_s=99.0, gpu_s=12.5), day_ends=50.0)
    refusal = quota.admit(2.0)
    assert refusal is not None
    assert ("10 GPU seconds" in refusal.message, refusal.retry_after_s) == (True, 48.0)
    assert dict(quota.headers(2.0))[b"ratelimit"] == b'"run-seconds";r=1;t=48, "gpu-seconds";r=0;t=48'
    assert quota.admit(50.0) is None
    assert dict(quota.headers(50.0))[b"ratelimit"] == b'"run-seconds";r=100, "gpu-seconds";r=10'


def test_a_gateway_reports_new_usage_and_reports_the_absence_of_usage_once() -> None:
    quota = KeyQuota("k", KeyLimits(rate=5, concurrency=5), 0.0)
    assert quota.take_report() is None
    quota.admit(0.0)
    quota.begin(0.0)
    assert quota.take_report() == KeyUse("k", 1, 1)
    assert quota.take_report() == KeyUse("k", 0, 1)
    quota.end(1.0)
    assert quota.take_report() == KeyUse("k", 0, 0)
    assert quota.take_report() is None


@pytest.mark.parametrize(
    ("limits", "policy", "state"),
    [
        (KeyLimits(rate=50), b'"rate";q=50;w=1', b'"rate";r=49;t=1'),
        (KeyLimits(rate=0.5, burst=3), b'"rate";q=3;w=6', b'"rate";r=2;t=2'),
        (
            KeyLimits(rate=2, concurrency=8),
            b'"rate";q=2;w=1, "concurrency";q=8;qu="concurrent-requests"',
            b'"rate";r=1;t=1, "concurrency";r=7',
        ),
    ],
)
def test_the_header_fields_of_the_draft(limits: KeyLimits, policy: bytes, state: bytes) -> None:
    quota = KeyQuota("k", limits, 0.0)
    quota.admit(0.0)
    quota.begin(0.0)
    assert quota.headers(0.0) == [(b"ratelimit-policy", policy), (b"ratelimit", state)]
    assert KeyQuota("k", KeyLimits(queued=1), 0.0).headers(0.0) == []
