"""Frames of the fast path: a unix socket on which a gateway sends calls to the runner of its own host, bypassing NATS.

It uses the same framing as the worker's socket (`frames`). Both ends are ours and run as the same user. The path of the
socket is `Home.fast_path_socket`.

1. The runner sends Limit for each revision when it changes, and a Heartbeat each second.
2. The gateway sends an Offer for a call whose caller waits. At most `Limit.calls` calls of a revision are in flight.
3. The runner answers with Refused at once, and the gateway queues the call as usual. Otherwise it answers with Ended,
   or with Queued when the attempt failed and the runner queued the next one.
4. If either end disconnects, the gateway queues its in-flight calls and the runner cancels them.
"""

from __future__ import annotations

from gpufn_core.protocol.frames import Frame
from gpufn_core.protocol.messages import InvocationMessage, ResultReply

RUNNER_TIMEOUT_S = 3.5  # the gateway considers the runner dead after this long without a frame


class Offer(Frame, tag=1, frozen=True, array_like=True, gc=False):
    """A call with its body. `message.reply` is the subject for its result if the call is queued."""

    message: InvocationMessage


class Withdraw(Frame, tag=2, frozen=True, array_like=True, gc=False):
    """The caller of this call no longer waits."""

    invocation: str


class Limit(Frame, tag=11, frozen=True, array_like=True, gc=False):
    """The number of calls of a revision that may be in flight. `created_at` is copied from the Revision: a
    gateway of another platform that uses this path by mistake may have other code under the same name and number."""

    function: str
    revision: int
    created_at: float
    calls: int


class Ended(Frame, tag=12, frozen=True, array_like=True, gc=False):
    """The end of an offered call. The body is its result."""

    reply: ResultReply


class Refused(Frame, tag=13, frozen=True, array_like=True, gc=False):
    """No slot is free, or other calls already wait: the gateway must queue the call. `has_begun`: its attempt was
    interrupted."""

    invocation: str
    has_begun: bool = False


class Queued(Frame, tag=14, frozen=True, array_like=True, gc=False):
    """An attempt failed, and the runner queued the next one."""

    invocation: str


class Heartbeat(Frame, tag=15, frozen=True, array_like=True, gc=False):
    pass


GatewayFrame = Offer | Withdraw
RunnerFrame = Limit | Ended | Refused | Queued | Heartbeat
