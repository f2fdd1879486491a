"""Requests for a profile of a worker: of gateways to agents for the CPU, and to runners for memory."""

from __future__ import annotations

from typing import Final

import msgspec

from gpufn_core.errors import ErrorInfo

LONGEST_PROFILE_S: Final = 60.0
RATE: Final = 100  # samples per second
MAX_STACKS_BYTES: Final = 512 << 10  # of a reply; the lightest stacks are counted together


class ProfileRequest(msgspec.Struct, frozen=True):
    """`idle`: also sample threads that wait; only of the CPU."""

    worker: str
    seconds: float
    idle: bool = False


class ProfileReply(msgspec.Struct, frozen=True):
    """`stacks` are folded: a line per stack, with its frames from the outermost one, and its number of samples or
    bytes."""

    stacks: str = ""
    error: ErrorInfo | None = None
