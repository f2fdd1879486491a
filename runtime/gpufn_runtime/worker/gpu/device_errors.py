"""Classify CUDA errors: their consequences for the call that failed, for its worker and for the GPU. Pure.

| blame | the call | the worker | then |
|---|---|---|---|
| MEMORY: out of memory | raised, as by the function | stays | |
| PROGRAM: a kernel made an invalid operation | raised; under MPS lost: another client may have caused it | replaced | |
| SHARE: MPS | lost | replaced | |
| GPU: one GPU failed | lost | replaced | its agent proves CUDA on the worker's GPUs |
| NODE: the driver or its setup failed | lost | replaced | the same |

A context in which a kernel has failed is unusable: every later call in it fails the same way. Libraries report an error
by number, by the driver's or the runtime's name, or only by its text. Numbers and names are from CUDA 11 to 13
(cuda.h, driver_types.h).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from typing import NamedTuple


class ErrorCause(enum.Enum):
    MEMORY = "memory"
    PROGRAM = "program"
    SHARE = "share"
    GPU = "gpu"
    NODE = "node"


class CudaError(NamedTuple):
    """A CUDA error. `name`: the driver's, without CUDA_ERROR_; `runtime`: the runtime's, without cudaError."""

    code: int
    name: str
    runtime: str
    words: str
    blame: ErrorCause


class DeviceFault(NamedTuple):
    error: CudaError
    is_lost: bool  # the call can run again elsewhere
    replaces: bool  # the worker is unusable

    @property
    def is_of_device(self) -> bool:
        """True if the GPU or the node's driver failed; False for a kernel, MPS or an allocation."""
        return self.error.blame in (ErrorCause.GPU, ErrorCause.NODE)

    def describe(self) -> str:
        subject = "CUDA failed on the node" if self.error.blame is ErrorCause.NODE else "the GPU failed"
        return f"{subject}: {self.error.words} (CUDA error {self.error.code}, {self.error.name})"


_MEMORY, _PROGRAM, _SHARE, _GPU, _NODE = ErrorCause
CUDA_ERRORS = tuple(
    CudaError(*row)
    for row in (
        (2, "OUT_OF_MEMORY", "MemoryAllocation", "out of memory", _MEMORY),
        (46, "DEVICE_UNAVAILABLE", "DevicesUnavailable", "busy or unavailable", _GPU),
        (100, "NO_DEVICE", "NoDevice", "no CUDA-capable device is detected", _NODE),
        (101, "INVALID_DEVICE", "InvalidDevice", "invalid device ordinal", _NODE),
        (214, "ECC_UNCORRECTABLE", "ECCUncorrectable", "uncorrectable ECC error", _GPU),
        (220, "NVLINK_UNCORRECTABLE", "NvlinkUncorrectable", "uncorrectable NVLink error", _GPU),
        (226, "CONTAINED", "Contained", "contained error", _GPU),
        (304, "OPERATING_SYSTEM", "OperatingSystem", "OS call failed", _NODE),
        (700, "ILLEGAL_ADDRESS", "IllegalAddress", "illegal memory access", _PROGRAM),
        (702, "LAUNCH_TIMEOUT", "LaunchTimeout", "the launch timed out", _PROGRAM),
        (709, "CONTEXT_IS_DESTROYED", "ContextIsDestroyed", "context is destroyed", _PROGRAM),
        (710, "ASSERT", "Assert", "device-side assert triggered", _PROGRAM),
        (714, "HARDWARE_STACK_ERROR", "HardwareStackError", "hardware stack error", _PROGRAM),
        (715, "ILLEGAL_INSTRUCTION", "IllegalInstruction", "illegal instruction", _PROGRAM),
        (716, "MISALIGNED_ADDRESS", "MisalignedAddress", "misaligned address", _PROGRAM),
        (717, "INVALID_ADDRESS_SPACE", "InvalidAddressSpace", "global/shared address space", _PROGRAM),
        (718, "INVALID_PC", "InvalidPc", "invalid program counter", _PROGRAM),
        (719, "LAUNCH_FAILED", "LaunchFailure", "unspecified launch failure", _PROGRAM),
        (802, "SYSTEM_NOT_READY", "SystemNotReady", "system not yet initialized", _NODE),
        (803, "SYSTEM_DRIVER_MISMATCH", "SystemDriverMismatch", "unsupported display driver", _NODE),
        (805, "MPS_CONNECTION_FAILED", "MpsConnectionFailed", "MPS client failed to connect", _SHARE),
        (806, "MPS_RPC_FAILURE", "MpsRpcFailure", "between the MPS server and the MPS client failed", _SHARE),
        (807, "MPS_SERVER_NOT_READY", "MpsServerNotReady", "MPS server is not ready", _SHARE),
        (808, "MPS_MAX_CLIENTS_REACHED", "MpsMaxClientsReached", "required to create MPS client", _SHARE),
        (809, "MPS_MAX_CONNECTIONS_REACHED", "MpsMaxConnectionsReached", "required to support device conn", _SHARE),
        (810, "MPS_CLIENT_TERMINATED", "MpsClientTerminated", "MPS client has been terminated", _SHARE),
        (999, "UNKNOWN", "Unknown", "CUDA error: unknown error", _NODE),
    )
)
_BY_CODE = {error.code: error for error in CUDA_ERRORS}
_BY_NAME = {name.lower(): error for error in CUDA_ERRORS for name in (error.name, error.runtime)}
# From the start of a word: an uncontained error is no contained one.
_BY_WORDS = tuple((re.compile(rf"\b{re.escape(error.words.lower())}"), error) for error in CUDA_ERRORS)

# Texts of libraries that name no CUDA error, each with the error that it means and its source. A status such as
# CUBLAS_STATUS_INTERNAL_ERROR is not listed: it follows lack of memory as well as faults.
LIBRARY_ERRORS: tuple[tuple[str, int, str], ...] = (
    (r"no cuda gpus are available", 100, "torch.cuda._lazy_init"),
    (r"cuda unknown error", 999, "torch, c10/cuda/CUDAFunctions.cpp"),
    (
        r"failed to initialize nvml",
        999,
        "nvidia-smi in a container that lost its devices (nvidia-container-toolkit 48)",
    ),
    (r"unhandled cuda error|nccl\w* *unhandledcudaerror", 999, "NCCL, ncclGetErrorString"),
    (r"cublas_status_execution_failed", 719, "cuBLAS documentation, cublasStatus_t"),
    (r"cusparse_status_execution_failed", 719, "cuSPARSE documentation, cusparseStatus_t"),
    (r"cusolver_status_execution_failed", 719, "cuSOLVER documentation, cusolverStatus_t"),
    (r"cufft_exec_failed", 719, "cuFFT documentation, cufftResult"),
    (r"cudnn_status_execution_failed", 719, "cuDNN documentation, cudnnStatus_t"),
    (r"(cublas|cusparse|cusolver|cudnn)_status_(\w+_)?alloc(ation)?_failed|cufft_alloc_failed", 2, "the same"),
)
_LIBRARY_ERRORS = tuple((re.compile(pattern), _BY_CODE[code]) for pattern, code, _ in LIBRARY_ERRORS)

_NAMED = re.compile(r"\b(?:CUDA_ERROR_([A-Z_]+)|cudaError([A-Za-z]+))")
_NUMBERED = re.compile(r"\bCUDA (?:failure|error|status)[\s:(=]*(\d{1,3})\b", re.IGNORECASE)
_LONGEST_CHAIN = 8
_LONGEST_TEXT = 10_000


def error_of_code(code: int) -> CudaError | None:
    return _BY_CODE.get(code)


def fault_of(error: BaseException, *, shares_by_mps: bool) -> DeviceFault | None:
    """Return the fault in `error` or its causes, or None if it is no CUDA error."""
    for exception in _chain(error):
        match = _cuda_error(exception)
        if match is not None:
            is_lost = match.blame in (_SHARE, _GPU, _NODE) or (shares_by_mps and match.blame is _PROGRAM)
            return DeviceFault(match, is_lost, replaces=match.blame is not ErrorCause.MEMORY)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    exception: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if exception is None:
            return
        yield exception
        exception = exception.__cause__ or exception.__context__


def _cuda_error(error: BaseException) -> CudaError | None:
    kind = type(error)
    if kind.__name__ == "OutOfMemoryError" and kind.__module__.partition(".")[0] in ("torch", "cupy"):
        return _BY_CODE[2]
    if kind.__name__ == "AcceleratorError":  # torch, from 2.8 on
        return _BY_CODE.get(getattr(error, "error_code", 0))
    try:
        text = str(error)[:_LONGEST_TEXT]
    except Exception:
        return None
    return _error_in_text(text)


def _error_in_text(text: str) -> CudaError | None:
    lower = text.lower()
    if "cuda" not in lower:
        return _library_error(lower)
    for match in _NAMED.finditer(text):
        if (known := _BY_NAME.get((match[1] or match[2]).lower())) is not None:
            return known
    for match in _NUMBERED.finditer(text):
        if (known := _BY_CODE.get(int(match[1]))) is not None:
            return known
    by_words = next((error for pattern, error in _BY_WORDS if pattern.search(lower)), None)
    return by_words or _library_error(lower)


def _library_error(lower: str) -> CudaError | None:
    return next((error for pattern, error in _LIBRARY_ERRORS if pattern.search(lower)), None)
