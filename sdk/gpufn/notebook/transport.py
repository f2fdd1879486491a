"""The transport of a notebook: like the transport of other processes, but it shows why a call waits.

It warns of a function that was defined again in a cell and not deployed since.
"""

from __future__ import annotations

import contextlib
import warnings

from gpufn.call.transport_protocol import EncodedCall
from gpufn.client.http_transport import HttpTransport
from gpufn.client.wait_reports import Subject
from gpufn.declare.declarations import was_declared_again
from gpufn.notebook.waits import waits_shown
from gpufn_core.errors import CapacityError, DeployedCodeDiffers, FunctionRaised, InvocationEnded, RequestError

_CALLER_LEVEL = 3  # stack level of the `f.remote(x)` line: above this method and the Remote

# A notebook shows each frame with its source: these are raised without the frames of the client.
_ABOUT_THE_CALL = (RequestError, FunctionRaised, CapacityError, InvocationEnded)


class NotebookTransport(HttpTransport):
    caller_level = HttpTransport.caller_level + 1

    def watching(self, subject: Subject) -> contextlib.AbstractContextManager[None]:
        if subject.kind == "map":  # its progress is below the cell already
            return contextlib.nullcontext()
        return waits_shown(subject.id, lambda: subject.query(self.client)[1])

    def call(self, call: EncodedCall) -> tuple[str, bytes]:
        function = call.target.function
        if was_declared_again(function):
            warnings.warn(
                f"{function} was defined again after its deploy: calls run the deployed code. Deploy it once more",
                DeployedCodeDiffers,
                stacklevel=_CALLER_LEVEL,
            )
        try:
            return super().call(call)
        except _ABOUT_THE_CALL as error:
            raise error.with_traceback(None) from error.__cause__

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
        try:
            return super().result(invocation, timeout_s=timeout_s)
        except _ABOUT_THE_CALL as error:
            raise error.with_traceback(None) from error.__cause__
