"""gpufn: deploy a Python function to your own GPUs, call it from anywhere.

>>> from gpufn import gpu_function
>>> @gpu_function(max_workers=2)
... def add(a: int, b: int = 1) -> int:
...     return a + b
>>> add(2)                                      # plain Python, here
3
>>> from gpufn.testing import run_locally
>>> with run_locally():                         # in a test; else `gpufn deploy FILE`, and a worker runs it
...     add.remote(2, b=5)
7

Every failure is a `GpufnError`; its subclasses say who can mend it:

>>> from gpufn import CapacityError, FunctionRaised, GpufnError, InvocationEnded, PlatformError, RequestError
>>> all(issubclass(kind, GpufnError) for kind in
...     (RequestError, FunctionRaised, CapacityError, InvocationEnded, PlatformError))
True
>>> CapacityError("the queue is full", retry_after_s=2.0).retryable
True

Workers import this package at every cold start, so names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpufn._calls import Call as Call
    from gpufn._client import Client as Client
    from gpufn._context import Context as Context
    from gpufn._context import current as current
    from gpufn._decorator import enter as enter
    from gpufn._decorator import exit as exit  # noqa: A004  named as its siblings are elsewhere
    from gpufn._decorator import gpu_function as gpu_function
    from gpufn._decorator import method as method
    from gpufn._decorator import park as park
    from gpufn._decorator import resume as resume
    from gpufn._function import Function as Function
    from gpufn._graph import Graph as Graph
    from gpufn._graph import gather as gather
    from gpufn._image import Image as Image
    from gpufn._map import Map as Map
    from gpufn._models import Model as Model
    from gpufn.errors import CapacityError as CapacityError
    from gpufn.errors import FunctionRaised as FunctionRaised
    from gpufn.errors import GpufnError as GpufnError
    from gpufn.errors import InvocationEnded as InvocationEnded
    from gpufn.errors import PlatformError as PlatformError
    from gpufn.errors import RequestError as RequestError
    from gpufn.schedule import Schedule as Schedule
    from gpufn.spec import Batch as Batch
    from gpufn.spec import Retry as Retry

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022  grouped by what they are for
    # Declare
    "gpu_function",
    "enter",
    "method",
    "park",
    "resume",
    "exit",
    "Batch",
    "Image",
    "Model",
    "Retry",
    "Schedule",
    # Inside a call
    "current",
    "Context",
    # Call and manage
    "Function",
    "Call",
    "Map",
    "gather",
    "Graph",
    "Client",
    # Errors
    "GpufnError",
    "RequestError",
    "FunctionRaised",
    "CapacityError",
    "InvocationEnded",
    "PlatformError",
]

_HOMES = {
    "gpu_function": "_decorator",
    "enter": "_decorator",
    "method": "_decorator",
    "park": "_decorator",
    "resume": "_decorator",
    "exit": "_decorator",
    "Batch": "spec",
    "Image": "_image",
    "Model": "_models",
    "Retry": "spec",
    "Schedule": "schedule",
    "current": "_context",
    "Context": "_context",
    "Function": "_function",
    "Call": "_calls",
    "Map": "_map",
    "gather": "_graph",
    "Graph": "_graph",
    "Client": "_client",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gpufn' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gpufn.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
