"""The steps of a stage, which are the progress of a build. Each takes one run of the model, or a similar time."""

from __future__ import annotations

from collections.abc import Callable

OnStep = Callable[[str], object]  # receives a description of each step before it begins


def ignore_step(step: str) -> None:
    """Report no step."""
