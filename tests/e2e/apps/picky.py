"""Functions with type hints, for callers that get them wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpufn import gpu_function


@gpu_function
def add(x: int, y: int = 1) -> int:
    return x + y


@gpu_function
def size(data: bytes) -> int:
    return len(data)


@gpu_function
def echo(value: Any = None) -> Any:
    return value


@gpu_function
def too_much(megabytes: int) -> bytes:
    return b"x" * (megabytes << 20)


@gpu_function
def not_sendable() -> Any:
    return lambda: None


@gpu_function
def items_until_one_is_not_sendable() -> Iterator[Any]:
    yield 1
    yield lambda: None
