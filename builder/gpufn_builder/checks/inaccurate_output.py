"""The error of an output that is too far from the reference. Does not import numpy: the service's process uses it."""

from __future__ import annotations

from gpufn_core.errors import BuildFailed


class InaccurateOutput(BuildFailed):
    """Output `node` is too far from the reference for the case `case`."""

    def __init__(self, message: str | None, *, case: str, stage: str = "", node: str = "", log: str = "") -> None:
        super().__init__(message, stage=stage, node=node, log=log)
        self.case = case
