"""MPS limits as seen by a worker: visible multiprocessors, and an allocation beyond its memory limit."""

from __future__ import annotations

from typing import Final

from gpu_check.findings import Finding, Table
from gpu_check.machine import Machine
from gpu_check.mps import need_mps
from gpu_check.platform import up

_VRAM_GIB: Final = 4
_CEILINGS: Final = (25, 50, 100)  # percent of the multiprocessors
_ROUNDED_BY: Final = 4  # multiprocessors: MPS assigns them in small groups
_HEAD: Final = """\
import torch

from gpufn import gpu_function


def look(gib: int):
    # Return the visible multiprocessors and memory, and the error of an allocation of this size.
    free, total = torch.cuda.mem_get_info()
    try:
        torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        refused = str(error).splitlines()[0]
    else:
        refused = ""
    torch.cuda.empty_cache()
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    return {{"multiprocessors": multiprocessors, "refused": refused, "free": free, "total": total}}
"""
_FUNCTION: Final = """

@gpu_function(name={name!r}, gpu="any", share="mps", vram="{vram}Gi", sm={sm}, max_workers=1)
def look_{sm}(gib: int) -> dict[str, int | str]:
    return look(gib)
"""


def mps_limits(machine: Machine) -> Finding:
    machine.need_module("torch")
    need_mps(machine)
    import torch

    whole = torch.cuda.get_device_properties(0).multi_processor_count
    source = _HEAD.format()
    source += "".join(_FUNCTION.format(name=_name(sm), vram=_VRAM_GIB, sm=sm) for sm in _CEILINGS)
    rows, wrong = [], []
    with up(machine) as platform:
        platform.deploy(source)
        for sm in _CEILINGS:
            within = platform.invoke(_name(sm), gib=_VRAM_GIB // 2)
            beyond = platform.invoke(_name(sm), gib=_VRAM_GIB * 2)
            seen = int(beyond["multiprocessors"])
            rows.append((
                sm, seen, f"{seen / whole:.0%}", within["refused"] or "allocated", beyond["refused"] or "allocated",
                within["free"] >> 20, within["total"] >> 20,
            ))  # fmt: skip
            print(*rows[-1], sep="; ")  # intermediate results, in case the step times out
            if abs(seen - whole * sm / 100) > _ROUNDED_BY:
                wrong.append(f"sm={sm}: the worker sees {seen} of {whole} multiprocessors")
            if within["refused"]:
                wrong.append(f"sm={sm}: {_VRAM_GIB // 2} GiB of {_VRAM_GIB} were refused")
            if not beyond["refused"]:
                wrong.append(f"sm={sm}: {_VRAM_GIB * 2} GiB were allocated beyond a limit of {_VRAM_GIB}")
    return Finding(
        summary=f"of {whole} multiprocessors a worker sees {', '.join(f'{row[1]} at {row[0]} %' for row in rows)}; "
        f"{_VRAM_GIB * 2} GiB beyond a limit of {_VRAM_GIB} are refused",
        figures={"multiprocessors": whole, "seen": {str(row[0]): row[1] for row in rows}},
        tables=[
            Table(
                (
                    "sm, %",
                    "multiprocessors",
                    "of all",
                    f"{_VRAM_GIB // 2} GiB",
                    f"{_VRAM_GIB * 2} GiB",
                    "mem_get_info: free, MiB",
                    "total",
                ),
                rows,
            )
        ],
        wrong=wrong,
    )


def _name(sm: int) -> str:
    return f"gpu-check-limit-{sm}"
