"""Functions that choose their isolation."""

from __future__ import annotations

import os
import socket

from gpufn import gpu_function


def attempt(code: str) -> object:
    try:
        return eval(code, {"os": os, "socket": socket})
    except OSError as error:
        return error.errno


@gpu_function(idle_timeout=60, network="none")
def offline(code: str) -> object:
    return attempt(code)
