"""Shared bodies of the workers on this node: the runner moves them, so that each worker accesses only its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from gpufn_core.errors import ArtifactUnavailable, GpufnError, InvalidInput, ResultNotEncodable
from gpufn_core.protocol.limits import LARGE_BODY_BYTES
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_platform.shared_bodies.bodies import SharedBodies, SharedBodyWriter

_COPIED_BYTES = 1 << 20
_KEPT = "kept"  # the runner's own folder: bodies written by its workers, until they are stored
_MAX_LOCAL_CALLERS = 1000  # gateways return under new names after a restart
_CALLER = re.compile(r"[a-z0-9-]{1,40}")


class NodeSharedBodies:
    """Moves shared bodies between folders. `root` is Home.shared_bodies. This runner receives results of nested
    calls in the folder `own`."""

    def __init__(self, root: Path, own: str = "r-") -> None:
        self._root = root
        self.own = own
        self._local_callers: set[str] = set()  # cache of callers found on this host

    def reach(self, message: InvocationMessage) -> bool:
        """Return whether the caller is on this host and accepts large results by reference."""
        caller = message.shared_folder
        if caller not in self._local_callers and self._is_local(caller):
            if len(self._local_callers) >= _MAX_LOCAL_CALLERS:
                self._local_callers.clear()
            self._local_callers.add(caller)
        return caller in self._local_callers

    def hand_over_arguments(self, message: InvocationMessage, worker: str) -> str:
        """Hand a call's arguments to its worker. Returns the name in the worker's folder, or "" if there are none. The
        caller keeps its file until the call has ended, for a retry. Raises ArtifactUnavailable, CapacityError."""
        if not message.shared_body:
            return ""
        worker_folder = self._of(worker)
        worker_folder.make()
        return self._caller_folder(message).link_into(message.shared_body, worker_folder)

    def writer(self, worker: str) -> SharedBodyWriter:
        """Return a writer for a body that is fetched for a worker. Raises CapacityError."""
        return self._of(worker).writer()

    def accept(self, worker: str, shared_body: str) -> str:
        """Take a worker's arguments for a nested call. Returns the name in the runner's folder. Raises PayloadTooLarge,
        or InvalidInput if the worker's file is invalid."""
        try:
            return self._move(worker, shared_body, self._kept_folder)
        except ResultNotEncodable as error:
            raise InvalidInput(f"the arguments cannot be sent: {error.message}") from error

    def hand_over_result(self, shared_body: str, worker: str) -> str:
        """Hand a nested call's result from the runner's folder to the worker that made the call. Returns the name
        there. Raises ArtifactUnavailable, CapacityError."""
        worker_folder, own = self._of(worker), self._of(self.own)
        try:
            worker_folder.make()
            return own.link_into(shared_body, worker_folder)
        finally:
            own.remove(shared_body)

    def copy_writer(self) -> SharedBodyWriter:
        """Return a writer for a body that several workers will read. Raises CapacityError."""
        return self._kept_folder().writer()

    def hand_over_copy(self, shared_body: str, worker: str) -> str:
        """Copy a body of the runner's folder for a worker: a worker could write to a file that others read too. Returns
        the name in the worker's folder. Blocks. Raises CapacityError, OSError."""
        with self.kept_path(shared_body).open("rb") as source, self.writer(worker) as target:
            while part := source.read(_COPIED_BYTES):
                target.write(part)
            return target.keep()

    def drop_result(self, shared_body: str) -> None:
        """Remove a result that arrived after its nested call had ended."""
        self._of(self.own).remove(shared_body)

    def collect(self, message: InvocationMessage, worker: str, shared_body: str) -> str:
        """Hand a worker's result to its caller. Returns the name in the caller's folder. Raises ResultNotEncodable if
        the worker's file is invalid."""
        return self._move(worker, shared_body, lambda: self._caller_folder(message))

    def keep(self, worker: str, shared_body: str) -> str:
        """Take a worker's result of a submitted call, or for a caller on another host. Returns the name in the runner's
        folder. Raises like `collect`."""
        return self._move(worker, shared_body, self._kept_folder)

    def kept_path(self, shared_body: str) -> Path:
        """Return the path of a body in the runner's folder. The code that has stored it must unlink it."""
        return self._root / _KEPT / shared_body

    def _move(self, worker: str, shared_body: str, open_target: Callable[[], SharedBodies]) -> str:
        worker_folder = self._of(worker)
        try:
            target = open_target()
            name = worker_folder.link_into(shared_body, target)
            try:
                if (size := target.size(name)) > LARGE_BODY_BYTES:
                    raise ResultNotEncodable(
                        f"the body has {size:,} bytes, more than the {LARGE_BODY_BYTES:,} allowed for one call"
                    )
            except GpufnError:
                target.remove(name)
                raise
            return name
        except ResultNotEncodable:
            raise
        except GpufnError as error:
            raise ResultNotEncodable(error.message) from error
        finally:
            self.drop(worker, shared_body)

    def drop(self, worker: str, shared_body: str) -> None:
        """Remove a file that is not needed any longer from a worker's folder."""
        if shared_body:
            try:
                self._of(worker).remove(shared_body)
            except GpufnError:
                return  # the worker made that name up

    def forget(self, worker: str) -> None:
        """Remove the folder of a worker that has ended."""
        self._of(worker).remove_all()

    def keep_only(self, workers: set[str]) -> None:
        """Remove the folders of an earlier runner's workers. Called at startup."""
        for folder in self._root.glob("w-*"):
            if folder.name not in workers:
                SharedBodies(folder).remove_all()
        for folder in self._root.glob("r-*"):
            SharedBodies(folder).remove_all()
        self._of(_KEPT).remove_all()

    def open(self) -> None:
        """Create the runner's own folder, so that other runners of this host find it. Raises CapacityError."""
        self._of(self.own).make()

    def close(self) -> None:
        self._of(self.own).remove_all()

    def _of(self, worker: str) -> SharedBodies:
        return SharedBodies(self._root / worker)

    def _kept_folder(self) -> SharedBodies:
        folder = self._of(_KEPT)
        folder.make()
        return folder

    def _caller_folder(self, message: InvocationMessage) -> SharedBodies:
        if not self._is_local(message.shared_folder):
            raise ArtifactUnavailable("the caller of this call keeps its large bodies on another host")
        return SharedBodies(self._root / message.shared_folder)

    def _is_local(self, caller: str) -> bool:
        return _CALLER.fullmatch(caller) is not None and (self._root / caller).is_dir()
