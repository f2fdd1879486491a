"""A function without code: its one model, tensors in and tensors out.

| body | answer |
|---|---|
| an Open Inference Protocol request (`media.TENSORS`) | the protocol's response, under the same type |
| JSON, msgpack or the SDK's encoding, a map from input to array | output name → array, as the caller accepts it |

To the executor it looks like any function: `bind` and `by_name` read a body, `call` and `call_all` run it. Calls that
the executor gathered into a batch are joined by rows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from gpufn_core.encoding import media, values
from gpufn_core.encoding.msgspec_errors import json_fault
from gpufn_core.errors import InvalidInput, RequestError, UnsupportedMediaType
from gpufn_runtime.worker.engines import batching, oip
from gpufn_runtime.worker.engines.base import Arrays
from gpufn_runtime.worker.engines.batching import Fitted
from gpufn_runtime.worker.engines.session import Session
from gpufn_runtime.worker.engines.tensors import cast
from gpufn_runtime.worker.execute.error_report import Rejected


@dataclass(frozen=True)
class Asked:
    """One call: its inputs, and the request to answer in the protocol's form, if it came so."""

    fitted: Fitted
    request: oip.Request | None


class ModelFunction:
    """`name` and `revision` are what the protocol calls the model and its version."""

    def __init__(self, session: Session, name: str, revision: int) -> None:
        self._session = session
        self._name = name
        self._version = str(revision)
        self._inputs = {spec.name: spec for spec in session.inputs}

    @property
    def shares_runs(self) -> bool:
        """Else a batch would only make its calls wait for each other."""
        return self._session.manifest.batched

    # --- what the executor knows as parameters ------------------------------------------------------------------------

    def bind(self, content_type: str, body: bytes | memoryview) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of `call`. RequestError says what does not fit."""
        return [self._read(content_type, body)], {}

    def by_name(self, content_type: str, body: bytes | memoryview) -> dict[str, Any]:
        """One call's part of the arguments of `call_all`. RequestError says what does not fit."""
        return {"asked": self._read(content_type, body)}

    # --- what it knows as the function --------------------------------------------------------------------------------

    def call(self, asked: Asked) -> Any:
        """Raises Rejected where the model refuses the values of its inputs."""
        try:
            outputs = self._session.run(asked.fitted)
        except InvalidInput as error:
            raise Rejected(error) from error
        return self._answer(asked, outputs)

    def call_all(self, asked: list[Asked]) -> list[Any]:
        """The answer to each, in order."""
        if len(asked) == 1:
            return [self.call(asked[0])]
        answers: dict[int, Any] = {}
        waiting = deque(range(len(asked)))
        while waiting:
            group = self._session.rules.take(waiting.popleft(), waiting, lambda index: asked[index].fitted)
            calls = [asked[index].fitted for index in group]
            outputs = self._session.run(batching.join(calls))
            for index, own in zip(group, batching.split(outputs, calls), strict=True):
                answers[index] = self._answer(asked[index], own)
        return [answers[index] for index in range(len(asked))]

    # --- one call -----------------------------------------------------------------------------------------------------

    def _read(self, content_type: str, body: bytes | memoryview) -> Asked:
        try:
            return self._decoded(content_type, body)
        except RequestError:
            raise
        except Exception as error:  # nested a thousand levels deep, say
            raise InvalidInput(f"the input could not be read: {type(error).__qualname__}: {error}") from error

    def _decoded(self, content_type: str, body: bytes | memoryview) -> Asked:
        kind = media.media_type(content_type)
        if kind == media.TENSORS:
            request = oip.decode(content_type, body, self._session.inputs, self._session.outputs)
            return Asked(self._session.fit(request.inputs), request)
        given = _arguments(kind, content_type, body)
        arrays = {name: cast(self._inputs[name], value) for name, value in given.items() if name in self._inputs}
        return Asked(self._session.fit({**given, **arrays}), None)

    def _answer(self, asked: Asked, outputs: Arrays) -> Any:
        if asked.request is None:
            return outputs
        return values.Encoded(*oip.encode(asked.request, outputs, self._session.outputs, self._name, self._version))


def _arguments(kind: str, content_type: str, body: bytes | memoryview) -> dict[str, Any]:
    try:
        if kind == media.JSON:
            given = msgspec.json.decode(body or b"{}")
        elif kind == media.MSGPACK:
            given = msgspec.msgpack.decode(body or b"\x80")
        elif kind == media.NATIVE:
            args, given = values.decode_call(body)
            if args:
                raise InvalidInput("a model's inputs are given by name")
        else:
            accepted = f"{media.JSON}, {media.MSGPACK} or {media.TENSORS}"
            raise UnsupportedMediaType(f"{content_type!r} is not accepted: send {accepted}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the body is not valid {kind}: {json_fault(error, body)}") from None
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise InvalidInput("the body is a map from the model's inputs to arrays")
    return given
