"""The OpenAPI 3.1 document of a gateway. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpufn.revision import Revision
from gpufn_gateway import openapi_calls, openapi_management


def document(serving: Iterable[Revision], *, needs_key: bool) -> dict[str, Any]:
    """`serving`: each function's serving revision."""
    paths, schemas = openapi_calls.describe(serving)
    managed, bodies = openapi_management.describe()
    for path, operations in managed.items():
        paths[path] = {**operations, **paths.get(path, {})}
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "gpufn functions", "version": "1"},
        "paths": paths,
        "components": {"schemas": bodies | schemas},
    }
    if needs_key:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return described
