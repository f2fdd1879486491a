"""How the threads of an ONNX Runtime session wait for one another in a run, where it is measured as where it serves.

A run has dozens of steps that its threads share, and at each they meet. One that sleeps meanwhile has to be woken; one
that spins for milliseconds, as ONNX Runtime does by itself, takes the core of somebody who has work. One that spins for
about as long as a wake-up takes, and then sleeps, has most of the one and loses little of the other (decision 0023).
"""

from __future__ import annotations

from typing import Final

_SPIN_US: Final = 20
_KNOWS_HOW_LONG: Final = (1, 26)


def waiting(version: str) -> dict[str, str]:
    """Entries for the config of a session of ONNX Runtime `version`. One that cannot be told how long to spin sleeps.

    >>> waiting("1.31.1")
    {'session.intra_op.spin_duration_us': '20'}
    >>> waiting("1.25.1")
    {'session.intra_op.allow_spinning': '0'}
    """
    major, minor, *_ = version.split(".")
    if (int(major), int(minor)) < _KNOWS_HOW_LONG:
        return {"session.intra_op.allow_spinning": "0"}
    return {"session.intra_op.spin_duration_us": str(_SPIN_US)}
