"""The OpenAPI 3.1 document of a gateway. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpufn_core.domain.revision import Revision
from gpufn_gateway.openapi import function_paths, management_paths


def document(serving: Iterable[Revision], *, needs_key: bool) -> dict[str, Any]:
    """Build the document. `serving` has the serving revision of each function."""
    paths, schemas = function_paths.describe(serving)
    management, bodies = management_paths.describe()
    for path, operations in management.items():
        paths[path] = {**operations, **paths.get(path, {})}
    document_: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "gpufn functions", "version": "1"},
        "paths": paths,
        "components": {"schemas": bodies | schemas},
    }
    if needs_key:
        document_["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document_["security"] = [{"key": []}]
    return document_
