"""Load a safetensors file into torch tensors on the CPU: safetensors' mmap, Run:ai Model Streamer, fastsafetensors.

    BENCH_PEERS=~/loaders python benchmarks/loaders.py [--gib 4] [--rounds 3]

Each load is a process of its own, with the file out of the page cache and in it, in turns. `read` reads the bytes only;
fio reads past the page cache. The file is in the current folder, so that it is on the disk to be measured.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import measure

_SCRIPT = Path(__file__).parent / "peers" / "load_weights.py"
_LOADERS = {
    "read": "read(2), 1 MiB at a time, one thread",
    "mmap": "safetensors, mapped, each page touched",
    "mmap_summed": "safetensors, mapped, each byte summed",
    "mmap_copied": "safetensors, copied",
    "runai": "Run:ai Model Streamer, copied",
    "fast": "fastsafetensors, copied",
}
_PACKAGES = ("torch", "safetensors", "runai-model-streamer", "fastsafetensors")
_TENSOR_BYTES = 64 << 20


def main() -> None:
    options = measure.arguments("Loads of a safetensors file on the CPU.", gib=4, rounds=3)
    about, python = measure.machine(), measure.peers_python()
    about["versions"] = {package: measure.version_in(python, package) for package in _PACKAGES}
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder) / "model.safetensors"
        _write(path, options.gib << 30)
        for _ in range(options.rounds):
            for loader in _LOADERS:
                for cache in ("cold", "warm"):
                    if cache == "cold":
                        _drop(path)
                    runs[f"{loader}, {cache}"].append(_load(python, loader, path))
        disk = _fio(path)
    measure.write("loaders", {"gib": options.gib, "disk": disk, "runs": runs}, _table(runs, disk, options.gib), about)


def _write(path: Path, size: int) -> None:
    """Write random tensors of 64 MiB."""
    count = size // _TENSOR_BYTES
    tensors = {
        f"layers.{number}": {
            "dtype": "BF16",
            "shape": [_TENSOR_BYTES // 2],
            "data_offsets": [number * _TENSOR_BYTES, (number + 1) * _TENSOR_BYTES],
        }
        for number in range(count)
    }
    header = json.dumps(tensors).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(count):
            file.write(os.urandom(_TENSOR_BYTES))
        file.flush()
        os.fsync(file.fileno())


def _drop(path: Path) -> None:
    """Remove the file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _load(python: str, loader: str, path: Path) -> dict[str, float]:
    ended = subprocess.run([python, _SCRIPT, loader, path], capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return result


def _fio(path: Path) -> dict[str, float]:
    """Return the disk's rates in GiB/s past the page cache, by queue depth; empty without fio."""
    if shutil.which("fio") is None:
        return {}
    rates = {}
    for depth in (1, 8, 32):
        command = [
            "fio", "--name=read", f"--filename={path}", "--readonly", "--rw=read", "--bs=1M", "--direct=1",
            "--ioengine=libaio", f"--iodepth={depth}", "--output-format=json",
        ]  # fmt: skip
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        rates[str(depth)] = round(json.loads(ended.stdout)["jobs"][0]["read"]["bw_bytes"] / 2**30, 2)
    return rates


def _table(runs: dict[str, list[dict[str, float]]], disk: dict[str, float], gib: int) -> str:
    rows: list[list[Any]] = []
    for loader, words in _LOADERS.items():
        row: list[Any] = [words]
        for cache in ("cold", "warm"):
            seconds = [run["load_s"] for run in runs[f"{loader}, {cache}"]]
            row += [f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}", f"{gib / min(seconds):.2f}"]
        rows.append([*row, f"{min(run['cpu_s'] for run in runs[f'{loader}, cold']):.2f}"])
    columns = [f"{cache} {figure}" for cache in ("cold", "warm") for figure in ("s, median", "s, least", "GiB/s, best")]
    rates = ", ".join(f"{rate:g} at depth {depth}" for depth, rate in disk.items())
    memory_s = min(run["memory_s"] for cache in ("cold", "warm") for run in runs[f"mmap_summed, {cache}"])
    return measure.table(["loader", *columns, "cold CPU s, least"], rows) + (
        f"\nThe same sum over a copy in memory, GiB/s: {gib / memory_s:.2f}.\n"
        + (f"\nThe disk past the page cache (fio, GiB/s): {rates}.\n" if rates else "")
    )


if __name__ == "__main__":
    main()
