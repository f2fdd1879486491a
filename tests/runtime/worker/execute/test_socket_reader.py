"""Ownership of the socket, as a table of the events that both sides may see."""

from __future__ import annotations

import threading

import pytest

from gpufn_runtime.worker.execute.socket_reader import Loan


def waiting(loan: Loan) -> threading.Thread:
    lender = threading.Thread(target=loan.wait)
    lender.start()
    return lender


def test_a_loan_is_given_back() -> None:
    loan = Loan()
    number = loan.lend()
    assert loan.is_mine(number)
    lender = waiting(loan)
    loan.give_back()
    lender.join(10)
    assert not lender.is_alive()
    assert not loan.is_mine(number)


def test_a_call_that_lasts_costs_the_borrower_the_socket() -> None:
    loan = Loan()
    number = loan.lend()
    assert loan.is_mine(number)
    loan.begin_call()
    lender = waiting(loan)
    lender.join(10)
    assert not lender.is_alive()
    assert not loan.is_mine(number)


def test_a_borrower_that_never_comes_costs_nothing() -> None:
    loan = Loan()
    number = loan.lend()
    lender = waiting(loan)
    lender.join(10)
    assert not lender.is_alive()
    assert not loan.is_mine(number)


def test_an_old_loan_is_not_mistaken_for_the_new_one() -> None:
    loan = Loan()
    old = loan.lend()
    waiting(loan).join(10)
    new = loan.lend()
    assert not loan.is_mine(old)
    assert loan.is_mine(new)


def test_a_lender_that_has_fallen_asleep_wakes_for_a_call_that_lasts() -> None:
    loan = Loan()
    number = loan.lend()
    assert loan.is_mine(number)
    lender = waiting(loan)
    lender.join(0.3)  # longer than its timeout
    assert lender.is_alive(), "an idle borrower keeps the socket"
    loan.begin_call()
    lender.join(10)
    assert not loan.is_mine(number)


def test_the_borrowers_error_is_raised_where_the_lender_waits() -> None:
    loan = Loan()
    loan.lend()
    loan.give_back(ValueError("garbage"))
    with pytest.raises(ValueError, match="garbage"):
        loan.wait()
