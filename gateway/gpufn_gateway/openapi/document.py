"""The OpenAPI 3.1 document of a gateway. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpufn_core.domain.revision import Revision
from gpufn_gateway.openapi import function_paths, management_paths


def document(serving: Iterable[Revision], *, needs_key: bool) -> dict[str, Any]:
    """`serving`: each function's serving revision."""
    paths, schemas = function_paths.describe(serving)
    managed, bodies = management_paths.describe()
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
