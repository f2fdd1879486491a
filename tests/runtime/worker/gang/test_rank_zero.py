"""Why rank 0 lost a rank decides whether its call uses up a retry."""

from __future__ import annotations

import errno
import os

import pytest

from gpufn_core.errors import ProtocolMismatch
from gpufn_runtime.worker.gang.rank_zero import loss_of


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
