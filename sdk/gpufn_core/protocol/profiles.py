"""Requests for a profile of a worker: of gateways to agents for the CPU, and to runners for profiles that workers
record themselves: memory, and the GPU.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from gpufn_core.errors import ErrorInfo

LONGEST_PROFILE_S: Final = 60.0
RATE: Final = 100  # samples per second
LONGEST_GPU_PROFILE_S: Final = 10.0  # torch keeps each event in the memory of the worker
LONGEST_WAIT_S: Final = 300.0  # for a slow call
GPU_EXTRA_S: Final = 60.0  # for torch to start its profiler and to write the trace
MAX_TRACE_BYTES: Final = 7 << 20  # a GPU trace, compressed: it is one message
MAX_STACKS_BYTES: Final = 512 << 10  # per reply; the lightest stacks are counted together


class ProfileKind(enum.StrEnum):
    CPU = "cpu"
    MEMORY = "memory"
    GPU = "gpu"


class ProfileRequest(msgspec.Struct, frozen=True):
    """`idle`: also sample threads that wait; only of the CPU."""

    worker: str
    seconds: float
    idle: bool = False
    kind: ProfileKind = ProfileKind.CPU


class ProfileReply(msgspec.Struct, frozen=True):
    """`stacks` are folded: a line per stack, with its frames from the outermost one, and its number of samples or
    bytes. `trace` is the trace of a GPU instead: Chrome's JSON, compressed by gzip."""

    stacks: str = ""
    trace: bytes = b""
    error: ErrorInfo | None = None
