"""The options of `@gpu_function`: names, types, checks, and their conversion to the parts of a FunctionSpec.

Decoration checks all options. An option that this release does not implement is refused, never ignored.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import msgspec

from gpufn.declare.image import Image
from gpufn.declare.model import Model
from gpufn.declare.volume import Volume
from gpufn.declare.weights import Weights
from gpufn_core.domain.devices.device import Share
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.function_spec import (
    SESSIONS,
    Batch,
    EntryPoint,
    FunctionSpec,
    MethodSpec,
    Packaging,
    Retry,
    ScalingPolicy,
    Serves,
)
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_core.spec.isolation import Isolation, Network
from gpufn_core.spec.model_spec import ModelSpec
from gpufn_core.spec.naming.names import DEFAULT, HOME, Home, check_group, full_name
from gpufn_core.spec.priority import Priority
from gpufn_core.spec.resources import Resources, parse_gpu
from gpufn_core.spec.schedule import Schedule
from gpufn_core.spec.units import parse_bytes
from gpufn_core.spec.volume_spec import VolumeMount, check_mounts
from gpufn_core.spec.web_spec import WebSpec
from gpufn_core.spec.weights_spec import WeightsSpec

_Choice = TypeVar("_Choice", Isolation, Network, Serves)
# The names of the options on other platforms.
_OTHER_NAMES = {
    "allow_concurrent_inputs": "concurrency",
    "buffer_containers": "buffer_workers",
    "concurrency_limit": "max_workers",
    "container_idle_timeout": "idle_timeout",
    "cron": "schedule",
    "dependencies": "image",
    "keep_warm": "min_workers",
    "max_containers": "max_workers",
    "max_concurrency": "concurrency",
    "max_inputs": "concurrency",
    "max_ongoing_requests": "concurrency",
    "min_containers": "min_workers",
    "num_replicas": "max_workers",
    "single_use_containers": "max_calls",
    "pip": "image",
    "requirements": "image",
    "time_limit": "timeout",
}
_SCALING = {
    "min_workers": "min_workers",
    "max_workers": "max_workers",
    "buffer_workers": "buffer_workers",
    "idle_timeout": "idle_timeout_s",
    "target": "target",
    "scaledown_window": "scaledown_window_s",
    "target_delay": "target_delay_s",
    "park_timeout": "park_timeout_s",
    "prewarm": "prewarm",
}
_LIMITS = {
    "concurrency": "concurrency",
    "max_calls": "max_calls",
    "max_variants": "max_variants",
    "timeout": "timeout_s",
    "startup_timeout": "startup_timeout_s",
    "queue_timeout": "queue_timeout_s",
    "retention": "retention_s",
}
# The types of options that need no other check, and their description in an error.
_TYPES: dict[str, tuple[Any, str]] = {
    "name": (str, "a string"),
    "app": (str | None, "the name of an app, such as 'search'"),
    "trust_domain": (str | None, "a string"),
    "batch": (Batch | None, "a Batch, such as Batch(max_size=32, max_wait_ms=5)"),
    "retries": (Retry | int | None, "a number or a Retry, such as Retry(3, backoff=2.0)"),
    "schedule": (Schedule | str | None, "a cron line such as '*/5 * * * *', or a Schedule"),
    "webhook": (str | None, "a URL, such as 'https://example.org/done'"),
    "image": (Image | None, "an Image, such as Image.python('3.12').pip_install('torch')"),
    "egress": (bool, "True or False"),
    "prewarm": (bool, "True or False"),
    "pickle": (bool, "True or False"),
    "models": (Mapping | None, 'a dict of parameters and Models, such as {"net": Model("net.onnx")}'),
}
_SPEC_DEFAULTS: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(FunctionSpec)}


class PlainOptions(TypedDict, total=False):
    """The options that do not bind a parameter of the function."""

    name: Annotated[str, "the name to deploy under. Default: the Python name, with hyphens for underscores"]
    app: Annotated[str | None, 'the app of the function, such as `"search"`; `@App("search").function` sets it']
    gpu: Annotated[
        str | Sequence[str] | None,
        '`"any"`, a name such as `"L4"`, `"H100:2"` for two GPUs, or a list in order of preference',
    ]
    share: Annotated[
        Literal["exclusive", "mps", "time"],
        '`"exclusive"`: a whole GPU; `"mps"`: a part of a GPU, with `vram` of its memory; `"time"`: a GPU that several '
        "functions use in turns",
    ]
    nodes: Annotated[
        int, "the number of nodes of one worker: a process on each runs every call, and rank 0 returns the result"
    ]
    vram: Annotated[str | int | None, 'GPU memory of one worker, reserved and enforced; `share="mps"` requires it']
    sm: Annotated[
        int | None, 'with `share="mps"`: the maximum percentage of the multiprocessors for one worker, not reserved'
    ]
    trust_domain: Annotated[str | None, "functions share a GPU only if they name the same trust domain"]
    cpu: Annotated[float, "CPU cores of one worker: a share of time, not dedicated cores"]
    memory: Annotated[
        str | int | None, 'memory of one worker, reserved and enforced: bytes or a string such as `"2Gi"`'
    ]
    env: Annotated[Mapping[str, str], "environment variables of the workers"]
    secrets: Annotated[
        Sequence[str], "the names of secrets (`gpufn secrets set`), which the workers receive as environment variables"
    ]
    image: Annotated[Image | None, "an `Image`: the Python, packages and files of the workers"]
    egress: Annotated[bool, "whether workers in containers can reach the network"]
    network: Annotated[
        Literal["full", "egress", "none"] | None,
        'the network of the workers: `"full"`: as the node has it; `"egress"`: the internet, but no private network; '
        '`"none"`. Default: `"full"`, in containers `"none"`',
    ]
    isolation: Annotated[
        Literal["process", "sandbox", "container", "gvisor"] | None,
        '`"process"`: no isolation; `"sandbox"`: a process in a complete sandbox; `"container"`; `"gvisor"`: a '
        "container with gVisor. "
        "Default: a sandbox with the parts that the node has, or a container if `image` needs one",
    ]
    min_workers: Annotated[int, "the minimum number of workers, with or without calls"]
    max_workers: Annotated[int, "the maximum number of workers"]
    buffer_workers: Annotated[int, "the number of spare workers while there are calls"]
    idle_timeout: Annotated[float, "seconds without calls after which a worker is parked or stopped"]
    park_timeout: Annotated[
        float | None,
        "seconds that a parked worker waits, off its GPU, for the next call before it stops. 0: never park. "
        "Default: 600 with `gpu`, else 0",
    ]
    prewarm: Annotated[
        bool, "whether a worker starts before the next call that the arrivals of the last five weeks predict"
    ]
    target: Annotated[
        float, "the fraction of a worker's slots that scaling plans with; a lower value leaves more spare slots"
    ]
    scaledown_window: Annotated[float, "seconds for which fewer workers must have been enough before scaling down"]
    target_delay: Annotated[
        float, "seconds that a queued call may wait before it justifies the start of another worker"
    ]
    concurrency: Annotated[int, "calls, or batches, that one worker runs at the same time"]
    max_calls: Annotated[int | None, "calls after which a worker is replaced; 1: each call has a process of its own"]
    max_variants: Annotated[
        int | None,
        "variants that may exist at a time: pools of workers for other parameters of a class. Default: 10",
    ]
    batch: Annotated[Batch | None, "a `Batch`: calls are gathered, and the function gets a list per parameter"]
    timeout: Annotated[float, "seconds that one call may run"]
    startup_timeout: Annotated[float, "seconds that a worker may take to start"]
    queue_timeout: Annotated[float | None, "seconds that a call may wait before it starts; after that it expires"]
    retries: Annotated[Retry | int | None, "retries of a failed call: their number, or a `Retry`"]
    schedule: Annotated[
        str | Schedule | None,
        'when the platform calls the function: a cron line such as `"*/5 * * * *"`, or a `Schedule`',
    ]
    weights: Annotated[
        Weights | Sequence[Weights] | None,
        "the `Weights`, or a list of them, that a node fetches before a worker starts",
    ]
    volumes: Annotated[
        Volume | Sequence[Volume] | None,
        "the `Volume`, or a list of them, whose newest version a worker reads, or that it commits to",
    ]
    serves: Annotated[
        Literal["openai-chat", "openai-embeddings", "openai-transcriptions", "openai-images"] | None,
        "the API of OpenAI through which clients may also use the function: its requests are the arguments",
    ]
    webhook: Annotated[str | None, "the URL that receives a request when a submitted call has ended"]
    retention: Annotated[float, "seconds for which the outcome of a submitted call is kept after its end"]
    priority: Annotated[Literal["hi", "normal", "low"], "the priority of calls that set none"]
    pickle: Annotated[
        bool,
        "accept and return pickles of values that have no form of their own, such as functions. Reading a pickle runs "
        "code: a caller with a key of the scope `pickle` can run code in the workers",
    ]


class Options(PlainOptions, total=False):
    """The table of options: type and meaning. The defaults come from the spec. Times are in seconds.

    docs/reference/python.md and the signature of `gpu_function` are generated from it.
    """

    models: Annotated[Mapping[str, Model], "the `Model` for each parameter, or attribute of a class, that receives one"]


def default_of(option: str) -> Any:
    """Return the default of an option.

    >>> default_of("max_workers"), default_of("gpu"), default_of("timeout")
    (4, None, 300.0)
    """
    if option in _SCALING:
        return getattr(ScalingPolicy(), _SCALING[option])
    if option in _LIMITS:
        return _SPEC_DEFAULTS[_LIMITS[option]]
    if option == "share":
        return Share.EXCLUSIVE.value
    return {
        "cpu": Resources().cpu,
        "secrets": _SPEC_DEFAULTS["secrets"],
        "nodes": Resources().nodes,
        "egress": _SPEC_DEFAULTS["egress"],
        "pickle": _SPEC_DEFAULTS["pickle"],
        "priority": _SPEC_DEFAULTS["priority"].value,
    }.get(option)


def signature() -> inspect.Signature:
    """Return the signature of `gpu_function`, for `help()` and for editors that inspect the loaded object."""
    declared = inspect.Parameter("declared", inspect.Parameter.POSITIONAL_ONLY, default=None)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [declared, *(inspect.Parameter(option, kind, default=default_of(option)) for option in Options.__annotations__)]
    )


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The checked options of one function: the fields of a FunctionSpec that do not depend on the code."""

    name: str
    app: str = ""  # "" for a function that declares none
    resources: Resources = Resources()
    scaling: ScalingPolicy = ScalingPolicy()
    concurrency: int = _SPEC_DEFAULTS["concurrency"]
    max_calls: int | msgspec.UnsetType = msgspec.UNSET
    max_variants: int | msgspec.UnsetType = msgspec.UNSET
    batch: Batch | None = None
    timeout_s: float = _SPEC_DEFAULTS["timeout_s"]
    startup_timeout_s: float = _SPEC_DEFAULTS["startup_timeout_s"]
    queue_timeout_s: float | None = None
    retries: Retry | None = None
    priority: Priority = _SPEC_DEFAULTS["priority"]
    schedule: Schedule | None = None
    webhook: str | None = None
    retention_s: float = _SPEC_DEFAULTS["retention_s"]
    env: dict[str, str] = {}
    secrets: tuple[str, ...] = ()
    egress: bool = _SPEC_DEFAULTS["egress"]
    isolation: Isolation | msgspec.UnsetType = msgspec.UNSET
    network: Network | msgspec.UnsetType = msgspec.UNSET
    serves: Serves | msgspec.UnsetType = msgspec.UNSET
    pickle: bool = _SPEC_DEFAULTS["pickle"]
    web: WebSpec | msgspec.UnsetType = msgspec.UNSET
    declared_models: dict[str, Model] = {}
    declared_image: Image | None = None
    declared_weights: tuple[Weights, ...] = ()
    volumes: tuple[VolumeMount, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def path(self) -> str:
        """The name by which callers find the function, in any environment."""
        return f"{self.app}/{self.name}" if self.app else self.name

    @property
    def web_methods(self) -> tuple[MethodSpec, ...]:
        """The methods of a function that returns a web application; () for another one."""
        return SESSIONS if self.web is not msgspec.UNSET and self.web.is_app else ()

    def spec(
        self,
        methods: tuple[MethodSpec, ...],
        *,
        is_class: bool,
        constructor: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET,
        entry: EntryPoint | None = None,
        python: str = "",
        modules: tuple[str, ...] = (),
        models: tuple[ModelSpec, ...] = (),
        image: ImageSpec | None = None,
        weights: tuple[WeightsSpec, ...] = (),
        home: Home = HOME,
    ) -> FunctionSpec:
        """Return the spec. `models`, `image` and `weights` are the declared ones, with their files known; empty before
        that. `home` is the environment to deploy to, and the app of a function that declares none."""
        fields = msgspec.structs.asdict(self)
        del fields["declared_models"], fields["declared_image"], fields["declared_weights"], fields["app"]
        if self.app and home.app not in (self.app, DEFAULT):
            raise InvalidSpec(f"the function declares the app {self.app}: it cannot be deployed to the app {home.app}")
        if self.declared_image is not None:
            fields["env"] = {**dict(self.declared_image.variables), **self.env}
        fields["name"] = full_name(home.env, self.app or home.app, self.name)
        return FunctionSpec(
            entry=entry or EntryPoint("", "", Packaging.SOURCE),
            methods=methods,
            is_class=is_class,
            constructor=constructor,
            python=python,
            modules=modules,
            models=models,
            image=image,
            weights=weights,
            **fields,
        )


def settings_from(options: Mapping[str, Any], default_name: str) -> Settings:
    """Check the options. Raises InvalidSpec, which names the wrong option."""
    _refuse_unknown(options)
    _check_types(options)
    retries, schedule = options.get("retries"), options.get("schedule")
    fields: dict[str, Any] = {
        "name": options.get("name", default_name),
        "app": _app(options.get("app")),
        "resources": _resources(options),
        "scaling": ScalingPolicy(**{field: options[name] for name, field in _SCALING.items() if name in options}),
        "batch": options.get("batch"),
        "retries": Retry(retries) if isinstance(retries, int) else retries,
        "priority": _priority(options.get("priority", Priority.NORMAL)),
        "env": _env(options.get("env")),
        "secrets": _secrets(options.get("secrets")),
        "egress": options.get("egress", False),
        "isolation": _choice(Isolation, "isolation", options.get("isolation")),
        "serves": _choice(Serves, "serves", options.get("serves")),
        "network": _choice(Network, "network", options.get("network")),
        "pickle": options.get("pickle", False),
        "schedule": Schedule(schedule) if isinstance(schedule, str) else schedule,
        "webhook": options.get("webhook"),
        "declared_models": _models(options.get("models") or {}),
        "declared_image": options.get("image"),
        "declared_weights": _weights(options.get("weights")),
        "volumes": _volumes(options.get("volumes")),
    }
    fields |= {field: options[name] for name, field in _LIMITS.items() if name in options}
    for option in ("max_calls", "max_variants"):
        if fields.get(option, 0) is None:
            del fields[option]
    return Settings(**fields)


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    known = Options.__annotations__
    for option in options:
        if option not in known:
            known_name = _OTHER_NAMES.get(option)
            matches = [known_name] if known_name else difflib.get_close_matches(option, known, n=1)
            raise InvalidSpec(f"there is no option {option!r}" + (f"; did you mean {matches[0]!r}?" if matches else ""))


def _check_types(options: Mapping[str, Any]) -> None:
    for option, (kind, description) in _TYPES.items():
        value = options.get(option)
        is_bool = isinstance(value, bool) and kind is not bool  # Python counts a bool as an int
        if option in options and (is_bool or not isinstance(value, kind)):
            raise InvalidSpec(f"{option} is {description}, not {value!r}")


def _app(name: str | None) -> str:
    if name is None:
        return ""
    check_group("app", name)
    return "" if name == DEFAULT else name


def _resources(options: Mapping[str, Any]) -> Resources:
    names, count = parse_gpu(options.get("gpu"))
    return Resources(
        gpu=names,
        gpu_count=count,
        share=_share(options.get("share", Share.EXCLUSIVE)),
        cpu=options.get("cpu", Resources().cpu),
        memory_bytes=_bytes("memory", options.get("memory")),
        vram_bytes=_bytes("vram", options.get("vram")),
        sm_percent=options.get("sm"),
        trust_domain=options.get("trust_domain") or "",
        nodes=options.get("nodes", Resources().nodes),
    )


def _share(share: Any) -> Share:
    if share not in tuple(Share):
        raise InvalidSpec(f"share is 'exclusive', 'mps' or 'time', not {share!r}")
    return Share(share)


def _bytes(option: str, quantity: Any) -> int | None:
    try:
        return None if quantity is None else parse_bytes(quantity)
    except InvalidSpec as error:
        raise InvalidSpec(f"{option}: {error}") from error


def _priority(priority: Any) -> Priority:
    if priority not in tuple(Priority):
        raise InvalidSpec(f"priority is 'hi', 'normal' or 'low', not {priority!r}")
    return Priority(priority)


def _choice(kind: type[_Choice], option: str, choice: Any) -> _Choice | msgspec.UnsetType:
    if choice is None:
        return msgspec.UNSET
    if choice not in tuple(kind):
        *first, last = (repr(each.value) for each in kind)
        raise InvalidSpec(f"{option} is {', '.join(first)} or {last}, not {choice!r}")
    return kind(choice)


def _env(env: Any) -> dict[str, str]:
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise InvalidSpec(f"env is a dict of names and values, not {type(env).__name__}")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidSpec(f"env: names and values are strings, not {name!r}: {type(value).__name__}")
    return dict(env)


def _secrets(secrets: Any) -> tuple[str, ...]:
    names = () if secrets is None else secrets
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise InvalidSpec(f"secrets is a list of names, such as ['HF_TOKEN'], not {secrets!r}")
    return tuple(names)


def _models(models: Mapping[Any, Any]) -> dict[str, Model]:
    for name, model in models.items():
        if not isinstance(name, str) or not isinstance(model, Model):
            raise InvalidSpec(f'models: write {{"net": Model("net.onnx")}}, not {name!r}: {model!r}')
    return dict(models)


def _weights(weights: Any) -> tuple[Weights, ...]:
    declared = () if weights is None else (weights,) if isinstance(weights, Weights) else weights
    if not isinstance(declared, (list, tuple)) or not all(isinstance(each, Weights) for each in declared):
        raise InvalidSpec(
            f"weights is a Weights, such as Weights('hf://org/model'), or a list of them, not {weights!r}"
        )
    if len(set(declared)) < len(declared):
        raise InvalidSpec("weights names the same source twice")
    return tuple(declared)


def _volumes(volumes: Any) -> tuple[VolumeMount, ...] | msgspec.UnsetType:
    declared = () if volumes is None else (volumes,) if isinstance(volumes, Volume) else volumes
    if not isinstance(declared, (list, tuple)) or not all(isinstance(each, Volume) for each in declared):
        raise InvalidSpec(
            f"volumes is a Volume, such as Volume('models'), or a list of them, not {volumes!r}; the function finds "
            "the files in `volume.path`"
        )
    mounts = tuple(VolumeMount(each.name, each.writable) for each in declared)
    check_mounts(mounts)
    return mounts or msgspec.UNSET
