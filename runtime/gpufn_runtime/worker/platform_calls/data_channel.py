"""Operations of user code on volumes, dicts, queues and stored values, over the worker's socket."""

from __future__ import annotations

from gpufn_core.protocol import codec
from gpufn_core.protocol.data import Operation
from gpufn_core.protocol.frames import Verb
from gpufn_runtime.worker.platform_calls.pending_requests import PendingRequests


class DataChannel:
    """The `gpufn.data.channel.Channel` of a worker."""

    def __init__(self, requests: PendingRequests) -> None:
        self._requests = requests

    def execute(self, operation: Operation, value: bytes = b"") -> tuple[str, bytes]:
        return self._requests.request(Verb.DATA, operation.name, codec.pack(operation, value))
