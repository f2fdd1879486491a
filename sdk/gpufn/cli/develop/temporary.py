"""Temporary functions: deployed with a lease that this process renews, and deleted when it ends.

If this process is killed, nobody renews the lease, and the gateway deletes the functions after `LEASE_S`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gpufn.cli.terminal.command import connect
from gpufn.cli.terminal.output import say
from gpufn_core.domain.revision import Lease
from gpufn_core.errors import Conflict, FunctionNotFound, GpufnError
from gpufn_core.ids import new_ulid

if TYPE_CHECKING:
    from gpufn.client.client import Client
    from gpufn.deploy.deployables import Deployable

LEASE_S: Final = 30.0
_RENEW_S: Final = 8.0


def development_version(deployable: Deployable) -> Deployable:
    """Return a function without its schedule and without workers that wait for calls: nobody asked for those yet."""
    spec = deployable.spec
    scaling = msgspec.structs.replace(spec.scaling, min_workers=0, buffer_workers=0)
    return deployable._replace(spec=msgspec.structs.replace(spec, scaling=scaling, schedule=None))


class Temporary:
    """The temporary functions of this process. `lost` says why some are not its own any more, or is "". `gone` has
    those that expired during an outage."""

    def __init__(self, client: Client, lease_id: str = "") -> None:
        self._client = client
        self.lease = Lease(lease_id or new_ulid(), LEASE_S)
        self.lost = ""
        self.gone: set[str] = set()
        self._names: dict[str, bool] = {}  # whether it was deployed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def add(self, name: str) -> None:
        """Add a function before it is deployed: an interrupted deploy may have taken place."""
        self._names.setdefault(name, False)

    def on_deployed(self, name: str) -> None:
        self._names[name] = True
        self.gone.discard(name)

    @property
    def names(self) -> list[str]:
        return list(self._names)

    def remove(self, name: str) -> None:
        """Delete one function, unless it is under another lease now."""
        with contextlib.suppress(FunctionNotFound):
            try:
                self._client.delete(name, lease=self.lease.id)
            except Conflict as error:
                if error.retryable:
                    raise
        self._names.pop(name, None)

    def close(self) -> None:
        """Delete all functions. A function that cannot be deleted now disappears when its lease expires."""
        self._stop.set()
        for name in self.names:
            try:
                self.remove(name)
            except GpufnError as error:
                if self._names[name]:
                    say(f"gpufn: {name} disappears within {LEASE_S:g} s: it could not be deleted: {error}", err=True)

    def _renew(self) -> None:
        if self._stop.wait(_RENEW_S):  # most runs are shorter: they need no second client
            return
        with connect() as client:
            while not self._stop.is_set():
                for name in self.names:
                    try:
                        client.renew(name, self.lease)
                    except FunctionNotFound:
                        if self._names.get(name):
                            self.gone.add(name)
                    except Conflict as error:
                        if not error.retryable:
                            self._names.pop(name, None)
                            self.lost = error.message
                    except GpufnError:  # the next round tries again
                        break
                self._stop.wait(_RENEW_S)


@contextlib.contextmanager
def temporary(client: Client, lease_id: str = "") -> Iterator[Temporary]:
    """Delete the functions at the end, also when this process is interrupted, terminated or loses its terminal."""
    with _ends_as_interrupt(), contextlib.closing(Temporary(client, lease_id)) as functions:
        yield functions


@contextlib.contextmanager
def _ends_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
