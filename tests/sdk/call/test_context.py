"""The Context of a call, with a fake Channel."""

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


class FakeChannel:
    def __init__(self) -> None:
        self.sent: list[tuple[float, str]] = []
        self.was_sent = threading.Event()
        self.stored: tuple[str, bytes] | None = None
        self.loads = 0

    def progress(self, fraction: float, message: str) -> None:
        self.sent.append((fraction, message))
        self.was_sent.set()

    def save_checkpoint(self, content_type: str, body: bytes) -> None:
        self.stored = content_type, body

    def load_checkpoint(self) -> tuple[str, bytes] | None:
        self.loads += 1
        return self.stored


@pytest.fixture
def channel() -> FakeChannel:
    return FakeChannel()


@pytest.fixture
def context(channel: FakeChannel) -> Context:
    return Context("i1", 2, 1e9, channel)


def test_progress_is_sent_at_once_after_a_pause(
    context: Context, channel: FakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for step in range(1, 5):
        now += 0.125
        context.progress(step / 4, f"step {step}")
    assert channel.sent == [(0.25, "step 1"), (0.5, "step 2"), (0.75, "step 3"), (1.0, "step 4")]


def test_frequent_progress_is_reduced_to_the_first_and_the_latest_report(
    context: Context, channel: FakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    for step in range(1, 101):
        context.progress(step / 200, f"step {step}")
    while len(channel.sent) < 2:
        channel.was_sent.wait()
        channel.was_sent.clear()
    assert channel.sent == [(0.005, "step 1"), (0.5, "step 100")]


@pytest.mark.parametrize("state", [{"step": 3, "best": (0.5, {1, 2})}, 0, [], "text"])
def test_the_next_attempt_gets_the_last_checkpoint(channel: FakeChannel, state: Any) -> None:
    Context("i1", 1, None, channel).checkpoint("older")
    Context("i1", 1, None, channel).checkpoint(state)
    assert Context("i1", 2, None, channel).restored == state


def test_progress_that_is_not_a_number_is_refused(context: Context, channel: FakeChannel) -> None:
    with pytest.raises(InvalidInput, match=r"as in ctx\.progress\(0\.4, 'text'\), not 'half'"):
        context.progress("half")  # type: ignore[arg-type]
    assert channel.sent == []


def test_the_checkpoint_is_loaded_once_even_if_there_is_none(context: Context, channel: FakeChannel) -> None:
    assert context.restored is None
    assert (context.restored, channel.loads) == (None, 1)


def test_a_checkpoint_that_cannot_be_encoded_names_the_part(context: Context, channel: FakeChannel) -> None:
    with pytest.raises(InvalidInput, match=r"the checkpoint at \.lock is a _thread\.lock") as raised:
        context.checkpoint({"step": 1, "lock": threading.Lock()})
    assert (raised.value.field, channel.stored) == ("checkpoint", None)


def test_a_checkpoint_above_the_limit_names_a_remedy(context: Context, channel: FakeChannel) -> None:
    context.checkpoint(bytes(CHECKPOINT_BYTES - 100))
    stored = channel.stored
    with pytest.raises(PayloadTooLarge, match=r"4,194,3\d\d bytes.*4,194,304.*: write"):
        context.checkpoint(bytes(CHECKPOINT_BYTES))
    assert channel.stored is stored


def test_a_local_function_has_a_context_that_stores_nothing() -> None:
    context = gpufn.current()
    context.progress(0.5)
    context.checkpoint({"step": 1})
    assert (context.attempt, context.deadline, context.restored, gpufn.current().restored) == (1, None, None, None)
    assert "attempt 1" in repr(context)


def test_a_restored_checkpoint_has_its_python_types(channel: FakeChannel) -> None:
    channel.stored = values.encode_result((1, {2}), media.NATIVE)
    assert Context("i1", 2, None, channel).restored == (1, {2})
