"""A terminal: a command in its own worker, connected to a client by a WebSocket. Pure.

The client's first message is a `Start`, a text in JSON. Each other message is binary: a byte for the channel, then its
data. The platform sends `Status` in JSON on the channel STATUS: first when the command starts, after which it takes
input, and last with the exit code or a problem. Then it closes the WebSocket. A binary message without a byte has no
meaning; a gateway sends some to a worker, to show that it is alive.

Between gateway and worker a terminal is a session (`web_session`), whose body is the packed `Start`.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import msgspec

from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.codec import Unpacker

CONTENT_TYPE: Final = "application/vnd.gpufn.terminal"
NOT_FOUND: Final = 127  # exit codes as in a shell
NOT_EXECUTABLE: Final = 126
BY_SIGNAL: Final = 128  # plus the number of the signal
ALIVE_EVERY_S: Final = 15.0  # a gateway sends an empty message
LOST_AFTER_S: Final = 60.0  # without any message the worker takes its gateway for lost
MAX_ARGUMENTS: Final = 1000
MAX_COMMAND_BYTES: Final = 64 << 10
_MAX_SIDE: Final = 10_000  # of a terminal, in characters


class Channel(enum.IntEnum):
    """The first byte of a message. The channels of Kubernetes' remote command protocol have the same meaning."""

    STDIN = 0
    STDOUT = 1  # also the output of a pseudo-terminal
    STDERR = 2
    STATUS = 3
    RESIZE = 4  # a Size in JSON
    END = 255  # no further input follows


class Size(msgspec.Struct, frozen=True):
    """The window of a terminal, in characters."""

    rows: int = 24
    columns: int = 80

    def __post_init__(self) -> None:
        if not (0 < self.rows <= _MAX_SIDE and 0 < self.columns <= _MAX_SIDE):
            raise ValueError(f"a window has 1 to {_MAX_SIDE} rows and columns")


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`command` is a program and its arguments; none means a shell. `tty`: with a pseudo-terminal of the type `term`;
    otherwise standard input, output and error are pipes."""

    command: tuple[str, ...] = ()
    tty: bool = False
    size: Size = Size()
    term: str = "xterm"

    def __post_init__(self) -> None:
        if len(self.command) > MAX_ARGUMENTS or sum(map(len, self.command)) > MAX_COMMAND_BYTES:
            raise ValueError(f"a command has at most {MAX_ARGUMENTS} arguments and {MAX_COMMAND_BYTES} characters")
        if any("\0" in part for part in (*self.command, self.term)) or self.command[:1] == ("",):
            raise ValueError("a command has a program, and no null characters")


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """The command has started in the worker `worker`, has ended with `exit_code`, or has failed with `problem`, an
    object as in RFC 9457."""

    worker: str = ""
    exit_code: int | None = None
    problem: dict[str, Any] | None = None


unpack_start: Unpacker[Start] = Unpacker(Start)
decode_size = msgspec.json.Decoder(Size).decode
decode_status = msgspec.json.Decoder(Status).decode
_decode_start = msgspec.json.Decoder(Start).decode


def parse_start(text: str) -> Start:
    """Decode the first message of a client. Raises InvalidInput."""
    try:
        return _decode_start(text)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise InvalidInput(f"the first message does not start a terminal: {error}") from None
