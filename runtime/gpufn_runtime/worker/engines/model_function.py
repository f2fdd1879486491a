"""A function without user code: its only model, with tensors as inputs and outputs.

| body | response |
|---|---|
| an Open Inference Protocol request (`media.TENSORS`) | the protocol's response, with the same type |
| JSON, msgpack or the SDK's encoding, a map from input to array | output name → array, in a type that the caller
accepts |

It has the interface that the executor expects of any function: `bind` and `by_name` decode a body, `call` and
`call_all` run it. Calls that the executor gathered into a batch are joined by rows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from gpufn_core.encoding import media, values
from gpufn_core.encoding.msgspec_errors import describe_json_error
from gpufn_core.errors import InvalidInput, RequestError, UnsupportedMediaType
from gpufn_runtime.worker.engines import batching, oip
from gpufn_runtime.worker.engines.base import Arrays
from gpufn_runtime.worker.engines.batching import Fitted
from gpufn_runtime.worker.engines.session import Session
from gpufn_runtime.worker.engines.tensors import cast
from gpufn_runtime.worker.execute.error_report import Rejected


@dataclass(frozen=True)
class ModelCall:
    """One call: its inputs, and the request if the response must have the protocol's form."""

    fitted: Fitted
    request: oip.Request | None


class ModelFunction:
    """The function of one model. `name` and `revision` are the model's name and version in the protocol."""

    def __init__(self, session: Session, name: str, revision: int) -> None:
        self._session = session
        self._name = name
        self._version = str(revision)
        self._inputs = {spec.name: spec for spec in session.inputs}

    @property
    def shares_runs(self) -> bool:
        """Whether calls can share a run. Otherwise a batch would only make its calls wait for each other."""
        return self._session.manifest.batched

    # --- the interface of Parameters ----------------------------------------------------------------------------------

    def bind(self, content_type: str, body: bytes | memoryview) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of `call`. Raises a RequestError that names the mismatch."""
        return [self._read(content_type, body)], {}

    def by_name(self, content_type: str, body: bytes | memoryview) -> dict[str, Any]:
        """Return one call's part of the arguments of `call_all`. Raises a RequestError that names the mismatch."""
        return {"calls": self._read(content_type, body)}

    # --- the interface of the function --------------------------------------------------------------------------------

    def call(self, model_call: ModelCall) -> Any:
        """Run one call. Raises Rejected if the model rejects the values of its inputs."""
        try:
            outputs = self._session.run(model_call.fitted)
        except InvalidInput as error:
            raise Rejected(error) from error
        return self._result(model_call, outputs)

    def call_all(self, calls: list[ModelCall]) -> list[Any]:
        """Run several calls; returns their results in order."""
        if len(calls) == 1:
            return [self.call(calls[0])]
        results: dict[int, Any] = {}
        waiting = deque(range(len(calls)))
        while waiting:
            group = self._session.rules.take(waiting.popleft(), waiting, lambda index: calls[index].fitted)
            fitted = [calls[index].fitted for index in group]
            outputs = self._session.run(batching.join(fitted))
            for index, call_outputs in zip(group, batching.split(outputs, fitted), strict=True):
                results[index] = self._result(calls[index], call_outputs)
        return [results[index] for index in range(len(calls))]

    # --- one call -----------------------------------------------------------------------------------------------------

    def _read(self, content_type: str, body: bytes | memoryview) -> ModelCall:
        try:
            return self._decode(content_type, body)
        except RequestError:
            raise
        except Exception as error:  # for example for thousands of nested levels
            raise InvalidInput(f"cannot read the input: {type(error).__qualname__}: {error}") from error

    def _decode(self, content_type: str, body: bytes | memoryview) -> ModelCall:
        kind = media.media_type(content_type)
        if kind == media.TENSORS:
            request = oip.decode(content_type, body, self._session.inputs, self._session.outputs)
            return ModelCall(self._session.rules.fit(request.inputs), request)
        arguments = _arguments(kind, content_type, body)
        arrays = {name: cast(self._inputs[name], value) for name, value in arguments.items() if name in self._inputs}
        return ModelCall(self._session.rules.fit({**arguments, **arrays}), None)

    def _result(self, model_call: ModelCall, outputs: Arrays) -> Any:
        if model_call.request is None:
            return outputs
        return values.Encoded(
            *oip.encode(model_call.request, outputs, self._session.outputs, self._name, self._version)
        )


def _arguments(kind: str, content_type: str, body: bytes | memoryview) -> dict[str, Any]:
    try:
        if kind == media.JSON:
            arguments = msgspec.json.decode(body or b"{}")
        elif kind == media.MSGPACK:
            arguments = msgspec.msgpack.decode(body or b"\x80")
        elif kind == media.NATIVE:
            args, arguments = values.decode_call(body)
            if args:
                raise InvalidInput(
                    "pass a model's inputs by name, as in remote(x=...); `gpufn models describe` shows the names"
                )
        else:
            accepted = f"{media.JSON}, {media.MSGPACK} or {media.TENSORS}"
            raise UnsupportedMediaType(f"{content_type!r} is not accepted: send {accepted}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the body is not valid {kind}: {describe_json_error(error, body)}") from None
    if not isinstance(arguments, dict) or not all(isinstance(name, str) for name in arguments):
        raise InvalidInput("the body must be a map from the model's inputs to arrays")
    return arguments
