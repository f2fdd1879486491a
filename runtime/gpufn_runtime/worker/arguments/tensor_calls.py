"""Calls of the Open Inference Protocol to functions with code: inputs become arguments, the result becomes outputs.

Each parameter that is an array takes the input of its name. Other parameters take values from the parameters of the
request. The result may be an array or a number (the output `output`), a dict of them, or a tuple or list of them
(`output_0` and so on).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gpufn_core.encoding import media, values
from gpufn_core.spec.function_spec import CallKind
from gpufn_runtime.worker.arguments.parameters import Parameters
from gpufn_runtime.worker.engines import oip


class TensorCall(NamedTuple):
    """The arguments of a call, and the request that its response answers."""

    request: oip.FunctionRequest
    args: list[Any]
    kwargs: dict[str, Any]


class TensorFunction:
    """A function, with the interface that the executor expects: `bind` also reads requests of the protocol, and `call`
    returns the response of such a request. `inputs` has the datatype of each array, or "". `name` and `version` are
    those of the model in the protocol."""

    def __init__(
        self,
        call: Callable[..., Any],
        kind: CallKind,
        parameters: Parameters,
        inputs: Mapping[str, str],
        *,
        name: str,
        version: str,
    ) -> None:
        self._raw = call
        self._parameters = parameters
        self._inputs = inputs
        self._name = name
        self._version = version
        self.call = self._call_async if kind is CallKind.ASYNC else self._call

    def bind(self, content_type: str, body: bytes | memoryview) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of `call`. Raises a RequestError that names the mismatch."""
        if media.media_type(content_type) != media.TENSORS:
            return self._parameters.bind(content_type, body)
        request = oip.decode_for_function(content_type, body, self._inputs)
        # Copies, because user code may write to its arguments, and the body is read-only.
        arrays = {name: array.copy() for name, array in request.inputs.items()}
        return [TensorCall(request, *self._parameters.bind_values({**request.parameters, **arrays}))], {}

    def by_name(self, content_type: str, body: bytes | memoryview) -> dict[str, Any]:
        return self._parameters.by_name(content_type, body)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if not (args and type(args[0]) is TensorCall):
            return self._raw(*args, **kwargs)
        request, args_, kwargs_ = args[0]
        return self._response(request, self._raw(*args_, **kwargs_))

    async def _call_async(self, *args: Any, **kwargs: Any) -> Any:
        if not (args and type(args[0]) is TensorCall):
            return await self._raw(*args, **kwargs)
        request, args_, kwargs_ = args[0]
        return self._response(request, await self._raw(*args_, **kwargs_))

    def _response(self, request: oip.FunctionRequest, result: Any) -> values.Encoded:
        return values.Encoded(*oip.encode_result(request, result, self._name, self._version))
