"""OpenAPI paths of web functions. Pure. The paths below an application are not known."""

from __future__ import annotations

from typing import Any

from gpufn_core.domain.revision import Revision
from gpufn_core.encoding import media
from gpufn_core.spec.web_spec import WebSpec, root_path

_BODILESS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS"})


def describe(revision: Revision, web: WebSpec, problem: dict[str, Any]) -> dict[str, Any]:
    """Return the paths of a web function. `problem` is the response to a failed request."""
    path = f"{root_path(revision.function)}/"
    responses = {"200": {"description": "The response of the function"}, "default": problem}
    security: dict[str, Any] = {"security": []} if web.public else {}
    if web.is_app:
        rest = {"name": "path", "in": "path", "required": True, "schema": {"type": "string"}}
        operation = {
            "operationId": f"web {revision.function}",
            "summary": f"Any request to the {web.kind.value.upper()} application {revision.function}",
            "tags": [revision.function],
            "parameters": [rest],
            "responses": responses,
        }
        return {f"{path}{{path}}": {"get": operation | security}}
    return {
        path: {
            method.lower(): _endpoint(revision, method) | {"responses": responses} | security for method in web.methods
        }
    }


def _endpoint(revision: Revision, method: str) -> dict[str, Any]:
    (call,) = revision.spec.methods
    required = set(call.parameters.get("required", ()))
    # A request with a body may have its arguments there.
    parameters = [
        {"name": name, "in": "query", "required": method in _BODILESS and name in required, "schema": {}}
        for name in call.parameters.get("properties", {})
    ]
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()} {revision.function}",
        "summary": (call.doc.strip().splitlines() or [revision.function])[0],
        "tags": [revision.function],
        "parameters": parameters,
    }
    if method not in _BODILESS:
        operation["requestBody"] = {"content": {media.JSON: {"schema": {"type": "object"}}}}
    return operation
