"""What the user asked for: FunctionSpec and its parts, frozen values that validate themselves.

`FunctionSpec` is made by `@gpu_function` at deploy, travels as JSON, and is checked again by the gateway: construction
runs the same checks everywhere. An option that no part of this release implements is refused here, never ignored.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from gpufn_core.errors import InvalidInput, InvalidSpec
from gpufn_core.protocol import subjects
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_core.spec.model_spec import ModelSpec
from gpufn_core.spec.priority import Priority
from gpufn_core.spec.resources import Resources
from gpufn_core.spec.schedule import Schedule
from gpufn_core.spec.units import Bounds, check_fields

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MODULE_NAME = re.compile(r"[A-Za-z_]\w{0,99}")
# What follows /v2/ in the Open Inference Protocol; other protocols have a function's name there.
RESERVED_NAMES = frozenset(
    {"models", "health", "repository", "logging", "trace", "systemsharedmemory", "cudasharedmemory"}
)
MOST_MODULES = 256  # third-party ones of one revision
LONGEST_METHOD_NAME = 100
_MOST_ENV_BYTES = 32 << 10
_PARKED_ON_A_GPU_S = 600.0
_LONGEST_DELAY_S = 3600.0  # between two attempts
RETENTION_S = 86400.0
_LONGEST_RETENTION_S = 30 * 86400  # the stream of the records keeps nothing for longer
# What our own processes put into a worker's environment; a user's value would break it or claim to be ours.
RESERVED_ENV = ("GPUFN_", "CUDA_MPS_", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LD_PRELOAD")


# What `function_name` makes a valid name of.
SPELLED_NAME = re.compile(r"_*[A-Za-z0-9](?:[A-Za-z0-9_-]{0,38}[A-Za-z0-9])?_*")


def function_name(name: str) -> str:
    """The deployed spelling of a Python name: `f_x` is deployed as `f-x`, and both spellings reach it."""
    return name.strip("_").replace("_", "-").lower()


def is_module_name(name: str) -> bool:
    """Whether this can be a top-level module's name, for it is given to an interpreter to import."""
    return MODULE_NAME.fullmatch(name) is not None


def _exception_name(kind: object) -> str:
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return kind.__qualname__
    raise InvalidSpec(f"retries.on takes exception classes, not {kind!r}")


class CallKind(enum.StrEnum):
    SYNC = "sync"
    ASYNC = "async"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async_generator"

    @property
    def streams(self) -> bool:
        return self in (CallKind.GENERATOR, CallKind.ASYNC_GENERATOR)


class Packaging(enum.StrEnum):
    SOURCE = "source"  # the bundle holds modules; `module` is imported and `qualname` looked up
    PICKLE = "pickle"  # the bundle holds `function.pkl`, by value; unpickled in the worker only
    MODEL = "model"  # the bundle has no code: the function is its one model, tensors in and tensors out


class EntryPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the function is inside its bundle."""

    module: str
    qualname: str
    packaging: Packaging = Packaging.SOURCE


class MethodSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One callable of the function. A plain function has one, named ``""``; a class one per ``@method``.

    `parameters` is the JSON Schema (type object) of one call's keyword arguments, in the order of the signature, and
    `returns` that of its result. `raw_parameter` takes a body that is neither JSON nor msgpack.
    """

    name: str = ""
    kind: CallKind = CallKind.SYNC
    parameters: dict[str, Any] = {}
    returns: dict[str, Any] = {}
    raw_parameter: str | None = None
    doc: str = ""


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Gather calls into one: the function takes a list per parameter and returns a list as long.

    A batch is one run: `concurrency` is how many batches one worker runs at the same time. With the default of 1 a
    worker runs at most `max_size` calls, and as many more gather; with 4 it runs up to `4 * max_size`.

    A call that finds the worker idle runs at once. Calls that arrive while a batch runs gather, and run together when
    it ends, when `max_size` is reached, or when the oldest has waited `max_wait_ms`. When the function raises, or
    returns a list of another length, its log says so and each call is run once more, alone: who is to blame fails.

    >>> Batch(max_size=32, max_wait_ms=5)
    Batch(max_size=32, max_wait_ms=5.0)
    """

    bounds: ClassVar[Mapping[str, Bounds]] = {
        "max_size": Bounds("batch.max_size", 1, 4096, is_whole=True),
        "max_wait_ms": Bounds("batch.max_wait_ms", 0, 60_000),
    }

    max_size: int
    max_wait_ms: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, self.bounds)
        msgspec.structs.force_setattr(self, "max_wait_ms", float(self.max_wait_ms))


# Users write classes; `Retry` keeps and sends their names.
if TYPE_CHECKING:
    _Exceptions = tuple[str | type[BaseException], ...]
else:
    _Exceptions = tuple[str, ...]


class Retry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Run again when an attempt fails: up to `attempts` more times, after `delay_s`, `delay_s * backoff`, ... seconds,
    an hour at most; after more than a minute, a submitted call up to a second later.

    `on` names the exceptions that are worth another attempt; empty means all of them. A worker that dies counts as a
    failed attempt. A generator whose items are waited for is not run again once it gave one. Write the classes
    themselves: ``Retry(3, on=(IOError,))``.

    >>> Retry(3, backoff=2.0, on=(IOError,)).on
    ('OSError',)
    """

    bounds: ClassVar[Mapping[str, Bounds]] = {
        "attempts": Bounds("retries.attempts", 0, 100, is_whole=True),
        "delay_s": Bounds("retries.delay_s", 0, _LONGEST_DELAY_S),
        "backoff": Bounds("retries.backoff", 1, 100),
    }

    attempts: int
    delay_s: float = 1.0
    backoff: float = 2.0
    on: _Exceptions = ()

    def __post_init__(self) -> None:
        check_fields(self, self.bounds)
        if self.on and not self.attempts:
            raise InvalidSpec("retries: on=... says what to try again, and attempts=0 to try nothing again")
        if not isinstance(self.on, (tuple, list)):
            raise InvalidSpec("retries.on takes several exception classes: write on=(OSError,)")
        names = tuple(kind if isinstance(kind, str) else _exception_name(kind) for kind in self.on)
        msgspec.structs.force_setattr(self, "on", names)

    def delay_before(self, attempt: int) -> float:
        """Seconds to wait before `attempt` (2 is the first retry)."""
        return min(self.delay_s * self.backoff ** max(attempt - 2, 0), _LONGEST_DELAY_S)


class ScalingPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many workers, within what bounds. `target` is the share of a worker's slots to plan with.

    `park_timeout_s` None: as long as is usual for the function's device (`FunctionSpec.park_timeout_s`).
    """

    bounds: ClassVar[Mapping[str, Bounds]] = {
        "min_workers": Bounds("min_workers", 0, 1000, is_whole=True),
        "max_workers": Bounds("max_workers", 0, 1000, is_whole=True),
        "buffer_workers": Bounds("buffer_workers", 0, 1000, is_whole=True),
        "idle_timeout_s": Bounds("idle_timeout", 0, 7 * 86400),
        "target": Bounds("target", 0.05, 1.0),
        "scaledown_window_s": Bounds("scaledown_window", 0, 3600),
        "target_delay_s": Bounds("target_delay", 0.001, 3600),
        "park_timeout_s": Bounds("park_timeout", 0, 7 * 86400, may_be_none=True),
    }

    min_workers: int = 0
    max_workers: int = 4
    buffer_workers: int = 0
    idle_timeout_s: float = 60.0
    target: float = 0.7
    scaledown_window_s: float = 30.0
    target_delay_s: float = 1.0
    park_timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, self.bounds)
        if self.min_workers > self.max_workers:
            raise InvalidSpec(f"min_workers={self.min_workers} is more than max_workers={self.max_workers}")


class FunctionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A function as deployed. Frozen: what is not here does not change how it runs."""

    bounds: ClassVar[Mapping[str, Bounds]] = {
        "concurrency": Bounds("concurrency", 1, 1000, is_whole=True),
        "timeout_s": Bounds("timeout", 0.001, 7 * 86400),
        "startup_timeout_s": Bounds("startup_timeout", 0.1, 86400),
        "queue_timeout_s": Bounds("queue_timeout", 0.001, 7 * 86400, may_be_none=True),
        "retention_s": Bounds("retention", 1, _LONGEST_RETENTION_S),
    }

    name: str
    entry: EntryPoint
    methods: tuple[MethodSpec, ...]
    is_class: bool = False
    resources: Resources = Resources()
    scaling: ScalingPolicy = ScalingPolicy()
    concurrency: int = 1
    batch: Batch | None = None
    timeout_s: float = 300.0
    startup_timeout_s: float = 600.0
    queue_timeout_s: float | None = None
    retries: Retry | None = None
    priority: Priority = Priority.NORMAL  # of its calls, unless they say otherwise
    schedule: Schedule | None = None
    webhook: str | None = None  # where the ends of its submitted calls are told
    retention_s: float = RETENTION_S  # how long a submitted call is remembered after its end, and its result kept
    env: dict[str, str] = {}
    python: str = ""  # major.minor of the deploying interpreter; a pickle needs the same
    models: tuple[ModelSpec, ...] = ()
    image: ImageSpec | None = None  # of its workers' containers
    egress: bool = False  # in a container: whether it reaches the network
    pickle: bool = False  # whether its workers take and return pickles, which run code (decision 0030)
    modules: tuple[str, ...] = ()  # third-party modules that its import pulled in: what a standby preloads

    def __post_init__(self) -> None:
        if not subjects.is_function_name(self.name):
            raise InvalidSpec(
                f"{self.name!r} is not a function name: use a to z, 0 to 9 and hyphens, at most 40 characters, "
                "with a letter or digit at both ends"
            )
        if self.name in RESERVED_NAMES:
            raise InvalidSpec(f"{self.name!r} is a word of the protocols that the gateway speaks: choose another name")
        if not self.methods:
            raise InvalidSpec(f"{self.name}: there is nothing to call; a class needs at least one @method")
        self._check_methods()
        check_fields(self, self.bounds)
        if self.schedule is not None:
            self._check_schedule(self.schedule)
        if self.webhook is not None:
            self._check_webhook(self.webhook)
        if self.batch is not None:
            for method in self.methods:
                if method.kind.streams:
                    where = f"{self.name}: {method.name}" if method.name else self.name
                    raise InvalidSpec(
                        f"{where}: batch=... and a generator contradict each other: return a list with one result per "
                        "call, or leave batch out"
                    )
        self._check_env()
        self._check_modules()
        self._check_models()
        self._check_image()

    def _check_schedule(self, schedule: Schedule) -> None:
        method = self.method(schedule.method)
        if schedule.at is not None:
            raise InvalidSpec(
                f"{self.name}: a function's own schedule has a cron line; `gpufn schedules add` runs it once"
            )
        if method is None:
            known = ", ".join(repr(each.name) for each in self.methods)
            raise InvalidSpec(f"{self.name}: the schedule calls {schedule.method!r}; the methods are {known}")
        lacking = [name for name in method.parameters.get("required", ()) if name not in schedule.arguments]
        if lacking:
            raise InvalidSpec(
                f"{self.name}: the schedule gives no {', '.join(lacking)}; write Schedule(..., arguments={{...}})"
            )

    def _check_webhook(self, url: str) -> None:
        from gpufn_core.encoding.urls import check_webhook  # noqa: PLC0415  no worker needs it

        try:
            check_webhook(url)
        except InvalidInput as error:
            raise InvalidSpec(f"{self.name}: {error.message}") from error

    def _check_methods(self) -> None:
        names = [method.name for method in self.methods]
        if not self.is_class and names != [""]:
            raise InvalidSpec(f"{self.name}: a function has one method, without a name; a class has named ones")
        for name in names:
            if self.is_class and not (name.isidentifier() and len(name) <= LONGEST_METHOD_NAME):
                raise InvalidSpec(f"{self.name}: {name[:120]!r} is not the name of a method")
        if len(set(names)) < len(names):
            raise InvalidSpec(f"{self.name}: two methods have the same name")

    def _check_models(self) -> None:
        parameters = [model.parameter for model in self.models]
        if len(set(parameters)) < len(parameters):
            raise InvalidSpec(f"{self.name}: two models are handed to the same parameter")
        if self.entry.packaging is Packaging.MODEL and len(self.models) != 1:
            raise InvalidSpec(f"{self.name}: a function without code is one model, not {len(self.models)}")
        if not self.resources.gpu and any(model.require_gpu for model in self.models):
            raise InvalidSpec(f"{self.name}: a model requires a GPU, and gpu=... asks for none")

    def _check_image(self) -> None:
        image = self.image
        if image and image.python and self.entry.packaging is Packaging.PICKLE and image.python != self.python:
            raise InvalidSpec(
                f"{self.name}: it travels by value, which needs the same Python everywhere: yours is {self.python}, "
                f"its image's {image.python}"
            )

    def _check_env(self) -> None:
        for name, value in self.env.items():
            if ENV_NAME.fullmatch(name) is None:
                raise InvalidSpec(f"{self.name}: {name!r} is not the name of an environment variable")
            if name.startswith(RESERVED_ENV):
                raise InvalidSpec(f"{self.name}: {name} is set by gpufn itself and cannot be given in env")
            if "\0" in value:
                raise InvalidSpec(f"{self.name}: {name}: an environment variable cannot hold a null character")
        env_bytes = sum(len(part.encode(errors="replace")) for item in self.env.items() for part in item)
        if env_bytes > _MOST_ENV_BYTES:
            raise InvalidSpec(
                f"{self.name}: env holds {env_bytes:,} bytes, and {_MOST_ENV_BYTES:,} are allowed: "
                "put large values into a file"
            )

    def _check_modules(self) -> None:
        for name in self.modules:
            if not is_module_name(name):
                raise InvalidSpec(f"{self.name}: {name[:120]!r} is not the name of a module")
        if len(self.modules) > MOST_MODULES:
            raise InvalidSpec(f"{self.name}: {len(self.modules)} modules are more than the {MOST_MODULES} allowed")

    @property
    def parallel_calls(self) -> int:
        """Calls that one worker runs at a time: `concurrency` runs of one call each or, with `batch`, of `max_size`."""
        return self.concurrency if self.batch is None else self.concurrency * self.batch.max_size

    @property
    def slots(self) -> int:
        """Calls that one worker holds at a time: those that run and, with `batch`, one more batch, which gathers."""
        return self.parallel_calls if self.batch is None else self.parallel_calls + self.batch.max_size

    @property
    def park_timeout_s(self) -> float:
        """How long a worker that was idle for its timeout is parked before it ends; 0: it ends at once."""
        if self.scaling.park_timeout_s is not None:
            return self.scaling.park_timeout_s
        return _PARKED_ON_A_GPU_S if self.resources.gpu else 0.0

    def method(self, name: str) -> MethodSpec | None:
        return next((method for method in self.methods if method.name == name), None)


def spec_from_json(data: bytes | Mapping[str, Any]) -> FunctionSpec:
    """A validated FunctionSpec; InvalidSpec says which field is wrong."""
    try:
        if isinstance(data, bytes):
            spec = msgspec.json.decode(data, type=FunctionSpec)
        else:
            spec = msgspec.convert(data, FunctionSpec)
        msgspec.msgpack.encode(spec)  # as which it is stored
    except msgspec.ValidationError as error:
        raise InvalidSpec(str(error)) from error
    except msgspec.DecodeError as error:
        raise InvalidSpec(f"the spec is not valid JSON: {error}") from error
    except OverflowError:
        raise InvalidSpec("a number in the spec has more than 64 bits") from None
    return spec
