"""The lines of a batch: requests as calls, and calls as lines of its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.encoding.msgspec_errors import describe_json_error
from gpufn_core.errors import FunctionRaised, GpufnError, InvalidInput, PayloadTooLarge
from gpufn_core.protocol.records import CallRecord
from gpufn_core.spec.function_spec import Serves
from gpufn_core.spec.units import format_bytes
from gpufn_gateway import problems
from gpufn_gateway.protocols.openai import bodies, responses
from gpufn_gateway.protocols.openai.errors import error_object

MAX_LINES: Final = 1000
MAX_TEXT_CHARS: Final = 512  # per custom_id, model and value of the metadata, which are stored with the batch


class BatchCall(msgspec.Struct, frozen=True, array_like=True):
    """A line of a batch, as a submitted call."""

    custom_id: str
    model: str
    is_base64: bool = False
    call: str = ""


class Endpoint(NamedTuple):
    """An API that a batch can call: the arguments for a request, and the body of a response."""

    serves: Serves
    arguments: Callable[[dict[str, Any]], bytes]
    body: Callable[[Any, BatchCall], dict[str, Any]]


class Line(NamedTuple):
    custom_id: str
    fields: dict[str, Any]


class _Request(msgspec.Struct):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT_CHARS)]
    method: str
    url: str
    body: dict[str, Any]


ENDPOINTS: Final[dict[str, Endpoint]] = {
    "/v1/chat/completions": Endpoint(
        Serves.OPENAI_CHAT,
        bodies.arguments,
        lambda result, call: bodies.completion(bodies.message(result), call.model),
    ),
    "/v1/responses": Endpoint(
        Serves.OPENAI_CHAT,
        lambda fields: bodies.arguments(responses.messages(fields), bodies.RESPONSES_OWN),
        lambda result, call: responses.response({"model": call.model}, bodies.message(result)),
    ),
    "/v1/embeddings": Endpoint(
        Serves.OPENAI_EMBEDDINGS,
        lambda fields: bodies.arguments(bodies.embedding_fields(fields)),
        lambda result, call: bodies.embeddings(result, call.model, is_base64=call.is_base64),
    ),
}


def read(data: bytes, url: str) -> list[Line]:
    """Parse the input file of a batch for the API at `url`. Raises InvalidInput with the number of the line."""
    rows = [row for row in data.split(b"\n") if row.strip()]
    if not 0 < len(rows) <= MAX_LINES:
        raise InvalidInput(f"a batch has 1 to {MAX_LINES:,} lines, not {len(rows):,}", field="input_file_id")
    lines = [_line(number, row, url) for number, row in enumerate(rows, 1)]
    if len({line.custom_id for line in lines}) < len(lines):
        raise InvalidInput("two lines of the batch have the same custom_id", field="input_file_id")
    return lines


def _line(number: int, row: bytes, url: str) -> Line:
    try:
        request = msgspec.json.decode(row, type=_Request)
        fields = bodies.check(request.body)
    except msgspec.ValidationError as error:
        raise at_line(number, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise at_line(number, f"not valid JSON: {describe_json_error(error, row)}") from None
    except InvalidInput as error:
        raise at_line(number, error.message) from None
    if (request.method, request.url) != ("POST", url):
        raise at_line(number, f"the request must be POST {url}")
    if len(fields["model"]) > MAX_TEXT_CHARS:
        raise at_line(number, f"the name of a model has at most {MAX_TEXT_CHARS} characters")
    if fields.get("stream"):
        raise at_line(number, "a batch cannot stream")
    return Line(request.custom_id, fields)


def at_line(number: int, message: str) -> InvalidInput:
    return InvalidInput(f"line {number}: {message}", field="input_file_id")


def ended_line(call: BatchCall, record: CallRecord | None, result: bytes | None, endpoint: Endpoint) -> dict[str, Any]:
    """Return the line for a call that has ended. `record` is None if it is no longer kept."""
    try:
        if record is not None and result is not None:
            status, body = 200, endpoint.body(msgspec.json.decode(result), call)
        else:
            state, error = (InvocationState.EXPIRED, None) if record is None else (record.state, record.error)
            status, body = _failed(problems.from_state(state, error))
    except FunctionRaised as error:  # a result that does not fit the API
        status, body = _failed(problems.from_info(error.info()))
    return _line_of(call, status, body)


def _line_of(call: BatchCall, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": call.call, "body": body}
    return {"id": f"batch_req_{call.call}", "custom_id": call.custom_id, "response": response, "error": None}


def refused_line(call: BatchCall, error: GpufnError) -> dict[str, Any]:
    """Return the line for a call whose result cannot be in the file."""
    status, body = _failed(problems.from_info(error.info()))
    return _line_of(call, status, body)


def _failed(problem: problems.Problem) -> tuple[int, dict[str, Any]]:
    return problem.status, {"error": error_object(problem)}


class ResultFiles:
    """The contents of the two files of a batch. A result beyond `limit_bytes` becomes an error."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.output = bytearray()
        self.errors = bytearray()
        self.completed = 0
        self.failed = 0

    def add(self, call: BatchCall, line: dict[str, Any]) -> None:
        row = msgspec.json.encode(line) + b"\n"
        if line["response"]["status_code"] == 200:
            if len(self.output) + len(row) <= self._limit_bytes:
                self.output += row
                self.completed += 1
                return
            error = PayloadTooLarge(
                f"The results of the batch exceed {format_bytes(self._limit_bytes)}. Read this one at "
                f"/v1/invocations/{call.call}/result."
            )
            row = msgspec.json.encode(refused_line(call, error)) + b"\n"
        self.errors += row
        self.failed += 1
