"""Frames of a worker whose user code controls the socket: the runner handles each frame, or ends the worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
from hypothesis import given, reject
from hypothesis import strategies as st

from gpufn_core.domain.revision import Revision
from gpufn_core.ids import digest_of
from gpufn_core.protocol import frames
from gpufn_core.protocol.codec import PROTOCOL
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_platform.process.clock import SystemClock
from gpufn_runtime.runner.workers.output import Output
from gpufn_runtime.runner.workers.relay import Relay
from gpufn_runtime.runner.workers.worker_link import WorkerLink
from gpufn_runtime.runner.workers.worker_socket import WorkerSocket

SPEC = FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),), concurrency=3)
REVISION = Revision(function="f", number=1, spec=SPEC, bundle=digest_of(b""), created_at=1.0)
_KINDS: tuple[Any, ...] = frames.WorkerFrame.__args__
_FRAMES = st.lists(st.tuples(st.sampled_from(_KINDS).flatmap(st.from_type), st.binary(max_size=8)), max_size=6)


def new_socket() -> tuple[WorkerSocket, WorkerLink]:
    """Return the socket of a worker that runs attempt 1, without a connection."""
    bus = Mock()
    relay = Relay(bus, output=Output(bus, SystemClock()), nested=Mock(), inbox="inbox", cancel=Mock(), traced=Mock())
    link = WorkerLink("w-1", REVISION, Path("s"), owner=Mock(), relay=relay.handle, created_at=1.0)
    link.peer = peer = WorkerSocket(link)
    peer.transport = Mock()
    peer.transport.is_closing.return_value = False
    peer.data_received(frames.encode(frames.Hello(PROTOCOL, "w-1")) + frames.encode(frames.Ready(0.1, 0.1)))
    attempt = Mock(number=link.next_attempt_number(), message=Mock(id="call", attempt=1, trace=""))
    attempt.message.id, attempt.message.reply = "i", "reply"
    attempt.run.items, attempt.run.granted = 0, 2
    attempt.run.live_bytes = 0
    link.slots.take()
    link.attempts[attempt.number] = attempt
    return peer, link


@given(_FRAMES, st.booleans())
def test_any_frames_in_any_order_are_handled_or_end_the_connection(
    sent: list[tuple[Any, bytes]], of_attempt: bool
) -> None:
    peer, link = new_socket()
    for frame, body in sent:
        is_changed = of_attempt and hasattr(frame, "attempt")
        try:
            data = frames.encode(msgspec.structs.replace(frame, attempt=1) if is_changed else frame, body)
        except OverflowError:  # an integer that msgpack does not have
            reject()
        peer.data_received(data)
        if peer.transport.abort.called:  # type: ignore[attr-defined]
            break
    assert 0 <= link.slots.free <= SPEC.slots


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_bytes_are_handled_or_end_the_connection(parts: list[bytes]) -> None:
    peer, _ = new_socket()
    for part in parts:
        peer.data_received(part)


def test_bytes_that_are_no_frame_end_the_connection() -> None:
    """Bug: a text that was not UTF-8 raised an exception in the event loop."""
    peer, _ = new_socket()
    peer.data_received(b"\0\0\0\x06\0\0\0\0\x93\x0e\x01\xa2\xff\xfe")
    peer.transport.abort.assert_called_once()  # type: ignore[attr-defined]
