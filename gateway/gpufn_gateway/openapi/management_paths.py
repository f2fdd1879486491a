"""OpenAPI paths and schemas of the management requests. Pure.

The bodies come from the structs that the routes decode, and from the bounds of the later checks (`bounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.encoding import media
from gpufn_core.protocol import data
from gpufn_core.protocol.limits import DEAD_LETTERS_AT_ONCE
from gpufn_core.protocol.records import KeyLimits
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.volume_spec import VolumeChange
from gpufn_gateway.auth.access import OPEN_PATHS
from gpufn_gateway.openapi import bounds, request_bodies
from gpufn_gateway.openapi.bounds import DIGEST, FLAG, FUNCTION, FUNCTION_OR_METHOD, GROUP
from gpufn_gateway.openapi.function_paths import PROBLEM_RESPONSE
from gpufn_gateway.openapi.request_bounds import (
    MAX_CHANGE,
    MAX_CONSOLE_OFFSET,
    MAX_CONSOLE_ROWS,
    MAX_LISTED,
    MAX_LOG_LINES,
    MAX_SEQUENCE_DIGITS,
    MAX_WAIT_S,
)

_REF: Final = "#/components/schemas/{name}"
_BODIES: Final = (
    request_bodies.Deploy,
    request_bodies.LeaseRequest,
    request_bodies.Rollback,
    request_bodies.Scale,
    request_bodies.Profile,
    request_bodies.Traffic,
    request_bodies.NewSchedule,
    request_bodies.NewBuild,
    request_bodies.NewSecret,
    request_bodies.FileDigests,
    request_bodies.NewTeam,
    request_bodies.NewSigner,
    request_bodies.RequireSignatures,
    request_bodies.NewKey,
    request_bodies.KeyRotation,
    request_bodies.TokenRequest,
    request_bodies.Collect,
    KeyLimits,
    FunctionSpec,
    VolumeChange,
)


def describe() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the paths and the schemas."""
    _, components = msgspec.json.schema_components(_BODIES, ref_template=_REF)
    schemas: dict[str, Any] = msgspec.to_builtins(components)
    bounds.add_to(schemas)
    return _paths(), schemas


def _query(name: str, kind: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": kind, **schema}}


def _limit(maximum: int = MAX_LISTED) -> dict[str, Any]:
    return _query("limit", "number", minimum=1, maximum=maximum)


_AFTER: Final[dict[str, Any]] = {"name": "after", "in": "query", "schema": bounds.CURSOR}
_FOLLOW: Final[dict[str, Any]] = {"name": "follow", "in": "query", "schema": FLAG}
_FUNCTION: Final[dict[str, Any]] = {"name": "function", "in": "query", "schema": FUNCTION}
_WAIT: Final = _query("wait", "number", minimum=0, maximum=MAX_WAIT_S)
_SINCE: Final = _query("since", "number", minimum=0)
_UNTIL: Final = _query("until", "number", minimum=0)
_STATE: Final = _query("state", "string", enum=[state.value for state in InvocationState])
_ITEMS_BEFORE: Final = _query("before", "string", pattern=f"^[0-9]{{1,{MAX_SEQUENCE_DIGITS}}}$")
_BEFORE: Final[dict[str, Any]] = {"name": "before", "in": "query", "schema": bounds.PLACE}
_SEARCH: Final = (_SINCE, _UNTIL, _STATE, _query("key", "string"), _query("parent", "string"), _BEFORE)
_ENV: Final = _query("env", "string", enum=["names", "values"])
_LEASE: Final = _query("lease", "string", minLength=1)
_CALL: Final = _query("call", "string")
_TAIL: Final = _query("tail", "number", minimum=0, maximum=MAX_LOG_LINES)
_SINCE_CHANGE: Final = _query("since", "number", minimum=0, maximum=MAX_CHANGE)
_AFTER_RECORD: Final = _query("after", "number", minimum=-MAX_LISTED)
_KEY: Final = _query("key", "string")
_SECRET_SCOPE: Final[dict[str, Any]] = {"name": "scope", "in": "query", "schema": bounds.SECRET_SCOPE}
_VERSION: Final = _query("version", "integer", minimum=1)
_TTL: Final = _query("ttl", "number", minimum=data.MIN_S, maximum=data.MAX_S)
_SECONDS: Final = _query("lease", "number", minimum=data.MIN_S, maximum=data.MAX_S)
_ITEM_WAIT: Final = _query("wait", "number", minimum=0, maximum=data.WAIT_S)
_MAX_ITEMS: Final = _query("max_items", "number", minimum=1, maximum=data.MAX_ITEMS)
_ITEM_ID: Final = _query("id", "string")
_MAX_DELIVERIES: Final = _query("max_deliveries", "integer", minimum=1, maximum=data.MAX_DELIVERIES)
_TOKEN: Final = _query("lease", "string") | {"required": True}
_ENTRY: Final = _query("key", "string", minLength=1, maxLength=data.KEY_CHARS) | {"required": True}
_ONLY_NEW: Final[dict[str, Any]] = {"name": "only_new", "in": "query", "schema": FLAG}
_DAYS: Final = tuple(_query(name, "string", format="date") for name in ("since", "until"))
_BY: Final[dict[str, Any]] = {"name": "by", "in": "query", "schema": bounds.COST_COLUMNS}
_COST_FORMAT: Final = _query("format", "string", enum=["json", "focus"])
_SHARE_UNUSED: Final[dict[str, Any]] = {"name": "share_unused", "in": "query", "schema": FLAG}
_FROM_AND_TO: Final = tuple(_query(name, "number", minimum=0) for name in ("from", "to"))
_HISTORY: Final[tuple[dict[str, Any], ...]] = (
    {"name": "subject", "in": "query", "schema": bounds.HISTORY_SUBJECT, "required": True},
    {"name": "series", "in": "query", "schema": bounds.NAMES},
    _query("step", "number", minimum=10, multipleOf=10),
    *_FROM_AND_TO,
)
_EVENTS: Final[tuple[dict[str, Any], ...]] = (
    _limit(),
    _query("before", "integer", minimum=1, maximum=MAX_CHANGE),
    {"name": "subject", "in": "query", "schema": bounds.HISTORY_SUBJECT},
    {"name": "kind", "in": "query", "schema": bounds.NAMES},
    *_FROM_AND_TO,
)
_LIST: Final = (
    _query("search", "string"),
    _query("show", "string", enum=["all", "findings", "called", "running"]),
    _query("sort", "string", enum=["name", "calls", "errors", "p99", "queued", "workers"]),
    _query("offset", "number", minimum=0, maximum=MAX_CONSOLE_OFFSET),
    _query("limit", "number", minimum=1, maximum=MAX_CONSOLE_ROWS),
)
_PATH_SCHEMAS: Final[dict[str, Any]] = {
    **dict.fromkeys(("env", "app", "team"), GROUP),
    "digest": DIGEST,
    "fn": FUNCTION,
    **dict.fromkeys(("volume", "queue", "dict"), FUNCTION),
    "number": {"type": "integer", "minimum": 1},
}

_VALUE: Final = f"?{media.BYTES}"  # bytes of any content type, or none

# Method and path, summary, status of success, query parameters, body (a schema's name, or a content type).
_OPERATIONS: Final[tuple[tuple[str, str, str, Sequence[int], Sequence[dict[str, Any]], str], ...]] = (
    ("get", "/v1/functions", "List the functions", (200,), (_ENV,), ""),
    ("post", "/v1/functions", "Deploy a function", (201, 202), (), "Deploy"),
    ("get", "/v1/functions/{fn}", "Show a function", (200,), (_ENV,), ""),
    ("delete", "/v1/functions/{fn}", "Delete a function", (204,), (_LEASE,), ""),
    ("get", "/v1/functions/{fn}/revisions", "List the revisions of a function", (200,), (), ""),
    ("get", "/v1/functions/{fn}/revisions/{number}", "Show a revision", (200,), (), ""),
    ("get", "/v1/functions/{fn}/revisions/{number}/bundle", "Read the code of a revision", (200,), (), ""),
    ("post", "/v1/functions/{fn}/rollback", "Make an earlier revision active", (200,), (), "Rollback"),
    ("get", "/v1/functions/{fn}/traffic", "Show how the calls are split", (200,), (), ""),
    ("put", "/v1/functions/{fn}/traffic", "Split the calls between revisions", (200,), (), "Traffic"),
    ("delete", "/v1/functions/{fn}/traffic", "Send all calls to the serving revision", (200,), (), ""),
    ("get", "/v1/functions/{fn}/differences", "List differences of mirrored calls", (200,), (), ""),
    ("post", "/v1/functions/{fn}/scale", "Change the bounds of the worker count", (200,), (), "Scale"),
    ("post", "/v1/functions/{fn}/lease", "Renew the lease of a temporary function", (200,), (), "LeaseRequest"),
    ("get", "/v1/functions/{fn}/why", "Explain the number of workers", (200,), (), ""),
    ("get", "/v1/functions/{fn}/advice", "Compare the options of a function with its history", (200,), (), ""),
    ("get", "/v1/functions/{fn}/exec", "Run a command in a worker: a WebSocket (docs/shell.md)", (101,), (), ""),
    ("post", "/v1/functions/{fn}/profile", "Profile a worker of a function", (200,), (), "Profile"),
    ("get", "/v1/functions/{fn}/logs", "Read the log lines of a function", (200,), (_TAIL, _FOLLOW, _CALL), ""),
    ("get", "/v1/functions/{fn}/calls", "List calls of a function", (200,), (_limit(), *_SEARCH), ""),
    ("get", "/v1/apps", "List the apps", (200,), (), ""),
    ("post", "/v1/apps/{env}/{app}/rollback", "Undo the last deploy of an app", (200,), (), ""),
    ("get", "/v1/calls", "List calls", (200,), (_FUNCTION, _limit(), *_SEARCH), ""),
    ("head", "/v1/bundles/{digest}", "Report whether a bundle is stored", (200, 404), (), ""),
    ("put", "/v1/bundles/{digest}", "Store a bundle", (201,), (), "application/zip"),
    ("head", "/v1/artifacts/{digest}", "Report whether a file of a model is stored", (200, 404), (), ""),
    ("put", "/v1/artifacts/{digest}", "Store a file of a model", (201,), (), media.BYTES),
    ("get", "/v1/maps", "List maps", (200,), (_FUNCTION, _limit()), ""),
    ("get", "/v1/maps/{id}", "Show a map", (200,), (), ""),
    ("delete", "/v1/maps/{id}", "Cancel a map", (200,), (), ""),
    ("get", "/v1/maps/{id}/items", "List the items that ended last", (200,), (_limit(), _STATE, _ITEMS_BEFORE), ""),
    ("get", "/v1/maps/{id}/outcomes", "Read the outcomes of a map", (200,), (_AFTER,), ""),
    ("get", "/v1/dlq", "List dead letters", (200,), (_limit(DEAD_LETTERS_AT_ONCE),), ""),
    ("get", "/v1/dlq/{fn}", "List dead letters of a function", (200,), (_limit(DEAD_LETTERS_AT_ONCE),), ""),
    ("delete", "/v1/dlq/{fn}", "Drop all dead letters of a function", (200,), (), ""),
    ("post", "/v1/dlq/{fn}/replay", "Replay all dead letters of a function", (202,), (), ""),
    ("get", "/v1/dlq/{fn}/{id}", "Show a dead letter", (200,), (), ""),
    ("delete", "/v1/dlq/{fn}/{id}", "Drop a dead letter", (204,), (), ""),
    ("get", "/v1/dlq/{fn}/{id}/payload", "Read the arguments of a dead letter", (200,), (), ""),
    ("post", "/v1/dlq/{fn}/{id}/replay", "Replay a dead letter", (202,), (), ""),
    ("get", "/v1/builds", "List builds", (200,), (_limit(),), ""),
    ("post", "/v1/builds", "Start a build", (202,), (), "NewBuild"),
    ("get", "/v1/builds/{id}", "Show a build", (200,), (_WAIT, _SINCE_CHANGE), ""),
    ("delete", "/v1/builds/{id}", "Cancel a build", (200,), (), ""),
    ("get", "/v1/builds/{id}/report", "Read the report of a build", (200,), (), ""),
    ("get", "/v1/builds/{id}/report.html", "Read the report of a build as a page", (200,), (), ""),
    ("get", "/v1/engines", "List engines", (200,), (), ""),
    ("post", "/v1/engines/gc", "Remove unused engines", (200,), (), "Collect"),
    ("get", "/v1/models", "List models", (200,), (), ""),
    ("get", "/v1/models/{model}", "Show a model", (200,), (), ""),
    ("get", "/v1/schedules", "List schedules", (200,), (_FUNCTION,), ""),
    ("post", "/v1/schedules", "Add a schedule", (201,), (), "NewSchedule"),
    ("get", "/v1/schedules/{id}", "Show a schedule", (200,), (), ""),
    ("delete", "/v1/schedules/{id}", "Remove a schedule", (204,), (), ""),
    ("post", "/v1/schedules/{id}/pause", "Pause a schedule", (200,), (), ""),
    ("post", "/v1/schedules/{id}/resume", "Resume a schedule", (200,), (), ""),
    ("post", "/v1/schedules/{id}/run", "Submit a call of a schedule now", (202,), (), ""),
    ("get", "/v1/usage", "Report usage per function, key and day", (200,), (_FUNCTION, _KEY, *_DAYS), ""),
    ("get", "/v1/costs", "Report costs", (200,), (_BY, _SHARE_UNUSED, _COST_FORMAT, *_DAYS), ""),
    ("get", "/v1/history", "Read series of the history", (200,), _HISTORY, ""),
    ("get", "/v1/events", "Read the time line of events", (200,), _EVENTS, ""),
    ("get", "/v1/traces", "List the traces in memory", (200,), (_FUNCTION, _limit()), ""),
    ("get", "/v1/traces/{id}", "Read the spans of a trace, or of a call in it", (200,), (), ""),
    ("get", "/v1/nodes", "List the nodes", (200,), (), ""),
    ("put", "/v1/nodes/{node}/drain", "Let a node accept no new workers", (200,), (), ""),
    ("delete", "/v1/nodes/{node}/drain", "Let a drained node accept workers again", (204,), (), ""),
    ("get", "/v1/secrets", "List the secrets, without values", (200,), (), ""),
    ("put", "/v1/secrets/{name}", "Set a secret", (200,), (_SECRET_SCOPE,), "NewSecret"),
    ("delete", "/v1/secrets/{name}", "Delete a secret", (204,), (_SECRET_SCOPE,), ""),
    ("post", "/v1/secrets/rotate", "Encrypt the secrets under a new master key", (200,), (), ""),
    ("get", "/v1/volumes", "List the volumes", (200,), (), ""),
    ("get", "/v1/volumes/{volume}", "Show a volume and its versions", (200,), (), ""),
    ("delete", "/v1/volumes/{volume}", "Delete a volume", (204,), (), ""),
    ("get", "/v1/volumes/{volume}/tree", "List the files of a version", (200,), (_VERSION,), ""),
    ("get", "/v1/volumes/{volume}/blobs/{digest}", "Read a file of a volume", (200,), (), ""),
    ("put", "/v1/volumes/{volume}/blobs/{digest}", "Store a file for a commit", (201,), (), media.BYTES),
    ("post", "/v1/volumes/{volume}/missing", "Report which files are not stored", (200,), (), "FileDigests"),
    ("post", "/v1/volumes/{volume}/commits", "Publish a new version", (201,), (), "VolumeChange"),
    ("get", "/v1/queues", "List the queues with items", (200,), (), ""),
    ("get", "/v1/queues/{queue}", "Count the items of a queue", (200,), (), ""),
    ("delete", "/v1/queues/{queue}", "Delete a queue with its items", (204,), (), ""),
    ("post", "/v1/queues/{queue}/items", "Append an item", (201,), (_TTL, _MAX_ITEMS, _ITEM_ID), _VALUE),
    (
        "post",
        "/v1/queues/{queue}/lease",
        "Take the first item with a lease",
        (200, 204),
        (_ITEM_WAIT, _SECONDS, _MAX_DELIVERIES),
        "",
    ),
    ("post", "/v1/queues/{queue}/ack", "Remove a taken item", (204,), (_TOKEN,), ""),
    ("post", "/v1/queues/{queue}/release", "Let a taken item be delivered again", (204,), (_TOKEN,), ""),
    ("post", "/v1/values", "Store a value for some time", (201,), (_TTL,), _VALUE),
    ("get", "/v1/values/{id}", "Read a stored value", (200,), (), ""),
    ("get", "/v1/dicts", "List the dicts with entries", (200,), (), ""),
    ("delete", "/v1/dicts/{dict}", "Delete all entries of a dict", (204,), (), ""),
    ("get", "/v1/dicts/{dict}/keys", "List the keys of a dict", (200,), (), ""),
    ("get", "/v1/dicts/{dict}/entry", "Read a value of a dict", (200,), (_ENTRY,), ""),
    ("put", "/v1/dicts/{dict}/entry", "Store a value in a dict", (204,), (_ENTRY, _TTL, _ONLY_NEW), _VALUE),
    ("delete", "/v1/dicts/{dict}/entry", "Delete an entry of a dict", (204,), (_ENTRY,), ""),
    ("get", "/v1/audit", "Read the audit log", (200,), (_limit(), _AFTER_RECORD), ""),
    ("get", "/v1/auth", "Show the OpenID provider of logins", (200,), (), ""),
    ("post", "/v1/auth/token", "Exchange a key, a token or a JSON Web Token for a token", (201,), (), "TokenRequest"),
    ("get", "/v1/auth/me", "Show the principal of this request", (200,), (), ""),
    ("delete", "/v1/auth/tokens", "Reject all tokens issued until now", (204,), (), ""),
    ("get", "/v1/users", "List the users that have logged in", (200,), (), ""),
    ("delete", "/v1/users/{id}/tokens", "Reject the tokens of a user issued until now", (204,), (), ""),
    ("get", "/v1/teams", "List the teams", (200,), (), ""),
    ("put", "/v1/teams/{team}", "Set a team", (200,), (), "NewTeam"),
    ("delete", "/v1/teams/{team}", "Remove a team", (204,), (), ""),
    ("get", "/v1/signing", "List the trusted keys, and the environments that require signatures", (200,), (), ""),
    ("put", "/v1/signing/keys/{name}", "Trust a key", (200,), (), "NewSigner"),
    ("delete", "/v1/signing/keys/{name}", "Stop trusting a key", (200,), (), ""),
    ("put", "/v1/signing/required/{env}", "Require signatures in an environment", (200,), (), "RequireSignatures"),
    ("delete", "/v1/signing/required/{env}", "Allow unsigned deploys in an environment", (200,), (), ""),
    ("get", "/v1/keys", "List the API keys", (200,), (), ""),
    ("post", "/v1/keys", "Create an API key", (201,), (), "NewKey"),
    ("delete", "/v1/keys/{id}", "Delete an API key", (204,), (), ""),
    ("post", "/v1/keys/{id}/rotate", "Replace the secret of an API key", (200,), (), "KeyRotation"),
    ("put", "/v1/keys/{id}/limits", "Replace the limits of an API key", (200,), (), "KeyLimits"),
    ("get", "/v1/keys/{id}/webhook-secret", "Show the secret that signs webhooks", (200,), (), ""),
    ("post", "/v1/keys/{id}/webhook-secret", "Replace the secret that signs webhooks", (201,), (), ""),
    ("get", "/v1/console/overview", "Show the totals, and what is wrong", (200,), (_FOLLOW,), ""),
    ("get", "/v1/console/functions", "Search the functions, with their rates", (200,), (*_LIST, _FOLLOW), ""),
    ("get", "/v1/console/functions/{fn}", "Show what a function is doing", (200,), (_FOLLOW,), ""),
    ("get", "/v1/console/nodes", "Show the nodes, their GPUs and workers", (200,), (_FOLLOW,), ""),
    ("post", "/v1/console/ticket", "Make a ticket to sign in at the console", (201,), (), ""),
    ("get", "/", "List the entry points of the API", (200,), (), ""),
    ("get", "/healthz", "Report that the gateway is alive", (200,), (), ""),
    ("get", "/readyz", "Report whether the gateway is ready", (200, 503), (), ""),
    ("get", "/metrics", "Read the metrics", (200,), (), ""),
    ("get", "/openapi.json", "Read this document", (200,), (), ""),
)


def _paths() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for method, path, summary, statuses, query, body in _OPERATIONS:
        responses: dict[str, Any] = {str(status): {"description": summary} for status in statuses}
        operation: dict[str, Any] = {
            "operationId": f"{method} {path}",
            "summary": summary,
            "tags": ["management"],
            "parameters": [*_path_parameters(path), *query],
            "responses": responses | {"default": PROBLEM_RESPONSE},
        }
        if body:
            operation["requestBody"] = _body(body)
        if path in OPEN_PATHS:
            operation["security"] = []
        paths.setdefault(path, {})[method] = operation
    return paths


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    schemas = _PATH_SCHEMAS | ({"fn": FUNCTION_OR_METHOD} if path.startswith("/v1/functions/") else {})
    if path.startswith("/v1/secrets/"):
        schemas |= {"name": bounds.SECRET}
    if path.startswith("/v1/signing/"):
        schemas |= {"name": bounds.SIGNER, "env": bounds.ENVIRONMENT}
    return [
        {"name": name, "in": "path", "required": True, "schema": schemas.get(name, {"type": "string"})}
        for name in names
    ]


def _body(body: str) -> dict[str, Any]:
    if "/" in body:
        return {"required": body != _VALUE, "content": {body.removeprefix("?"): {"schema": {}}}}
    is_required = body in (
        "Deploy",
        "NewSchedule",
        "NewBuild",
        "NewSecret",
        "FileDigests",
        "NewTeam",
        "NewSigner",
        "NewKey",
        "LeaseRequest",
    )
    return {"required": is_required, "content": {media.JSON: {"schema": {"$ref": _REF.format(name=body)}}}}
