"""The receiving end of `gpufn_platform.process.watchdog`: detects processes that send no heartbeat for too long.

nats-server sends no heartbeats. It greets each client, so the watchdog connects to it instead. A server with TLS logs
an error for each connection without a handshake, so the watchdog completes one.
"""

from __future__ import annotations

import socket
import ssl
import struct
from typing import Final, Protocol

from gpufn_platform.process.watchdog import ALIVE

_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid of the sender, set by the kernel
_GREETING: Final = b"INFO "
_HANDSHAKE_S: Final = 0.5  # the supervisor waits meanwhile; a server on this machine needs 2 ms


class HeartbeatMonitor:
    """Detects processes that are silent for `limit_s`. Pure: `now` is in seconds of a monotonic clock.

    A process is watched from its first heartbeat on. If `over` was not called for long, because the machine or this
    process stood still, every process gets the full time again.

    >>> silence = HeartbeatMonitor(limit_s=60.0)
    >>> silence.received(7, now=0.0)
    >>> [silence.over(now) for now in (30.0, 60.0, 90.0)]
    [[], [7], []]
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._heard_at: dict[int, float] = {}  # by pid
        self._looked_at = 0.0

    def received(self, pid: int, now: float) -> None:
        self._heard_at[pid] = now

    def forget(self, pid: int) -> None:
        """Remove a process that has ended."""
        self._heard_at.pop(pid, None)

    def over(self, now: float) -> list[int]:
        """Return the pids over the limit, each once. Call this at least twice per limit."""
        if now - self._looked_at > self._limit_s / 2:
            self._heard_at = dict.fromkeys(self._heard_at, now)
        self._looked_at = now
        silent = [pid for pid, heard_at in self._heard_at.items() if now - heard_at >= self._limit_s]
        for pid in silent:
            del self._heard_at[pid]
        return silent


class _Greeter:
    """Periodic connections to a NATS server on this machine. `now` is monotonic, in seconds."""

    def __init__(self, port: int, every_s: float) -> None:
        self._port = port
        self._every_s = every_s
        self._connect_at = 0.0
        self._socket: socket.socket | None = None

    def has_greeted(self, now: float) -> bool:
        """Whether the server has greeted since the last call. Never blocks; one connection is open at a time."""
        if self._socket is None:
            if now < self._connect_at:
                return False
            self._connect_at = now + self._every_s
            self._socket = socket.socket()
            self._socket.setblocking(False)
            self._socket.connect_ex(("127.0.0.1", self._port))
        try:
            data = self._socket.recv(64)
        except BlockingIOError:
            return False
        except OSError:  # refused: the server has just ended
            data = b""
        self.close()
        return data.startswith(_GREETING)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


class _Prober(Protocol):
    def has_greeted(self, now: float) -> bool: ...
    def close(self) -> None: ...


class _TlsGreeter:
    """Like `_Greeter`, but for a server with TLS. Blocks for `_HANDSHAKE_S` per wait at most."""

    def __init__(self, host: str, port: int, every_s: float) -> None:
        self._address = host, port
        self._every_s = every_s
        self._connect_at = 0.0
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # it sends nothing that anyone could misuse
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE

    def has_greeted(self, now: float) -> bool:
        if now < self._connect_at:
            return False
        self._connect_at = now + self._every_s
        try:
            with socket.create_connection(self._address, timeout=_HANDSHAKE_S) as plain:
                while not (data := plain.recv(4096)).endswith(b"\n"):
                    if not data:
                        return False
                self._context.wrap_socket(plain).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        pass


class Watchdog:
    """A socket that receives heartbeats. Must be closed."""

    def __init__(self, limit_s: float) -> None:
        self._silence = HeartbeatMonitor(limit_s)
        self._limit_s = limit_s
        self._watched: set[int] = set()
        self._greeters: dict[int, _Prober] = {}  # by pid
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        self._socket.bind("")  # the kernel chooses an abstract name

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the watched processes. With it they also dump their stacks when they are aborted."""
        address = "@" + self._socket.getsockname()[1:].decode()
        limit_us = str(int(self._limit_s * 1e6))
        return {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": limit_us, "WATCHDOG_PID": "", "PYTHONFAULTHANDLER": "1"}

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def look_every_s(self) -> float:
        return self._limit_s / 4

    def look(self, now: float) -> list[int]:
        """Return the pids of hung processes, each once. `now` is monotonic."""
        for pid, greeter in self._greeters.items():
            if greeter.has_greeted(now):
                self._silence.received(pid, now)
        while True:
            try:
                message, rights, _, _ = self._socket.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return self._silence.over(now)
            for _, kind, data in rights:
                pid = _CREDENTIALS.unpack(data)[0] if kind == socket.SCM_CREDENTIALS else 0
                if pid in self._watched and message == ALIVE:
                    self._silence.received(pid, now)

    def watch(self, pid: int) -> None:
        """Accept heartbeats of a process that has started. Other senders are ignored."""
        self._watched.add(pid)

    def watch_nats(self, pid: int, port: int, now: float, *, tls_host: str = "") -> None:
        """Watch a nats-server that has started and listens: on 127.0.0.1, or on `tls_host` with TLS."""
        every_s = self.look_every_s
        self._greeters[pid] = _TlsGreeter(tls_host, port, every_s) if tls_host else _Greeter(port, every_s)
        self._silence.received(pid, now)

    def forget(self, pid: int) -> None:
        """Remove a process that has ended."""
        self._watched.discard(pid)
        self._silence.forget(pid)
        if greeter := self._greeters.pop(pid, None):
            greeter.close()

    def close(self) -> None:
        self._socket.close()
        for greeter in self._greeters.values():
            greeter.close()
