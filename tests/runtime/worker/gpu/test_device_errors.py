from __future__ import annotations

import pytest

from gpufn_runtime.worker.gpu.device_errors import CUDA_ERRORS, ErrorCause, fault_of


class OutOfMemoryError(RuntimeError):
    __module__ = "torch.cuda"


class AcceleratorError(RuntimeError):
    def __init__(self, text: str, error_code: int) -> None:
        super().__init__(text)
        self.error_code = error_code


def _wrapped(error: BaseException) -> BaseException:
    try:
        try:
            raise error
        except BaseException as inner:
            raise ValueError("it did not work") from inner
    except ValueError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."), 700),
        (RuntimeError("CUDA error: device-side assert triggered"), 710),
        (RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"), 46),
        (AcceleratorError("CUDA error: whatever", 719), 719),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), 2),
        (RuntimeError("cudaErrorMpsClientTerminated: the MPS client has been terminated by the server"), 810),
        (RuntimeError("CUDA_ERROR_MPS_SERVER_NOT_READY"), 807),
        (RuntimeError("Non-zero status code: CUDA failure 700: an illegal memory access ; GPU=0 ; hostname=x"), 700),
        (RuntimeError("cudaMalloc: out of memory"), 2),
        (RuntimeError("CUDA error 214"), 214),
        (RuntimeError("CUDA error: a contained error occurred"), 226),
        (_wrapped(RuntimeError("CUDA error: misaligned address")), 716),
        (RuntimeError("CUDA error: unknown error"), 999),
        (RuntimeError("No CUDA GPUs are available"), 100),
        (
            RuntimeError(
                "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env "
                "variable CUDA_VISIBLE_DEVICES after program start."
            ),
            999,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb)`"), 719),
        (RuntimeError("CUBLAS failure 14: CUBLAS_STATUS_EXECUTION_FAILED ; GPU=0"), 719),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), 719),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDART"), 719),
        (RuntimeError("cuFFT error: CUFFT_EXEC_FAILED"), 719),
        (RuntimeError("Failed to initialize NVML: Unknown Error"), 999),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error, NCCL version 2.30"), 999),
        (RuntimeError("ncclUnhandledCudaError: Call to CUDA function failed."), 999),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), 2),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), 2),
    ],
)
def test_an_error_of_cuda_is_recognized_by_number_name_or_message(error: BaseException, code: int) -> None:
    fault = fault_of(error, shares_by_mps=False)
    assert fault is not None
    assert fault.error.code == code


@pytest.mark.parametrize(
    "error",
    [ValueError("out of memory"), RuntimeError("misaligned address"), MemoryError(), RuntimeError("CUDA error 12345"),
     RuntimeError("install CUDA first"), RuntimeError("CUDA: an uncontained error"),
     RuntimeError("CUDNN_STATUS_NOT_SUPPORTED"),
     RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm`"), KeyboardInterrupt(),
     AcceleratorError("CUDA", 1)],
)  # fmt: skip
def test_other_errors_are_the_functions_own(error: BaseException) -> None:
    assert fault_of(error, shares_by_mps=True) is None


def test_an_error_whose_text_cannot_be_made_is_the_functions_own() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert fault_of(Odd(), shares_by_mps=True) is None


def test_the_consequences_of_each_error() -> None:
    follows: dict[ErrorCause, set[tuple[bool, ...]]] = {}
    for error in CUDA_ERRORS:
        alone, shared = (fault_of(RuntimeError(f"CUDA_ERROR_{error.name}"), shares_by_mps=mps) for mps in (False, True))
        assert alone is not None
        assert shared is not None
        follows.setdefault(error.blame, set()).add((alone.is_lost, shared.is_lost, alone.replaces, shared.replaces))
    assert follows == {
        ErrorCause.MEMORY: {(False, False, False, False)},
        ErrorCause.PROGRAM: {(False, True, True, True)},
        ErrorCause.SHARE: {(True, True, True, True)},
        ErrorCause.GPU: {(True, True, True, True)},
        ErrorCause.NODE: {(True, True, True, True)},
    }


def test_the_runtimes_names_lead_to_the_same_errors() -> None:
    for error in CUDA_ERRORS:
        fault = fault_of(RuntimeError(f"cudaError{error.runtime}: ..."), shares_by_mps=False)
        assert fault is not None
        assert fault.error is error
