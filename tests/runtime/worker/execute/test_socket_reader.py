"""Ownership of the socket, as a table of the events that both sides may see."""

from __future__ import annotations

import threading

import pytest

from gpufn_runtime.worker.execute.socket_reader import SocketHandoff


def waiting(handoff: SocketHandoff) -> threading.Thread:
    lender = threading.Thread(target=handoff.wait)
    lender.start()
    return lender


def test_a_lent_socket_is_returned() -> None:
    handoff = SocketHandoff()
    number = handoff.hand_off()
    assert handoff.is_mine(number)
    lender = waiting(handoff)
    handoff.give_back()
    lender.join(10)
    assert not lender.is_alive()
    assert not handoff.is_mine(number)


def test_a_call_that_lasts_costs_the_borrower_the_socket() -> None:
    handoff = SocketHandoff()
    number = handoff.hand_off()
    assert handoff.is_mine(number)
    handoff.begin_call()
    lender = waiting(handoff)
    lender.join(10)
    assert not lender.is_alive()
    assert not handoff.is_mine(number)


def test_a_borrower_that_never_starts_costs_nothing() -> None:
    handoff = SocketHandoff()
    number = handoff.hand_off()
    lender = waiting(handoff)
    lender.join(10)
    assert not lender.is_alive()
    assert not handoff.is_mine(number)


def test_an_old_loan_is_not_mistaken_for_the_new_one() -> None:
    handoff = SocketHandoff()
    old = handoff.hand_off()
    waiting(handoff).join(10)
    new = handoff.hand_off()
    assert not handoff.is_mine(old)
    assert handoff.is_mine(new)


def test_a_lender_that_has_fallen_asleep_wakes_for_a_call_that_lasts() -> None:
    handoff = SocketHandoff()
    number = handoff.hand_off()
    assert handoff.is_mine(number)
    lender = waiting(handoff)
    lender.join(0.3)  # longer than its timeout
    assert lender.is_alive(), "an idle borrower keeps the socket"
    handoff.begin_call()
    lender.join(10)
    assert not handoff.is_mine(number)


def test_the_borrowers_error_is_raised_where_the_lender_waits() -> None:
    handoff = SocketHandoff()
    handoff.hand_off()
    handoff.give_back(ValueError("garbage"))
    with pytest.raises(ValueError, match="garbage"):
        handoff.wait()
