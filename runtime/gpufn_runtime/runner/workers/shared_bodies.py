"""Large bodies between callers of this host and its workers: the runner gives each worker what is its, and no more."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from gpufn_core.errors import ArtifactUnavailable, GpufnError, InvalidInput, ResultNotEncodable
from gpufn_core.protocol.limits import PARCEL_BYTES
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_platform.shared_bodies.bodies import Parcels, ParcelWriter

_KEPT = "kept"  # the runner's own folder: bodies that its workers wrote, until they are stored
_MOST_NEAR = 1000  # gateways come back under new names
_CALLER = re.compile(r"[a-z0-9-]{1,40}")


class NodeParcels:
    """`root` is Home.parcels; `own` the folder where this runner takes results of the calls that its functions make."""

    def __init__(self, root: Path, own: str = "r-") -> None:
        self._root = root
        self.own = own
        self._near: set[str] = set()  # callers that were found here: each call asks

    def reach(self, message: InvocationMessage) -> bool:
        """Whether its caller is on this host, and takes a large result by reference."""
        caller = message.parcels
        if caller not in self._near and self._is_here(caller):
            if len(self._near) >= _MOST_NEAR:
                self._near.clear()
            self._near.add(caller)
        return caller in self._near

    def give(self, message: InvocationMessage, worker: str) -> str:
        """The call's parcel for its worker: the name of it there, empty when there is none. The caller keeps its own
        until the call has ended, for it may run again. Raises ArtifactUnavailable, CapacityError."""
        if not message.parcel:
            return ""
        theirs = self._of(worker)
        theirs.make()
        return self._of_caller(message).hand_on(message.parcel, theirs)

    def writer(self, worker: str) -> ParcelWriter:
        """Of a body that is fetched for a worker. Raises CapacityError."""
        return self._of(worker).writer()

    def accept(self, worker: str, parcel: str) -> str:
        """A worker's arguments for a call: the name of the file among ours. Raises PayloadTooLarge, InvalidInput,
        whatever is wrong with what the worker claims."""
        try:
            return self._hand_on(worker, parcel, self._ours)
        except ResultNotEncodable as error:
            raise InvalidInput(f"the arguments cannot be sent: {error.message}") from error

    def give_result(self, parcel: str, worker: str) -> str:
        """A result in our own folder, for the worker whose call it answers: the name of it there. Raises
        ArtifactUnavailable, CapacityError."""
        theirs, own = self._of(worker), self._of(self.own)
        try:
            theirs.make()
            return own.hand_on(parcel, theirs)
        finally:
            own.remove(parcel)

    def drop_result(self, parcel: str) -> None:
        """A result in our own folder that came for a call that had ended."""
        self._of(self.own).remove(parcel)

    def collect(self, message: InvocationMessage, worker: str, parcel: str) -> str:
        """A worker's result for its caller: the name of it there. Raises ResultNotEncodable, whatever is wrong with
        what the worker claims."""
        return self._hand_on(worker, parcel, lambda: self._of_caller(message))

    def keep(self, worker: str, parcel: str) -> str:
        """A worker's result that nobody waits for, or somebody on another host: the name of it among ours. Raises as
        `collect`."""
        return self._hand_on(worker, parcel, self._ours)

    def kept(self, parcel: str) -> Path:
        """The file of a body that is ours now; whoever has stored it unlinks it."""
        return self._root / _KEPT / parcel

    def _hand_on(self, worker: str, parcel: str, to: Callable[[], Parcels]) -> str:
        theirs = self._of(worker)
        try:
            ours = to()
            name = theirs.hand_on(parcel, ours)
            try:
                if (size := ours.size(name)) > PARCEL_BYTES:
                    raise ResultNotEncodable(
                        f"the body takes {size:,} bytes, more than the {PARCEL_BYTES:,} of one call"
                    )
            except GpufnError:
                ours.remove(name)
                raise
            return name
        except ResultNotEncodable:
            raise
        except GpufnError as error:
            raise ResultNotEncodable(error.message) from error
        finally:
            self.drop(worker, parcel)

    def drop(self, worker: str, parcel: str) -> None:
        """A result that nobody wants."""
        if parcel:
            try:
                self._of(worker).remove(parcel)
            except GpufnError:
                return  # its worker made that name up

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        self._of(worker).remove_all()

    def keep_only(self, workers: set[str]) -> None:
        """At the start: remove what the workers of an earlier runner left."""
        for folder in self._root.glob("w-*"):
            if folder.name not in workers:
                Parcels(folder).remove_all()
        for folder in self._root.glob("r-*"):
            Parcels(folder).remove_all()
        self._of(_KEPT).remove_all()

    def open(self) -> None:
        """Make our own folder, so that runners of this host find it. Raises CapacityError."""
        self._of(self.own).make()

    def close(self) -> None:
        self._of(self.own).remove_all()

    def _of(self, worker: str) -> Parcels:
        return Parcels(self._root / worker)

    def _ours(self) -> Parcels:
        kept = self._of(_KEPT)
        kept.make()
        return kept

    def _of_caller(self, message: InvocationMessage) -> Parcels:
        if not self._is_here(message.parcels):
            raise ArtifactUnavailable("the caller of this call keeps its large bodies on another host")
        return Parcels(self._root / message.parcels)

    def _is_here(self, caller: str) -> bool:
        return _CALLER.fullmatch(caller) is not None and (self._root / caller).is_dir()
