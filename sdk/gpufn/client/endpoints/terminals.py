"""The terminal endpoint of `Client`."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from gpufn.client.http import Requests, trusted_certificates
from gpufn.client.responses import error_of
from gpufn_core.errors import GatewayUnavailable, GpufnError, ProtocolMismatch
from gpufn_core.protocol.streams import terminal
from gpufn_core.protocol.streams.terminal import Channel, Size, Start
from gpufn_core.protocol.streams.web_session import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

_OUTPUTS = (Channel.STDOUT, Channel.STDERR)


class RemoteCommand:
    """A command that runs in a worker. One thread reads `output`, others may send. `exit_code` is known at the end."""

    def __init__(self, connection: ClientConnection, url: str) -> None:
        self._connection = connection
        self._url = url
        self._is_closed = False
        self.exit_code: int | None = None

    def wait_until_started(self) -> None:
        """Wait until a worker has started the command. Raises GpufnError if none can."""
        channel, data = self._receive()
        if channel is not Channel.STATUS:
            raise ProtocolMismatch("the gateway sent output before the command had started")
        self._read_status(data)

    def output(self) -> Iterator[tuple[Channel, bytes]]:
        """Yield the output, until the command has ended. Raises GpufnError if it was interrupted."""
        while self.exit_code is None:
            channel, data = self._receive()
            if channel is Channel.STATUS:
                self._read_status(data)
            elif channel in _OUTPUTS:
                yield channel, data

    def send_input(self, data: bytes) -> None:
        self._send(Channel.STDIN, data)

    def end_input(self) -> None:
        """End the standard input of a command without a terminal."""
        self._send(Channel.END, bytes([Channel.STDIN]))

    def resize(self, size: Size) -> None:
        self._send(Channel.RESIZE, msgspec.json.encode(size))

    def close(self) -> None:
        """Close the connection. A command that still runs receives SIGHUP."""
        self._is_closed = True
        self._connection.close()

    def _send(self, channel: Channel, data: bytes) -> None:
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415

        with contextlib.suppress(ConnectionClosed):  # the reader learns why
            self._connection.send(bytes([channel]) + data)

    def _receive(self) -> tuple[Channel, bytes]:
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415

        try:
            message = self._connection.recv()
        except ConnectionClosed as error:
            if self._is_closed:
                raise GpufnError("the connection was closed, so the command was ended") from None
            raise GatewayUnavailable(
                f"the connection to the gateway at {self._url} broke, so the command was ended: {error}"
            ) from None
        if isinstance(message, str) or not message or message[0] not in tuple(Channel):
            raise ProtocolMismatch("the gateway sent a message that this release of gpufn does not know")
        return Channel(message[0]), message[1:]

    def _read_status(self, data: bytes) -> None:
        try:
            status = terminal.decode_status(data)
        except msgspec.MsgspecError as error:
            raise ProtocolMismatch(f"cannot decode the status of the command: {error}") from None
        if status.problem is not None:
            raise error_of(int(status.problem.get("status", 500)), {}, msgspec.json.encode(status.problem))
        self.exit_code = status.exit_code


class TerminalRequests(Requests):
    """The terminal endpoint."""

    @contextlib.contextmanager
    def exec(self, name: str, start: Start) -> Iterator[RemoteCommand]:
        """Run a command in its own worker, in the environment of a function. It ends with the context.

        Raises FunctionNotFound, Forbidden, GatewayUnavailable, and GpufnError if websockets is not installed.
        """
        try:
            from websockets.exceptions import InvalidHandshake, InvalidStatus  # noqa: PLC0415  (an extra)
            from websockets.sync.client import connect  # noqa: PLC0415
        except ImportError:
            raise GpufnError("this needs websockets: pip install 'gpufn[shell]'") from None
        request = self._authorized_request("GET", f"{self._function_url(name)}/exec")
        headers = {"authorization": value} if (value := request.headers.get("authorization")) else {}
        trust = trusted_certificates() if request.url.scheme == "https" else None
        try:
            connection = connect(
                str(request.url.copy_with(scheme="wss" if request.url.scheme == "https" else "ws")),
                additional_headers=headers,
                ssl=trust if isinstance(trust, ssl.SSLContext) else None,
                compression=None,
                max_size=MAX_MESSAGE_BYTES,
                proxy=None,
            )
        except InvalidStatus as error:
            response = error.response
            raise error_of(
                response.status_code, dict(response.headers.raw_items()), bytes(response.body or b"")
            ) from None
        except (OSError, InvalidHandshake) as error:
            reason = "is `gpufn up` running?" if isinstance(error, ConnectionRefusedError) else error
            raise GatewayUnavailable(f"no gateway answers at {self.url}: {reason}") from None
        with connection:
            connection.send(msgspec.json.encode(start).decode())
            yield RemoteCommand(connection, self.url)
