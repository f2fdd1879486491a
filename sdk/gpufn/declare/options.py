"""The options of `@gpu_function`: their names and types, and how they become the parts of a FunctionSpec.

Everything is checked at decoration. An option that this release does not implement is refused, never ignored.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

import msgspec

from gpufn.declare.image import Image
from gpufn.declare.model import Model
from gpufn_core.domain.device import Share
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.function_spec import Batch, EntryPoint, FunctionSpec, MethodSpec, Packaging, Retry, ScalingPolicy
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_core.spec.model_spec import ModelSpec
from gpufn_core.spec.priority import Priority
from gpufn_core.spec.resources import Resources
from gpufn_core.spec.schedule import Schedule
from gpufn_core.spec.units import parse_bytes

_GPU = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9 ._-]*)(?::(?P<count>\d{1,3}))?")
# Named in the design, built later: refused with the reason, so that nobody relies on them in silence.
_NOT_YET = {
    "secrets": "; use env=... for what is not secret",
    "volumes": "",
}
# What other platforms call them.
_OTHER_WORDS = {
    "allow_concurrent_inputs": "concurrency",
    "buffer_containers": "buffer_workers",
    "concurrency_limit": "max_workers",
    "container_idle_timeout": "idle_timeout",
    "cron": "schedule",
    "dependencies": "image",
    "keep_warm": "min_workers",
    "max_containers": "max_workers",
    "max_inputs": "concurrency",
    "max_ongoing_requests": "concurrency",
    "min_containers": "min_workers",
    "num_replicas": "max_workers",
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
}
_LIMITS = {
    "concurrency": "concurrency",
    "timeout": "timeout_s",
    "startup_timeout": "startup_timeout_s",
    "queue_timeout": "queue_timeout_s",
    "retention": "retention_s",
}


_SPEC: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(FunctionSpec)}  # the defaults


class PlainOptions(TypedDict, total=False):
    """Those that leave the function's parameters to its callers."""

    name: Annotated[str, "how it is deployed; else its Python name, with hyphens for underscores"]
    gpu: Annotated[
        str | Sequence[str] | None,
        '`"any"`, a name such as `"L4"`, `"H100:2"` for two, or a list, the preferred one first',
    ]
    share: Annotated[
        Literal["exclusive", "mps", "time"],
        '`"exclusive"`: a GPU of its own; `"mps"`: a part of one, of so much `vram`; `"time"`: one in turn with others',
    ]
    vram: Annotated[str | int | None, 'GPU memory of one worker, reserved and enforced; `share="mps"` needs it']
    sm: Annotated[int | None, 'with `share="mps"`: at most so many percent of the multiprocessors, reserved for nobody']
    trust_domain: Annotated[str | None, "a shared GPU is shared only with functions that name the same one"]
    cpu: Annotated[float, "cores that one worker takes; a share of time, not cores of its own"]
    memory: Annotated[str | int | None, 'memory of one worker, reserved and enforced: bytes or text such as `"2Gi"`']
    env: Annotated[Mapping[str, str], "environment variables of its workers"]
    image: Annotated[Image | None, "an `Image`: its workers run in containers with that Python, packages and files"]
    egress: Annotated[bool, "whether its workers in containers reach the network"]
    min_workers: Annotated[int, "always so many"]
    max_workers: Annotated[int, "never more"]
    buffer_workers: Annotated[int, "so many spare ones while there are calls"]
    idle_timeout: Annotated[float, "a worker without calls is parked, or ends, after it"]
    park_timeout: Annotated[
        float | None,
        "so long a parked worker waits, off its GPU, for the next call; then it ends. 0: it is not parked. "
        "600 when not given with `gpu`, else 0",
    ]
    target: Annotated[float, "the share of a worker's slots to plan with; less means more spare room"]
    scaledown_window: Annotated[float, "fewer workers only when fewer were enough for so long"]
    target_delay: Annotated[float, "how long a queued call may wait before another worker is worth it"]
    concurrency: Annotated[int, "calls, or batches, that one worker runs at the same time"]
    batch: Annotated[Batch | None, "a `Batch`: calls gather, and the function gets a list per parameter"]
    timeout: Annotated[float, "how long one call may run"]
    startup_timeout: Annotated[float, "how long a worker may take to start"]
    queue_timeout: Annotated[float | None, "how long a call may wait before it starts; then it ends as expired"]
    retries: Annotated[Retry | int | None, "run a failed call again: so often, or as a `Retry` says"]
    schedule: Annotated[
        str | Schedule | None, 'call it by itself: a cron line such as `"*/5 * * * *"`, or a `Schedule`'
    ]
    webhook: Annotated[str | None, "the address that is told when a submitted call has ended"]
    retention: Annotated[float, "how long a submitted call's outcome is kept after its end"]
    priority: Annotated[Literal["hi", "normal", "low"], "the class of its calls, unless they say otherwise"]
    pickle: Annotated[
        bool,
        "take and return pickles of what has no form of its own, such as functions. A pickle runs code where it is "
        "read: a caller with a key of the scope `pickle` runs code in the workers",
    ]


class Options(PlainOptions, total=False):
    """The table of options: type and meaning; the defaults are those of the spec. Times are in seconds.

    docs/reference/python.md is made from it, and so is the signature of `gpu_function`.
    """

    models: Annotated[Mapping[str, Model], "parameter, or attribute of a class, and the `Model` that it receives"]


def default_of(option: str) -> Any:
    """What counts when it is not given.

    >>> default_of("max_workers"), default_of("gpu"), default_of("timeout")
    (4, None, 300.0)
    """
    if option in _SCALING:
        return getattr(ScalingPolicy(), _SCALING[option])
    if option in _LIMITS:
        return _SPEC[_LIMITS[option]]
    if option == "share":
        return Share.EXCLUSIVE.value
    return {
        "cpu": Resources().cpu,
        "egress": _SPEC["egress"],
        "pickle": _SPEC["pickle"],
        "priority": _SPEC["priority"].value,
    }.get(option)


def signature() -> inspect.Signature:
    """Of `gpu_function`, for `help()` and for editors that look at what is loaded."""
    declared = inspect.Parameter("declared", inspect.Parameter.POSITIONAL_ONLY, default=None)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [declared, *(inspect.Parameter(option, kind, default=default_of(option)) for option in Options.__annotations__)]
    )


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one function, checked: what a FunctionSpec holds besides the code, with its defaults."""

    name: str
    resources: Resources = Resources()
    scaling: ScalingPolicy = ScalingPolicy()
    concurrency: int = _SPEC["concurrency"]
    batch: Batch | None = None
    timeout_s: float = _SPEC["timeout_s"]
    startup_timeout_s: float = _SPEC["startup_timeout_s"]
    queue_timeout_s: float | None = None
    retries: Retry | None = None
    priority: Priority = _SPEC["priority"]
    schedule: Schedule | None = None
    webhook: str | None = None
    retention_s: float = _SPEC["retention_s"]
    env: dict[str, str] = {}
    egress: bool = _SPEC["egress"]
    pickle: bool = _SPEC["pickle"]
    declared_models: dict[str, Model] = {}
    declared_image: Image | None = None

    def spec(
        self,
        methods: tuple[MethodSpec, ...],
        *,
        is_class: bool,
        entry: EntryPoint | None = None,
        python: str = "",
        modules: tuple[str, ...] = (),
        models: tuple[ModelSpec, ...] = (),
        image: ImageSpec | None = None,
    ) -> FunctionSpec:
        """`models` and `image`: the declared ones, prepared; none while nobody has read their files."""
        fields = msgspec.structs.asdict(self)
        del fields["declared_models"], fields["declared_image"]
        return FunctionSpec(
            entry=entry or EntryPoint("", "", Packaging.SOURCE),
            methods=methods,
            is_class=is_class,
            python=python,
            modules=modules,
            models=models,
            image=image,
            **fields,
        )


def settings_from(options: Mapping[str, Any], default_name: str) -> Settings:
    """The checked settings; InvalidSpec names the option that is wrong."""
    _refuse_unknown(options)
    fields: dict[str, Any] = {
        "name": _name(options.get("name", default_name)),
        "resources": _resources(options),
        "scaling": ScalingPolicy(**{field: options[name] for name, field in _SCALING.items() if name in options}),
        "batch": _batch(options.get("batch")),
        "retries": _retries(options.get("retries")),
        "priority": _priority(options.get("priority", Priority.NORMAL)),
        "env": _env(options.get("env")),
        "egress": _egress(options.get("egress", False)),
        "pickle": _pickle(options.get("pickle", False)),
        "schedule": _schedule(options.get("schedule")),
        "webhook": _webhook(options.get("webhook")),
        "declared_models": _models(options.get("models")),
        "declared_image": _image(options.get("image")),
    }
    fields |= {field: options[name] for name, field in _LIMITS.items() if name in options}
    return Settings(**fields)


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    known = Options.__annotations__
    for option, value in options.items():
        if option in _NOT_YET:
            if value is not None:
                raise InvalidSpec(
                    f"{option}={value!r}: this release of gpufn does not have {option} yet{_NOT_YET[option]}"
                )
        elif option not in known:
            word = _OTHER_WORDS.get(option)
            near = [word] if word else difflib.get_close_matches(option, known, n=1)
            raise InvalidSpec(f"there is no option {option!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise InvalidSpec(f"name is text, not {name!r}")
    return name


def _resources(options: Mapping[str, Any]) -> Resources:
    names, count = _gpu(options.get("gpu"))
    return Resources(
        gpu=names,
        gpu_count=count,
        share=_share(options.get("share", Share.EXCLUSIVE)),
        cpu=options.get("cpu", Resources().cpu),
        memory_bytes=_bytes("memory", options.get("memory")),
        vram_bytes=_bytes("vram", options.get("vram")),
        sm_percent=options.get("sm"),
        trust_domain=_trust_domain(options.get("trust_domain")),
    )


def _gpu(gpu: Any) -> tuple[tuple[str, ...], int]:
    """The acceptable names, and how many GPUs of one of them."""
    if gpu is None:
        return (), 1
    wanted = (gpu,) if isinstance(gpu, str) else gpu
    if not isinstance(wanted, (list, tuple)) or not wanted:
        raise InvalidSpec(f"gpu is None, 'any', a name such as 'L4', or a list of names, not {gpu!r}")
    names: list[str] = []
    counts: set[int] = set()
    for each in wanted:
        match = _GPU.fullmatch(each) if isinstance(each, str) else None
        if match is None:
            raise InvalidSpec(f"gpu: {each!r} is not the name of a GPU; write for example 'L4', 'any' or 'H100:2'")
        if match["name"].lower() == "cpu":
            raise InvalidSpec(f"gpu={each!r} is no GPU; leave gpu out to run on the CPU")
        names.append(match["name"])
        counts.add(int(match["count"] or 1))
    if len(counts) > 1:
        raise InvalidSpec(f"gpu={gpu!r}: a worker has the same number of GPUs wherever it runs; write it at each name")
    return tuple(names), counts.pop()


def _share(share: Any) -> Share:
    if share not in tuple(Share):
        raise InvalidSpec(f"share is 'exclusive', 'mps' or 'time', not {share!r}")
    return Share(share)


def _bytes(option: str, quantity: Any) -> int | None:
    try:
        return None if quantity is None else parse_bytes(quantity)
    except InvalidSpec as error:
        raise InvalidSpec(f"{option}: {error}") from error


def _trust_domain(name: Any) -> str:
    if name is not None and not isinstance(name, str):
        raise InvalidSpec(f"trust_domain is a name, not {name!r}")
    return name or ""


def _batch(batch: Any) -> Batch | None:
    if batch is None or isinstance(batch, Batch):
        return batch
    raise InvalidSpec(f"batch is a Batch, such as Batch(max_size=32, max_wait_ms=5), not {batch!r}")


def _retries(retries: Any) -> Retry | None:
    if retries is None or isinstance(retries, Retry):
        return retries
    if isinstance(retries, int) and not isinstance(retries, bool):
        return Retry(retries)
    raise InvalidSpec(f"retries is a number or a Retry, such as Retry(3, backoff=2.0), not {retries!r}")


def _priority(priority: Any) -> Priority:
    if priority not in tuple(Priority):
        raise InvalidSpec(f"priority is 'hi', 'normal' or 'low', not {priority!r}")
    return Priority(priority)


def _schedule(schedule: Any) -> Schedule | None:
    if schedule is None or isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, str):
        return Schedule(schedule)
    raise InvalidSpec(f"schedule is a cron line such as '*/5 * * * *', or a Schedule, not {schedule!r}")


def _webhook(webhook: Any) -> str | None:
    if webhook is None or isinstance(webhook, str):
        return webhook
    raise InvalidSpec(f"webhook is an address, such as 'https://example.org/done', not {webhook!r}")


def _env(env: Any) -> dict[str, str]:
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise InvalidSpec(f"env is a dict of names and values, not {type(env).__name__}")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidSpec(f"env: names and values are text, not {name!r}: {type(value).__name__}")
    return dict(env)


def _image(image: Any) -> Image | None:
    if image is None or isinstance(image, Image):
        return image
    raise InvalidSpec(f"image is an Image, such as Image.python('3.12').pip_install('torch'), not {image!r}")


def _egress(egress: Any) -> bool:
    if isinstance(egress, bool):
        return egress
    raise InvalidSpec(f"egress is True or False, not {egress!r}")


def _pickle(pickle: Any) -> bool:
    if isinstance(pickle, bool):
        return pickle
    raise InvalidSpec(f"pickle is True or False, not {pickle!r}")


def _models(models: Any) -> dict[str, Model]:
    if models is None:
        return {}
    if not isinstance(models, Mapping):
        raise InvalidSpec(
            f'models is a dict of parameters and Models, such as {{"net": Model("net.onnx")}}, not {models!r}'
        )
    for name, model in models.items():
        if not isinstance(name, str) or not isinstance(model, Model):
            raise InvalidSpec(f'models: write {{"net": Model("net.onnx")}}, not {name!r}: {model!r}')
    return dict(models)
