"""Bounds, patterns and cross-field rules for management bodies, as JSON Schema that extends the struct types. Pure.

They use the constants of the checks that run after decoding. Those checks also cover rules that a schema cannot
express: stored state, the current time, the order of two numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from gpufn_core import ids
from gpufn_core.domain import traffic
from gpufn_core.encoding import urls
from gpufn_core.protocol.limits import LARGEST_INTEGER
from gpufn_core.protocol.profiles import LONGEST_PROFILE_S
from gpufn_core.signing import trust
from gpufn_core.spec import function_spec, image_spec, isolation, model_spec, resources, volume_spec, web_spec
from gpufn_core.spec.naming import names, patterns, secret_scopes
from gpufn_core.spec.units import MIN_PROCESS_BYTES, Bounds
from gpufn_gateway.auth import quotas, scopes, tokens
from gpufn_gateway.openapi import request_bodies, request_bounds

Schema = Mapping[str, Any]

_FILE_PATH: Final = r"^(?!\.{1,2}(/|$))[A-Za-z0-9._-]{1,240}$"  # plain paths; a volume also accepts others


def _number(bounds: Bounds) -> Schema:
    return {"minimum": bounds.low, "maximum": bounds.high}


def _text(pattern: re.Pattern[str]) -> Schema:
    """A string that matches the whole pattern."""
    return {"type": "string", "pattern": f"^(?:{pattern.pattern})$"}


def _text_or_empty(pattern: re.Pattern[str]) -> Schema:
    return {"type": "string", "pattern": f"^(?:{pattern.pattern})?$"}


def _object(required: Iterable[str] = (), **properties: Schema) -> Schema:
    """A schema with these fields. Other fields are allowed."""
    return {"required": list(required), "properties": properties}


def _has(**properties: Schema) -> Schema:
    """Like `_object`, with all of the fields required."""
    return _object(properties, **properties)


def _when(condition: Schema, then: Schema, else_: Schema | None = None) -> Schema:
    return {"if": condition, "then": then} | ({} if else_ is None else {"else": else_})


DIGEST: Final = _text(ids.DIGEST)
FUNCTION: Final = _text(names.SPELLED_NAME)
FUNCTION_OR_METHOD: Final = _text(re.compile(rf"{names.SPELLED_NAME.pattern}(?:\.[^/]*)?"))
GROUP: Final = _text(names.GROUP)
_RESERVED_ENV: Final = "|".join(map(re.escape, function_spec.RESERVED_ENV))
_ENV_NAME: Final = f"^(?!{_RESERVED_ENV})(?:{function_spec.ENV_NAME.pattern})$"
SECRET: Final[Schema] = {
    "type": "string", "pattern": _ENV_NAME, "maxLength": function_spec.LONGEST_SECRET_NAME,
}  # fmt: skip
SECRET_SCOPE: Final = _text(secret_scopes.SCOPE)
SIGNER: Final = _text(trust.SIGNER_NAME)
ENVIRONMENT: Final = _text(names.GROUP)
CURSOR: Final = _text_or_empty(request_bounds.CURSOR)
PLACE: Final = _text(request_bounds.CURSOR)
HISTORY_SUBJECT: Final = _text(request_bounds.HISTORY_SUBJECT)
NAMES: Final = _text(request_bounds.NAMES)
COST_COLUMNS: Final = _text(request_bounds.COST_COLUMNS)
FLAG: Final[Schema] = {"type": "string", "enum": ["true", "false", "1", "0"]}
# The operator configures which networks are allowed.
WEBHOOK: Final[Schema] = {"format": "uri", "pattern": "^https?://[!-~]+$", "maxLength": urls.LONGEST_URL}

_NULL: Final[Schema] = {"type": "null"}
_NUMBER: Final[Schema] = {"type": "number"}
_INTEGER: Final[Schema] = {"type": "integer"}
_STRING: Final[Schema] = {"type": "string"}
_OBJECT: Final[Schema] = {"type": "object"}
_CONTAINER: Final[Schema] = {"enum": sorted(isolation.IN_CONTAINER)}
_NOT_FULL: Final[Schema] = {"not": {"const": "full"}}
_EMPTY: Final[Schema] = {"maxLength": 0}
_NOT_EMPTY: Final[Schema] = {"minLength": 1}
_SOME: Final[Schema] = {"minItems": 1}
_PROCESS_MEMORY: Final[Schema] = {"minimum": MIN_PROCESS_BYTES, "maximum": LARGEST_INTEGER}
_SIZES: Final[Schema] = {"items": {"type": "integer", "minimum": 0, "maximum": model_spec.LARGEST_SIZE}}
# Five fields, in the syntax of cronsim.
_CRON: Final[Schema] = {"pattern": r"^\s*\S+(\s+\S+){4}\s*$"}
_BASE64: Final[Schema] = {"pattern": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"}
_CALLS_OF_A_KEY: Final[Schema] = {"minimum": 1, "maximum": quotas.MAX_CALLS}
_HELD_BY_A_TEAM: Final[Schema] = {"minimum": 0, "maximum": request_bodies.MAX_HELD}
_SECONDS_OF_A_KEY: Final[Schema] = {"exclusiveMinimum": 0, "maximum": quotas.MAX_SECONDS}
_RESERVED: Final = "|".join(sorted(names.RESERVED_NAMES))
_RESERVED_NAME: Final = rf"^(?:{_RESERVED})/|(?:^|/)(?:{_RESERVED})$"
_PATTERNED: Final = f"(?:{'|'.join(scopes.VERBS)}):(?:{patterns.PATTERN.pattern})"
_SCOPES: Final = "|".join([*map(re.escape, scopes.SCOPES), _PATTERNED])

_NUMBERS: Final = (
    function_spec.Batch,
    function_spec.Retry,
    function_spec.ScalingPolicy,
    function_spec.FunctionSpec,
    resources.Resources,
)
# Bounds by struct and field, in addition to the field's type.
_FIELDS: Final[Mapping[str, Mapping[str, Schema]]] = {
    "Deploy": {"spec": {"$ref": "#/components/schemas/FunctionSpec"}, "bundle": DIGEST},
    "Profile": {"seconds": {"minimum": 1, "maximum": LONGEST_PROFILE_S}},
    "Scale": {name: _number(function_spec.ScalingPolicy.bounds[name]) for name in ("min_workers", "max_workers")},
    "Traffic": {
        "weights": {
            "propertyNames": {"pattern": "^[1-9][0-9]{0,8}$"},
            "additionalProperties": {"type": "integer", "minimum": 0, "maximum": traffic.WHOLE},
        },
        "return_if": {"items": _text(traffic.RETURN_RULE)},
    },
    "HeaderRule": {"name": _text(traffic.HEADER_NAME), "value": _text(traffic.HEADER_VALUE)},
    "NewSchedule": {
        "cron": _CRON,
        "in_s": {"minimum": request_bodies.MIN_DELAY_S, "maximum": request_bodies.MAX_DELAY_S},
    },
    "NewSecret": {
        "value": {"minLength": 1, "maxLength": request_bodies.MAX_SECRET_BYTES, "pattern": r"^[^\u0000]*$"},
    },
    "NewTeam": {
        "owns": {"minItems": 1, "maxItems": request_bodies.MAX_OWNED, "items": _text(patterns.PATTERN)},
        "weight": {"minimum": request_bodies.MIN_WEIGHT, "maximum": request_bodies.MAX_WEIGHT},
        "isolation": {"enum": [tier.value for tier in isolation.LEAST]},
        "callers": {"maxItems": request_bodies.MAX_OWNED, "items": _text(patterns.PATTERN)},
        "trust_domains": {"maxItems": request_bodies.MAX_OWNED, "items": _text(resources.DOMAIN)},
    },
    "TeamLimits": {
        "workers": _HELD_BY_A_TEAM,
        "gpus": _HELD_BY_A_TEAM,
        "queued": _CALLS_OF_A_KEY,
        "run_s": _SECONDS_OF_A_KEY,
        "gpu_s": _SECONDS_OF_A_KEY,
        "stored_bytes": {"minimum": 0, "maximum": LARGEST_INTEGER},
        "functions": _HELD_BY_A_TEAM,
    },
    "DeploySignature": {"payload": _BASE64, "value": _BASE64},
    "NewSigner": {
        "patterns": {
            "minItems": 1,
            "maxItems": request_bodies.MAX_SIGNER_PATTERNS,
            "items": _text(patterns.PATTERN),
        },
    },
    "NewKey": {
        "scopes": {"minItems": 1, "items": _text(re.compile(_SCOPES))},
        "label": {"maxLength": request_bodies.MAX_LABEL_LENGTH},
        "expires_in_s": {"minimum": request_bodies.MIN_KEY_S, "maximum": request_bodies.MAX_KEY_S},
    },
    "TokenRequest": {
        "scopes": {"minItems": 1, "items": _text(re.compile(_SCOPES))},
        "expires_in_s": {"minimum": tokens.MIN_TTL_S, "maximum": tokens.MAX_TTL_S},
    },
    "KeyRotation": {"overlap_s": {"minimum": 0, "maximum": request_bodies.MAX_KEY_S}},
    "KeyLimits": {
        "rate": {"minimum": quotas.MIN_RATE, "maximum": quotas.MAX_CALLS},
        "burst": _CALLS_OF_A_KEY,
        "concurrency": _CALLS_OF_A_KEY,
        "queued": _CALLS_OF_A_KEY,
        "run_s": _SECONDS_OF_A_KEY,
        "gpu_s": _SECONDS_OF_A_KEY,
    },
    "FunctionSpec": {
        "name": {**_text(names.FULL_NAME), "not": {"pattern": _RESERVED_NAME}},
        "methods": _SOME,
        "isolation": {"not": {"enum": sorted(isolation.NO_RUNTIME)}},
        "webhook": WEBHOOK,
        "env": {
            "propertyNames": {"pattern": _ENV_NAME},
            "additionalProperties": {"type": "string", "pattern": r"^[^\u0000]*$"},
        },
        "secrets": {"maxItems": function_spec.MAX_SECRETS, "items": SECRET, "uniqueItems": True},
        "modules": {"maxItems": function_spec.MAX_MODULES, "items": _text(function_spec.MODULE_NAME)},
    },
    "Resources": {"memory_bytes": _PROCESS_MEMORY, "trust_domain": _text_or_empty(resources.DOMAIN)},
    "Schedule": {"cron": _CRON, "at": _NULL},  # declared by a function; a one-time schedule is a NewSchedule
    "ImageSpec": {
        "python": _text_or_empty(image_spec.PYTHON),
        "base": _text_or_empty(image_spec.BASE),
        "apt": {"maxItems": image_spec.MAX_PACKAGES, "items": _text(image_spec.APT)},
        "pip": {"maxItems": image_spec.MAX_PACKAGES, "items": _text(image_spec.PIP)},
        "lock": _text_or_empty(ids.DIGEST),
        "files": {"maxItems": image_spec.MAX_FILES},
        "locked": _text_or_empty(ids.DIGEST),
        "machine": {"enum": ["", *image_spec.MACHINES]},
        "commands": {"maxItems": image_spec.MAX_COMMANDS, "items": _text(image_spec.COMMAND)},
    },
    "ImageFile": {"path": {**_text(image_spec.PATH), "not": {"pattern": r"/(\.{0,2}/|\.{0,2}$)"}}, "digest": DIGEST},
    "ModelSpec": {
        "parameter": _text(model_spec.PARAMETER),
        "files": {"minItems": 1, "maxItems": model_spec.MAX_MODEL_FILES},
        "max_batch": {"minimum": 1, "maximum": model_spec.MAX_BATCH},
        "build_timeout_s": {
            "minimum": model_spec.MIN_BUILD_TIMEOUT_S,
            "maximum": model_spec.MAX_BUILD_TIMEOUT_S,
        },
        "memory_limit_bytes": _PROCESS_MEMORY,
    },
    "FileDigests": {"digests": {"items": DIGEST}},
    "VolumeMount": {"name": _text(names.FULL_NAME)},
    "VolumeFile": {
        "path": {"pattern": _FILE_PATH},
        "digest": DIGEST,
        "size": {"minimum": 0, "maximum": LARGEST_INTEGER},
        "mode": {"enum": [volume_spec.MODE, volume_spec.EXECUTABLE]},
    },
    "ModelFile": {
        "name": {"pattern": r"^(?!\.{1,2}$)[^/\\\u0000]+$"},
        "digest": DIGEST,
        "size": {"minimum": 0, "maximum": LARGEST_INTEGER},
    },
    "ShapeRange": {"min": _SIZES, "opt": _SIZES, "max": _SIZES},
    "WebSpec": {
        "methods": {"items": {"type": "string", "pattern": rf"^(?!(?:CONNECT|TRACE)$){web_spec.METHOD.pattern}$"}}
    },
    "Tolerance": {
        **{name: {"minimum": 0} for name in ("max_abs", "rel_l2", "atol", "rtol")},
        "cosine": {"minimum": -1, "maximum": 1},
    },
}
_NO_GENERATOR: Final = _object(kind={"enum": ["sync", "async"]})
_METHOD_OF_A_CLASS: Final = rf"^(?![0-9])\w{{1,{function_spec.LONGEST_METHOD_NAME}}}$"
# Rules between fields, by struct.
_RULES: Final[Mapping[str, Schema]] = {
    "NewSchedule": {
        "oneOf": [
            _object(["cron"], cron=_STRING, at=_NULL, in_s=_NULL),
            _object(["at"], cron=_NULL, at=_NUMBER, in_s=_NULL),
            _object(["in_s"], cron=_NULL, at=_NULL, in_s=_NUMBER),
        ]
    },
    "KeyLimits": _when(_has(burst=_INTEGER), _has(rate=_NUMBER)),
    "Schedule": {"required": ["cron"]},
    "Retry": _when(_has(on=_SOME), _object(attempts={"minimum": 1})),
    "Resources": {
        "allOf": [
            _when(
                _has(share={"const": "mps"}),
                _has(gpu=_SOME, vram_bytes={"type": "integer", "minimum": resources.MIN_VRAM_BYTES}),
                _object(vram_bytes=_NULL, sm_percent=_NULL),
            ),
            _when(_has(share={"enum": ["mps", "time"]}), _object(gpu_count={"maximum": 1}, nodes={"maximum": 1})),
        ]
    },
    "ImageSpec": {
        "oneOf": [
            _object(["python"], python=_NOT_EMPTY, base=_EMPTY),
            _object(["base"], base=_NOT_EMPTY, python=_EMPTY),
        ],
        **_when(_has(locked=_NOT_EMPTY), _has(python=_NOT_EMPTY, machine=_NOT_EMPTY)),
    },
    "WebSpec": _when(_has(kind={"const": "endpoint"}), _has(methods=_SOME), _object(methods={"maxItems": 0})),
    "ModelSpec": _when(_has(precision={"const": "int8"}), _has(samples=_OBJECT)),
    "FunctionSpec": {
        "allOf": [
            _when(
                _has(is_class={"const": True}),
                _object(methods={"items": _has(name={"pattern": _METHOD_OF_A_CLASS})}),
                _object(methods={"maxItems": 1, "items": _object(name=_EMPTY)}),
            ),
            _when(
                _object(["resources"], resources=_object(["nodes"], nodes={"minimum": 2})),
                _object(
                    concurrency={"maximum": 1},
                    batch=_NULL,
                    methods={"items": _object(batch=_NULL)},
                    models={"maxItems": 0},
                    image=_NULL,
                    isolation={"not": _CONTAINER},
                    scaling=_object(park_timeout_s={"enum": [0, None]}),
                    env={"propertyNames": {"not": {"enum": sorted(function_spec.GANG_ENV)}}},
                ),
            ),
            # What `isolation.contradiction` refuses.
            _when(_has(image=_OBJECT), _object(isolation=_CONTAINER, network=_NOT_FULL)),
            _when(_has(isolation=_CONTAINER), _object(network=_NOT_FULL)),
            _when(_has(isolation={"const": "process"}), _object(network={"not": {"enum": ["egress", "none"]}})),
            _when(_has(egress={"const": True}), {"not": {"required": ["network"]}}),
            # Calls of generators are not gathered. A method's own `batch` replaces the function's.
            _object(methods={"items": _when(_has(batch=_OBJECT), _NO_GENERATOR)}),
            _when(_has(batch=_OBJECT), _object(methods={"items": {"anyOf": [_NO_GENERATOR, _has(batch=_NULL)]}})),
            _when(_object(["constructor"]), _has(is_class={"const": True})),
            _when(
                _has(web=_OBJECT),
                {
                    "not": {"required": ["serves"]},
                    **_object(
                        is_class={"const": False},
                        entry=_object(packaging={"not": {"const": "model"}}),
                        resources=_object(nodes={"maximum": 1}),
                    ),
                },
            ),
            _when(
                _has(web=_has(kind={"enum": ["asgi", "wsgi"]})),
                _object(
                    methods={"items": _has(kind={"const": "async_generator"})},
                    batch=_NULL,
                    models={"maxItems": 0},
                    retries=_NULL,
                    schedule=_NULL,
                    webhook=_NULL,
                ),
            ),
            _when(_object(entry=_has(packaging={"const": "model"})), _has(models={"minItems": 1, "maxItems": 1})),
        ]
    },
}


# Also the starting point of generated requests: random values of all fields contradict each other.
_SPEC: Final[Mapping[str, Any]] = {
    "name": "hello",
    "entry": {"module": "app", "qualname": "hello"},
    "methods": [{"parameters": {"type": "object", "properties": {"name": {"type": "string"}}}}],
    "timeout_s": 60,
}
_EXAMPLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "Deploy": {"spec": _SPEC, "bundle": ids.digest_of(b"")},
    "FunctionSpec": _SPEC,
}


def add_to(schemas: dict[str, dict[str, Any]]) -> None:
    """Add the bounds, rules and examples to `schemas`, the struct schemas by name."""
    for struct in _NUMBERS:
        _add_fields(schemas[struct.__name__], {name: _number(bounds_) for name, bounds_ in struct.bounds.items()})
    for name, fields in _FIELDS.items():
        _add_fields(schemas[name], fields)
    for name, rules in _RULES.items():
        schemas[name] |= rules
    for name, example in _EXAMPLES.items():
        schemas[name]["examples"] = [example]


def _add_fields(schema: dict[str, Any], fields: Mapping[str, Schema]) -> None:
    properties = schema["properties"]
    for field, bounds in fields.items():
        properties[field] = {**properties[field], **bounds}
