"""The transport of a notebook: like that of other processes, and it shows why a call waits."""

from __future__ import annotations

from gpufn.call.transport_protocol import EncodedCall
from gpufn.client.http_transport import HttpTransport
from gpufn.notebook.waits import waits_shown


class NotebookTransport(HttpTransport):
    caller_level = HttpTransport.caller_level + 1

    def call(self, call: EncodedCall) -> tuple[str, bytes]:
        function = call.target.function
        with waits_shown(function, lambda: self.client.why(function).waiting):
            return super().call(call)

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
        with waits_shown(invocation, lambda: self.client.invocation(invocation).waiting):
            return super().result(invocation, timeout_s=timeout_s)
