"""What a function can say of its own call, on the side of the SDK: a Channel of the test's hears it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import gpufn
from gpufn.call.context import Context
from gpufn_core.encoding import media, values
from gpufn_core.errors import InvalidInput, PayloadTooLarge
from gpufn_core.protocol.limits import CHECKPOINT_BYTES


class Heard:
    def __init__(self, kept: tuple[str, bytes] | None = None) -> None:
        self.told: list[tuple[float, str]] = []
        self.was_told = threading.Event()
        self.stored = kept
        self.asked = 0

    def progress(self, fraction: float, message: str) -> None:
        self.told.append((fraction, message))
        self.was_told.set()

    def keep(self, content_type: str, body: bytes) -> None:
        self.stored = content_type, body

    def kept(self) -> tuple[str, bytes] | None:
        self.asked += 1
        return self.stored


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def context(heard: Heard) -> Context:
    return Context("i1", 2, 1e9, heard)


def test_progress_is_told_at_once_when_none_was_told_for_a_while(
    context: Context, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for step in range(1, 5):
        now += 0.125
        context.progress(step / 4, f"step {step}")
    assert heard.told == [(0.25, "step 1"), (0.5, "step 2"), (0.75, "step 3"), (1.0, "step 4")]


def test_of_much_progress_at_once_the_first_and_the_latest_are_told(
    context: Context, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    for step in range(1, 101):
        context.progress(step / 200, f"step {step}")
    while len(heard.told) < 2:
        heard.was_told.wait()
        heard.was_told.clear()
    assert heard.told == [(0.005, "step 1"), (0.5, "step 100")]


@pytest.mark.parametrize("state", [{"step": 3, "best": (0.5, {1, 2})}, 0, [], "text"])
def test_the_next_attempt_gets_what_was_checkpointed_last(heard: Heard, state: Any) -> None:
    Context("i1", 1, None, heard).checkpoint("older")
    Context("i1", 1, None, heard).checkpoint(state)
    assert Context("i1", 2, None, heard).restored == state


def test_progress_that_is_no_number_says_how_it_is_told(context: Context, heard: Heard) -> None:
    with pytest.raises(InvalidInput, match=r"as in ctx\.progress\(0\.4, 'text'\), not 'half'"):
        context.progress("half")  # type: ignore[arg-type]
    assert heard.told == []


def test_what_was_restored_is_asked_for_once_and_none_is_none(context: Context, heard: Heard) -> None:
    assert context.restored is None
    assert (context.restored, heard.asked) == (None, 1)


def test_a_checkpoint_that_cannot_be_encoded_says_which_part(context: Context, heard: Heard) -> None:
    with pytest.raises(InvalidInput, match=r"the checkpoint at \.lock is a _thread\.lock") as raised:
        context.checkpoint({"step": 1, "lock": threading.Lock()})
    assert (raised.value.field, heard.stored) == ("checkpoint", None)


def test_a_checkpoint_that_is_too_large_says_what_to_do(context: Context, heard: Heard) -> None:
    context.checkpoint(bytes(CHECKPOINT_BYTES - 100))
    kept = heard.stored
    with pytest.raises(PayloadTooLarge, match=r"takes 4,194,3\d\d bytes, and 4,194,304 are allowed: write the state"):
        context.checkpoint(bytes(CHECKPOINT_BYTES))
    assert heard.stored is kept


def test_a_function_that_runs_here_has_a_context_that_keeps_nothing() -> None:
    context = gpufn.current()
    context.progress(0.5)
    context.checkpoint({"step": 1})
    assert (context.attempt, context.deadline, context.restored, gpufn.current().restored) == (1, None, None, None)
    assert repr(context) == "<Context of a call here, attempt 1>"


def test_what_is_restored_has_its_python_types(heard: Heard) -> None:
    heard.stored = values.encode_result((1, {2}), media.NATIVE)
    assert Context("i1", 2, None, heard).restored == (1, {2})
