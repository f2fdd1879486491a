"""Prove that CUDA works on the GPU that this process sees: initialize the driver and create a context.

The agent runs it in its own process (`python -m gpufn_runtime.worker --prove-cuda`). NVML answers on machines where
CUDA does not work: without the Fabric Manager, or after an update of the driver's libraries alone.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from gpufn_core.protocol.launch import CudaProof
from gpufn_runtime.worker.gpu.cuda_driver import OUT_OF_MEMORY, Driver, DriverError
from gpufn_runtime.worker.gpu.device_errors import error_of_code

_DEVICE_UNAVAILABLE = 46
_IN_USE = (OUT_OF_MEMORY, _DEVICE_UNAVAILABLE)  # by other processes: that proves nothing against the GPU
_HINTS = {
    100: "the driver shows it no device",
    802: "on a machine with NVSwitch, the Fabric Manager must run (nvidia-fabricmanager)",
    803: "the driver's libraries and its kernel module are of different releases: reload the module or reboot",
}


def prove(library: Any = None) -> CudaProof:
    """Return the proof. `library` replaces libcuda."""
    try:
        driver = Driver(library)
        driver.open()
        driver.close()
    except OSError as error:
        return CudaProof(f"the CUDA driver cannot be loaded: {error}")
    except DriverError as error:
        if error.code in _IN_USE:
            return CudaProof()
        known = error_of_code(error.code)
        words = f" ({known.name}: {known.words})" if known is not None else ""
        hint = f"; {_HINTS[error.code]}" if error.code in _HINTS else ""
        return CudaProof(f"CUDA does not work: {error}{words}{hint}")
    return CudaProof()


def main() -> int:
    """Print the proof. If CUDA works, stay without a context until standard input ends."""
    proof = prove()
    sys.stdout.write(msgspec.json.encode(proof).decode())
    sys.stdout.flush()
    os.close(sys.stdout.fileno())
    if not proof.trouble:
        sys.stdin.read()
    os._exit(0)  # the interpreter would flush the closed output
