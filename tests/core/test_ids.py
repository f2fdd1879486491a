from __future__ import annotations

import time

import pytest

from gpufn_core.ids import is_invocation_id, new_ulid


def test_later_ids_sort_later_though_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = new_ulid()
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 2_000_000)
    ahead = new_ulid()
    monkeypatch.setattr(time, "time_ns", lambda: now - 3600 * 10**9)
    after = new_ulid()
    assert before < ahead
    assert ahead[:10] == after[:10] != before[:10]
    assert ahead != after
    assert is_invocation_id(after)
