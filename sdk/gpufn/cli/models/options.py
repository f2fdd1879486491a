"""Options of models for `deploy` and `build`, options of their workers for `deploy`, and the conversion to ONNX."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from gpufn.cli.terminal.command import PATH, FloatRange, IntRange, options_together
from gpufn.cli.terminal.output import WrongUsage, step
from gpufn.deploy.convert.formats import NAMES, Format, format_of, split_factory
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.model_spec import MAX_BUILD_TIMEOUT_S, MIN_BUILD_TIMEOUT_S

if TYPE_CHECKING:
    from gpufn.declare.model import Model

model_options = options_together(
    click.option("--precision", help="Precision of a model's engine: fp32, tf32, fp16, bf16 or int8. Default: fp32."),
    click.option(
        "--max-batch", type=IntRange(min=1), help="Maximum rows per run of a model, for batching calls. Default: 1."
    ),
    click.option(
        "--shape",
        multiple=True,
        help="Shape of a model's input, such as x=1x3x224x224, or a range x=MIN:TYPICAL:MAX. Repeatable.",
    ),
    click.option(
        "--samples",
        type=PATH,
        help="Samples for a model: .npz or .safetensors, an array per input, samples along the first axis.",
    ),
    click.option(
        "--tolerance",
        multiple=True,
        help="Accuracy limit of a model: atol=1e-5, rtol=1e-4, max_abs=0.1, rel_l2=0.01 or cosine=0.999. Repeatable.",
    ),
    click.option(
        "--no-verify", is_flag=True, help="Do not compare a model's engines with a reference, as for random outputs."
    ),
    click.option(
        "--allow-cpu", is_flag=True, help="Compute a model on the CPU of a GPU worker if no engine for its GPU passes."
    ),
    click.option(
        "--build-timeout",
        type=FloatRange(min=MIN_BUILD_TIMEOUT_S, max=MAX_BUILD_TIMEOUT_S),
        help="Seconds without progress after which the build of a model ends. Default: the builder's, 600.",
    ),
    click.option(
        "--trust-model",
        is_flag=True,
        help="Accept a model whose file can run code: .joblib, .pkl, .pt2 and some .skops on this machine, a folder of "
        "MLflow in the workers.",
    ),
)
worker_options = options_together(
    click.option(
        "--gpu",
        multiple=True,
        help="GPU of a model's workers: 'any' or a name such as L4. Repeatable, in order of preference.",
    ),
    click.option("--memory", help="Memory of one worker of a model, or with --as, such as 2Gi."),
    click.option("--min", "min_workers", type=IntRange(min=0), help="Minimum number of model workers."),
    click.option("--max", "max_workers", type=IntRange(min=0), help="Maximum number of model workers."),
    click.option(
        "--idle-timeout", type=FloatRange(min=0), help="Seconds without calls after which a model worker parks or ends."
    ),
    click.option(
        "--park-timeout",
        type=FloatRange(min=0),
        help="Seconds after which a parked model worker ends; 0 disables parking.",
    ),
)


class ModelOptions(NamedTuple):
    """Options of a model from the command line; None or empty if not given."""

    precision: str | None
    max_batch: int | None
    shape: Sequence[str]
    samples: Path | None
    tolerance: Sequence[str]
    no_verify: bool
    allow_cpu: bool
    build_timeout: float | None
    trust_model: bool

    def specified(self) -> list[str]:
        return [name for name, value in self._asdict().items() if value]

    def model(self, onnx: Path) -> Model:
        """Return the Model, with Model's defaults for missing options."""
        from gpufn.declare.model import Model  # noqa: PLC0415

        options: dict[str, Any] = {
            "precision": self.precision,
            "max_batch": self.max_batch,
            "shapes": shapes_of(self.shape),
            "samples": self.samples,
            "tolerance": tolerance_of(self.tolerance),
            "allow_cpu": self.allow_cpu,
            "build_timeout": self.build_timeout,
        }
        return Model(onnx, verify=not self.no_verify, **{option: value for option, value in options.items() if value})


class WorkerOptions(NamedTuple):
    """Options of a model's workers from the command line; None or empty if not given."""

    gpu: Sequence[str]
    memory: str | None
    min_workers: int | None
    max_workers: int | None
    idle_timeout: float | None
    park_timeout: float | None

    def specified(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if value not in (None, ())}


def name_of(source: str) -> str:
    """Return the default name of a model, from its file or its factory.

    >>> name_of("models/ResNet18 v1.onnx"), name_of("app.py:make_model")
    ('resnet18-v1', 'make-model')
    """
    factory = split_factory(source)
    plain = factory[1] if factory else Path(source).resolve().stem
    name = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")[:40].rstrip("-")
    if not name:
        raise WrongUsage(f"cannot derive a name from {source}, which has no letter a-z or digit: pass --name")
    return name


@contextlib.contextmanager
def onnx_of(source: str, options: ModelOptions) -> Iterator[Path]:
    """Yield the ONNX file. A model of another format is converted to a temporary file."""
    form = format_of(source)
    if form is Format.ONNX:
        yield Path(source)
        return
    if form is None or form is Format.MLFLOW:
        raise WrongUsage(f"{source} does not become an ONNX model: pass {NAMES.replace(', a folder of MLflow', '')}")
    file, _ = split_factory(source) or (source, "")
    if not Path(file).is_file():
        raise WrongUsage(f"there is no file {file}")
    check_trust(source, form, options)
    with tempfile.TemporaryDirectory(prefix="gpufn-convert-") as folder:
        factory = split_factory(source)
        onnx = Path(folder) / f"{factory[1] if factory else Path(source).stem}.onnx"
        with step(f"Exporting {source}"):
            _convert(form, source, onnx, options)
        yield onnx


def check_trust(source: str, form: Format, options: ModelOptions) -> None:
    """Raise a usage error for a model that can run code, without --trust-model."""
    if form.runs_code and not options.trust_model:
        where = "in the workers" if form is Format.MLFLOW else "on this machine"
        raise WrongUsage(
            f"{source} can contain code that runs {where} when the model is read: if you trust the author, pass "
            "--trust-model"
        )


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
            raise WrongUsage(f"--shape must be x=1x3x224x224, or three shapes MIN:TYPICAL:MAX, not {text!r}")
        shapes[name] = ranges[0] if len(ranges) == 1 else tuple(ranges)
    return shapes


def tolerance_of(texts: Sequence[str]) -> Mapping[str, float]:
    """
    >>> tolerance_of(["rel_l2=0.01", "cosine=0.999"])
    {'rel_l2': 0.01, 'cosine': 0.999}
    """
    tolerance = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            tolerance[name] = float(number)
        except ValueError:
            raise WrongUsage(
                f"--tolerance must be a limit such as atol=1e-5, rel_l2=0.01 or cosine=0.999, not {text!r}"
            ) from None
    return tolerance


def _shape(text: str) -> tuple[int, ...] | None:
    sizes = text.split("x") if text else []
    return tuple(map(int, sizes)) if all(size.isdecimal() for size in sizes) else None


def _convert(form: Format, source: str, onnx: Path, options: ModelOptions) -> None:
    """Convert in a separate process, because the file may run and load anything."""
    import subprocess  # noqa: PLC0415

    from gpufn.deploy.convert.options import ConvertOptions, encode  # noqa: PLC0415

    shapes = {
        name: shape if isinstance(shape[0], int) else shape[1] for name, shape in shapes_of(options.shape).items()
    }
    extra = ConvertOptions(shapes, str(options.samples or ""), options.trust_model)
    command = [sys.executable, "-m", "gpufn.deploy.convert", form.value, source, str(onnx), encode(extra)]
    export = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # noqa: S603
    if export.returncode:
        output = (export.stderr or export.stdout).strip()
        last = output.splitlines()[-1] if output else f"the export failed with exit code {export.returncode}"
        error = InvalidSpec(f"cannot export {source}: {last}")
        error.add_note(output)
        raise error
