"""Functions with weights: `weights`, beside this file, are written by the test that deploys it."""

from __future__ import annotations

from gpufn import Weights, gpu_function

LOCAL = Weights("weights", exclude=["*.txt"])
HUB = Weights("hf://org/model")


@gpu_function(weights=LOCAL)
def weigh() -> dict[str, int]:
    return {path.relative_to(LOCAL.path).as_posix(): path.stat().st_size for path in LOCAL.path.rglob("*.*")}


@gpu_function(weights=HUB)
def weigh_hub() -> dict[str, int]:
    return {path.name: path.stat().st_size for path in HUB.path.rglob("*.*")}


@gpu_function
def look_away() -> str:
    try:
        return str(LOCAL.path)
    except Exception as error:
        return type(error).__name__
