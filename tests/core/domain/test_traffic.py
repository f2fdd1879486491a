from __future__ import annotations

import itertools
from collections import Counter

import pytest

from gpufn_core.domain.traffic import (
    HeaderRule,
    Measure,
    Mirror,
    Split,
    checked_headers,
    checked_weights,
    choose,
    parse_return_rules,
)
from gpufn_core.errors import InvalidInput

KEYS = [f"key {number}".encode() for number in range(5000)]


def split(weights: dict[int, int], **options: object) -> Split:
    return Split(weights=weights, set_at=0.0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [{1: 100}, {1: 90, 2: 10}, {1: 34, 2: 33, 7: 33}, {1: 0, 2: 100}])
def test_each_revision_gets_its_share_of_the_keys(weights: dict[int, int]) -> None:
    counts = Counter(choose(split(weights), key) for key in KEYS)
    for number, weight in weights.items():
        assert counts[number] == pytest.approx(len(KEYS) * weight / 100, abs=len(KEYS) * 0.02)


def test_a_larger_weight_moves_keys_in_one_direction_only() -> None:
    chosen = [[choose(split({1: 100 - canary, 2: canary}), key) for key in KEYS] for canary in (0, 5, 50, 95, 100)]
    for before, after in itertools.pairwise(chosen):
        assert all(now >= then for then, now in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [({b"x-canary": b"1"}, 2), ({b"x-canary": b"2"}, 3), ({b"x-canary": b"3"}, 1), ({b"x-other": b"1"}, 1), ({}, 1)],
)
def test_a_header_decides_before_the_weights(headers: dict[bytes, bytes], expected: int) -> None:
    rules = HeaderRule("x-canary", "1", 2), HeaderRule("x-canary", "2", 3)
    assert {choose(split({1: 100}, headers=rules), key, headers) for key in KEYS[:50]} == {expected}


def test_the_called_revisions_include_those_of_headers_and_of_the_mirror() -> None:
    everything = split({1: 100, 2: 0}, headers=(HeaderRule("x-a", "1", 3),), mirror=Mirror(4))
    assert everything.called == (1, 3, 4)


@pytest.mark.parametrize("weights", [{}, {1: 90}, {1: 90, 2: 20}, {1: 110, 2: -10}, {1: -1, 2: 101}])
def test_weights_are_percent_of_all_calls(weights: dict[int, int]) -> None:
    with pytest.raises(InvalidInput) as caught:
        checked_weights(weights)
    assert caught.value.field == "weights"


@pytest.mark.parametrize(
    ("name", "value"),
    [("authorization", "a"), ("cookie", "a"), ("x-gpufn-timeout", "1"), ("x-", "1"), ("x-a", ""), ("x-a", "a\nb")],
)
def test_a_rule_has_a_header_that_only_the_client_chooses(name: str, value: str) -> None:
    with pytest.raises(InvalidInput):
        checked_headers([HeaderRule(name, value, 1)])


def test_rules_of_headers_are_in_lower_case_and_differ() -> None:
    assert checked_headers([HeaderRule("X-Canary", "On", 2)]) == (HeaderRule("x-canary", "On", 2),)
    with pytest.raises(InvalidInput):
        checked_headers([HeaderRule("x-a", "1", 2), HeaderRule("X-A", "1", 3)])


def test_return_rules_are_read_and_shown() -> None:
    rules = parse_return_rules(["errors > 2%", "P99>1.5x", "p50>2x"])
    assert [(rule.measure, rule.limit) for rule in rules] == [
        (Measure.ERRORS, 0.02),
        (Measure.P99, 1.5),
        (Measure.P50, 2.0),
    ]
    assert [str(rule) for rule in rules] == ["errors>2%", "p99>1.5x", "p50>2x"]


@pytest.mark.parametrize(
    "text", ["", "errors", "errors>2x", "p99>5%", "p99>0.5x", "errors>101%", "p98>2x", "errors>-1%"]
)
def test_a_meaningless_rule_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_return_rules([text])
