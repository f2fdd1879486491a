"""A model's options as they are typed: those that `deploy` and `build` share, and of `deploy` those of its workers. And
where its ONNX file comes from."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from gpufn.cli.terminal.output import WrongUsage, step
from gpufn_core.errors import InvalidSpec

if TYPE_CHECKING:
    from gpufn.declare.model import Model

PrecisionOption = Annotated[
    str | None, typer.Option("--precision", help="Of a model's engine: fp32, tf32, fp16, bf16 or int8. Else fp32.")
]
MaxBatch = Annotated[int | None, typer.Option(help="Of a model: calls share a run of up to so many rows.", min=1)]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", help="Of a model's input: x=1x3x224x224, or least:usual:largest. May be given again, for another."
    ),
]
Samples = Annotated[
    Path | None,
    typer.Option(help="Of a model: .npz or .safetensors, an array per input, samples along the first axis."),
]
ToleranceOption = Annotated[
    list[str] | None,
    typer.Option("--tolerance", help="Of a model: rel_l2=0.01, max_abs=0.1 or cosine=0.999. May be given again."),
]
RequireGpu = Annotated[bool, typer.Option("--require-gpu", help="Of a model: never an engine on the CPU.")]

Gpu = Annotated[
    list[str] | None, typer.Option(help="Of a model: 'any' or a name such as L4; again, for the next best.")
]
Memory = Annotated[str | None, typer.Option(help="Of a model: memory of one worker, such as 2Gi.")]
MinWorkers = Annotated[int | None, typer.Option("--min", min=0, help="Of a model: always so many workers.")]
MaxWorkers = Annotated[int | None, typer.Option("--max", min=0, help="Of a model: never more workers.")]
IdleTimeout = Annotated[
    float | None, typer.Option(min=0, help="Of a model: a worker without calls parks, or ends, after it (seconds).")
]
ParkTimeout = Annotated[
    float | None, typer.Option(min=0, help="Of a model: a parked worker ends after so many seconds; 0: none parks.")
]

_FACTORY = re.compile(r"(?P<file>.+\.py):(?P<factory>[A-Za-z_]\w*)")


def is_model(source: str) -> bool:
    """
    >>> is_model("net.onnx"), is_model("app.py:make_model"), is_model("app.py")
    (True, True, False)
    """
    return source.lower().endswith(".onnx") or _FACTORY.fullmatch(source) is not None


class ModelOptions(NamedTuple):
    """As typed; None, or empty, where nothing was."""

    precision: str | None
    max_batch: int | None
    shape: Sequence[str] | None
    samples: Path | None
    tolerance: Sequence[str] | None
    require_gpu: bool

    def given(self) -> list[str]:
        return [name for name, value in self._asdict().items() if value]

    def model(self, onnx: Path) -> Model:
        """What was not given is as `Model` has it."""
        from gpufn.declare.model import Model  # noqa: PLC0415

        options: dict[str, Any] = {
            "precision": self.precision,
            "max_batch": self.max_batch,
            "shapes": shapes_of(self.shape or ()),
            "samples": self.samples,
            "tolerance": tolerance_of(self.tolerance or ()),
            "require": "gpu" if self.require_gpu else None,
        }
        return Model(onnx, **{option: value for option, value in options.items() if value})


class WorkerOptions(NamedTuple):
    """As typed; None where nothing was."""

    gpu: Sequence[str] | None
    memory: str | None
    min_workers: int | None
    max_workers: int | None
    idle_timeout: float | None
    park_timeout: float | None

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if value is not None}


def name_of(source: str) -> str:
    """How a model is deployed when nobody says: after its file, or its factory.

    >>> name_of("models/ResNet18 v1.onnx"), name_of("app.py:make_model")
    ('resnet18-v1', 'make-model')
    """
    factory = _FACTORY.fullmatch(source)
    plain = factory["factory"] if factory else Path(source).stem
    name = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")[:40].rstrip("-")
    if not name:
        raise WrongUsage(f"{source} has no letter from a to z and no digit to be deployed under: give --name")
    return name


@contextlib.contextmanager
def onnx_of(source: str) -> Iterator[Path]:
    """The ONNX file, or the one that `FILE.py:FACTORY` makes, in a folder that is removed afterwards."""
    factory = _FACTORY.fullmatch(source)
    if factory is None:
        yield Path(source)
        return
    with tempfile.TemporaryDirectory(prefix="gpufn-export-") as folder:
        onnx = Path(folder) / f"{factory['factory']}.onnx"
        with step(f"Exporting {source}"):
            _export(factory["file"], factory["factory"], onnx)
        yield onnx


def shapes_of(texts: Sequence[str]) -> dict[str, Any]:
    """
    >>> shapes_of(["x=1x3", "y=1x8:4x8:32x8"])
    {'x': (1, 3), 'y': ((1, 8), (4, 8), (32, 8))}
    """
    shapes: dict[str, Any] = {}
    for text in texts:
        name, equals, sizes = text.rpartition("=")
        ranges = [_shape(part) for part in sizes.split(":")]
        if not (equals and name) or None in ranges or len(ranges) not in (1, 3):
            raise WrongUsage(
                f"--shape is x=1x3x224x224, or three for least, usual and largest, with colons: not {text!r}"
            )
        shapes[name] = ranges[0] if len(ranges) == 1 else tuple(ranges)
    return shapes


def tolerance_of(texts: Sequence[str]) -> Mapping[str, float]:
    """
    >>> tolerance_of(["rel_l2=0.01", "cosine=0.999"])
    {'rel_l2': 0.01, 'cosine': 0.999}
    """
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            raise WrongUsage(f"--tolerance is rel_l2=0.01, max_abs=0.1 or cosine=0.999, not {text!r}") from None
    return found


def _shape(text: str) -> tuple[int, ...] | None:
    sizes = text.split("x") if text else []
    return tuple(map(int, sizes)) if all(size.isdecimal() for size in sizes) else None


def _export(file: str, factory: str, onnx: Path) -> None:
    """In a process of its own, for the file may do and load what it likes."""
    import subprocess  # noqa: PLC0415

    if not Path(file).is_file():
        raise WrongUsage(f"there is no file {file}")
    command = [sys.executable, "-m", "gpufn.deploy.torch_export", file, factory, str(onnx)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode:
        said = (ended.stderr or ended.stdout).strip()
        last = said.splitlines()[-1] if said else f"it ended with exit code {ended.returncode}"
        error = InvalidSpec(f"cannot export {file}:{factory}: {last}")
        error.add_note(said)
        raise error
