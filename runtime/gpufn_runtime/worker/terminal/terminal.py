"""The session of a worker that runs a command: start it, pass its input and output on, report its exit code.

The command is the leader of a process session. If the client leaves, or its gateway is lost, the command receives
SIGHUP and then SIGKILL. All processes that it leaves behind end with the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from typing import Any, Final, NamedTuple

import msgspec

from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.streams import terminal, web_session
from gpufn_core.protocol.streams.terminal import BY_SIGNAL, Channel, Start, Status
from gpufn_core.protocol.streams.web_session import Close, Disconnect, MessagePart
from gpufn_runtime.worker.terminal import child
from gpufn_runtime.worker.terminal.streams import Reader, Writer, set_size
from gpufn_runtime.worker.web.session import Session

_HANG_UP_S: Final = 5.0  # from SIGHUP to SIGKILL
_CHECK_S: Final = 2.0
_encode = msgspec.json.Encoder().encode


class Starts:
    """Reads the start of a terminal. A call of its function is refused."""

    def __init__(self, function: str) -> None:
        self._function = function

    def bind(self, content_type: str, body: bytes | memoryview) -> tuple[list[Any], dict[str, Any]]:
        if content_type != terminal.CONTENT_TYPE:
            raise InvalidInput(f"this worker runs a terminal of {self._function}, and no calls")
        return list(terminal.unpack_start(bytes(body))), {}

    def by_name(self, content_type: str, body: bytes | memoryview) -> dict[str, Any]:
        start, first = self.bind(content_type, body)[0]
        return {"start": start, "body": first}


class Terminal:
    def __init__(self, worker: str) -> None:
        self._worker = worker

    async def serve(self, session: Session[Start]) -> None:
        """Run the command until it ends or its client leaves."""
        try:
            command = await _Command.start(session.request)
        except InvalidInput as error:
            problem = {"status": 422, "detail": error.message, "code": error.code}
            await _send(session, Channel.STATUS, _encode(Status(problem=problem)))
            return
        await _send(session, Channel.STATUS, _encode(Status(self._worker)))
        outputs: asyncio.Future[Any] = asyncio.gather(*(_send_output(session, *output) for output in command.outputs))
        leaves: asyncio.Future[Any] = asyncio.create_task(_take_input(session, command))
        lost: asyncio.Future[Any] = asyncio.create_task(_gateway_lost(session))
        ends: asyncio.Future[Any] = asyncio.create_task(command.process.wait())
        try:
            await asyncio.wait([ends, leaves, lost], return_when=asyncio.FIRST_COMPLETED)
            if ends.done():
                for _, reader in command.outputs:
                    reader.finish()
                await asyncio.wait([outputs, leaves, lost], return_when=asyncio.FIRST_COMPLETED)
            if leaves.done():
                leaves.result()  # raises if a part of the input was lost
        finally:
            tasks: list[asyncio.Future[Any]] = [outputs, leaves, lost]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await command.hang_up()
            await ends
        if not session.is_disconnected:
            code = ends.result()
            status = Status(exit_code=code if code >= 0 else BY_SIGNAL - code)
            await _send(session, Channel.STATUS, _encode(status))
            await session.send(Close(web_session.NORMAL_CLOSE))


class _Command(NamedTuple):
    """A running command. `tty` is the pseudo-terminal, or -1."""

    process: asyncio.subprocess.Process
    input: Writer
    outputs: list[tuple[Channel, Reader]]
    tty: int

    @classmethod
    async def start(cls, start: Start) -> _Command:
        """Raises InvalidInput if there is no pseudo-terminal."""
        if not start.tty:
            pairs = [os.pipe() for _ in range(3)]
            (stdin, write), (out, stdout), (error, stderr) = pairs
            process = await _run("pipes", start, stdin, stdout, stderr)
            return cls(process, Writer(write), [(Channel.STDOUT, Reader(out)), (Channel.STDERR, Reader(error))], -1)
        try:
            tty, inner = os.openpty()
        except OSError as failure:
            reason = failure.strerror or failure
            raise InvalidInput(
                f"the workers of this node have no pseudo-terminals ({reason}): run the command with --no-tty"
            ) from failure
        set_size(tty, start.size)
        process = await _run("tty", start, inner, inner, inner)
        return cls(process, Writer(os.dup(tty)), [(Channel.STDOUT, Reader(tty))], tty)

    async def hang_up(self) -> None:
        """End the command, if it still runs, and close its terminal."""
        self.input.close()
        self._signal(signal.SIGHUP)
        self._signal(signal.SIGCONT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HANG_UP_S):
                await self.process.wait()
        self._signal(signal.SIGKILL)
        for _, reader in self.outputs:
            reader.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):  # its process group has ended
            os.killpg(self.process.pid, number)


async def _run(kind: str, start: Start, stdin: int, stdout: int, stderr: int) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-IS",
            child.__file__,
            kind,
            *start.command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            env={**os.environ, "TERM": start.term} if start.tty else None,
        )
    finally:
        for fd in {stdin, stdout, stderr}:
            os.close(fd)


async def _send_output(session: Session[Start], channel: Channel, reader: Reader) -> None:
    async for part in reader.parts():
        await _send(session, channel, part)


async def _send(session: Session[Start], channel: Channel, data: bytes) -> None:
    await session.send(MessagePart(False, False), bytes([channel]) + data)


async def _take_input(session: Session[Start], command: _Command) -> None:
    """Pass the client's messages on until it leaves."""
    message = bytearray()
    while True:
        event, data = await session.receive()
        if isinstance(event, Disconnect):
            return
        message += data
        if not event.more:
            await _take(bytes(message), command)
            message.clear()


async def _take(message: bytes, command: _Command) -> None:
    channel, data = message[:1], message[1:]
    if channel == bytes([Channel.STDIN]):
        await command.input.write(data)
    elif channel == bytes([Channel.END]) and command.tty < 0:
        command.input.close()
    elif channel == bytes([Channel.RESIZE]) and command.tty >= 0:
        with contextlib.suppress(msgspec.ValidationError, msgspec.DecodeError):
            set_size(command.tty, terminal.decode_size(data))


async def _gateway_lost(session: Session[Start]) -> None:
    """Wait until the client leaves while its input waits for the command, or nothing arrives any more."""
    while True:
        if session.is_disconnected or time.monotonic() - session.heard_at > terminal.LOST_AFTER_S:
            return
        await asyncio.sleep(_CHECK_S)
