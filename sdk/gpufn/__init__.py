"""gpufn: deploy a Python function to your own GPUs and call it from anywhere.

>>> from gpufn import gpu_function
>>> @gpu_function(max_workers=2)
... def add(a: int, b: int = 1) -> int:
...     return a + b
>>> add(2)                                      # a plain Python call in this process
3
>>> from gpufn.testing import run_locally
>>> with run_locally():                         # for tests; after `gpufn deploy FILE` a worker runs the call
...     add.remote(2, b=5)
7

Every failure is a `GpufnError`; its subclasses show whether the caller, the operator or a retry can fix it:

>>> from gpufn import CapacityError, FunctionRaised, GpufnError, InvocationEnded, PlatformError, RequestError
>>> all(issubclass(kind, GpufnError) for kind in
...     (RequestError, FunctionRaised, CapacityError, InvocationEnded, PlatformError))
True
>>> CapacityError("the queue is full", retry_after_s=2.0).retryable
True

Workers import this package at every cold start, so each name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpufn.call.context import Context as Context
    from gpufn.call.context import current as current
    from gpufn.call.graph import Graph as Graph
    from gpufn.call.graph import gather as gather
    from gpufn.call.submitted_call import Call as Call
    from gpufn.client.client import Client as Client
    from gpufn.data.dict import Dict as Dict
    from gpufn.data.queue import Queue as Queue
    from gpufn.data.value import Ref as Ref
    from gpufn.data.value import put as put
    from gpufn.declare.app import App as App
    from gpufn.declare.decorator import enter as enter
    from gpufn.declare.decorator import exit as exit  # noqa: A004  the counterpart of `enter`
    from gpufn.declare.decorator import gpu_function as gpu_function
    from gpufn.declare.decorator import method as method
    from gpufn.declare.decorator import park as park
    from gpufn.declare.decorator import resume as resume
    from gpufn.declare.function import Function as Function
    from gpufn.declare.image import Image as Image
    from gpufn.declare.model import Model as Model
    from gpufn.declare.volume import Volume as Volume
    from gpufn.declare.web import asgi_app as asgi_app
    from gpufn.declare.web import web_endpoint as web_endpoint
    from gpufn.declare.web import wsgi_app as wsgi_app
    from gpufn.declare.weights import Weights as Weights
    from gpufn.maps.map import Map as Map
    from gpufn_core.errors import CapacityError as CapacityError
    from gpufn_core.errors import FunctionRaised as FunctionRaised
    from gpufn_core.errors import GpufnError as GpufnError
    from gpufn_core.errors import InvocationEnded as InvocationEnded
    from gpufn_core.errors import PlatformError as PlatformError
    from gpufn_core.errors import RequestError as RequestError
    from gpufn_core.spec.function_spec import Batch as Batch
    from gpufn_core.spec.function_spec import Retry as Retry
    from gpufn_core.spec.schedule import Schedule as Schedule

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022  grouped by purpose
    # Declare
    "gpu_function",
    "asgi_app",
    "wsgi_app",
    "web_endpoint",
    "App",
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
    "Volume",
    "Weights",
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
    # Share data
    "Dict",
    "Queue",
    "put",
    "Ref",
    # Errors
    "GpufnError",
    "RequestError",
    "FunctionRaised",
    "CapacityError",
    "InvocationEnded",
    "PlatformError",
]

_MODULES = {
    "gpufn.data.dict": ("Dict",),
    "gpufn.data.queue": ("Queue",),
    "gpufn.data.value": ("put", "Ref"),
    "gpufn.declare.app": ("App",),
    "gpufn.declare.decorator": ("gpu_function", "enter", "method", "park", "resume", "exit"),
    "gpufn.declare.function": ("Function",),
    "gpufn.declare.image": ("Image",),
    "gpufn.declare.model": ("Model",),
    "gpufn.declare.web": ("asgi_app", "wsgi_app", "web_endpoint"),
    "gpufn.declare.volume": ("Volume",),
    "gpufn.declare.weights": ("Weights",),
    "gpufn_core.spec.function_spec": ("Batch", "Retry"),
    "gpufn_core.spec.schedule": ("Schedule",),
    "gpufn.call.context": ("current", "Context"),
    "gpufn.call.submitted_call": ("Call",),
    "gpufn.call.graph": ("gather", "Graph"),
    "gpufn.maps.map": ("Map",),
    "gpufn.client.client": ("Client",),
    "gpufn_core.errors": (
        "GpufnError",
        "RequestError",
        "FunctionRaised",
        "CapacityError",
        "InvocationEnded",
        "PlatformError",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gpufn' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
