"""What runs a model: one per engine, made by the module of its backend."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpufn_core.domain.engine import EngineManifest

Array = npt.NDArray[Any]
Arrays = dict[str, Array]  # by the name of the input or output


class EngineSession(Protocol):
    """A loaded engine. `parallel` is how many threads may be in `run` at once."""

    @property
    def manifest(self) -> EngineManifest: ...

    @property
    def parallel(self) -> int: ...

    def run(self, inputs: Arrays) -> Arrays:
        """Every output. The arrays have the manifest's dtypes and shapes that a profile accepts (`batching.Batching`);
        BF16 comes and goes as `tensors.BF16` has it, BYTES as str objects. What the backend raises comes through."""
        ...

    def warm_up(self, inputs: Arrays) -> None:
        """Run `inputs` wherever `run` may run them, so that no call pays for memory or for a CUDA graph."""
        ...

    @property
    def parked_bytes(self) -> int:
        """What it keeps in the host's memory while it is parked."""
        ...

    def park(self) -> None:
        """Give up all of its device's memory. Nothing runs until `resume`."""
        ...

    def resume(self) -> None:
        """As it was. What is raised leaves it of no use."""
        ...

    def close(self) -> None: ...


def contiguous(array: Array) -> Array:
    """`array` as one aligned block in row-major order, without a copy where it is one. Rank 0 stays rank 0."""
    return array if array.flags.c_contiguous and array.flags.aligned else np.array(array, order="C")
