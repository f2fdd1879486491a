"""The builder's input: ModelSpec, the files of an ONNX model and the options of its compilation.

Frozen and self-validating, like FunctionSpec. Users write a `Model`, which becomes a ModelSpec at deploy, when the
digests of its files are known (`gpufn.declare.model`).
"""

from __future__ import annotations

import enum
import re

import msgspec

from gpufn_core.errors import InvalidSpec
from gpufn_core.ids import is_digest
from gpufn_core.protocol.limits import LARGEST_INTEGER
from gpufn_core.spec.units import MIN_PROCESS_BYTES, check_least_bytes

MAX_MODEL_FILES = 2048
MAX_DIMENSIONS = 64  # numpy's limit for a tensor
LARGEST_SIZE = (1 << 31) - 1  # limit of one dimension
LONGEST_NAME = 1000  # characters of an input's or output's name
MAX_BATCH = 65_536
MIN_BUILD_TIMEOUT_S = 1
MAX_BUILD_TIMEOUT_S = 86_400
PARAMETER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")


class Precision(enum.StrEnum):
    """The arithmetic of an engine, the most exact first. Inputs and outputs keep the types of the model."""

    FP32 = "fp32"  # without TF32
    TF32 = "tf32"  # float32 storage; on GPUs that support it, matrix products may round factors to 10 mantissa bits
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"  # static quantization, calibrated on the samples


# Open Inference Protocol datatype → size of an element in bytes. BYTES elements vary in length.
DATATYPES: dict[str, int] = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "FP32": 4, "FP64": 8, "BF16": 2, "BYTES": 0,
}  # fmt: skip


class TensorSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """An input or output of a model. `datatype` is an Open Inference Protocol name; a dynamic size is -1 in `shape`.

    `default` is the value of an optional input: its elements, little-endian and row-major.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    default: bytes | None = None


class ShapeRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shapes of one input that an engine accepts, and the shape that it is tuned for."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.min) == len(self.opt) == len(self.max):
            raise InvalidSpec(f"min {self.min}, opt {self.opt} and max {self.max} differ in their number of dimensions")
        sizes = zip(self.min, self.opt, self.max, strict=True)
        if any(not 0 <= low <= best <= high <= LARGEST_SIZE for low, best, high in sizes):
            raise InvalidSpec(f"a shape range is min <= opt <= max <= {LARGEST_SIZE} in each dimension, not {self}")

    def accepts(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )

    def __str__(self) -> str:
        return f"{list(self.min)} to {list(self.max)}, tuned for {list(self.opt)}"


class ShapeProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ShapeRange for each input with dynamic sizes."""

    inputs: dict[str, ShapeRange]


class Tolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The largest allowed distance of an engine's outputs from the reference's. None skips the check.

    `max_abs` is the largest difference; `rel_l2` is the L2 norm of the difference divided by the reference's; `cosine`
    is the least cosine similarity. With `atol` or `rtol`, each element may differ by atol + rtol * |reference|, and by
    the output's floor, which the builder measures (`gpufn_builder.checks.rounding`).
    """

    max_abs: float | None = None
    rel_l2: float | None = None
    cosine: float | None = None
    atol: float | None = None
    rtol: float | None = None

    @property
    def limits_elements(self) -> bool:
        return self.atol is not None or self.rtol is not None

    def __post_init__(self) -> None:
        for name in ("max_abs", "rel_l2", "atol", "rtol"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise InvalidSpec(f"tolerance: {name} is 0 or more, not {value:g}")
        if self.cosine is not None and not -1 <= self.cosine <= 1:
            raise InvalidSpec(f"tolerance: cosine is from -1 to 1, not {self.cosine:g}")


# The presets, by the coarsest arithmetic in an engine. The tolerance of a ModelSpec overrides them.
TOLERANCES: dict[Precision, Tolerance] = {
    Precision.FP32: Tolerance(atol=1e-5, rtol=1e-4),
    Precision.TF32: Tolerance(rel_l2=2e-3),
    Precision.FP16: Tolerance(rel_l2=5e-3, cosine=0.9995),
    Precision.BF16: Tolerance(rel_l2=2e-2),
    Precision.INT8: Tolerance(cosine=0.99),
}


_SMALL_SHARE = 0.1  # functions such as Sigmoid have absolute errors: a detector's of 1.2e-6 differed by 7 %


def absolute_limit(tolerance: Tolerance, largest: float) -> float:
    """Return the `atol` for an output whose largest absolute reference is `largest`.

    A preset's `atol` is at most a tenth of `largest`, because every output of small values would pass otherwise. Zeros
    have no scale, so their limit is the whole `atol`. A tolerance that equals a preset is the preset.
    """
    atol = tolerance.atol or 0.0
    is_preset = tolerance in TOLERANCES.values()
    return min(atol, _SMALL_SHARE * largest) if is_preset and largest else atol


def coarser(one: Precision, other: Precision) -> Precision:
    """
    >>> str(coarser(Precision.TF32, Precision.FP16))
    'fp16'
    """
    return max(one, other, key=tuple(Precision).index)


def wrong_build_timeout(seconds: float) -> str | None:
    """Describe the valid build timeouts if `seconds` is not one of them."""
    if MIN_BUILD_TIMEOUT_S <= seconds <= MAX_BUILD_TIMEOUT_S:
        return None
    return f"a number of seconds from {MIN_BUILD_TIMEOUT_S} to {MAX_BUILD_TIMEOUT_S}, not {seconds:g}"


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An uploaded file of a model, by its plain name."""

    name: str
    digest: str
    size: int

    def __post_init__(self) -> None:
        if not self.name or self.name in (".", "..") or set(self.name) & set("/\\\0"):
            raise InvalidSpec(f"{self.name[:120]!r} is not a plain file name: a model's files lie in one folder")
        if not is_digest(self.digest):
            raise InvalidSpec(f"{self.name}: {self.digest[:80]!r} is not a sha256")
        if not 0 <= self.size <= LARGEST_INTEGER:
            raise InvalidSpec(f"{self.name}: the size must be from 0 to less than 8 EiB, not {self.size}")


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One model of a function. `parameter` is where the function receives the EngineSession.

    `files` lists the ONNX file first, then its external data. `samples` is an .npz or .safetensors file with one array
    per input, stacked along a new first axis of samples. If `profiles` is empty, the builder derives them from
    `max_batch` and the samples. A build without progress for `build_timeout_s` ends; None means the builder's default.
    """

    parameter: str
    files: tuple[ModelFile, ...]
    precision: Precision = Precision.FP32
    max_batch: int = 1
    profiles: tuple[ShapeProfile, ...] = ()
    samples: ModelFile | None = None
    tolerance: Tolerance | None = None
    verify: bool = True  # compare engines with the reference
    allow_cpu: bool = False  # on a GPU, use an engine for the CPU if none for the GPU passes
    build_timeout_s: float | None = None
    memory_limit_bytes: int | None = None  # of each compiler process

    def __post_init__(self) -> None:
        if PARAMETER.fullmatch(self.parameter) is None:
            raise InvalidSpec(f"{self.parameter[:120]!r} is not the name of a parameter")
        if not self.files:
            raise InvalidSpec(f"{self.parameter}: a model needs at least its ONNX file")
        if len(self.files) > MAX_MODEL_FILES:
            raise InvalidSpec(f"{self.parameter}: {len(self.files)} files are more than the {MAX_MODEL_FILES} allowed")
        names = [file.name for file in self.files]
        if len(set(names)) < len(names):
            raise InvalidSpec(f"{self.parameter}: two files have the same name")
        if not 1 <= self.max_batch <= MAX_BATCH:
            raise InvalidSpec(f"{self.parameter}: max_batch is a number from 1 to {MAX_BATCH}, not {self.max_batch!r}")
        if self.build_timeout_s is not None and (wrong := wrong_build_timeout(self.build_timeout_s)) is not None:
            raise InvalidSpec(f"{self.parameter}: build_timeout_s is {wrong}")
        if self.memory_limit_bytes is not None:
            if not 0 < self.memory_limit_bytes <= LARGEST_INTEGER:
                raise InvalidSpec(
                    f"{self.parameter}: memory_limit_bytes is positive and less than 8 EiB, "
                    f"not {self.memory_limit_bytes}"
                )
            check_least_bytes("build_memory", self.memory_limit_bytes, MIN_PROCESS_BYTES, "a process that compiles")
        if self.precision is Precision.INT8 and self.samples is None:
            raise InvalidSpec(f"{self.parameter}: precision int8 is calibrated on samples: set samples=")

    def accepted(self, arithmetic: Precision) -> Tolerance:
        """Return the tolerance of an engine whose coarsest arithmetic is `arithmetic`."""
        return self.tolerance or TOLERANCES[arithmetic]
