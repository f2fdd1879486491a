"""Functions as models of Replicate: `owner/name`, where the owner is the app. Pure.

predict                    default/predict
default/search/predict     search/predict
prod/search/predict        prod.search/predict
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gpufn_core.domain.revision import Revision
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_core.spec.naming.names import ANY, DEFAULT, parts_of

_COG_VERSION: Final = "0.16.0"  # the client reads the form of `openapi_schema` from it


class VersionId(NamedTuple):
    function: str
    number: int


def model_of(path: str) -> tuple[str, str]:
    """Return owner and name for the path of a function or a method.

    >>> model_of("predict"), model_of("prod/search/counter.add")
    (('default', 'predict'), ('prod.search', 'counter.add'))
    """
    env, app, base = parts_of(path)
    return (app if env == DEFAULT else f"{env}.{app}"), base


def function_of(owner: str, name: str) -> str:
    """Return the name of the function that a client means.

    >>> function_of("search", "predict"), function_of("prod.search", "predict")
    ('-/search/predict', 'prod/search/predict')
    """
    env, _, app = owner.rpartition(".")
    return f"{env or ANY}/{app}/{name}"


def version_id(path: str, number: int) -> str:
    """Return the id of a version, which can be a segment of a path.

    >>> version_id("prod/search/predict", 3)
    'prod~search~predict@3'
    """
    return f"{path.replace('/', '~')}@{number}"


def parse_version(text: str) -> VersionId | None:
    """Return the function and the revision of a version's id; None if it is none.

    >>> parse_version("prod~search~predict@3"), parse_version("5c7d")
    (VersionId(function='prod/search/predict', number=3), None)
    """
    function, at, number = text.rpartition("@")
    if not at or not number.isascii() or not number.isdecimal() or len(number) > 9:
        return None
    return VersionId(function.replace("~", "/"), int(number))


def model(path: str, method: MethodSpec, revision: Revision, url: str) -> dict[str, Any]:
    """Return a model with its serving revision as the latest version."""
    owner, name = model_of(path)
    return {
        "url": url,
        "owner": owner,
        "name": name,
        "description": method.doc,
        "visibility": "private",
        "run_count": 0,
        "github_url": None,
        "paper_url": None,
        "license_url": None,
        "cover_image_url": None,
        "default_example": None,
        "latest_version": version(path, method, revision),
    }


def version(path: str, method: MethodSpec, revision: Revision) -> dict[str, Any]:
    return {
        "id": version_id(path, revision.number),
        "created_at": timestamp(revision.created_at),
        "cog_version": _COG_VERSION,
        "openapi_schema": _openapi(method),
    }


def _openapi(method: MethodSpec) -> dict[str, Any]:
    """Return the schemas of input and output as cog describes them."""
    properties = method.parameters.get("properties", {})
    ordered = {name: {**schema, "x-order": at} for at, (name, schema) in enumerate(properties.items())}
    output: dict[str, Any] = {"title": "Output", **method.returns}
    if method.kind.streams:
        output = {"type": "array", "items": {}, **output, "x-cog-array-type": "iterator"}
    schemas = {"Input": {**method.parameters, "title": "Input", "properties": ordered}, "Output": output}
    info = {"title": "Cog", "version": "0.1.0"}
    return {"openapi": "3.0.2", "info": info, "paths": {}, "components": {"schemas": schemas}}


def page(results: Sequence[object]) -> dict[str, Any]:
    """Return the only page of a list."""
    return {"previous": None, "next": None, "results": results}


def timestamp(seconds: float) -> str:
    """Return UNIX seconds in ISO 8601.

    >>> timestamp(0.5)
    '1970-01-01T00:00:00.500000Z'
    """
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")
