"""Frames on the lane: a unix socket on which a gateway hands calls to the runner of its own host, past the bus.

Framed like the worker's socket (`frames`). Both ends are ours and run as one user; the path is `Home.lane_socket`.

1. the runner says how much Room each revision has, when it changes, and a Beat each second
2. the gateway sends Offer for a call that somebody waits for; at most `Room.calls` of a revision are under way
3. the runner answers Refused at once, and the call goes into the queue like any other; or Ended; or Queued, when the
   attempt failed and the next one is in the queue
4. whichever end hangs up: the gateway queues what was under way, the runner cancels it
"""

from __future__ import annotations

import msgspec

from gpufn_core.protocol.messages import InvocationMessage, ResultReply

SILENCE_S = 3.5  # without a word the other end takes the runner to be gone


class _Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Offer(_Frame, tag=1, frozen=True, array_like=True, gc=False):
    """A call, with its body; `message.reply` is where its result goes should it come to be queued."""

    message: InvocationMessage


class Withdraw(_Frame, tag=2, frozen=True, array_like=True, gc=False):
    """Nobody waits for this one any more."""

    invocation: str


class Room(_Frame, tag=11, frozen=True, array_like=True, gc=False):
    """How many calls of a revision may be under way. `created_at` is the Revision's: a gateway of another platform,
    which has the path by mistake, may know other code by the same name and number."""

    function: str
    revision: int
    created_at: float
    calls: int


class Ended(_Frame, tag=12, frozen=True, array_like=True, gc=False):
    """The end of an offered call; the body is its result."""

    reply: ResultReply


class Refused(_Frame, tag=13, frozen=True, array_like=True, gc=False):
    """No slot is free, or others wait already: it is for the queue. `has_begun`: its attempt was interrupted."""

    invocation: str
    has_begun: bool = False


class Queued(_Frame, tag=14, frozen=True, array_like=True, gc=False):
    """An attempt failed, and the runner has put the next one into the queue."""

    invocation: str


class Beat(_Frame, tag=15, frozen=True, array_like=True, gc=False):
    pass


GatewayFrame = Offer | Withdraw
RunnerFrame = Room | Ended | Refused | Queued | Beat
