"""`Model`: declares a model that a function receives. At deploy it becomes a ModelSpec.

A declaration reads no files: a worker declares again when it starts, and its bundle does not have the files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import msgspec

from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.model_spec import (
    ModelFile,
    ModelSpec,
    Precision,
    ShapeProfile,
    ShapeRange,
    Tolerance,
    wrong_build_timeout,
)
from gpufn_core.spec.units import parse_bytes

Shape = Sequence[int]
Shapes = Mapping[str, Shape | tuple[Shape, Shape, Shape]]

_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class Model:
    """An ONNX model that is compiled, checked and measured at deploy, and passed to the function that declares it.

    `path` is relative to the file that defines the function. External data beside the model is uploaded with it;
    `files` lists other files instead. The engine computes in `precision`: fp32, tf32, fp16, bf16 or int8. Several calls
    share a run of up to `max_batch` rows.

    `shapes` sets the shapes of the dynamic inputs: `{"x": (1, 128)}`, or the smallest, the usual and the largest shape:
    `{"x": ((1, 16), (8, 128), (32, 512))}`. Without it, they are derived from `max_batch` and `samples`, an .npz or
    .safetensors file with one array per input, stacked along a new first axis. `tolerance` limits how far outputs may
    differ from the reference: a dict of atol, rtol, max_abs, rel_l2, cosine. `verify=False` skips this comparison,
    which fails if outputs are random. With `allow_cpu=True`, a function with a GPU computes the model on the CPU if no
    engine for its GPU passes. A build that makes no progress for `build_timeout` seconds ends (default: the builder's,
    600). Each compiler process may use `build_memory`.

    The function receives a session. `session(images)`, or `session(x=images)`, takes and returns numpy arrays: one
    array for a model with one output, else a dict by name. In an async function, write `await session.aio(images)`. A
    class has the session as an attribute, which its `__init__` can already use.

    Raises InvalidSpec, which names the wrong option.

    >>> from gpufn import gpu_function
    >>> @gpu_function(models={"net": Model("digits.onnx", max_batch=32, precision="fp16")})
    ... def read_digit(pixels: list[float], net) -> int:
    ...     return max(range(10), key=list(net([pixels])[0]).__getitem__)
    >>> read_digit([0.5] * 64, net=lambda rows: [[0, 0, 0, 1, 0, 0, 0, 0, 0, 0]])  # a test double
    3
    >>> Model("digits.onnx", precision="fp8")
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidSpec: precision is fp32, tf32, fp16, bf16 or int8, not 'fp8'
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    precision: Literal["fp32", "tf32", "fp16", "bf16", "int8"] = "fp32"
    max_batch: int = 1
    shapes: Shapes | None = None
    samples: str | os.PathLike[str] | None = None
    tolerance: Mapping[str, float] | None = None
    verify: bool = True
    allow_cpu: bool = False
    files: Sequence[str | os.PathLike[str]] | None = None
    build_timeout: float | None = None
    build_memory: str | int | None = None

    def __post_init__(self) -> None:
        path = _path("path", self.path)
        if not path.lower().endswith(".onnx"):
            raise InvalidSpec(
                f"{path!r} is not an ONNX file (.onnx); `gpufn build app.py:make_model` exports a torch module"
            )
        if self.files is not None and not isinstance(self.files, (list, tuple)):
            raise InvalidSpec(f"files is a list of paths, not {self.files!r}")
        for file in self.files or ():
            _path("files", file)
        samples = None
        if self.samples is not None:
            if not _path("samples", self.samples).lower().endswith((".npz", ".safetensors")):
                raise InvalidSpec(f"samples is an .npz or .safetensors file, not {os.fspath(self.samples)!r}")
            samples = ModelFile("samples", _NO_DIGEST, 0)
        self.spec("model", (ModelFile("model.onnx", _NO_DIGEST, 0),), samples)

    def spec(self, parameter: str, files: tuple[ModelFile, ...], samples: ModelFile | None) -> ModelSpec:
        """Return the spec to deploy. `files` are the uploaded files, the ONNX file first."""
        return ModelSpec(
            parameter=parameter,
            files=files,
            precision=_precision(self.precision),
            max_batch=_whole("max_batch", self.max_batch),
            profiles=_profiles(self.shapes),
            samples=samples,
            tolerance=_tolerance(self.tolerance),
            verify=_is_bool("verify", self.verify),
            allow_cpu=_is_bool("allow_cpu", self.allow_cpu),
            build_timeout_s=None if self.build_timeout is None else _seconds("build_timeout", self.build_timeout),
            memory_limit_bytes=None if self.build_memory is None else parse_bytes(self.build_memory),
        )


def _path(option: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise InvalidSpec(f"{option} is a file path, not {value!r}")
    return str(os.fspath(value))


def _precision(value: Any) -> Precision:
    try:
        return Precision(value)
    except ValueError:
        *names, last = (precision.value for precision in Precision)
        raise InvalidSpec(f"precision is {', '.join(names)} or {last}, not {value!r}") from None


def _whole(option: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidSpec(f"{option} is an integer, not {value!r}")
    return value


def _seconds(option: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidSpec(f"{option} is a number of seconds, not {value!r}")
    if (wrong := wrong_build_timeout(value)) is not None:
        raise InvalidSpec(f"{option} is {wrong}")
    return float(value)


def _profiles(shapes: Any) -> tuple[ShapeProfile, ...]:
    if not shapes:
        return ()
    if not isinstance(shapes, Mapping):
        raise InvalidSpec(f'shapes is a dict of inputs and shapes, such as {{"x": (1, 3, 224, 224)}}, not {shapes!r}')
    return (ShapeProfile({str(name): _shape_range(str(name), value) for name, value in shapes.items()}),)


def _shape_range(name: str, value: Any) -> ShapeRange:
    if _is_shape(value):
        return ShapeRange(tuple(value), tuple(value), tuple(value))
    if not isinstance(value, (list, tuple)) or len(value) != 3 or not all(map(_is_shape, value)):
        raise InvalidSpec(
            f"shapes[{name!r}] is one shape, or three: the smallest, the usual and the largest, not {value!r}"
        )
    try:
        return ShapeRange(*map(tuple, value))
    except InvalidSpec as error:
        raise InvalidSpec(f"shapes[{name!r}]: {error.message}") from None


def _is_shape(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not {type(size) for size in value} - {int}


def _tolerance(tolerance: Any) -> Tolerance | None:
    if tolerance is None or isinstance(tolerance, Tolerance):
        return tolerance
    try:
        if not all(value is None or math.isfinite(value) for value in dict(tolerance).values()):
            # JSON cannot express NaN and infinity: the tolerance would be lost.
            raise ValueError("each value is a finite number")
        return msgspec.convert(dict(tolerance), Tolerance)
    except (TypeError, ValueError) as error:
        raise InvalidSpec(
            f"tolerance is a dict of atol, rtol, max_abs, rel_l2 and cosine, not {tolerance!r}: {error}"
        ) from None


def _is_bool(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidSpec(f"{option} is True or False, not {value!r}")
    return value
