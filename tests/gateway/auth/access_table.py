"""The rights of each principal: the table that the access test checks and docs/access.md shows. Data only.

P is a pattern, `prod/search/*`. A function that it names is the key's own, any other is foreign. The cells are the
responses to each principal:

yes      success; a list has the object
hidden   success; a list does not have the object
401      no valid key
403      the key has no scope of this kind for this object. The response is the same if the object does not exist
404      the object does not exist for the key: the response is the same as if it did not exist
"""

from __future__ import annotations

from typing import Final, NamedTuple

PATTERN: Final = "prod/search/*"
PRINCIPALS: Final[dict[str, tuple[str, ...]]] = {
    "no key": (),
    "expired key": ("admin",),
    "invoke:P": (f"invoke:{PATTERN}",),
    "read:P": (f"read:{PATTERN}",),
    "deploy:P": (f"deploy:{PATTERN}",),
    "exec:P": (f"exec:{PATTERN}",),
    "invoke:*": ("invoke:*",),
    "read": ("read",),
    "deploy": ("deploy",),
    "admin": ("admin",),
}


class Rule(NamedTuple):
    """`own` and `foreign` have a response per principal, in the order of `PRINCIPALS`."""

    meaning: str
    own: str
    foreign: str


# no key, expired, invoke:P, read:P, deploy:P, exec:P, invoke:*, read, deploy, admin
RULES: Final[dict[str, Rule]] = {
    "open": Rule(
        "everybody, without a key",
        "yes yes yes    yes    yes    yes    yes yes yes yes",
        "yes yes yes    yes    yes    yes    yes yes yes yes",
    ),
    "key": Rule(
        "every key",
        "401 401 yes    yes    yes    yes    yes yes yes yes",
        "401 401 yes    yes    yes    yes    yes yes yes yes",
    ),
    "invoke": Rule(
        "`invoke` for the function",
        "401 401 yes    403    403    403    yes 403 403 yes",
        "401 401 404    404    404    404    yes 403 403 yes",
    ),
    "invoke something": Rule(
        "`invoke` for any function: the id of a value cannot be guessed",
        "401 401 yes    403    403    403    yes 403 403 yes",
        "401 401 yes    403    403    403    yes 403 403 yes",
    ),
    "invoke regions": Rule(
        "`invoke` for any function: a region belongs to the key that registered it, or to its team",
        "401 401 yes    403    403    403    yes 403 403 yes",
        "401 401 yes    403    403    403    yes 403 403 yes",
    ),
    "invoke or read": Rule(
        "`invoke` or `read` for the function",
        "401 401 yes    yes    yes    403    yes yes yes yes",
        "401 401 404    404    404    404    yes yes yes yes",
    ),
    "invoke or read, listed": Rule(
        "every key; the list has the functions for which it has `invoke` or `read`",
        "401 401 yes    yes    yes    hidden yes yes yes yes",
        "401 401 hidden hidden hidden hidden yes yes yes yes",
    ),
    "read": Rule(
        "`read` for the function",
        "401 401 403    yes    yes    403    403 yes yes yes",
        "401 401 403    404    404    403    403 yes yes yes",
    ),
    "read, listed": Rule(
        "`read` for any function; the list has what belongs to functions for which the key has `read`",
        "401 401 403    yes    yes    403    403 yes yes yes",
        "401 401 403    hidden hidden 403    403 yes yes yes",
    ),
    "deploy": Rule(
        "`deploy` for the function",
        "401 401 403    403    yes    403    403 403 yes yes",
        "401 401 403    403    404    403    403 403 yes yes",
    ),
    "exec": Rule(
        "`exec` for the function, and `deploy` for its secrets",
        "401 401 403    403    403    yes    403 403 403 yes",
        "401 401 403    403    403    404    403 403 403 yes",
    ),
    "deploy this name": Rule(
        "`deploy` for the name in the body, whether it exists or not",
        "401 401 403    403    yes    403    403 403 yes yes",
        "401 401 403    403    403    403    403 403 yes yes",
    ),
    "upload": Rule(
        "`deploy` for any function: a digest names the content",
        "401 401 403    403    yes    403    403 403 yes yes",
        "401 401 403    403    yes    403    403 403 yes yes",
    ),
    "read everything": Rule(
        "`read` without a pattern: it belongs to no function",
        "401 401 403    403    403    403    403 yes yes yes",
        "401 401 403    403    403    403    403 yes yes yes",
    ),
    "deploy everything": Rule(
        "`deploy` without a pattern: it belongs to no function",
        "401 401 403    403    403    403    403 403 yes yes",
        "401 401 403    403    403    403    403 403 yes yes",
    ),
    "read secrets, listed": Rule(
        "`read` for any function; the list has the secrets whose functions the key may all read",
        "401 401 403    yes    yes    403    403 yes yes yes",
        "401 401 403    hidden hidden 403    403 yes yes yes",
    ),
    "deploy secret": Rule(
        "`deploy` for all functions that the secret is for",
        "401 401 403    403    yes    403    403 403 yes yes",
        "401 401 403    403    404    403    403 403 yes yes",
    ),
    "admin": Rule(
        "`admin`",
        "401 401 403    403    403    403    403 403 403 yes",
        "401 401 403    403    403    403    403 403 403 yes",
    ),
    "own key": Rule(
        "the key itself, and `admin` for other keys",
        "401 401 yes    yes    yes    yes    yes yes yes yes",
        "401 401 403    403    403    403    403 403 403 yes",
    ),
}

_ONE: Final = "/v1/functions/{fn}"
_DLQ: Final = "/v1/dlq/{fn}"
_QUEUE: Final = "/v1/queues/{queue}"
_DICT: Final = "/v1/dicts/{dict}"
_VOLUME: Final = "/v1/volumes/{volume}"
_VOLUMES: Final = ("GET /v1/auth/me", "GET /v1/volumes")  # to find the full name
_MODEL: Final = "/v2/models/{model}"
_VERSION: Final = f"{_MODEL}/versions/{{version}}"

ROUTES: Final[dict[str, str]] = {
    "GET /": "open",
    "GET /healthz": "open",
    "GET /readyz": "open",
    "GET /metrics": "read everything",
    "GET /openapi.json": "read, listed",
    "GET /v1/functions": "read, listed",
    "POST /v1/functions": "deploy this name",
    f"GET {_ONE}": "read",
    f"DELETE {_ONE}": "deploy",
    f"GET {_ONE}/revisions": "read",
    f"GET {_ONE}/revisions/{{number}}": "read",
    f"GET {_ONE}/revisions/{{number}}/bundle": "deploy",
    f"POST {_ONE}/lease": "deploy",
    f"POST {_ONE}/rollback": "deploy",
    f"POST {_ONE}/scale": "deploy",
    f"GET {_ONE}/traffic": "read",
    f"PUT {_ONE}/traffic": "deploy",
    f"DELETE {_ONE}/traffic": "deploy",
    f"GET {_ONE}/differences": "deploy",
    f"GET {_ONE}/why": "invoke or read",
    f"GET {_ONE}/advice": "read",
    f"GET {_ONE}/exec": "exec",
    f"POST {_ONE}/profile": "deploy",
    f"GET {_ONE}/logs": "read",
    f"GET {_ONE}/calls": "read",
    f"POST {_ONE}/invoke": "invoke",
    f"POST {_ONE}/submit": "invoke",
    f"PUT {_ONE}/invocations/{{id}}": "invoke",
    f"PUT {_ONE}/maps/{{id}}/items/{{first}}": "invoke",
    "GET /web/{fn}/": "invoke",
    "GET /v1/apps": "read, listed",
    "GET /v1/console/overview": "read, listed",
    "GET /v1/console/functions": "read, listed",
    "GET /v1/console/functions/{fn}": "read",
    "GET /v1/console/nodes": "read everything",
    "POST /v1/console/ticket": "key",
    "POST /v1/apps/{env}/{app}/rollback": "deploy",
    "GET /v1/invocations/{id}": "invoke or read",
    "GET /v1/invocations/{id}/events": "invoke or read",
    "GET /v1/invocations/{id}/result": "invoke",
    "DELETE /v1/invocations/{id}": "invoke",
    "GET /v1/calls": "read, listed",
    "GET /v1/maps": "read, listed",
    "GET /v1/maps/{id}": "invoke or read",
    "GET /v1/maps/{id}/items": "invoke or read",
    "GET /v1/maps/{id}/outcomes": "invoke",
    "DELETE /v1/maps/{id}": "invoke",
    "GET /v1/dlq": "read, listed",
    f"GET {_DLQ}": "read",
    f"DELETE {_DLQ}": "deploy",
    f"POST {_DLQ}/replay": "invoke",
    f"GET {_DLQ}/{{id}}": "read",
    f"DELETE {_DLQ}/{{id}}": "deploy",
    f"GET {_DLQ}/{{id}}/payload": "invoke",
    f"POST {_DLQ}/{{id}}/replay": "invoke",
    "GET /v1/schedules": "read, listed",
    "POST /v1/schedules": "invoke",
    "GET /v1/schedules/{id}": "read",
    "DELETE /v1/schedules/{id}": "invoke",
    "POST /v1/schedules/{id}/pause": "invoke",
    "POST /v1/schedules/{id}/resume": "invoke",
    "POST /v1/schedules/{id}/run": "invoke",
    "GET /v1/usage": "read, listed",
    "HEAD /v1/bundles/{digest}": "upload",
    "PUT /v1/bundles/{digest}": "upload",
    "HEAD /v1/artifacts/{digest}": "upload",
    "PUT /v1/artifacts/{digest}": "upload",
    "GET /v1/builds": "read, listed",
    "POST /v1/builds": "deploy everything",
    "GET /v1/builds/{id}": "read",
    "DELETE /v1/builds/{id}": "deploy",
    "GET /v1/builds/{id}/report": "read",
    "GET /v1/builds/{id}/report.html": "read",
    "GET /v1/engines": "read, listed",
    "POST /v1/engines/gc": "deploy everything",
    "GET /v1/models": "read, listed",
    "GET /v1/models/{model}": "read",
    "GET /v1/costs": "read, listed",
    "GET /v1/history": "read",
    "GET /v1/events": "read, listed",
    "GET /v1/traces": "read, listed",
    "GET /v1/traces/{id}": "read",
    "GET /v1/nodes": "read everything",
    "PUT /v1/nodes/{node}/drain": "admin",
    "DELETE /v1/nodes/{node}/drain": "admin",
    "GET /v1/secrets": "read secrets, listed",
    "PUT /v1/secrets/{name}": "deploy secret",
    "DELETE /v1/secrets/{name}": "deploy secret",
    "POST /v1/secrets/rotate": "admin",
    "GET /v1/volumes": "read, listed",
    f"GET {_VOLUME}": "read",
    f"DELETE {_VOLUME}": "deploy",
    f"GET {_VOLUME}/tree": "read",
    f"GET {_VOLUME}/blobs/{{digest}}": "read",
    f"POST {_VOLUME}/missing": "deploy",
    f"PUT {_VOLUME}/blobs/{{digest}}": "deploy",
    f"POST {_VOLUME}/commits": "deploy",
    "GET /v1/queues": "read, listed",
    f"GET {_QUEUE}": "invoke",
    f"DELETE {_QUEUE}": "deploy",
    f"POST {_QUEUE}/items": "invoke",
    f"POST {_QUEUE}/lease": "invoke",
    f"POST {_QUEUE}/ack": "invoke",
    f"POST {_QUEUE}/release": "invoke",
    "POST /v1/values": "invoke something",
    "GET /v1/values/{id}": "invoke something",
    "GET /v1/dicts": "read, listed",
    f"DELETE {_DICT}": "deploy",
    f"GET {_DICT}/keys": "invoke",
    f"GET {_DICT}/entry": "invoke",
    f"PUT {_DICT}/entry": "invoke",
    f"DELETE {_DICT}/entry": "invoke",
    "GET /v1/keys": "admin",
    "POST /v1/keys": "admin",
    "DELETE /v1/keys/{id}": "admin",
    "POST /v1/keys/{id}/rotate": "admin",
    "PUT /v1/keys/{id}/limits": "admin",
    "GET /v1/keys/{id}/webhook-secret": "own key",
    "POST /v1/keys/{id}/webhook-secret": "own key",
    "GET /v1/auth": "open",
    "POST /v1/auth/token": "key",
    "GET /v1/auth/me": "key",
    "DELETE /v1/auth/tokens": "admin",
    "GET /v1/users": "admin",
    "DELETE /v1/users/{id}/tokens": "admin",
    "GET /v1/teams": "read, listed",
    "PUT /v1/teams/{team}": "admin",
    "DELETE /v1/teams/{team}": "admin",
    "GET /v1/audit": "admin",
    "GET /v1/signing": "read everything",
    "PUT /v1/signing/keys/{name}": "admin",
    "DELETE /v1/signing/keys/{name}": "admin",
    "PUT /v1/signing/required/{env}": "admin",
    "DELETE /v1/signing/required/{env}": "admin",
    "GET /v2": "key",
    "GET /v2/health/live": "open",
    "GET /v2/health/ready": "open",
    "GET /v2/models/stats": "invoke or read, listed",
    "POST /v2/repository/index": "invoke or read, listed",
    "POST /v2/repository/models/{model}/load": "deploy",
    "POST /v2/repository/models/{model}/unload": "deploy",
    "GET /v2/systemsharedmemory/status": "invoke regions",
    "GET /v2/systemsharedmemory/region/{region}/status": "invoke regions",
    "POST /v2/systemsharedmemory/region/{region}/register": "invoke regions",
    "POST /v2/systemsharedmemory/region/{region}/unregister": "invoke regions",
    "POST /v2/systemsharedmemory/unregister": "invoke regions",
    "GET /v2/cudasharedmemory/status": "key",
    "POST /v2/cudasharedmemory/unregister": "key",
    f"POST {_MODEL}/infer": "invoke",
    f"POST {_VERSION}/infer": "invoke",
    f"GET {_MODEL}": "invoke or read",
    f"GET {_MODEL}/ready": "invoke or read",
    f"GET {_MODEL}/config": "invoke or read",
    f"GET {_MODEL}/stats": "invoke or read",
    f"GET {_VERSION}": "invoke or read",
    f"GET {_VERSION}/ready": "invoke or read",
    f"GET {_VERSION}/config": "invoke or read",
    f"GET {_VERSION}/stats": "invoke or read",
}
# RunPod's protocol, which is not in the OpenAPI document: RunPod's own documentation describes it.
_RUNPOD: Final = {
    "POST": ("run", "runsync", "purge-queue", "cancel/{id}", "retry/{id}"),
    "GET": ("health", "status/{id}", "stream/{id}"),
}
ROUTES.update(
    (f"{method} {prefix}/{{fn}}/{verb}", "invoke")
    for prefix in ("/v2", "/runpod/v2")
    for method, verbs in _RUNPOD.items()
    for verb in verbs
)
ROUTES.update({"GET /replicate/v1/predictions/{id}": "invoke", "POST /replicate/v1/predictions/{id}/cancel": "invoke"})
ROUTES.update(
    dict.fromkeys(
        (
            *(f"{method} /function/{{fn}}" for method in ("GET", "POST", "PUT", "DELETE")),
            "POST /async-function/{fn}",
            "GET /system/function/{fn}",
        ),
        "invoke",
    )
)
ROUTES.update({"GET /system/info": "key", "GET /system/namespaces": "key"})
_REPLICATE: Final = {
    "GET": (
        *(
            "predictions",
            "predictions/{id}/stream",
            "models",
            "models/{owner}/{name}",
            "models/{owner}/{name}/versions",
        ),
        *("models/{owner}/{name}/versions/{version}", "files", "files/{id}", "webhooks/default/secret", "account"),
    ),
    "POST": (*("predictions", "models/{owner}/{name}/predictions", "deployments/{owner}/{name}/predictions", "files"),),
    "DELETE": ("files/{id}",),
}
_OPENAI: Final = {
    "GET": ("models", "models/{model}", "files", "files/{id}", "files/{id}/content", "batches", "batches/{id}"),
    "POST": (
        *("responses", "audio/transcriptions", "images/generations", "files", "batches", "batches/{id}/cancel"),
        *("chat/completions", "embeddings"),
    ),
    "DELETE": ("files/{id}",),
}
# Routes that name the function in the body or in their own way: tests/gateway/protocols has their access.
IN_PROTOCOL_TESTS: Final = frozenset(
    {"GET /system/functions", "POST /cloudevents/{fn}", "POST /mcp"}
    | {"POST /v1/chat/completions", "POST /v1/embeddings"}
    | {f"{method} /openai/v1/{path}" for method, paths in _OPENAI.items() for path in paths}
    | {f"{method} /replicate/v1/{path}" for method, paths in _REPLICATE.items() for path in paths}
)
# Extensions of the Open Inference Protocol, whose response is an error for every key.
UNSUPPORTED: Final = (
    *(
        f"{method} {path}"
        for method in ("GET", "POST")
        for path in (
            "/v2/logging",
            "/v2/trace/{rest}",
            "/v2/cudasharedmemory/{rest}",
            "/v2/tpusharedmemory/{rest}",
            f"{_MODEL}/trace/setting",
            f"{_MODEL}/generate",
            f"{_MODEL}/generate_stream",
            f"{_VERSION}/generate",
            f"{_VERSION}/generate_stream",
        )
    ),
)
ROUTES.update(dict.fromkeys(UNSUPPORTED, "key"))

# The requests that each command of the CLI can make. Completion and "did you mean" also use GET /v1/functions, and
# show nothing if it is refused.
COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "up": (),
    "down": (),
    "deploy": (
        "GET /v1/functions",
        "HEAD /v1/bundles/{digest}",
        "PUT /v1/bundles/{digest}",
        "HEAD /v1/artifacts/{digest}",
        "PUT /v1/artifacts/{digest}",
        "POST /v1/functions",
        f"GET {_ONE}/revisions/{{number}}",
        f"GET {_ONE}",
        "GET /v1/builds/{id}",
        "GET /v1/nodes",
        f"DELETE {_ONE}",
    ),
    "run": (
        "HEAD /v1/bundles/{digest}",
        "PUT /v1/bundles/{digest}",
        "HEAD /v1/artifacts/{digest}",
        "PUT /v1/artifacts/{digest}",
        "POST /v1/functions",
        f"GET {_ONE}/revisions",
        f"GET {_ONE}/revisions/{{number}}",
        f"GET {_ONE}",
        "GET /v1/builds/{id}",
        "GET /v1/nodes",
        f"GET {_ONE}/logs",
        f"GET {_ONE}/why",
        f"POST {_ONE}/invoke",
        f"POST {_ONE}/lease",
        f"DELETE {_ONE}",
        "GET /v1/auth/me",
    ),
    "serve": (
        "GET /healthz",
        "GET /v1/functions",
        "HEAD /v1/bundles/{digest}",
        "PUT /v1/bundles/{digest}",
        "HEAD /v1/artifacts/{digest}",
        "PUT /v1/artifacts/{digest}",
        "POST /v1/functions",
        f"GET {_ONE}/revisions",
        f"GET {_ONE}/revisions/{{number}}",
        f"GET {_ONE}",
        "GET /v1/builds/{id}",
        "GET /v1/nodes",
        f"GET {_ONE}/logs",
        f"POST {_ONE}/lease",
        f"DELETE {_ONE}",
    ),
    "diff": (
        "GET /v1/functions",
        f"GET {_ONE}",
        f"GET {_ONE}/revisions",
        f"GET {_ONE}/revisions/{{number}}/bundle",
    ),
    "init": (),
    "build": (
        "HEAD /v1/artifacts/{digest}",
        "PUT /v1/artifacts/{digest}",
        "POST /v1/builds",
        "GET /v1/builds/{id}",
        "GET /v1/builds/{id}/report",
        "GET /v1/builds/{id}/report.html",
    ),
    "invoke": (f"POST {_ONE}/invoke", "GET /v1/auth/me", f"GET {_ONE}", f"GET {_ONE}/why"),
    "exec": (f"GET {_ONE}/exec",),
    "shell": (f"GET {_ONE}/exec",),
    "profile": (f"POST {_ONE}/profile",),
    "submit": (f"POST {_ONE}/submit", f"PUT {_ONE}/invocations/{{id}}"),
    "map": (
        "GET /v1/auth/me",
        f"GET {_ONE}",
        f"PUT {_ONE}/maps/{{id}}/items/{{first}}",
        "GET /v1/maps/{id}/outcomes",
        "GET /v1/invocations/{id}/result",
        "DELETE /v1/maps/{id}",
    ),
    "status": ("GET /v1/invocations/{id}", "GET /v1/maps/{id}"),
    "result": ("GET /v1/invocations/{id}/result", "GET /v1/invocations/{id}", "GET /v1/maps/{id}"),
    "cancel": ("DELETE /v1/invocations/{id}", "DELETE /v1/maps/{id}"),
    "ls": ("GET /v1/functions",),
    "describe": (f"GET {_ONE}", f"GET {_ONE}/revisions"),
    "logs": (f"GET {_ONE}/logs",),
    "calls": ("GET /v1/calls", f"GET {_ONE}/calls", "GET /v1/maps", "GET /v1/dlq", f"GET {_DLQ}"),
    "dlq ls": ("GET /v1/dlq", f"GET {_DLQ}"),
    "dlq show": (f"GET {_DLQ}/{{id}}", f"GET {_DLQ}/{{id}}/payload"),
    "dlq replay": (f"POST {_DLQ}/{{id}}/replay", f"POST {_DLQ}/replay"),
    "dlq drop": (f"DELETE {_DLQ}/{{id}}", f"DELETE {_DLQ}"),
    "why": (f"GET {_ONE}/why",),
    "scale": (f"POST {_ONE}/scale",),
    "traffic": (
        f"GET {_ONE}/traffic",
        f"PUT {_ONE}/traffic",
        f"DELETE {_ONE}/traffic",
        f"GET {_ONE}/differences",
    ),
    "apps ls": ("GET /v1/apps",),
    "apps rollback": ("POST /v1/apps/{env}/{app}/rollback",),
    "rollback": (f"GET {_ONE}", f"POST {_ONE}/rollback"),
    "rm": (f"GET {_ONE}", f"DELETE {_ONE}"),
    "schedules ls": ("GET /v1/schedules",),
    "schedules add": ("POST /v1/schedules",),
    "schedules rm": ("DELETE /v1/schedules/{id}",),
    "schedules pause": ("POST /v1/schedules/{id}/pause",),
    "schedules resume": ("POST /v1/schedules/{id}/resume",),
    "schedules run": ("POST /v1/schedules/{id}/run",),
    "usage": ("GET /v1/usage", "GET /v1/functions"),
    "advise": (f"GET {_ONE}/advice",),
    "cost": ("GET /v1/costs", "GET /v1/functions"),
    "history": ("GET /v1/history",),
    "events": ("GET /v1/events",),
    "traces": ("GET /v1/traces",),
    "trace": ("GET /v1/traces/{id}",),
    "console": ("POST /v1/console/ticket",),
    "nodes ls": ("GET /v1/nodes",),
    "nodes drain": ("PUT /v1/nodes/{node}/drain",),
    "nodes undrain": ("DELETE /v1/nodes/{node}/drain",),
    "top": ("GET /v1/nodes",),
    "builds ls": ("GET /v1/builds",),
    "builds cancel": ("GET /v1/builds/{id}", "DELETE /v1/builds/{id}"),
    "builds report": ("GET /v1/builds/{id}/report", "GET /v1/builds/{id}/report.html"),
    "engines ls": ("GET /v1/engines",),
    "engines gc": ("POST /v1/engines/gc",),
    "models ls": ("GET /v1/models",),
    "models describe": ("GET /v1/models/{model}",),
    "queue ls": ("GET /v1/queues",),
    "queue rm": ("GET /v1/auth/me", "GET /v1/queues", "DELETE /v1/queues/{queue}"),
    "dict ls": ("GET /v1/dicts",),
    "dict rm": ("GET /v1/auth/me", "GET /v1/dicts", "DELETE /v1/dicts/{dict}"),
    "volume put": (
        *_VOLUMES,
        f"POST {_VOLUME}/missing",
        f"PUT {_VOLUME}/blobs/{{digest}}",
        f"POST {_VOLUME}/commits",
    ),
    "volume get": (*_VOLUMES, f"GET {_VOLUME}/tree", f"GET {_VOLUME}/blobs/{{digest}}"),
    "volume ls": (*_VOLUMES, f"GET {_VOLUME}/tree"),
    "volume versions": (*_VOLUMES, f"GET {_VOLUME}"),
    "volume rm": (*_VOLUMES, f"POST {_VOLUME}/commits", f"DELETE {_VOLUME}"),
    "secrets set": ("PUT /v1/secrets/{name}",),
    "secrets ls": ("GET /v1/secrets",),
    "secrets rm": ("DELETE /v1/secrets/{name}",),
    "secrets rotate": ("POST /v1/secrets/rotate",),
    "keys create": ("POST /v1/keys",),
    "keys rotate": ("POST /v1/keys/{id}/rotate",),
    "keys limit": ("PUT /v1/keys/{id}/limits",),
    "keys ls": ("GET /v1/keys",),
    "keys rm": ("DELETE /v1/keys/{id}",),
    "keys reset": (),
    "keys webhook-secret": ("GET /v1/keys/{id}/webhook-secret", "POST /v1/keys/{id}/webhook-secret"),
    "login": ("GET /v1/auth", "POST /v1/auth/token"),
    "logout": (),
    "whoami": ("GET /v1/auth/me",),
    "token": ("POST /v1/auth/token",),
    "users ls": ("GET /v1/users",),
    "users revoke": ("DELETE /v1/users/{id}/tokens", "DELETE /v1/auth/tokens"),
    "teams ls": ("GET /v1/teams",),
    "teams set": ("PUT /v1/teams/{team}",),
    "teams rm": ("DELETE /v1/teams/{team}",),
    "audit ls": ("GET /v1/audit",),
    "signing keygen": (),
    "signing trust": ("PUT /v1/signing/keys/{name}",),
    "signing ls": ("GET /v1/signing",),
    "signing rm": ("DELETE /v1/signing/keys/{name}",),
    "signing require": ("PUT /v1/signing/required/{env}",),
    "signing allow-unsigned": ("DELETE /v1/signing/required/{env}",),
    "audit export": ("GET /v1/audit",),
    "audit verify": ("GET /v1/audit",),
    "simulate": (),
    "doctor": ("GET /healthz", "GET /readyz", "GET /v1/nodes"),
    "version": (),
    "completion": (),
}
