from __future__ import annotations

from gpufn_core.errors import ErrorInfo
from gpufn_gateway.controller.decide.scaling.circuit import Circuit, CircuitState

ERROR = ErrorInfo("function_start_failed", "no module named nope")


def opened(openings: int = 1) -> tuple[Circuit, float]:
    circuit, now = Circuit(), 0.0
    for _ in range(2):
        circuit.record_failure(now, ERROR)
    for _ in range(openings):
        now += circuit.retry_in_s(now)
        circuit.record_failure(now, ERROR)
    return circuit, now


def test_the_third_failure_in_a_row_opens_it() -> None:
    circuit = Circuit()
    states = []
    for _ in range(3):
        circuit.record_failure(0.0, ERROR)
        states.append(circuit.state(0.0))
    assert states == [CircuitState.CLOSED, CircuitState.CLOSED, CircuitState.OPEN]
    assert circuit.last_error == ERROR


def test_one_failure_opens_it_if_no_worker_served_meanwhile() -> None:
    circuit = Circuit()
    circuit.record_failure(0.0, ERROR, took_a_place=True)
    assert (circuit.state(0.0), circuit.backoff_s) == (CircuitState.OPEN, 5.0)


def test_a_ready_worker_between_failures_starts_the_count_again() -> None:
    circuit = Circuit()
    for _ in range(5):
        circuit.record_failure(0.0, ERROR)
        circuit.record_failure(0.0, ERROR)
        circuit.record_ready()
    assert circuit.state(0.0) is CircuitState.CLOSED


def test_each_opening_lasts_longer_up_to_five_minutes() -> None:
    lengths = []
    for openings in range(1, 9):
        circuit, now = opened(openings)
        lengths.append(circuit.retry_in_s(now))
    assert lengths == [5, 10, 20, 40, 80, 160, 300, 300]


def test_a_function_that_has_failed_to_start_for_days_still_waits_five_minutes() -> None:
    circuit, now = opened(1100)
    assert (circuit.state(now), circuit.retry_in_s(now)) == (CircuitState.OPEN, 300.0)


def test_an_open_circuit_starts_no_worker_and_a_half_open_one_starts_one() -> None:
    circuit, now = opened()
    assert circuit.starts_allowed(now + 4.9, 3, 0) == 0
    assert circuit.state(now + 5) is CircuitState.HALF_OPEN
    assert circuit.starts_allowed(now + 5, 3, 0) == 1
    assert circuit.starts_allowed(now + 5, 3, 1) == 0


def test_workers_that_fail_together_open_it_once() -> None:
    circuit, now = opened()
    for _ in range(10):
        circuit.record_failure(now, ERROR)
    assert (circuit.openings, circuit.retry_in_s(now)) == (1, 5.0)


def test_ready_closes_it() -> None:
    circuit, now = opened(3)
    circuit.record_ready()
    assert (circuit.state(now), circuit.starts_allowed(now, 4, 0), circuit.last_error) == (CircuitState.CLOSED, 4, None)
