"""The deployed form of a function: FunctionSpec and its parts, frozen and self-validating.

`@gpu_function` builds a `FunctionSpec` at deploy. It travels as JSON; the gateway validates it again: the constructor
runs the same checks everywhere. An option that this release does not implement is rejected, never ignored.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from gpufn_core.errors import InvalidInput, InvalidSpec
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_core.spec.isolation import (
    AS_PROCESS,
    IN_CONTAINER,
    OWN_NETWORK,
    OWN_RUNTIME,
    Isolation,
    Network,
    contradiction,
)
from gpufn_core.spec.model_spec import ModelSpec
from gpufn_core.spec.naming.names import RESERVED_NAMES, is_function_name, parts_of
from gpufn_core.spec.priority import Priority
from gpufn_core.spec.resources import Resources
from gpufn_core.spec.schedule import Schedule
from gpufn_core.spec.units import Bounds, check_fields
from gpufn_core.spec.volume_spec import VolumeMount, check_mounts
from gpufn_core.spec.web_spec import WebSpec
from gpufn_core.spec.weights_spec import WeightsSpec, check_weights

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MODULE_NAME = re.compile(r"[A-Za-z_]\w{0,99}")
MAX_MODULES = 256  # third-party modules of one revision
LONGEST_METHOD_NAME = 100
_MAX_ENV_BYTES = 32 << 10
LONGEST_SECRET_NAME = 200
MAX_SECRETS = 100  # per function
MAX_VARIANTS = 10  # variants of a function at a time, unless it sets max_variants
_PARKED_ON_A_GPU_S = 600.0
_LONGEST_DELAY_S = 3600.0  # between two attempts
RETENTION_S = 86400.0
_LONGEST_RETENTION_S = 30 * 86400  # the stream of call records keeps messages for 30 days
# Environment variables that gpufn sets in workers. A user's value would break them or impersonate gpufn.
RESERVED_ENV = ("GPUFN_", "CUDA_MPS_", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LD_PRELOAD")
# Environment variables of `torch.distributed`, which gpufn sets in the processes of a gang.
GANG_ENV = frozenset(
    {
        *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("GROUP_RANK", "NODE_RANK", "NNODES"),
    }
)


def is_module_name(name: str) -> bool:
    """Return whether `name` can be a top-level module's name. Such names are passed to an interpreter to import."""
    return MODULE_NAME.fullmatch(name) is not None


def check_secret_name(name: str) -> None:
    """Raise InvalidInput unless a secret may have this name: it becomes an environment variable of workers."""
    if ENV_NAME.fullmatch(name) is None or len(name) > LONGEST_SECRET_NAME:
        raise InvalidInput(f"{name[:120]!r} is not the name of an environment variable", field="name")
    if name.startswith(RESERVED_ENV):
        raise InvalidInput(f"{name} is set by gpufn itself and cannot be a secret", field="name")


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
    PICKLE = "pickle"  # the bundle holds `function.pkl`, pickled by value; only workers unpickle it
    MODEL = "model"  # the bundle has no code: the function is a single model, tensors in and tensors out


class EntryPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The location of the function inside its bundle."""

    module: str
    qualname: str
    packaging: Packaging = Packaging.SOURCE


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Batch calls: the function takes a list per parameter and returns a list of the same length.

    One batch is one run, and `concurrency` is the number of batches that a worker runs at the same time. With the
    default of 1 a worker runs at most `max_size` calls while as many more gather; with 4 it runs up to `4 * max_size`.

    A call that arrives at an idle worker runs at once. Calls that arrive while a batch runs gather. They run together
    when that batch ends, when `max_size` is reached, or when the oldest has waited `max_wait_ms`. If the function
    raises, or returns a list of another length, the worker logs it and runs each call once more alone, so that only the
    faulty call fails.

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


class MethodSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One callable of the function. A plain function has one, named ``""``; a class has one per ``@method``.

    `parameters` is the JSON Schema (type object) of the keyword arguments, in signature order. `returns` is the JSON
    Schema of the result. `raw_parameter` names the parameter that receives a body that is neither JSON nor msgpack.
    `batch` replaces the function's; None runs each call alone.
    """

    name: str = ""
    kind: CallKind = CallKind.SYNC
    parameters: dict[str, Any] = {}
    returns: dict[str, Any] = {}
    raw_parameter: str | None = None
    doc: str = ""
    batch: Batch | msgspec.UnsetType | None = msgspec.UNSET


# The only method of a web application: a call of it is a web session, whose events are the items of a stream.
SESSIONS = (MethodSpec(kind=CallKind.ASYNC_GENERATOR),)

# Users pass exception classes; `Retry` stores and sends their names.
if TYPE_CHECKING:
    _Exceptions = tuple[str | type[BaseException], ...]
else:
    _Exceptions = tuple[str, ...]


class Retry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Retry policy: up to `attempts` retries, after `delay_s`, `delay_s * backoff`, ... seconds, at most an hour each.
    A submitted call whose delay exceeds a minute may start up to a second late.

    `on` names the exceptions that are retried; empty means all. The death of the worker counts as a failed attempt.
    A generator call with a waiting reader is not retried after its first item. Pass the exception classes:
    ``Retry(3, on=(IOError,))``.

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
            raise InvalidSpec("retries: on=... has no effect with attempts=0: raise attempts or remove on")
        if not isinstance(self.on, (tuple, list)):
            raise InvalidSpec("retries.on must be a tuple of exception classes: write on=(OSError,)")
        names = tuple(kind if isinstance(kind, str) else _exception_name(kind) for kind in self.on)
        msgspec.structs.force_setattr(self, "on", names)

    def delay_before(self, attempt: int) -> float:
        """Return the seconds to wait before `attempt` (2 is the first retry)."""
        return min(self.delay_s * self.backoff ** max(attempt - 2, 0), _LONGEST_DELAY_S)


class ScalingPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds and targets of the autoscaler. `target` is the fraction of a worker's slots to plan with.

    `park_timeout_s` of None means the default of the function's device (see `FunctionSpec.park_timeout_s`).
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
    prewarm: bool = False  # start a worker before the next call that the history of arrivals predicts

    def __post_init__(self) -> None:
        check_fields(self, self.bounds)
        if self.min_workers > self.max_workers:
            raise InvalidSpec(f"min_workers={self.min_workers} is more than max_workers={self.max_workers}")


class Serves(enum.StrEnum):
    """An API of another platform whose requests a function takes as its arguments."""

    OPENAI_CHAT = "openai-chat"
    OPENAI_EMBEDDINGS = "openai-embeddings"
    OPENAI_TRANSCRIPTIONS = "openai-transcriptions"
    OPENAI_IMAGES = "openai-images"


class FunctionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A function as deployed. Everything that affects how it runs is in here."""

    bounds: ClassVar[Mapping[str, Bounds]] = {
        "concurrency": Bounds("concurrency", 1, 1000, is_whole=True),
        "max_calls": Bounds("max_calls", 1, 1_000_000_000, is_whole=True),
        "timeout_s": Bounds("timeout", 0.001, 7 * 86400),
        "startup_timeout_s": Bounds("startup_timeout", 0.1, 86400),
        "queue_timeout_s": Bounds("queue_timeout", 0.001, 7 * 86400, may_be_none=True),
        "retention_s": Bounds("retention", 1, _LONGEST_RETENTION_S),
        "max_variants": Bounds("max_variants", 1, 1000, is_whole=True),
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
    priority: Priority = Priority.NORMAL  # default of its calls
    schedule: Schedule | None = None
    webhook: str | None = None  # URL that receives the ends of submitted calls
    retention_s: float = RETENTION_S  # how long the record and the result of a submitted call are kept after its end
    env: dict[str, str] = {}
    secrets: tuple[str, ...] = ()  # names of the secrets that its workers receive as environment variables
    python: str = ""  # major.minor of the deploying interpreter; a pickle needs the same version
    models: tuple[ModelSpec, ...] = ()
    weights: tuple[WeightsSpec, ...] = ()
    image: ImageSpec | None = None  # the Python, packages and files of its workers
    egress: bool = False  # whether its containers can reach the network
    pickle: bool = False  # whether its workers accept and return pickles, which can run code (decision 0030)
    # Unset ones are not stored, so that nodes of an older release read specs that do not use them.
    isolation: Isolation | msgspec.UnsetType = msgspec.UNSET  # unset: the node's default
    network: Network | msgspec.UnsetType = msgspec.UNSET  # unset: full, or none in a container without `egress`
    max_calls: int | msgspec.UnsetType = msgspec.UNSET  # calls after which a worker is replaced; unset: no limit
    serves: Serves | msgspec.UnsetType = msgspec.UNSET  # the API of another platform that clients use it through
    constructor: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET  # JSON Schema of a class's parameters
    max_variants: int | msgspec.UnsetType = msgspec.UNSET  # variants that may exist at a time; unset: MAX_VARIANTS
    web: WebSpec | msgspec.UnsetType = msgspec.UNSET  # how it serves its own HTTP requests
    volumes: tuple[VolumeMount, ...] | msgspec.UnsetType = msgspec.UNSET  # volumes that its workers read, or commit to
    modules: tuple[str, ...] = ()  # third-party modules that importing it loads; template processes preload them

    def __post_init__(self) -> None:
        self._check_name()
        if not self.methods:
            raise InvalidSpec(f"{self.name}: there is nothing to call; a class needs at least one @method")
        self._check_methods()
        if self.constructor is not msgspec.UNSET and not self.is_class:
            raise InvalidSpec(f"{self.name}: only a class has a constructor")
        check_fields(self, self.bounds)
        if self.schedule is not None:
            self._check_schedule(self.schedule)
        if self.webhook is not None:
            self._check_webhook(self.webhook)
        for method in self.methods:
            if self.batch_of(method) is not None and method.kind.streams:
                where = f"{self.name}: {method.name}" if method.name else self.name
                raise InvalidSpec(
                    f"{where}: batch=... and a generator contradict each other: return a list with one result per "
                    "call, or remove batch"
                )
        self._check_env()
        self._check_secrets()
        self._check_modules()
        self._check_models()
        self._check_weights()
        self._check_image()
        self._check_isolation()
        if self.resources.nodes > 1:
            self._check_gang()
        if self.web is not msgspec.UNSET:
            self._check_web(self.web)

    def _check_web(self, web: WebSpec) -> None:
        """Reject options that contradict requests over the web."""
        if self.is_class:
            raise InvalidSpec(f"{self.name}: a web function is a function, not a class")
        if self.entry.packaging is Packaging.MODEL:
            raise InvalidSpec(f"{self.name}: a model has the Open Inference Protocol, and no web")
        for option, value in {"serves": self.serves is not msgspec.UNSET, "nodes": self.resources.nodes > 1}.items():
            if value:
                raise InvalidSpec(f"{self.name}: {option}=... and a web function contradict each other: remove one")
        if not web.is_app:
            return
        if self.methods[0].kind is not CallKind.ASYNC_GENERATOR:
            raise InvalidSpec(f"{self.name}: the sessions of a web application are of the kind async_generator")
        contradictions = {
            "batch": self.batch is not None,
            "models": bool(self.models),
            "retries": self.retries is not None,
            "schedule": self.schedule is not None,
            "webhook": self.webhook is not None,
        }
        for option, is_set in contradictions.items():
            if is_set:
                raise InvalidSpec(
                    f"{self.name}: {option}=... does not apply to a web application, which is not called: remove it"
                )

    def _check_name(self) -> None:
        if not is_function_name(self.name):
            raise InvalidSpec(
                f"{self.name!r} is not a function name: use a to z, 0 to 9 and hyphens, at most 40 characters, "
                "with a letter or digit at both ends; or env/app/name, where env and app start with a letter"
            )
        env, _, base = parts_of(self.name)
        for part in RESERVED_NAMES & {env, base}:
            raise InvalidSpec(f"{part!r} is reserved by the HTTP protocols of the gateway: choose another name")

    def _check_gang(self) -> None:
        """Reject options that a worker on several nodes does not support."""
        reasons = {
            "concurrency": "its ranks run the same calls in the same order, one at a time"
            if self.concurrency > 1
            else "",
            "batch": "its ranks run the same calls in the same order, one at a time" if self.largest_batch else "",
            "models": "its engines are for one device: load the model in the function" if self.models else "",
            "image": "other nodes cannot reach a container" if self._has_container_image else "",
            "isolation": "other nodes cannot reach a container" if self.isolation in IN_CONTAINER else "",
            "max_calls": "its ranks are replaced together" if self.max_calls is not msgspec.UNSET else "",
            "network": "its ranks connect to each other" if self.network in OWN_NETWORK else "",
            "park_timeout": "a gang does not park" if self.scaling.park_timeout_s else "",
        }
        for option, reason in reasons.items():
            if reason:
                raise InvalidSpec(f"{self.name}: {option}=... and nodes={self.resources.nodes}: {reason}; remove one")
        if names := GANG_ENV & self.env.keys():
            raise InvalidSpec(f"{self.name}: {min(names)} is set by gpufn with nodes=..., and cannot be set in env")

    def _check_schedule(self, schedule: Schedule) -> None:
        method = self.method(schedule.method)
        if schedule.at is not None:
            raise InvalidSpec(
                f"{self.name}: a function's own schedule needs a cron line; use `gpufn schedules add` for a single run"
            )
        if method is None:
            known = ", ".join(repr(each.name) for each in self.methods)
            raise InvalidSpec(f"{self.name}: the schedule calls {schedule.method!r}; the methods are {known}")
        missing = [name for name in method.parameters.get("required", ()) if name not in schedule.arguments]
        if missing:
            raise InvalidSpec(
                f"{self.name}: the schedule lacks {', '.join(missing)}; write Schedule(..., arguments={{...}})"
            )

    def _check_webhook(self, url: str) -> None:
        from gpufn_core.encoding.urls import check_webhook  # noqa: PLC0415  workers do not need it

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
            raise InvalidSpec(f"{self.name}: two models use the same parameter")
        if self.entry.packaging is Packaging.MODEL and len(self.models) != 1:
            raise InvalidSpec(f"{self.name}: a function without code needs exactly one model, not {len(self.models)}")

    def _check_weights(self) -> None:
        try:
            check_weights(self.weights)
            check_mounts(self.mounts)
        except InvalidSpec as error:
            raise InvalidSpec(f"{self.name}: {error.message}") from None

    def _check_image(self) -> None:
        image = self.image
        if image and image.python and self.entry.packaging is Packaging.PICKLE and image.python != self.python:
            raise InvalidSpec(
                f"{self.name}: a function that is deployed by value needs the same Python version everywhere: "
                f"yours is {self.python}, its image's {image.python}"
            )

    def _check_isolation(self) -> None:
        isolation = None if self.isolation is msgspec.UNSET else self.isolation
        network = None if self.network is msgspec.UNSET else self.network
        if reason := contradiction(isolation, network, has_image=self._has_container_image, egress=self.egress):
            raise InvalidSpec(f"{self.name}: {reason}")

    def _check_env(self) -> None:
        for name, value in self.env.items():
            if ENV_NAME.fullmatch(name) is None:
                raise InvalidSpec(f"{self.name}: {name!r} is not the name of an environment variable")
            if name.startswith(RESERVED_ENV):
                raise InvalidSpec(f"{self.name}: {name} is set by gpufn itself and cannot be set in env")
            if "\0" in value:
                raise InvalidSpec(f"{self.name}: {name}: an environment variable cannot hold a null character")
        env_bytes = sum(len(part.encode(errors="replace")) for item in self.env.items() for part in item)
        if env_bytes > _MAX_ENV_BYTES:
            raise InvalidSpec(
                f"{self.name}: env holds {env_bytes:,} bytes, more than the {_MAX_ENV_BYTES:,} allowed: "
                "put large values into a file"
            )

    def _check_secrets(self) -> None:
        try:
            for name in self.secrets:
                check_secret_name(name)
        except InvalidInput as error:
            raise InvalidSpec(f"{self.name}: {error.message}") from None
        if repeated := {name for name in self.secrets if name in self.env or self.secrets.count(name) > 1}:
            raise InvalidSpec(
                f"{self.name}: {', '.join(sorted(repeated))} is set twice: name it once, in secrets or in env"
            )
        if len(self.secrets) > MAX_SECRETS:
            raise InvalidSpec(f"{self.name}: {len(self.secrets)} secrets are more than the {MAX_SECRETS} allowed")

    def _check_modules(self) -> None:
        for name in self.modules:
            if not is_module_name(name):
                raise InvalidSpec(f"{self.name}: {name[:120]!r} is not the name of a module")
        if len(self.modules) > MAX_MODULES:
            raise InvalidSpec(f"{self.name}: {len(self.modules)} modules are more than the {MAX_MODULES} allowed")

    @property
    def serves_app(self) -> bool:
        """True if the function returns a web application, which serves requests instead of calls."""
        return self.web is not msgspec.UNSET and self.web.is_app

    @property
    def in_container(self) -> bool:
        """Whether its workers run in containers on every node."""
        return self._has_container_image or self.isolation in IN_CONTAINER

    @property
    def _has_container_image(self) -> bool:
        return self.image is not None and self.image.needs_container

    @property
    def least_isolation(self) -> Isolation:
        """The tier that its workers have on every node. Without a choice it is a process, because a node may lack parts
        of the sandbox."""
        if self.in_container:
            return Isolation.CONTAINER
        return Isolation.PROCESS if self.isolation is msgspec.UNSET else self.isolation

    @property
    def node_needs(self) -> frozenset[str]:
        """The requirements that a node must offer: a tier by name, and a network of the workers' own."""
        tier = {self.isolation.value} if self.isolation in AS_PROCESS | OWN_RUNTIME else set()
        return frozenset(tier | ({self.network.value} if self.network in OWN_NETWORK else set()))

    def batch_of(self, method: MethodSpec) -> Batch | None:
        """Return how calls of a method are gathered; None if they are not."""
        return self.batch if method.batch is msgspec.UNSET else method.batch

    @property
    def largest_batch(self) -> Batch | None:
        """The batch of the method with the largest `max_size`; None if no method has one."""
        largest = None
        for method in self.methods:  # without further function calls: each step of the controller needs it
            batch = self.batch if method.batch is msgspec.UNSET else method.batch
            if batch is not None and (largest is None or batch.max_size > largest.max_size):
                largest = batch
        return largest

    @property
    def parallel_calls(self) -> int:
        """Calls that one worker runs at a time: `concurrency` runs of one call each or, with `batch`, of `max_size`."""
        batch = self.largest_batch
        return self.concurrency if batch is None else self.concurrency * batch.max_size

    @property
    def slots(self) -> int:
        """Calls that one worker holds at a time: running calls and, with `batch`, one more batch that gathers."""
        batch = self.largest_batch
        return self.parallel_calls if batch is None else self.parallel_calls + batch.max_size

    @property
    def calls_per_worker(self) -> int | None:
        """Calls after which a worker is replaced; None: no limit."""
        return None if self.max_calls is msgspec.UNSET else self.max_calls

    @property
    def variant_limit(self) -> int:
        """Variants of the function that may exist at a time."""
        return MAX_VARIANTS if self.max_variants is msgspec.UNSET else self.max_variants

    @property
    def mounts(self) -> tuple[VolumeMount, ...]:
        """The volumes that its workers use."""
        return () if self.volumes is msgspec.UNSET else self.volumes

    @property
    def park_timeout_s(self) -> float:
        """How long a worker stays parked after its idle timeout before it stops. 0 means that it stops at once."""
        if self.scaling.park_timeout_s is not None:
            return self.scaling.park_timeout_s
        if self.resources.nodes > 1:
            return 0.0
        return _PARKED_ON_A_GPU_S if self.resources.gpu else 0.0

    def method(self, name: str) -> MethodSpec | None:
        return next((method for method in self.methods if method.name == name), None)


def spec_from_json(data: bytes | Mapping[str, Any]) -> FunctionSpec:
    """Decode and validate a FunctionSpec. Raises InvalidSpec, which names the wrong field."""
    try:
        if isinstance(data, bytes):
            spec = msgspec.json.decode(data, type=FunctionSpec)
        else:
            spec = msgspec.convert(data, FunctionSpec)
        msgspec.msgpack.encode(spec)  # the stored form; rejects integers over 64 bits
    except msgspec.ValidationError as error:
        raise InvalidSpec(str(error)) from error
    except msgspec.DecodeError as error:
        raise InvalidSpec(f"the spec is not valid JSON: {error}") from error
    except OverflowError:
        raise InvalidSpec("a number in the spec has more than 64 bits") from None
    return spec
