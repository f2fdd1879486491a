"""Eviction of parked workers when host memory is wanted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpufn_gateway.controller.decide.room.host_memory import HostMemory, Parked

PARKED = st.builds(
    Parked,
    worker=st.sampled_from([f"w{number}" for number in range(8)]),
    bytes=st.integers(1, 1 << 34),
    uses=st.integers(1, 1000),
    saved_s=st.floats(0.1, 1000),
)


def memory(*held: Parked) -> HostMemory:
    made = HostMemory()
    for parked in held:
        made.add(parked)
    return made


def test_large_rarely_used_or_quickly_started_workers_are_removed_first() -> None:
    usual = Parked("usual", 100, uses=10, saved_s=10)
    assert memory(usual, Parked("large", 1000, uses=10, saved_s=10)).victims(1) == ["large"]
    assert memory(usual, Parked("rare", 100, uses=1, saved_s=10)).victims(1) == ["rare"]
    assert memory(usual, Parked("quick", 100, uses=10, saved_s=1)).victims(1) == ["quick"]


def test_a_once_busy_worker_is_removed_after_many_others() -> None:
    held = memory(Parked("old", 100, uses=5))
    for number in range(20):
        held.add(Parked(f"new{number}", 100))
        (victim,) = held.victims(100)
        held.evict(victim)
        held.release(victim)
        if victim == "old":
            break
    assert number == 5


def test_a_repeated_report_keeps_the_value_of_a_parked_worker_and_changes_its_size() -> None:
    held = memory(Parked("a", 100, saved_s=1), Parked("b", 100, saved_s=2))
    held.evict("b")
    held.add(Parked("a", 70, saved_s=1))
    assert (held.used, held.victims(1)) == (170, ["a"])


@given(st.lists(PARKED, max_size=20), st.integers(0, 1 << 36))
def test_only_the_needed_number_is_evicted_and_none_is_worth_more_than_a_remaining_one(
    told: list[Parked], wanted: int
) -> None:
    held = memory(*told)
    sizes = {parked.worker: parked.bytes for parked in told}
    victims = held.victims(wanted)
    freed = sum(sizes[worker] for worker in victims)
    assert freed >= min(wanted, held.used)
    assert not victims or freed - sizes[victims[-1]] < wanted
    staying = [held.worth(worker) for worker in sizes if worker not in victims]
    assert all(held.worth(worker) <= min(staying) for worker in victims if staying)


@given(st.lists(st.tuples(PARKED, st.booleans()), max_size=40), st.integers(1 << 34, 1 << 36))
def test_with_a_budget_held_memory_never_exceeds_it_and_worth_never_falls(
    told: list[tuple[Parked, bool]], budget: int
) -> None:
    held, floor = HostMemory(), 0.0
    for parked, is_resumed in told:
        held.release(parked.worker)
        for victim in held.victims(held.used + parked.bytes - budget):
            held.evict(victim)
            floor = max(floor, held.worth(victim))
            held.release(victim)
        held.add(parked)
        assert held.used <= budget
        assert held.worth(parked.worker) >= floor
        if is_resumed:
            held.release(parked.worker)
    for parked, _ in told:
        held.release(parked.worker)
    assert held.used == 0
