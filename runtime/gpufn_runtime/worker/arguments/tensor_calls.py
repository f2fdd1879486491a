"""Calls of the Open Inference Protocol to functions with code: inputs become arguments, the result becomes outputs.

Each parameter that is an array takes the input of its name. Other parameters take values from the parameters of the
request. The result may be an array or a number (the output `output`), a dict of them, or a tuple or list of them
(`output_0` and so on).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gpufn_core.encoding import media, values
from gpufn_core.errors import ResultNotEncodable
from gpufn_core.spec.function_spec import CallKind
from gpufn_runtime.worker.arguments.parameters import Parameters
from gpufn_runtime.worker.engines import oip


class TensorCall(NamedTuple):
    """The arguments of a call, and the request that its response answers."""

    request: oip.FunctionRequest
    args: list[Any]
    kwargs: dict[str, Any]


class BatchedCall(NamedTuple):
    """A call of a batch: its arguments by name, and the request that its response answers, if it is one of the
    protocol."""

    request: oip.FunctionRequest | None
    arguments: dict[str, Any]


class TensorFunction:
    """A function, with the interface that the executor expects: `bind` also reads requests of the protocol, and `call`
    returns the response of such a request. `inputs` has the datatype of each array, or "". `name` and `version` belong
    to the model in the protocol.

    If `batched`, `by_name` reads the calls, and `call` takes them as the list `calls`.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        kind: CallKind,
        parameters: Parameters,
        inputs: Mapping[str, str],
        *,
        name: str,
        version: str,
        batched: bool = False,
    ) -> None:
        self._raw = call
        self._parameters = parameters
        self._inputs = inputs
        self._name = name
        self._version = version
        is_async = kind is CallKind.ASYNC
        if batched:
            self.call: Callable[..., Any] = self._call_all_async if is_async else self._call_all
        else:
            self.call = self._call_async if is_async else self._call

    def bind(self, content_type: str, body: bytes | memoryview) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of `call`. Raises a RequestError that names the mismatch."""
        if media.media_type(content_type) != media.TENSORS:
            return self._parameters.bind(content_type, body)
        request = oip.decode_for_function(content_type, body, self._inputs)
        return [TensorCall(request, *self._parameters.bind_values(_arguments(request)))], {}

    def by_name(self, content_type: str, body: bytes | memoryview) -> dict[str, Any]:
        """Return one call of a batch. Raises a RequestError that names the mismatch."""
        if media.media_type(content_type) != media.TENSORS:
            return {"calls": BatchedCall(None, self._parameters.by_name(content_type, body))}
        request = oip.decode_for_function(content_type, body, self._inputs)
        return {"calls": BatchedCall(request, self._parameters.values_by_name(_arguments(request)))}

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

    def _call_all(self, calls: list[BatchedCall]) -> Any:
        return self._responses(calls, self._raw(**_lists(calls)))

    async def _call_all_async(self, calls: list[BatchedCall]) -> Any:
        return self._responses(calls, await self._raw(**_lists(calls)))

    def _responses(self, calls: list[BatchedCall], results: Any) -> Any:
        """Return the results of a batch, and responses for calls of the protocol. A result that is not a tensor is an
        error of its own call."""
        is_list = hasattr(results, "__len__") and not isinstance(results, (str, bytes, Mapping, set))
        if not is_list or len(results) != len(calls):
            return results  # `batch_runs` raises
        responses: list[Any] = []
        for call, result in zip(calls, results, strict=True):
            if call.request is None or isinstance(result, Exception):
                responses.append(result)
                continue
            try:
                responses.append(self._response(call.request, result))
            except ResultNotEncodable as error:
                responses.append(error)
        return responses

    def _response(self, request: oip.FunctionRequest, result: Any) -> values.Encoded:
        return values.Encoded(*oip.encode_result(request, result, self._name, self._version))


def _arguments(request: oip.FunctionRequest) -> dict[str, Any]:
    """Return the arguments of a request. Arrays are copies: user code may write to them, and the body is read-only."""
    return {**request.parameters, **{name: array.copy() for name, array in request.inputs.items()}}


def _lists(calls: list[BatchedCall]) -> dict[str, list[Any]]:
    """Return the arguments of a batch: for each parameter a list with one value per call."""
    return {name: [call.arguments[name] for call in calls] for name in calls[0].arguments}
