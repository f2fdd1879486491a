"""Why rank 0 lost a rank decides whether its call uses up a retry."""

from __future__ import annotations

import errno
import os
import queue
import time

import pytest

from gpufn_core.domain.worker import Gang, Rank
from gpufn_core.errors import ProtocolMismatch
from gpufn_core.protocol import frames
from gpufn_core.protocol.codec import PROTOCOL
from gpufn_platform.shared_bodies.bodies import SharedBodies
from gpufn_runtime.worker.execute.attempts import Attempt
from gpufn_runtime.worker.execute.results import End
from gpufn_runtime.worker.gang import connection
from gpufn_runtime.worker.gang.rank_zero import RankZero, loss_of
from gpufn_runtime.worker.link import Link, unix_dialer
from tests.runtime.worker.gang.test_gang import free_port


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "is_stopping", "code"),
    [
        (None, False, "worker_lost"),
        (os_error(errno.ECONNRESET), False, "worker_lost"),
        (ProtocolMismatch("a frame"), False, "worker_lost"),
        (None, True, "platform_stopping"),
        (os_error(errno.ETIMEDOUT), False, "platform_stopping"),
        (os_error(errno.EHOSTUNREACH), False, "platform_stopping"),
    ],
)
def test_a_lost_node_differs_from_a_dead_process(error: Exception | None, is_stopping: bool, code: str) -> None:
    loss = loss_of("rank 1 on b", error, is_stopping=is_stopping)
    assert (loss.code, "rank 1 on b" in loss.message) == (code, True)


class Failures:
    """The worker of rank 0."""

    def __init__(self) -> None:
        self.ends: queue.Queue[End] = queue.Queue()

    def on_gang_failed(self, attempt: Attempt | None, end: End) -> None:
        self.ends.put(end)

    def on_rank_draining(self) -> None:
        pass

    def restore(self, attempt: Attempt) -> tuple[str, bytes]:
        raise NotImplementedError


def test_a_lost_node_uses_up_no_retry_if_a_blocked_send_detects_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports the loss to one caller only: to the send, or to the reader."""
    monkeypatch.setattr(connection, "_LOST_S", 0.1)
    gang = Gang((Rank("w-0", "a"), Rank("w-1", "b")), "127.0.0.1", free_port(), "secret")
    failures = Failures()
    zero = RankZero(gang, Link(unix_dialer(""), "w-0"), failures, time.time() + 600)
    zero.listen()
    run = frames.Run(1, "i1", method="", content_type="", accept="")
    with connection.dial(gang) as one:
        one.sendall(frames.encode(frames.Hello(PROTOCOL, "w-1", False, 0, ())) + frames.encode(frames.Ready(0, 0)))
        zero.wait_until_ready()
        zero.begin(Attempt(run, b"", 1, SharedBodies(""), 0, 0.0), bytes(8_000_000))  # `one` does not read
        kind, error = failures.ends.get(timeout=20)
    assert error is not None
    assert (kind, error.code) == ("lost", "platform_stopping")
