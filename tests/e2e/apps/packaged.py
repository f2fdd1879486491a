"""Functions with contradicting packages; the tests make these packages."""

from typing import Any

from gpufn import Image, gpu_function


@gpu_function(image=Image().pip_install("tint==1"), memory="256Mi")
def old() -> list[str]:
    return _report()


@gpu_function(image=Image().pip_install("tint==2").env(SHADE="dark"), memory="256Mi")
def new() -> list[str]:
    return _report()


@gpu_function(image=Image().pip_install("tint==1"), memory="256Mi")
def spied() -> dict[str, Any]:
    import sys

    return {"saw_platform": getattr(sys, "saw_platform", None)}


def _report() -> list[str]:
    import importlib.util
    import os

    tint: Any = importlib.import_module("tint")
    others = [name for name in ("httpx", "nats", "uvloop", "gpufn_gateway") if importlib.util.find_spec(name)]
    try:
        with open(tint.__file__, "a") as file:
            file.write("# changed\n")
    except OSError as error:
        others.append(type(error).__name__)
    return [tint.VERSION, os.environ.get("SHADE", ""), *others]
