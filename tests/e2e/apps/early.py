"""Functions whose variables make an interpreter load a folder's `sitecustomize` when it starts."""

from __future__ import annotations

import os

from gpufn import gpu_function

# Each is six bytes of JSON: the request did not fit a template's pipe, so the worker started cold.
BIG = "\x01" * 20_000


ENV = {"PYTHONPATH": os.environ.get("EVIL_FOLDER", ""), "BIG": BIG}


@gpu_function(env=ENV | {"TIER": "sandbox"})
def early() -> str:
    return os.environ["PYTHONPATH"]


@gpu_function(env=ENV | {"TIER": "process"}, isolation="process")
def early_unconfined() -> str:
    return os.environ["PYTHONPATH"]
