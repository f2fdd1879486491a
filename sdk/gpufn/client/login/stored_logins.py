"""The logins of `gpufn login`: one file, private to its user, with an entry per gateway.

A token is renewed shortly before it expires, with the refresh token of the provider, as long as the provider accepts
that. Processes that share the file renew one after the other, since a provider may accept a refresh token only once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from gpufn_core.errors import GatewayUnavailable, GpufnError, Unauthorized
from gpufn_core.home import Home

_RENEWED_BEFORE_S: Final = 60.0
_RETRY_S: Final = 10.0  # after a failed renewal, while the token is still valid


class Login(msgspec.Struct, frozen=True, kw_only=True):
    """A token of a gateway, and how to get the next one. `expires_at` is in unix seconds of this machine's clock."""

    token: str
    expires_at: float
    name: str = ""
    issuer: str = ""
    client_id: str = ""
    client_secret: str = ""
    refresh_token: str = ""


class _File(msgspec.Struct):
    logins: dict[str, Login] = {}  # by the gateway's address


class Logins:
    """The stored logins of a user."""

    def __init__(self, home: Home | None = None) -> None:
        self._path = (home or Home.from_env()).logins_file

    def get(self, gateway: str) -> Login | None:
        return self._read().logins.get(gateway)

    def put(self, gateway: str, login: Login) -> None:
        """Store the login. Raises OSError."""
        with self.locked():
            self.replace(gateway, login)

    def remove(self, gateway: str) -> Login | None:
        """Remove and return the login; None if there is none. Raises OSError."""
        if self.get(gateway) is None:
            return None
        with self.locked():
            removed = self.get(gateway)
            self.replace(gateway, None)
        return removed

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other processes that change the logins."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600), "rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def replace(self, gateway: str, login: Login | None) -> None:
        """Write the file with another login, or without one. Hold `locked`."""
        file = self._read()
        file.logins.pop(gateway, None)
        if login is not None:
            file.logins[gateway] = login
        descriptor, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".logins-")  # mode 0600
        try:
            with open(descriptor, "wb") as new:
                new.write(msgspec.json.format(msgspec.json.encode(file)))
            Path(temporary).replace(self._path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _read(self) -> _File:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self._path.read_bytes(), type=_File)
        return _File()


class StoredToken:
    """The token of a login, renewed in time. `renew(login)` returns the next login."""

    def __init__(self, gateway: str, login: Login, logins: Logins, renew: Callable[[Login], Login]) -> None:
        self._gateway = gateway
        self._login = login
        self._logins = logins
        self._renew = renew
        self._retry_at = 0.0
        self._lock = threading.Lock()

    def get(self) -> str:
        """Return a token that is valid. Raises Unauthorized if the login has ended, and the errors of `renew`."""
        if not self._is_due(time.time()):
            return self._login.token
        with self._lock:
            if self._is_due(time.time()):
                self._update()
            return self._login.token

    def _is_due(self, now: float) -> bool:
        return now >= max(self._login.expires_at - _RENEWED_BEFORE_S, min(self._retry_at, self._login.expires_at))

    def _update(self) -> None:
        with self._logins.locked():
            stored = self._logins.get(self._gateway)
            if stored is None:
                raise Unauthorized("You have logged out: run `gpufn login`.")
            self._login = stored  # another process may have renewed it
            now = time.time()
            if not self._is_due(now):
                return
            try:
                if not stored.refresh_token:
                    raise Unauthorized("Your login has expired: run `gpufn login`.")
                self._login = self._renew(stored)
            except GpufnError as error:
                if now < stored.expires_at and isinstance(error, GatewayUnavailable | Unauthorized):
                    self._retry_at = now + _RETRY_S
                    return
                raise
            self._logins.replace(self._gateway, self._login)
