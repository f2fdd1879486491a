"""OpenAPI paths and schemas for calls of the deployed functions, from their declared signatures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.domain.revision import Revision
from gpufn_core.encoding import media
from gpufn_core.ids import CLIENT_ID_PATTERN
from gpufn_core.protocol.limits import LONGEST_TIMEOUT_S
from gpufn_core.spec.function_spec import MethodSpec, Packaging
from gpufn_core.spec.model_spec import DATATYPES
from gpufn_core.spec.priority import Priority
from gpufn_gateway.arguments.signature import Signature
from gpufn_gateway.maps import map_views
from gpufn_gateway.openapi import bounds, web_paths
from gpufn_gateway.openapi.request_bounds import MAX_IDEMPOTENCY_KEY_LENGTH, MAX_INDEX_DIGITS, MAX_WAIT_S
from gpufn_gateway.submitted import call_views

_PROBLEM = "#/components/schemas/Problem"
_STRING: Final = {"type": "string"}
_INTEGER: Final = {"type": "integer"}


def _object(required: Sequence[str], properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


_PROBLEM_SCHEMA = _object(
    ["type", "title", "status", "detail", "code", "retryable"],
    dict.fromkeys(["type", "title", "detail", "code", "field", "error_type", "traceback", "stage", "node"], _STRING)
    | {"status": _INTEGER, "retryable": {"type": "boolean"}, "retry_after_s": {"type": "number"}}
    | {"error_classes": {"type": "array", "items": _STRING}, "request_id": _STRING},
)
_JSON_OF_BYTES = {"type": "string", "contentEncoding": "base64"}  # a bytes result is sent raw, not as base64


def describe(serving: Iterable[Revision]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the paths and the schemas for calls of each serving revision."""
    schemas: dict[str, Any] = {"Problem": _PROBLEM_SCHEMA, "Submitted": _SUBMITTED, "Accepted": _ACCEPTED}
    paths: dict[str, Any] = dict(_SUBMITTED_CALLS)
    for revision in sorted(serving, key=lambda each: each.function):
        if revision.spec.web is not msgspec.UNSET:
            paths |= web_paths.describe(revision, revision.spec.web, PROBLEM_RESPONSE)
        if revision.spec.serves_app:
            continue
        for method in revision.spec.methods:
            name = f"{revision.function}.{method.name}" if method.name else revision.function
            paths[f"/v1/functions/{name}/invoke"] = {"post": _invoke(name, revision, method, schemas)}
            paths[f"/v1/functions/{name}/submit"] = {"post": _submit(name, method, schemas)}
            paths[f"/v1/functions/{name}/invocations/{{id}}"] = {"put": _put(name, method, schemas)}
            paths[f"/v1/functions/{name}/maps/{{id}}/items/{{first}}"] = {"put": _map(name)}
        if revision.spec.entry.packaging is Packaging.MODEL:
            schemas |= _INFERENCE_SCHEMAS
            paths[f"/v2/models/{revision.function}/infer"] = {"post": _infer(revision.function)}
    return paths, schemas


def _header(name: str, description: str, kind: str = "string", **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": description, "schema": {"type": kind, **schema}}


_ID: dict[str, Any] = {"name": "id", "in": "path", "required": True, "schema": _STRING}
_CLIENT_ID: dict[str, Any] = {
    **_ID,
    "description": "A ULID",
    "schema": {"type": "string", "pattern": CLIENT_ID_PATTERN},
}
_IDEMPOTENCY_KEY = _header(
    "Idempotency-Key", "Requests with the same key are one call", minLength=1, maxLength=MAX_IDEMPOTENCY_KEY_LENGTH
)
_LAST_EVENT = _header(
    "Last-Event-ID", "The last item that was received: a stream with an Idempotency-Key continues after it"
)
_WEBHOOK = _header("X-Gpufn-Webhook", "The URL that receives the outcome of the call", **bounds.WEBHOOK)
_CALL_HEADERS = (
    _header(
        "X-Gpufn-Timeout",
        "End the call if it has not ended after this many seconds",
        "number",
        exclusiveMinimum=0,
        maximum=LONGEST_TIMEOUT_S,
    ),
    # Its bounds depend on the time of the request, which a schema cannot express.
    _header(
        "X-Gpufn-Deadline",
        "End the call if it has not ended at this time, in unix seconds, at most "
        f"{LONGEST_TIMEOUT_S / 86_400:g} days from now",
        "number",
        exclusiveMinimum=0,
    ),
    _header(
        "X-Gpufn-Priority", "Priority of the call, instead of the function's", enum=[value.value for value in Priority]
    ),
    _header("traceparent", "W3C Trace Context"),
    _header("tracestate", "W3C Trace Context; passed on with the traceparent"),
)
_INDEX: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 10**MAX_INDEX_DIGITS - 1}
_WAIT: dict[str, Any] = {
    "name": "wait",
    "in": "query",
    "description": "Seconds to wait for the call to end",
    "schema": {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S},
}


def _call_operation(
    operation_id: str, summary: str, responses_by_status: Mapping[str, str], *parameters: dict[str, Any]
) -> dict[str, Any]:
    responses: dict[str, Any] = {code: {"description": text} for code, text in responses_by_status.items()}
    return {
        "operationId": operation_id,
        "summary": summary,
        "tags": ["calls"],
        "parameters": [_ID, *parameters],
        "responses": responses | {"default": PROBLEM_RESPONSE},
    }


PROBLEM_RESPONSE: dict[str, Any] = {
    "description": "A problem",
    "content": {media.PROBLEM: {"schema": {"$ref": _PROBLEM}}},
}
_STATUS: Final = {"200": "Its status"}
_SUBMITTED_CALLS: dict[str, Any] = {
    "/v1/invocations/{id}": {
        "get": _call_operation("status", "Show the status of a submitted call, and why it waits", _STATUS),
        "delete": _call_operation("cancel", "Cancel a submitted call, queued or running", _STATUS),
    },
    "/v1/invocations/{id}/result": {
        "get": _call_operation(
            "result",
            "Read the result of a submitted call",
            {"200": "The result", "202": "The call has not ended"},
            _WAIT,
        )
    },
    "/v1/invocations/{id}/events": {
        "get": _call_operation(
            "events",
            "Follow a submitted call with server-sent events",
            {"200": "Events", "204": "There are no more events"},
            _header("Last-Event-ID", "The last event that was received"),
        )
    },
}


def _links(names: Iterable[str]) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(names, _STRING)}


_SUBMITTED = _object(
    ["id", "state", "links"],
    {
        "id": _STRING,
        "state": {"enum": [value.value for value in InvocationState]},
        "links": _links(call_views.links("")),
    },
)
_ACCEPTED = _object(
    ["id", "accepted", "state", "links"],
    {
        "id": _STRING,
        "accepted": _INTEGER,
        "state": {"enum": ["open", "running", "ended", "cancelled"]},
        "links": _links(map_views.links("")),
    },
)


def _responses(status: str, description: str, schema: str) -> dict[str, Any]:
    content = {media.JSON: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {status: {"description": description, "content": content}, "default": PROBLEM_RESPONSE}


def _invoke(name: str, revision: Revision, method: MethodSpec, schemas: dict[str, Any]) -> dict[str, Any]:
    returns = _hoist(method.returns, f"{name}.returns", schemas)
    content: dict[str, Any] = {media.JSON: {"schema": returns}}
    if returns == _JSON_OF_BYTES:
        content = {media.BYTES: {"schema": {}}}
    parameters = [*_CALL_HEADERS, _IDEMPOTENCY_KEY, *_query(name, method, schemas)]
    if method.kind.streams:
        content[media.EVENTS] = {"schema": _STRING}
        parameters.append(_LAST_EVENT)
    return {
        "operationId": f"invoke {name}",
        "summary": (method.doc.strip().splitlines() or [name])[0],
        "description": method.doc,
        "tags": [revision.function],
        "parameters": parameters,
        "requestBody": _body(name, method, schemas),
        "responses": {"200": {"description": "The result", "content": content}, "default": PROBLEM_RESPONSE},
    }


def _submit(name: str, method: MethodSpec, schemas: dict[str, Any]) -> dict[str, Any]:
    return {
        "operationId": f"submit {name}",
        "summary": f"Queue a call of {name} and fetch its result later",
        "tags": [name.partition(".")[0]],
        "parameters": [*_CALL_HEADERS, _WEBHOOK, _IDEMPOTENCY_KEY, *_query(name, method, schemas)],
        "requestBody": _body(name, method, schemas),
        "responses": _responses("202", "Queued", "Submitted"),
    }


def _put(name: str, method: MethodSpec, schemas: dict[str, Any]) -> dict[str, Any]:
    return _submit(name, method, schemas) | {
        "operationId": f"put {name}",
        "summary": f"Queue a call of {name} under your own id; a repeat is the same call",
        # No Idempotency-Key: the id takes its place.
        "parameters": [_CLIENT_ID, *_CALL_HEADERS, _WEBHOOK, *_query(name, method, schemas)],
    }


def _map(name: str) -> dict[str, Any]:
    return {
        "operationId": f"map {name}",
        "summary": f"Submit items of a map of {name}: one line per item, with the arguments of its call",
        "tags": [name.partition(".")[0]],
        "parameters": [
            _CLIENT_ID,
            {"name": "first", "in": "path", "required": True, "schema": _INDEX},
            {"name": "last", "in": "query", "schema": bounds.FLAG},
            *_CALL_HEADERS,
            _WEBHOOK,
        ],
        # Without a body there are no items, but `last` still applies.
        "requestBody": {"content": {media.LINES: {"schema": _STRING}}},
        "responses": _responses("202", "All items were accepted", "Accepted"),
    }


# Open Inference Protocol. Its binary form appends the bytes of the tensors to this JSON.
_TENSOR = _object(
    ["name", "shape", "datatype"],
    {
        "name": _STRING,
        "shape": {"type": "array", "items": _INTEGER},
        "datatype": {"enum": list(DATATYPES)},
        "parameters": {"type": "object"},
        "data": {"type": "array"},
    },
)
_TENSORS: dict[str, Any] = {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}}
_REQUESTED_OUTPUTS: dict[str, Any] = {"type": "array", "items": {"type": "object", "required": ["name"]}}
_INFERENCE_SCHEMAS: dict[str, Any] = {
    "Tensor": _TENSOR,
    "InferenceRequest": _object(
        ["inputs"], {"id": _STRING, "parameters": {"type": "object"}, "inputs": _TENSORS, "outputs": _REQUESTED_OUTPUTS}
    ),
    "InferenceResponse": _object(
        ["model_name", "outputs"], {"model_name": _STRING, "model_version": _STRING, "id": _STRING, "outputs": _TENSORS}
    ),
    "InferenceError": _object(["error"], {"error": _STRING}),
}


def _infer(name: str) -> dict[str, Any]:
    def content(schema: str) -> dict[str, Any]:
        return {media.JSON: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}

    return {
        "operationId": f"infer {name}",
        "summary": f"Run inference with {name}, in the Open Inference Protocol",
        "tags": [name],
        "requestBody": {"required": True, "content": content("InferenceRequest")},
        "responses": {
            "200": {"description": "The outputs", "content": content("InferenceResponse")},
            "default": {"description": "An error", "content": content("InferenceError")},
        },
    }


def _query(name: str, method: MethodSpec, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the query parameters beside a raw body. They are optional, because a JSON body has all arguments."""
    if method.raw_parameter is None:
        return []
    parameters = _hoist(method.parameters, f"{name}.arguments", schemas)
    return [
        {"name": parameter, "in": "query", "description": "Only with a body of raw bytes", "schema": schema}
        for parameter, schema in parameters.get("properties", {}).items()
        if parameter != method.raw_parameter
    ]


def _body(name: str, method: MethodSpec, schemas: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {media.JSON: {"schema": _hoist(method.parameters, f"{name}.arguments", schemas)}}
    if method.raw_parameter:
        content[media.BYTES] = {"schema": {}}
        content[media.FORM] = {"schema": _form(content[media.JSON]["schema"], method)}
    return {"required": bool(method.parameters.get("required")), "content": content}


def _form(arguments: Mapping[str, Any], method: MethodSpec) -> dict[str, Any]:
    """Return the schema of the arguments as a form, where bytes are raw parts."""
    binary = {"type": "string", "contentMediaType": media.BYTES}
    properties = arguments.get("properties", {}) | dict.fromkeys(Signature.of(method).bytes_names, binary)
    return {**arguments, "properties": properties}


def _hoist(schema: Mapping[str, Any], prefix: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its `$defs` moved to the document's components, and its `$ref`s adjusted."""
    for name, definition in (schema.get("$defs") or {}).items():
        schemas[f"{prefix}.{name}"] = _with_refs(definition, prefix)
    hoisted: dict[str, Any] = _with_refs({key: value for key, value in schema.items() if key != "$defs"}, prefix)
    return hoisted


def _with_refs(node: Any, prefix: str) -> Any:
    if isinstance(node, Mapping):
        return {
            key: value.replace("#/$defs/", f"#/components/schemas/{prefix}.", 1)
            if key == "$ref" and isinstance(value, str)
            else _with_refs(value, prefix)
            for key, value in node.items()
        }
    return [_with_refs(item, prefix) for item in node] if isinstance(node, list) else node
