"""Load a safetensors file with one library, and print the seconds as one line of JSON.

    load_weights.py LOADER FILE

All loaders but `mmap` and `mmap_summed` end with torch tensors in memory of their own; these two end with every page of
the file mapped. `mmap_summed` also prints how long the same sum takes over a copy in memory: that is the memory's rate.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def read(path: str) -> object:
    """The floor: read the bytes into one buffer."""
    import os

    buffer = bytearray(os.path.getsize(path))
    with open(path, "rb", buffering=0) as file:
        view, at = memoryview(buffer), 0
        while count := file.readinto(view[at : at + (1 << 20)]):
            at += count
    return buffer


def mmap(path: str) -> object:
    import torch
    from safetensors.torch import load_file

    tensors = load_file(path)
    for tensor in tensors.values():
        tensor.view(torch.uint8)[::4096].sum()
    return tensors


def mmap_summed(path: str) -> object:
    from safetensors.torch import load_file

    tensors = load_file(path)
    _sum(tensors)
    return tensors


def memory_s(tensors: Any) -> float:
    """Return the seconds of the sum over a copy of the tensors."""
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    started = time.perf_counter()
    _sum(copies)
    return time.perf_counter() - started


def _sum(tensors: Any) -> None:
    """Read each byte, with as many threads as torch uses."""
    import torch

    for tensor in tensors.values():
        tensor.view(torch.int64).sum()


def mmap_copied(path: str) -> object:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def runai(path: str) -> object:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path)
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def fast(path: str) -> object:
    from fastsafetensors import fastsafe_open

    with fastsafe_open([path], nogds=True, device="cpu") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


_IMPORTS = {
    "mmap": "safetensors.torch",
    "mmap_summed": "safetensors.torch",
    "mmap_copied": "safetensors.torch",
    "runai": "runai_model_streamer",
    "fast": "fastsafetensors",
}


def main(loader: str, path: str) -> None:
    started = time.perf_counter()
    if loader in _IMPORTS:
        __import__("torch")
    torch_s = time.perf_counter() - started
    if loader in _IMPORTS:
        __import__(_IMPORTS[loader])
    import_s = time.perf_counter() - started - torch_s
    loaders: dict[str, Any] = {
        "read": read,
        "mmap": mmap,
        "mmap_summed": mmap_summed,
        "mmap_copied": mmap_copied,
        "runai": runai,
        "fast": fast,
    }
    cpu_s, started = time.process_time(), time.perf_counter()
    loaded = loaders[loader](path)
    load_s = time.perf_counter() - started
    told = {"load_s": load_s, "cpu_s": time.process_time() - cpu_s, "import_s": import_s}
    if loader == "mmap_summed":
        told["memory_s"] = memory_s(loaded)
    print(json.dumps(told), flush=True)
    del loaded


if __name__ == "__main__":
    main(*sys.argv[1:])
