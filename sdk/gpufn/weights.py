"""Load safetensors files onto a GPU.

    from gpufn.weights import load_safetensors

    net.load_state_dict(load_safetensors(LLAMA.path))

Threads read the file into pinned buffers, and the GPU copies from them while the threads read on. With 4 GiB in the
page cache of a machine with an H100 this loads 23.9 GB/s; safetensors' own `load_file` loads 6.4 GB/s
(benchmarks/results/gpu-2026-11-26.md).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpufn_core.errors import ArtifactUnavailable
from gpufn_core.weights import safetensors

if TYPE_CHECKING:
    import torch

_THREADS: Final = 12
_CHUNK_BYTES: Final = 8 << 20
_BUFFERS: Final = 2  # of each thread: it fills one while the GPU copies from the other
_DTYPES: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "U16": "uint16",
    "I16": "int16", "F16": "float16", "BF16": "bfloat16", "U32": "uint32", "I32": "int32", "F32": "float32",
    "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64",
}  # fmt: skip


def load_safetensors(
    path: str | os.PathLike[str], device: str | torch.device = "cuda", *, threads: int | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a `.safetensors` file by name, or of all such files in a folder.

    The tensors of a file share one block of memory on `device`, which is freed when the last of them is gone. `threads`
    read at the same time; default: 12, or fewer on a machine with fewer cores. On the CPU each tensor is a copy: use
    `safetensors.torch.load_file` there, which maps the file. Raises ArtifactUnavailable if there is no file, or a file
    is damaged.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in _files(Path(path)):
        tensors |= _load(file, device, threads or min(_THREADS, len(os.sched_getaffinity(0))))
    return tensors


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob(f"*{safetensors.SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise ArtifactUnavailable(f"{path} has no {safetensors.SUFFIX} file")
    return files


def _load(path: Path, device: str | torch.device, threads: int) -> dict[str, torch.Tensor]:
    import torch  # noqa: PLC0415  (this module is imported without it)

    try:
        with path.open("rb") as file:
            entries, data_start = safetensors.read_header(file, os.fstat(file.fileno()).st_size)
            size = max((entry.data_offsets[1] for entry in entries.values()), default=0)
            block = torch.empty(size, dtype=torch.uint8, device=device)
            if size:
                if block.is_cuda:  # its memory may be in use by earlier kernels of this stream
                    torch.cuda.current_stream(block.device).synchronize()
                _fill(torch, block, _Source(file.fileno(), data_start), threads)
    except OSError as error:
        raise ArtifactUnavailable(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ArtifactUnavailable(f"{path} is not a complete safetensors file: {error}") from error
    return {name: _view(torch, block, entry) for name, entry in entries.items()}


def _view(torch: Any, block: torch.Tensor, entry: safetensors.Tensor) -> torch.Tensor:
    if entry.dtype not in _DTYPES:
        raise ArtifactUnavailable(f"the dtype {entry.dtype} is not supported: use safetensors.torch.load_file")
    dtype = getattr(torch, _DTYPES[entry.dtype])
    begin, end = entry.data_offsets
    part = block[begin:end]
    if begin % dtype.itemsize:
        part = part.clone()  # a view must begin at a multiple of its item size
    view: torch.Tensor = part.view(dtype).view(entry.shape)
    return view


class _Source(NamedTuple):
    """The data of an open file: the bytes from `start` on."""

    file: int
    start: int

    def read(self, buffer: torch.Tensor, begin: int) -> None:
        """Fill a buffer on the host with the data from `begin` on."""
        view, offset = memoryview(buffer.numpy()), self.start + begin
        while view:
            count = os.preadv(self.file, [view], offset)
            if not count:
                raise ValueError(f"it ended at byte {offset:,} while it was read")
            view, offset = view[count:], offset + count


def _fill(torch: Any, block: torch.Tensor, source: _Source, threads: int) -> None:
    """Read the data of a file into `block`. The first error of a thread is raised when all have ended."""
    starts = deque(range(0, block.numel(), _CHUNK_BYTES))
    threads = min(threads, len(starts))
    staging = torch.empty(threads * _BUFFERS * _CHUNK_BYTES, dtype=torch.uint8)
    on_gpu = block.is_cuda
    # In place: torch's own pinned memory is never freed. If pinning fails, the copies are slower.
    is_pinned = on_gpu and not int(torch.cuda.cudart().cudaHostRegister(staging.data_ptr(), staging.numel(), 0))
    try:
        with ThreadPoolExecutor(threads) as pool:
            work = [
                pool.submit(_copy, torch, block, source, _remaining(starts, block.numel()), buffers)
                for buffers in staging.chunk(threads)
            ]
        for each in work:
            each.result()
    finally:
        if is_pinned:
            torch.cuda.cudart().cudaHostUnregister(staging.data_ptr())


def _remaining(starts: deque[int], size: int) -> Iterator[tuple[int, int]]:
    """Yield the chunks that no thread has begun, as (first byte, end)."""
    with contextlib.suppress(IndexError):  # `popleft` is atomic
        while True:
            begin = starts.popleft()
            yield begin, min(begin + _CHUNK_BYTES, size)


def _copy(
    torch: Any, block: torch.Tensor, source: _Source, chunks: Iterable[tuple[int, int]], staging: torch.Tensor
) -> None:
    """Copy chunks until none remains. Runs in a thread of its own, with a stream of its own."""
    if not block.is_cuda:
        for begin, end in chunks:
            source.read(block[begin:end], begin)
        return
    buffers = staging.chunk(_BUFFERS)
    stream = torch.cuda.Stream(block.device)
    copied = [torch.cuda.Event() for _ in buffers]
    with torch.cuda.stream(stream):
        for number, (begin, end) in enumerate(chunks):
            buffer, event = buffers[number % _BUFFERS][: end - begin], copied[number % _BUFFERS]
            event.synchronize()  # returns at once before the first copy
            source.read(buffer, begin)
            block[begin:end].copy_(buffer, non_blocking=True)
            event.record(stream)
    stream.synchronize()
