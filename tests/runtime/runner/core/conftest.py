"""Fixture of the state machine's tests."""

from __future__ import annotations

import pytest

from tests.runtime.runner.core.bench import Bench


@pytest.fixture
def bench() -> Bench:
    """A machine of a plain sync function, with one worker of one slot."""
    bench = Bench()
    bench.worker()
    return bench
