"""Interface of a loaded engine, which each backend's module implements."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpufn_core.domain.devices.engine import EngineManifest

Array = npt.NDArray[Any]
Arrays = dict[str, Array]  # by the name of the input or output


class EngineSession(Protocol):
    """A loaded engine. `parallel` is how many threads may be in `run` at once."""

    @property
    def manifest(self) -> EngineManifest: ...

    @property
    def parallel(self) -> int: ...

    def run(self, inputs: Arrays) -> Arrays:
        """Return all outputs. Exceptions of the backend propagate.

        The inputs have the manifest's dtypes and shapes that a profile accepts (`batching.Batching`). BF16 has the
        dtype `tensors.BF16`, BYTES are str objects.
        """
        ...

    def warm_up(self, inputs: Arrays) -> None:
        """Run `inputs` wherever `run` may run them, so that no call has to allocate memory or capture a CUDA graph."""
        ...

    @property
    def parked_bytes(self) -> int:
        """Host memory that the engine uses while it is parked."""
        ...

    def park(self) -> None:
        """Release all device memory. Nothing runs until `resume`."""
        ...

    def resume(self) -> None:
        """Restore the engine. After an exception it is unusable."""
        ...

    def close(self) -> None: ...


def contiguous(array: Array) -> Array:
    """Return `array` as one aligned row-major block, without a copy if it is one. Rank 0 stays rank 0."""
    return array if array.flags.c_contiguous and array.flags.aligned else np.array(array, order="C")
