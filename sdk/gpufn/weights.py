"""Load safetensors files onto a GPU.

    from gpufn.weights import load_safetensors

    net.load_state_dict(load_safetensors(LLAMA.path))

Threads read the file into pinned buffers, and the GPU copies from them while the threads read on (`staging`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpufn_core.errors import ArtifactUnavailable
from gpufn_core.weights import safetensors
from gpufn_core.weights.staging import Plan, Source, Staging

if TYPE_CHECKING:
    import torch

_DTYPES: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "U16": "uint16",
    "I16": "int16", "F16": "float16", "BF16": "bfloat16", "U32": "uint32", "I32": "int32", "F32": "float32",
    "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64",
}  # fmt: skip


def load_safetensors(
    path: str | os.PathLike[str], device: str | torch.device = "cuda", *, threads: int | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a `.safetensors` file by name, or of all such files in a folder.

    The tensors of a file share one block of memory on `device`, which is freed with the last of them. `threads` read at
    the same time; default: 12, or fewer on a machine with fewer cores. On the CPU each tensor is a copy: use
    `safetensors.torch.load_file` there, which maps the file. Raises ArtifactUnavailable if there is no file, or a file
    is damaged.
    """
    import torch  # noqa: PLC0415  (this module is imported without it)

    tensors: dict[str, torch.Tensor] = {}
    files = _files(Path(path))
    staging = Staging(torch, device, Plan.default(threads))
    try:
        for file in files:
            tensors |= _load(torch, file, staging)
    finally:
        staging.close()
    return tensors


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob(f"*{safetensors.SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise ArtifactUnavailable(f"{path} has no {safetensors.SUFFIX} file")
    return files


def _load(torch: Any, path: Path, staging: Staging) -> dict[str, torch.Tensor]:
    try:
        with path.open("rb") as file:
            entries, data_start = safetensors.read_header(file, os.fstat(file.fileno()).st_size)
            size = max((entry.data_offsets[1] for entry in entries.values()), default=0)
            block = staging.load(Source(file.fileno(), data_start, size))
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
