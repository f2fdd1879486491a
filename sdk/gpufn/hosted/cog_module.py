"""The module that predictors import as `cog`."""

from __future__ import annotations

import collections.abc
import logging
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

__all__ = [
    "AsyncConcatenateIterator",
    "AsyncIterator",
    "BaseModel",
    "BasePredictor",
    "BaseRunner",
    "CancelationException",
    "ConcatenateIterator",
    "File",
    "Input",
    "Iterator",
    "Path",
    "Secret",
    "current_scope",
    "emit_metric",
]

_log = logging.getLogger("cog")
T = TypeVar("T")
AsyncIterator = collections.abc.AsyncIterator
_UNSET: Any = object()


class BasePredictor:
    """The base class of predictors."""

    def setup(self, weights: Any = None) -> Any:
        """Prepare the model. Runs once per worker."""


class BaseRunner(BasePredictor):
    """A predictor whose method is called `run`."""


@dataclass(frozen=True)
class InputField:
    """The default of a parameter that has constraints."""

    default: Any = _UNSET
    description: str | None = None
    ge: float | None = None
    le: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    regex: str | None = None
    choices: tuple[Any, ...] | None = None

    @property
    def is_required(self) -> bool:
        return self.default is _UNSET or self.default is ...


def Input(  # noqa: N802  as in cog
    default: Any = _UNSET,
    *,
    description: str | None = None,
    ge: float | None = None,
    le: float | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
    regex: str | None = None,
    choices: list[Any] | None = None,
    **_: Any,  # such as `deprecated`, which changes nothing
) -> Any:
    """Describe a parameter of `predict`."""
    allowed = None if choices is None else tuple(choices)
    return InputField(default, description, ge, le, min_length, max_length, regex, allowed)


class Path(type(pathlib.Path())):  # type: ignore[misc]  # the class for this system
    """A file: an argument that was downloaded, or a result to send."""


class File:
    """The hint of a parameter that takes an open file."""


class Secret(str):
    """A text that is not printed."""

    __slots__ = ()

    def get_secret_value(self) -> str | None:
        return str.__str__(self)

    def __repr__(self) -> str:
        return "Secret('**********')"


class ConcatenateIterator(Iterator[T], Generic[T]):
    """The hint of a generator whose items are parts of one text."""


class AsyncConcatenateIterator(AsyncIterator[T], Generic[T]):
    """The hint of an async generator whose items are parts of one text."""


class BaseModel:
    """The base class of results with fields."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()
        dataclass(cls)


class CancelationException(BaseException):
    """A prediction was cancelled. gpufn ends the worker's attempt instead, so it never raises this."""


@dataclass
class Scope:
    """The scope of the running prediction."""

    context: Mapping[str, str] = field(default_factory=dict)

    def record_metric(self, name: str, value: Any, mode: str = "replace") -> None:
        """Log a metric: gpufn has no metrics of single calls."""
        _log.info("metric %s=%s", name, value)


def current_scope() -> Scope:
    return Scope()


def emit_metric(name: str, value: Any) -> None:
    current_scope().record_metric(name, value)
