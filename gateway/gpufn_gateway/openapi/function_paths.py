"""The calls of the deployed functions in OpenAPI: their signatures, as declared, by path. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.domain.revision import Revision
from gpufn_core.encoding import media
from gpufn_core.ids import ULID_PATTERN
from gpufn_core.protocol.limits import LONGEST_TIMEOUT_S
from gpufn_core.spec.function_spec import MethodSpec, Packaging
from gpufn_core.spec.model_spec import DATATYPES
from gpufn_core.spec.priority import Priority
from gpufn_gateway.arguments.signature import Signature
from gpufn_gateway.maps import map_views
from gpufn_gateway.openapi import bounds
from gpufn_gateway.openapi.request_bounds import LONGEST_IDEMPOTENCY_KEY, LONGEST_PLACE, LONGEST_WAIT_S
from gpufn_gateway.submitted import call_views

_PROBLEM = "#/components/schemas/Problem"
_PROBLEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "code", "retryable"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "retryable": {"type": "boolean"},
        "retry_after_s": {"type": "number"},
        "field": {"type": "string"},
        "error_type": {"type": "string"},
        "error_classes": {"type": "array", "items": {"type": "string"}},
        "traceback": {"type": "string"},
        "stage": {"type": "string"},
        "node": {"type": "string"},
    },
}
_JSON_OF_BYTES = {"type": "string", "contentEncoding": "base64"}  # which a result is not: its bytes are all of it


def describe(serving: Iterable[Revision]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The paths and the schemas of the calls of each serving revision."""
    schemas: dict[str, Any] = {"Problem": _PROBLEM_SCHEMA, "Submitted": _SUBMITTED, "Accepted": _ACCEPTED}
    paths: dict[str, Any] = dict(_CALLS)
    for revision in sorted(serving, key=lambda each: each.function):
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


_ID: dict[str, Any] = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_OWN_ID: dict[str, Any] = {**_ID, "description": "A ULID", "schema": {"type": "string", "pattern": ULID_PATTERN}}
_KEY = _header("Idempotency-Key", "The same key is the same call", minLength=1, maxLength=LONGEST_IDEMPOTENCY_KEY)
_LAST_EVENT = _header("Last-Event-ID", "The last item that came: a stream with an Idempotency-Key goes on behind it")
_WEBHOOK = _header("X-Gpufn-Webhook", "An address to which the end of the call is sent", **bounds.WEBHOOK)
_OF_CALLS = (
    _header(
        "X-Gpufn-Timeout",
        "End it when it has not ended after so many seconds",
        "number",
        exclusiveMinimum=0,
        maximum=LONGEST_TIMEOUT_S,
    ),
    # Its bounds are relative to the time of the request, which a schema cannot state.
    _header(
        "X-Gpufn-Deadline",
        f"End it when it has not ended at this time in unix seconds, in the next {LONGEST_TIMEOUT_S / 86_400:g} days",
        "number",
        exclusiveMinimum=0,
    ),
    _header("X-Gpufn-Priority", "Its class, in place of the function's", enum=[each.value for each in Priority]),
    _header("traceparent", "Of the W3C's Trace Context"),
)
_PLACE: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 10**LONGEST_PLACE - 1}
_WAIT: dict[str, Any] = {
    "name": "wait",
    "in": "query",
    "description": "Seconds to wait for its end",
    "schema": {"type": "number", "minimum": 0, "maximum": LONGEST_WAIT_S},
}


def _of_call(verb: str, summary: str, answers: Mapping[str, str], *parameters: dict[str, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {code: {"description": text} for code, text in answers.items()}
    return {
        "operationId": verb,
        "summary": summary,
        "tags": ["calls"],
        "parameters": [_ID, *parameters],
        "responses": responses | {"default": PROBLEM_ANSWER},
    }


PROBLEM_ANSWER: dict[str, Any] = {
    "description": "A problem",
    "content": {media.PROBLEM: {"schema": {"$ref": _PROBLEM}}},
}
_STATUS: Final = {"200": "Its status"}
_CALLS: dict[str, Any] = {
    "/v1/invocations/{id}": {
        "get": _of_call("status", "How a submitted call stands, and why it waits", _STATUS),
        "delete": _of_call("cancel", "Cancel a submitted call, queued or running", _STATUS),
    },
    "/v1/invocations/{id}/result": {
        "get": _of_call(
            "result", "The result of a submitted call", {"200": "The result", "202": "It has not ended"}, _WAIT
        ),
    },
    "/v1/invocations/{id}/events": {
        "get": _of_call(
            "events",
            "What happens to a submitted call, as server-sent events",
            {"200": "Events", "204": "There are no more"},
            _header("Last-Event-ID", "The last event that came"),
        ),
    },
}


def _links(known: Iterable[str]) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"} for name in known}}


_SUBMITTED: dict[str, Any] = {
    "type": "object",
    "required": ["id", "state", "links"],
    "properties": {
        "id": {"type": "string"},
        "state": {"enum": [each.value for each in InvocationState]},
        "links": _links(call_views.links("")),
    },
}


_ACCEPTED: dict[str, Any] = {
    "type": "object",
    "required": ["id", "accepted", "state", "links"],
    "properties": {
        "id": {"type": "string"},
        "accepted": {"type": "integer"},
        "state": {"enum": ["open", "running", "ended", "cancelled"]},
        "links": _links(map_views.links("")),
    },
}


def _invoke(name: str, revision: Revision, method: MethodSpec, schemas: dict[str, Any]) -> dict[str, Any]:
    returns = _hoisted(method.returns, f"{name}.returns", schemas)
    content: dict[str, Any] = {media.JSON: {"schema": returns}}
    if returns == _JSON_OF_BYTES:
        content = {media.BYTES: {"schema": {}}}
    if method.kind.streams:
        content[media.EVENTS] = {"schema": {"type": "string"}}
    last_event = [_LAST_EVENT] if method.kind.streams else []
    return {
        "operationId": f"invoke {name}",
        "summary": (method.doc.strip().splitlines() or [name])[0],
        "description": method.doc,
        "tags": [revision.function],
        "parameters": [
            *_OF_CALLS,
            _KEY,
            *_query(name, method, schemas),
            *last_event,
        ],
        "requestBody": _body(name, method, schemas),
        "responses": {"200": {"description": "The result", "content": content}, "default": PROBLEM_ANSWER},
    }


def _submit(name: str, method: MethodSpec, schemas: dict[str, Any]) -> dict[str, Any]:
    accepted = {"schema": {"$ref": "#/components/schemas/Submitted"}}
    return {
        "operationId": f"submit {name}",
        "summary": f"Queue a call of {name} and come back for its result",
        "tags": [name.partition(".")[0]],
        "parameters": [*_OF_CALLS, _WEBHOOK, _KEY, *_query(name, method, schemas)],
        "requestBody": _body(name, method, schemas),
        "responses": {
            "202": {"description": "Queued", "content": {media.JSON: accepted}},
            "default": PROBLEM_ANSWER,
        },
    }


def _put(name: str, method: MethodSpec, schemas: dict[str, Any]) -> dict[str, Any]:
    return _submit(name, method, schemas) | {
        "operationId": f"put {name}",
        "summary": f"Queue a call of {name} under an id of your own; again, it is the same call",
        "parameters": [_OWN_ID, *_OF_CALLS, _WEBHOOK, *_query(name, method, schemas)],
    }


def _map(name: str) -> dict[str, Any]:
    accepted = {"schema": {"$ref": "#/components/schemas/Accepted"}}
    return {
        "operationId": f"map {name}",
        "summary": f"Submit items of a map of {name}: a line each, the arguments of a call",
        "tags": [name.partition(".")[0]],
        "parameters": [
            _OWN_ID,
            {"name": "first", "in": "path", "required": True, "schema": _PLACE},
            {"name": "last", "in": "query", "schema": bounds.FLAG},
            *_OF_CALLS,
            _WEBHOOK,
        ],
        "requestBody": {"content": {media.LINES: {"schema": {"type": "string"}}}},  # none: no items, and `last` counts
        "responses": {
            "202": {"description": "Accepted, all of them", "content": {media.JSON: accepted}},
            "default": PROBLEM_ANSWER,
        },
    }


# Of the Open Inference Protocol; its binary form puts the tensors' bytes after this JSON.
_TENSOR: dict[str, Any] = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": {"enum": list(DATATYPES)},
        "parameters": {"type": "object"},
        "data": {"type": "array"},
    },
}
_TENSORS: dict[str, Any] = {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}}
_INFERENCE_SCHEMAS: dict[str, Any] = {
    "Tensor": _TENSOR,
    "InferenceRequest": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {"type": "object"},
            "inputs": _TENSORS,
            "outputs": {"type": "array", "items": {"type": "object", "required": ["name"]}},
        },
    },
    "InferenceResponse": {
        "type": "object",
        "required": ["model_name", "outputs"],
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": _TENSORS,
        },
    },
    "InferenceError": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
}


def _infer(name: str) -> dict[str, Any]:
    def content(schema: str) -> dict[str, Any]:
        return {media.JSON: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}

    return {
        "operationId": f"infer {name}",
        "summary": f"Inference with {name}, by the Open Inference Protocol",
        "tags": [name],
        "requestBody": {"required": True, "content": content("InferenceRequest")},
        "responses": {
            "200": {"description": "The outputs", "content": content("InferenceResponse")},
            "default": {"description": "An error", "content": content("InferenceError")},
        },
    }


def _query(name: str, method: MethodSpec, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments beside a raw body. None is required: a JSON body has all of them."""
    if method.raw_parameter is None:
        return []
    parameters = _hoisted(method.parameters, f"{name}.arguments", schemas)
    return [
        {"name": each, "in": "query", "description": "Beside a body of raw bytes only", "schema": schema}
        for each, schema in parameters.get("properties", {}).items()
        if each != method.raw_parameter
    ]


def _body(name: str, method: MethodSpec, schemas: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {media.JSON: {"schema": _hoisted(method.parameters, f"{name}.arguments", schemas)}}
    if method.raw_parameter:
        content[media.BYTES] = {"schema": {}}
        content[media.FORM] = {"schema": _form(content[media.JSON]["schema"], method)}
    return {"required": bool(method.parameters.get("required")), "content": content}


def _form(arguments: Mapping[str, Any], method: MethodSpec) -> dict[str, Any]:
    """The schema of the arguments, where bytes are parts as they are."""
    file = {"type": "string", "contentMediaType": media.BYTES}
    properties = arguments.get("properties", {}) | dict.fromkeys(Signature.of(method).bytes_names, file)
    return {**arguments, "properties": properties}


def _hoisted(schema: Mapping[str, Any], prefix: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema with its `$defs` moved to the document's components, where its `$ref`s can find them."""
    for name, definition in (schema.get("$defs") or {}).items():
        schemas[f"{prefix}.{name}"] = _with_refs(definition, prefix)
    moved: dict[str, Any] = _with_refs({key: value for key, value in schema.items() if key != "$defs"}, prefix)
    return moved


def _with_refs(node: Any, prefix: str) -> Any:
    if isinstance(node, Mapping):
        return {
            key: value.replace("#/$defs/", f"#/components/schemas/{prefix}.", 1)
            if key == "$ref" and isinstance(value, str)
            else _with_refs(value, prefix)
            for key, value in node.items()
        }
    return [_with_refs(item, prefix) for item in node] if isinstance(node, list) else node
