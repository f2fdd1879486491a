"""Queues, dicts and stored values inside `run_locally`."""

from __future__ import annotations

import threading

import pytest

import gpufn
from gpufn import Dict, Queue, Ref, gpu_function
from gpufn.data import channel
from gpufn.data.local_channel import LocalChannel
from gpufn.errors import Conflict, DataNotFound, InvalidInput, QueueFull
from gpufn.testing import run_locally

JOBS = Queue("jobs", lease=30, max_items=2, max_deliveries=2)
SEEN = Dict("seen", ttl=60)


@gpu_function
def work() -> str:
    with JOBS.get(timeout=0) as job:
        SEEN[job] = len(job)
    return str(job)


@gpu_function
def total(numbers: Ref) -> int:
    return sum(numbers.get())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of a channel that this process uses."""
    now = [100.0]
    monkeypatch.setattr(channel, "_installed", LocalChannel(lambda: now[0]))
    return now


def test_functions_and_the_test_share_queues_dicts_and_values() -> None:
    with run_locally():
        JOBS.put("a")
        assert (work.remote(), len(JOBS), SEEN["a"], list(SEEN)) == ("a", 0, 1, ["a"])
        assert total.remote(gpufn.put([1, 2, 3])) == 6
    with run_locally():
        assert "a" not in SEEN


def test_a_waiting_get_receives_the_next_item() -> None:
    with run_locally():
        taken: list[str] = []
        thread = threading.Thread(target=lambda: taken.append(JOBS.get(timeout=30).value))
        thread.start()
        JOBS.put("late")
        thread.join()
        assert taken == ["late"]


def test_an_item_is_delivered_again_after_its_lease_and_then_dead(clock: list[float]) -> None:
    JOBS.put("bad")
    first = JOBS.get(timeout=0)
    with pytest.raises(TimeoutError):
        JOBS.get(timeout=0)
    clock[0] += 31
    second = JOBS.get(timeout=0)
    assert (first.deliveries, second.deliveries) == (1, 2)
    with pytest.raises(Conflict):
        first.ack()
    second.release()
    with pytest.raises(TimeoutError):
        JOBS.get(timeout=0)
    assert Queue("jobs-dead").get(timeout=0).value == "bad"


def test_limits_and_times_to_live(clock: list[float]) -> None:
    JOBS.put(1)
    JOBS.put(2)
    with pytest.raises(QueueFull):
        JOBS.put(3)
    reference = gpufn.put("value", ttl=10)
    assert (SEEN.add("a", 1), SEEN.add("a", 2), SEEN.get("a")) == (True, False, 1)
    clock[0] += 61
    assert SEEN.add("a", 2)
    with pytest.raises(DataNotFound):
        reference.get()
    with pytest.raises(KeyError):
        del SEEN["b"]


def test_a_value_above_the_limit_names_a_better_place() -> None:
    for size in (2 << 20, 20 << 20):
        with pytest.raises(InvalidInput, match=r"gpufn\.put"):
            SEEN["large"] = b"0" * size
