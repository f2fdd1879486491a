"""The transport of a notebook: like that of other processes, and it shows why a call waits.

It warns of a function that was defined again in a cell and not deployed since.
"""

from __future__ import annotations

import warnings

from gpufn.call.transport_protocol import EncodedCall
from gpufn.client.http_transport import HttpTransport
from gpufn.declare.declarations import was_declared_again
from gpufn.notebook.waits import waits_shown
from gpufn_core.errors import DeployedCodeDiffers

_CALLER_LEVEL = 3  # stack level of the `f.remote(x)` line: above this method and the Remote


class NotebookTransport(HttpTransport):
    caller_level = HttpTransport.caller_level + 1

    def call(self, call: EncodedCall) -> tuple[str, bytes]:
        function = call.target.function
        if was_declared_again(function):
            warnings.warn(
                f"{function} was defined again after its deploy: calls run the deployed code. Deploy it once more",
                DeployedCodeDiffers,
                stacklevel=_CALLER_LEVEL,
            )
        with waits_shown(function, lambda: self.client.why(function).waiting):
            return super().call(call)

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
        with waits_shown(invocation, lambda: self.client.invocation(invocation).waiting):
            return super().result(invocation, timeout_s=timeout_s)
