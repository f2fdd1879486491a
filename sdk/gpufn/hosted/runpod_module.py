"""The module that handlers import as `runpod`, and the modules below it."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Mapping
from typing import Any, Final

import gpufn

_PARTS: Final = (
    "runpod",
    "runpod.serverless",
    "runpod.serverless.modules",
    "runpod.serverless.modules.rp_logger",
    "runpod.serverless.utils",
    "runpod.serverless.utils.rp_cleanup",
    "runpod.serverless.utils.rp_validator",
)


class Started(BaseException):
    """`start` was called. The rest of the file does not run, as on RunPod, where `start` does not return."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__("runpod.serverless.start")
        self.config = config


def start(config: Mapping[str, Any]) -> None:
    raise Started(config)


def progress_update(job: Mapping[str, Any], progress: Any) -> None:
    """Report progress. A number from 0 to 1 is a fraction; anything else is a message."""
    is_fraction = isinstance(progress, (int, float)) and 0 <= progress <= 1
    gpufn.current().progress(progress if is_fraction else 0.0, str(progress))


class RunPodLogger:
    """Writes to `logging`, so that the lines are in the function's logs."""

    def __init__(self) -> None:
        self._log = logging.getLogger("runpod")

    def debug(self, message: object, request_id: str | None = None) -> None:
        self._log.debug(message)

    def info(self, message: object, request_id: str | None = None) -> None:
        self._log.info(message)

    def warn(self, message: object, request_id: str | None = None) -> None:
        self._log.warning(message)

    def error(self, message: object, request_id: str | None = None) -> None:
        self._log.error(message)

    def set_level(self, level: str) -> None:
        self._log.setLevel({"TRACE": "DEBUG", "WARN": "WARNING"}.get(level.upper(), level.upper()))


def validate(raw_input: Mapping[str, Any], schema: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Check an input as `rp_validator` does: `{"errors": [...]}`, or `{"validated_input": {...}}`.

    >>> validate({"n": 2}, {"n": {"type": int, "required": True}, "s": {"type": str, "default": "x"}})
    {'validated_input': {'n': 2, 's': 'x'}}
    """
    errors = [f"Unexpected input. {name} is not a valid input option." for name in raw_input if name not in schema]
    validated = dict(raw_input)
    for name, rules in schema.items():
        if name not in raw_input:
            if rules.get("required"):
                errors.append(f"{name} is a required input.")
            else:
                validated[name] = rules.get("default")
            continue
        kind = rules.get("type")
        value = raw_input[name]
        if kind is float and type(value) is int:
            validated[name] = value = float(value)
        if isinstance(kind, type) and not isinstance(value, kind):
            errors.append(f"{name} should be {kind} type, not {type(value)}.")
        elif (constraint := rules.get("constraints")) is not None and not constraint(value):
            errors.append(f"{name} does not meet the constraints.")
    return {"errors": errors} if errors else {"validated_input": validated}


class _Part(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"gpufn's replacement of {self.__name__} has no {name}")


def install() -> None:
    """Make the replacement importable as `runpod`."""
    parts = {name: _Part(name) for name in _PARTS}
    for name, part in parts.items():
        part.__path__ = []  # makes it a package
        sys.modules[name] = part
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(parts[parent], last, part)
    root, serverless = parts["runpod"], parts["runpod.serverless"]
    root.RunPodLogger = RunPodLogger  # type: ignore[attr-defined]
    serverless.start, serverless.progress_update = start, progress_update  # type: ignore[attr-defined]
    parts["runpod.serverless.modules.rp_logger"].RunPodLogger = RunPodLogger  # type: ignore[attr-defined]
    parts["runpod.serverless.utils.rp_validator"].validate = validate  # type: ignore[attr-defined]
    cleanup = parts["runpod.serverless.utils.rp_cleanup"]
    cleanup.clean = lambda folder_list=None: None  # type: ignore[attr-defined]
