"""How the threads of an ONNX Runtime session wait for each other, in measurements and in production.

A run has dozens of steps that its threads share, with a barrier after each. A thread that sleeps at a barrier has to be
woken. A thread that spins for milliseconds, the default of ONNX Runtime, occupies a core that other work needs.
Spinning for about the duration of a wakeup and then sleeping has most of the benefit at a small cost (decision 0023).
"""

from __future__ import annotations

from typing import Final

_SPIN_US: Final = 20
_HAS_SPIN_DURATION: Final = (1, 26)


def spin_config(version: str) -> dict[str, str]:
    """Return the session config entries for ONNX Runtime `version`. A version without a spin duration must sleep.

    >>> spin_config("1.31.1")
    {'session.intra_op.spin_duration_us': '20'}
    >>> spin_config("1.25.1")
    {'session.intra_op.allow_spinning': '0'}
    """
    major, minor, *_ = version.split(".")
    if (int(major), int(minor)) < _HAS_SPIN_DURATION:
        return {"session.intra_op.allow_spinning": "0"}
    return {"session.intra_op.spin_duration_us": str(_SPIN_US)}
