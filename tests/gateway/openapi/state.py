"""Hooks of schemathesis that make requests meet rules that no schema can state: they name stored objects, their times
are in the future, and the smaller of two numbers comes first. A value that its schema refuses stays as it is."""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import os
import re
import time
from collections.abc import Iterable
from typing import Any, Final

import schemathesis
from schemathesis.core.parameters import ParameterLocation

from gpufn_core.domain.traffic import RETURN_RULE
from gpufn_core.encoding import media
from gpufn_core.ids import digest_of, is_digest
from gpufn_core.protocol import subjects
from gpufn_core.protocol.data import MAX_ITEMS
from gpufn_core.signing.ed25519 import Signer
from gpufn_core.spec.naming.names import GROUP, canonical, is_function_name
from gpufn_gateway.openapi.request_bounds import HISTORY_SUBJECT, NAMES
from tests.gateway.openapi.stored import BUNDLE_VARIABLE, FUNCTION, KEY_VARIABLE, MODEL

_MODEL_DIGEST: Final = digest_of(MODEL)
_IN_AN_HOUR: Final = 3600.0
_WHOLE: Final = 100
_REVISION: Final = re.compile(r"[1-9][0-9]{0,8}")
_WEBHOOK: Final = "https://example.org/done"  # an address in a private network is not allowed
_CRON: Final = re.compile(r"\s*\S+(\s+\S+){4}\s*")
_ULID: Final = re.compile(r"0{26}")  # as generated
_UNKNOWN_CALL: Final = "1" * 26
_LONGEST_KEY: Final = 200
_PUBLIC_KEY: Final = Signer.new().public_pem()
_BASE64: Final = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")

_ITEMS: Final = {"shout": '{"text": "a"}', "detect": '{"image": ""}'}

_EXCLUSIVE: Final = ("constructor", "serves", "web")

_numbers = itertools.count(1)


@schemathesis.serializer(media.LINES)
def lines(_context: Any, value: Any) -> bytes:
    return (value if isinstance(value, str) else json.dumps(value)).encode()


@schemathesis.hook
def before_load_schema(_context: Any, document: dict[str, Any]) -> None:
    """Remove fields of a function that exclude others. Schemathesis looks for a value with all fields, and took 17 of
    35 seconds until it had found that there is none."""
    for name in _EXCLUSIVE:
        del document["components"]["schemas"]["FunctionSpec"]["properties"][name]


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    changed = case.meta.phase.data if case.meta is not None else None
    if getattr(changed, "parameter", None) == "Authorization":
        return  # an edited case would count as valid, and get its key back
    # Cases share their values.
    path, query, headers = (copy.copy(each) for each in (case.path_parameters, case.query, case.headers))
    body = copy.deepcopy(case.body) if isinstance(case.body, dict) else case.body
    operation = f"{case.method.lower()} {case.operation.path}"
    _name_what_is_stored(operation, path)
    _bound_query(query)
    if operation in ("get /v1/history", "get /v1/events"):
        _bound_history(query)
    _bound_headers(operation, headers)
    if operation.endswith(("/ack", "/release")) and query and isinstance(query.get("lease"), str):
        queue = canonical(str(path.get("queue")))
        query["lease"] = f"{subjects.QUEUES}.{subjects.queue_consumer(queue)}.1.1.1.1.0"
    if operation.startswith(("put /v1/artifacts/", "put /v1/volumes/")) and is_digest(str(path.get("digest"))):
        path["digest"], body = _MODEL_DIGEST, MODEL
    elif "/maps/" in operation and isinstance(body, str):
        body = _ITEMS[operation.split("/")[3]]
    elif isinstance(body, dict):
        _mend_body(operation, body)
    if "detect" in operation and query:  # the query is used only with a body of raw bytes
        if getattr(changed, "parameter_location", None) is ParameterLocation.QUERY:
            case.media_type, body = media.BYTES, b"bytes"
        elif case.media_type != media.BYTES:
            query.clear()
    case.path_parameters, case.query, case.headers, case.body = path, query, headers, body


def _name_what_is_stored(operation: str, path: dict[str, Any]) -> None:
    found = path.get("id")
    if is_function_name(str(path.get("fn"))) and operation != "delete /v1/functions/{fn}":
        path["fn"] = FUNCTION
    if "/v1/keys/" in operation and isinstance(found, str):
        path["id"] = os.environ[KEY_VARIABLE]
    elif operation.endswith(("/events", "/outcomes")) and isinstance(found, str):
        path["id"] = _UNKNOWN_CALL  # without a runner the event stream does not end
    elif operation.startswith("put ") and _matches(_ULID, found):
        path["id"] = f"{next(_numbers):026}"  # a new call
    if operation == "put /v1/signing/required/{env}" and _matches(GROUP, path.get("env")):
        path["env"] = "none-is-deployed-here"  # unsigned deploys to other environments stay possible
    if str(path.get("first")).isdecimal():
        path["first"] = int(path["first"])  # keep it valid for its schema: an edited case is validated again


def _bound_query(query: dict[str, Any]) -> None:
    query.pop("x-schemathesis-unknown-property", None)  # a request may have any other parameters
    if _is_positive(query.get("max_items")) and float(query["max_items"]) <= MAX_ITEMS:
        query["max_items"] = str(MAX_ITEMS)  # the queue has items
    if query.get("follow") in ("true", "1"):
        query["follow"] = "false"  # a followed log does not end
    if _is_positive(query.get("wait")):
        query["wait"] = "0.01"
    for name in ("since", "until"):
        if _is_day(query.get(name)):
            query[name] = datetime.datetime.now(datetime.UTC).date().isoformat()  # at most a year apart


def _bound_history(query: dict[str, Any]) -> None:
    """Name subjects and series that exist, in the last hour."""
    for name, pattern, right in (
        ("subject", HISTORY_SUBJECT, "overview"),
        ("series", NAMES, "calls"),
        ("kind", NAMES, "deploy"),
    ):
        if _matches(pattern, query.get(name)):
            query[name] = right
    for name, at in (("from", time.time() - _IN_AN_HOUR), ("to", time.time())):
        if _is_positive(query.get(name)) or query.get(name) in (0, "0", "0.0"):
            query[name] = str(at)
    if _is_positive(query.get("step")) and float(query["step"]) % 10 == 0:
        query["step"] = "60"


def _bound_headers(operation: str, headers: dict[str, Any]) -> None:
    headers.pop("x-schemathesis-unknown-property", None)  # a request may have any other headers
    if _is_positive(headers.get("X-Gpufn-Deadline")):
        headers["X-Gpufn-Deadline"] = str(time.time() + _IN_AN_HOUR)
    if _is_address(headers.get("X-Gpufn-Webhook")):
        headers["X-Gpufn-Webhook"] = _WEBHOOK
    key = headers.get("Idempotency-Key")
    if key and operation.endswith("/invoke"):
        del headers["Idempotency-Key"]  # there is no runner that ends submitted calls
    elif key and len(key) < _LONGEST_KEY:
        headers["Idempotency-Key"] = f"{key}{next(_numbers)}"  # a new call


def _mend_body(operation: str, body: dict[str, Any]) -> None:
    match operation:
        case "post /v1/functions":
            _mend_deploy(body)
        case "post /v1/functions/{fn}/scale":
            _order(body, "min_workers", "max_workers")
        case "put /v1/functions/{fn}/traffic":
            _mend_traffic(body)
        case "put /v1/signing/keys/{name}":
            if isinstance(body.get("public_key"), str):
                body["public_key"] = _PUBLIC_KEY
        case "post /v1/volumes/{volume}/commits":
            _mend_commit(body)
        case "post /v1/builds":
            _mend_models([body.get("model")])
        case "post /v1/schedules":
            _mend_schedule(body)
            for name, right in (("function", FUNCTION), ("method", "")):
                if isinstance(body.get(name), str):
                    body[name] = right
            if isinstance(body.get("arguments", {}), dict):
                body["arguments"] = {"text": "a"}
            if isinstance(body.get("at"), (int, float)) and not isinstance(body["at"], bool):
                body["at"] = time.time() + _IN_AN_HOUR


def _mend_traffic(body: dict[str, Any]) -> None:
    weights = body.get("weights")
    if isinstance(weights, dict) and all(
        _matches(_REVISION, number)
        and isinstance(weight, int)
        and not isinstance(weight, bool)
        and 0 <= weight <= _WHOLE
        for number, weight in weights.items()
    ):
        body["weights"] = {"1": _WHOLE}  # they add up
    rules = body.get("return_if")
    if isinstance(rules, list) and all(_matches(RETURN_RULE, rule) for rule in rules):
        body["return_if"] = []  # a rule needs a second revision
    _differ(_objects(body.get("headers")), "value")


def _mend_commit(body: dict[str, Any]) -> None:
    files = _objects(body.get("put"))
    _differ(files, "path")
    for file in files:
        if is_digest(str(file.get("digest"))):
            file["digest"] = _MODEL_DIGEST
        if isinstance(file.get("size"), int) and not isinstance(file["size"], bool) and file["size"] >= 0:
            file["size"] = len(MODEL)
    removed = body.get("remove")
    if isinstance(removed, list):
        body["remove"] = ["/" if isinstance(path, str) else path for path in removed]  # a path that is always there


def _mend_deploy(body: dict[str, Any]) -> None:
    if is_digest(str(body.get("bundle"))):
        body["bundle"] = os.environ[BUNDLE_VARIABLE]
    if isinstance(body.get("traffic"), int) and not isinstance(body["traffic"], bool) and 0 < body["traffic"] < _WHOLE:
        body["traffic"] = None  # a canary needs a second worker, and no model
    if isinstance(body.get("replace", True), bool):
        body["replace"] = True  # a function with this name may exist, from another source
    if isinstance(body.get("spec"), dict):
        _mend_spec(body["spec"])
    if _is_signature(body.get("signature")):
        body["signature"] = None


def _mend_spec(spec: dict[str, Any]) -> None:
    methods, schedule = _objects(spec.get("methods")), spec.get("schedule")
    for each in (*methods, *_objects([schedule])):
        for name in each.keys() & {"parameters", "returns", "arguments"}:
            each[name] = _with_64_bits(each[name])
    _differ([each for each in methods if each.get("name")], "name")
    if isinstance(spec.get("scaling"), dict):
        spec["scaling"].setdefault("max_workers", 1000)
        _order(spec["scaling"], "min_workers", "max_workers")
    if isinstance(schedule, dict):
        _mend_schedule(schedule)
        if isinstance(schedule.get("method", ""), str) and methods:
            schedule["method"] = methods[0].get("name", "")
    if _is_address(spec.get("webhook")):
        spec["webhook"] = _WEBHOOK
    _mend_models(spec.get("models"))
    mounts = _objects(spec.get("volumes"))
    _differ(mounts, "name")
    for mount in mounts:
        if mount.get("writable", False) is False:
            mount["writable"] = True  # else the volume has to exist


def _is_signature(value: Any) -> bool:
    """Return whether the schema accepts the value as a signature. No trusted key made it."""
    return (
        isinstance(value, dict)
        and value.keys() == {"payload", "key", "value"}
        and isinstance(value["key"], str)
        and len(value["key"]) <= 64
        and all(_matches(_BASE64, value[name]) for name in ("payload", "value"))
        and len(value["value"]) <= 88
    )


def _mend_schedule(schedule: dict[str, Any]) -> None:
    if _matches(_CRON, schedule.get("cron")):
        schedule["cron"] = "0 5 * * *"
    if isinstance(schedule.get("timezone"), str):
        schedule["timezone"] = "UTC"


def _mend_models(models: Any) -> None:
    for model in _objects(models):
        files = _objects(model.get("files"))
        _differ(files, "name")
        for file in (*files, *_objects([model.get("samples")])):
            if is_digest(str(file.get("digest"))):
                file["digest"] = _MODEL_DIGEST
        for profile in _objects(model.get("profiles")):
            inputs = profile.get("inputs")
            for shapes in _objects(inputs.values() if isinstance(inputs, dict) else ()):
                if all(_is_shape(shapes.get(name)) for name in ("min", "opt", "max")):
                    shapes["opt"] = shapes["max"] = shapes["min"]
    _differ(_objects(models), "parameter")


def _with_64_bits(value: Any) -> Any:
    """Free-form JSON, without the integers that no encoding of a record has."""
    if isinstance(value, dict):
        return {key: _with_64_bits(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_64_bits(each) for each in value]
    return max(-(1 << 63), min(value, (1 << 64) - 1)) if type(value) is int else value


def _differ(objects: list[dict[str, Any]], name: str) -> None:
    """No two of them have the same name."""
    for number, each in enumerate(objects[1:], 1):
        if each.get(name) and isinstance(each[name], str):
            each[name] = f"{each[name][:90]}{number}"


def _order(body: dict[str, Any], low: str, high: str) -> None:
    one, other = body.get(low), body.get(high)
    if isinstance(one, int) and isinstance(other, int) and 0 <= other < one <= 1000:
        body[low], body[high] = other, one


def _objects(values: Any) -> list[dict[str, Any]]:
    return [each for each in values if isinstance(each, dict)] if isinstance(values, Iterable) else []


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_address(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(("http://", "https://"))


def _is_positive(text: Any) -> bool:
    try:
        return float(text) > 0
    except (TypeError, ValueError):
        return False


def _is_day(text: Any) -> bool:
    try:
        return bool(datetime.date.fromisoformat(text))
    except (TypeError, ValueError):
        return False


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(size, int) and 0 <= size < 1 << 31 for size in value)
