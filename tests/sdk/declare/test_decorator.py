from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from gpufn import Batch, Function, Retry, enter, exit, gpu_function, method, park, resume  # noqa: A004
from gpufn.declare.options import Options, settings_from
from gpufn.testing import run_locally
from gpufn_core.domain.devices.device import Share
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.function_spec import CallKind, FunctionSpec, ScalingPolicy, spec_from_json


def _declared(**options: Any) -> FunctionSpec:
    def work(x: int) -> int:
        return x

    spec: FunctionSpec = gpu_function(**options)(work).spec()
    return spec


def test_without_options_the_defaults_of_the_spec_apply() -> None:
    @gpu_function
    def f_x(x: int) -> int:
        return x + 1

    assert isinstance(f_x, Function)
    assert (f_x(1), f_x.name, f_x.__name__) == (2, "f-x", "f_x")
    assert f_x.spec().scaling == ScalingPolicy()


def test_options_become_the_spec() -> None:
    spec = _declared(
        name="other",
        gpu=["L4", "any"],
        share="time",
        cpu=2,
        memory="2Gi",
        env={"A": "1"},
        min_workers=1,
        max_workers=8,
        buffer_workers=1,
        idle_timeout=5,
        target=0.5,
        concurrency=4,
        timeout=3,
        startup_timeout=30,
        queue_timeout=10,
        retries=2,
    )
    assert (spec.name, spec.resources.gpu, spec.resources.share) == ("other", ("L4", "any"), Share.TIME)
    assert (spec.resources.cpu, spec.resources.memory_bytes, spec.env) == (2, 2 << 30, {"A": "1"})
    assert spec.scaling == ScalingPolicy(min_workers=1, max_workers=8, buffer_workers=1, idle_timeout_s=5, target=0.5)
    assert (spec.concurrency, spec.timeout_s, spec.startup_timeout_s, spec.queue_timeout_s) == (4, 3, 30, 10)
    assert spec.retries == Retry(2)


def test_a_spec_survives_a_round_trip_as_json() -> None:
    import msgspec

    spec = _declared(gpu="L4", retries=Retry(2, on=(IOError,)), env={"A": "b"})
    assert spec_from_json(msgspec.json.encode(spec)) == spec


def test_the_share_of_a_gpu_is_an_option() -> None:
    part = _declared(gpu=["L4", "any"], share="mps", vram="6Gi", sm=25, trust_domain="team-a").resources
    assert (part.share, part.vram_bytes, part.sm_percent, part.trust_domain) == (Share.MPS, 6 << 30, 25, "team-a")
    several = _declared(gpu=["H100:2", "A100:2"]).resources
    assert (several.gpu, several.gpu_count, several.vram_bytes) == (("H100", "A100"), 2, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_worker": 1}, "work: there is no option 'max_worker'; did you mean 'max_workers'?"),
        ({"zzz": 1}, "there is no option 'zzz'"),
        ({"keep_warm": 1}, "there is no option 'keep_warm'; did you mean 'min_workers'?"),
        ({"concurrency_limit": 1}, "there is no option 'concurrency_limit'; did you mean 'max_workers'?"),
        ({"share": "mps"}, "share='mps' is a part of a GPU, and gpu=... asks for none: write for example gpu='any'"),
        ({"share": "mps", "gpu": "any"}, "share='mps' needs a limit of GPU memory: write for example vram='6Gi'"),
        ({"share": "mps", "gpu": "L4", "sm": 25}, "share='mps' needs a limit of GPU memory"),
        ({"share": "mps", "gpu": "L4", "vram": "6 gig"}, "vram: '6 gig' is not a memory size"),
        (
            {"share": "mps", "gpu": "L4", "vram": 1000},
            "vram is 1,000 bytes, and a CUDA context under MPS needs at least 64 MiB: write vram='1000Mi'",
        ),
        ({"share": "mps", "gpu": "L4", "vram": "6Gi", "sm": 0}, "sm is a whole number from 1 to 100, not 0"),
        ({"share": "mps", "gpu": "L4", "vram": "6Gi", "sm": 12.5}, "sm is a whole number from 1 to 100, not 12.5"),
        ({"share": "mps", "gpu": "L4:2", "vram": "6Gi"}, "share='mps' is a part of one GPU, and gpu=... asks for 2"),
        ({"share": "time", "gpu": "L4:2"}, "share='time' is a part of one GPU, and gpu=... asks for 2: several GPUs"),
        ({"share": "half"}, "share is 'exclusive', 'mps' or 'time', not 'half'"),
        ({"gpu": "L4", "vram": "6Gi"}, "vram=... is a limit that only share='mps' has, not share='exclusive'"),
        ({"gpu": "L4", "share": "time", "sm": 25}, "sm=... is a limit that only share='mps' has, not share='time'"),
        ({"gpu": "L4", "trust_domain": "Team A"}, "trust_domain='Team A': use a to z, 0 to 9 and hyphens"),
        ({"image": "x"}, "image is an Image, such as Image.python('3.12').pip_install('torch'), not 'x'"),
        ({"egress": 1}, "egress is True or False, not 1"),
        ({"network": "host"}, "network is 'full', 'egress' or 'none', not 'host'"),
        ({"isolation": "jail"}, "isolation is 'process', 'sandbox', 'container', 'gvisor' or 'vm', not 'jail'"),
        ({"isolation": "vm"}, "isolation='vm': a virtual machine cannot connect to the socket of its node's runner"),
        ({"isolation": "gvisor", "network": "full"}, "a container has no access to the node's own network"),
        ({"network": "egress", "isolation": "process"}, "network='egress' needs a sandbox or a container"),
        ({"network": "full", "isolation": "container"}, "a container has no access to the node's own network"),
        ({"network": "none", "isolation": "process"}, "network='none' needs a sandbox or a container"),
        ({"network": "none", "egress": True}, "egress=... and network=... set the same"),
        ({"network": "none", "nodes": 2}, "network=... and nodes=2: its ranks connect to each other"),
        ({"network": "egress", "nodes": 2}, "network=... and nodes=2: its ranks connect to each other"),
        ({"secrets": "T"}, "secrets is a list of names, such as ['HF_TOKEN'], not 'T'"),
        ({"secrets": [1]}, "secrets is a list of names"),
        ({"secrets": ["MY-TOKEN"]}, "'MY-TOKEN' is not the name of an environment variable"),
        ({"secrets": ["GPUFN_URL"]}, "GPUFN_URL is set by gpufn itself"),
        ({"secrets": ["T", "T"]}, "T is set twice"),
        ({"secrets": ["T"], "env": {"T": "1"}}, "T is set twice"),
        ({"prewarm": 1}, "prewarm is True or False, not 1"),
        ({"volumes": {"/x": "y"}}, "volumes"),
        ({"priority": "high"}, "priority is 'hi', 'normal' or 'low', not 'high'"),
        ({"gpu": "H100:0"}, "gpu is a whole number from 1 to 16, not 0"),
        ({"gpu": "H100:two"}, "gpu: 'H100:two' is not the name of a GPU; write for example 'L4', 'any' or 'H100:2'"),
        (
            {"gpu": ["H100:2", "L4"]},
            "a worker has the same number of GPUs on every node; write the same number after each name",
        ),
        ({"gpu": []}, "gpu is None, 'any', a name such as 'L4', or a list of names, not []"),
        ({"gpu": 1}, "gpu is None"),
        ({"gpu": "cpu"}, "gpu='cpu' is not a GPU"),
        ({"memory": "lots"}, "memory: 'lots' is not a memory size"),
        ({"memory": 512}, "memory is 512 bytes, and a Python process needs at least 16 MiB: write memory='512Mi'"),
        (
            {"memory": "8Mi"},
            "memory is 8,388,608 bytes, and a Python process needs at least 16 MiB: write memory='512Mi'",
        ),
        ({"cpu": 0}, "cpu is a number from 0.01 to 1024, not 0"),
        ({"timeout": 0}, "timeout is a number of seconds from 0.001"),
        ({"idle_timeout": "5m"}, "idle_timeout is a number of seconds from 0 to 604800, not '5m'"),
        ({"min_workers": 5}, "min_workers=5 is more than max_workers=4"),
        ({"batch": 8}, "batch is a Batch, such as Batch(max_size=32, max_wait_ms=5), not 8"),
        ({"retries": "many"}, "retries is a number or a Retry"),
        ({"env": {"A": 1}}, "env: names and values are strings, not 'A': int"),
        ({"env": {"GPUFN_X": "1"}}, "GPUFN_X is set by gpufn itself"),
        ({"name": "models"}, "'models' is reserved by the HTTP protocols of the gateway: choose another name"),
        ({"name": "No Good"}, "'No Good' is not a function name"),
    ],
)
def test_an_option_that_is_wrong_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        _declared(**options)
    assert message.removeprefix("work: ") in str(caught.value)


def test_none_leaves_an_option_unset() -> None:
    assert _declared(vram=None, image=None, gpu=None, memory=None).resources.gpu == ()


@pytest.mark.parametrize("kind", list(CallKind))
def test_the_kind_of_a_function_is_detected(kind: CallKind) -> None:
    def sync() -> int:
        return 1

    async def async_() -> int:
        return 1

    def generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    raw = {"sync": sync, "async": async_, "generator": generator, "async_generator": async_generator}[kind.value]
    assert gpu_function(name="f")(raw).spec().methods[0].kind is kind


def test_a_class_offers_its_marked_methods_and_those_of_its_bases() -> None:
    class Base:
        @method
        def first(self) -> int:
            return 1

        @method
        def hidden(self) -> int:
            return 1

    @gpu_function
    class Embedder(Base):
        @enter
        def load(self) -> None: ...

        @method
        def second(self, x: int) -> int:
            return x

        def hidden(self) -> int:  # type: ignore[override]  # marked in the base, taken back here
            return 2

        @exit
        def leave(self) -> None: ...

    spec = Embedder.spec()  # type: ignore[attr-defined]
    assert spec.is_class
    assert [each.name for each in spec.methods] == ["first", "second"]


def _with_star(*rest: int) -> int:
    return sum(rest)


def _positional(x: int, /) -> int:
    return x


class _NeedsArguments:
    def __init__(self, size: int) -> None: ...
    @method
    def go(self) -> None: ...


class _NothingToCall:
    @enter
    def load(self) -> None: ...


class _EnterTakesMore:
    @enter
    def load(self, size: int) -> None: ...
    @method
    def go(self) -> None: ...


class _ExitTakesMore:
    @exit
    def end(self, cause: str, when: float) -> None: ...
    @method
    def go(self) -> None: ...


class _MethodWithANameOfOurs:
    @method
    def name(self) -> None: ...


class _CallableItself:
    @method
    def __call__(self) -> None: ...


class _MethodWithAnAttributeOfOurs:
    @method
    def settings(self) -> None: ...


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (_with_star, "*rest cannot be passed by name"),
        (_positional, "x is positional only"),
        (_NeedsArguments, "a worker creates the instance without arguments: give size of __init__ a default"),
        (_NothingToCall, "there is nothing to call; a class needs at least one @method"),
        (_EnterTakesMore, "@enter load takes no parameter but self"),
        (_ExitTakesMore, "@exit end takes self, and the cause if it needs it"),
        (
            _MethodWithANameOfOurs,
            "_MethodWithANameOfOurs.name is an attribute of gpufn: give the @method another name",
        ),
        (_MethodWithAnAttributeOfOurs, "_MethodWithAnAttributeOfOurs.settings is an attribute of gpufn"),
        (
            _CallableItself,
            "_CallableItself: callers use the name of a @method: give __call__ a name without double underscores",
        ),
        (_NothingToCall.load, "put @gpu_function on the class and @method on the method"),
        (3, "@gpu_function takes a function or a class, not 3"),
    ],
)
def test_functions_that_cannot_be_called_remotely_are_refused(target: Any, message: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        gpu_function(target)
    assert message in str(caught.value)


@pytest.mark.parametrize(("mark", "lacking"), [(park, "resume"), (resume, "park")])
def test_park_and_resume_need_each_other(mark: Callable[..., Any], lacking: str) -> None:
    class Half:
        @mark
        def move(self) -> None: ...

        @method
        def call(self) -> None: ...

    with pytest.raises(InvalidSpec, match=f"no @{lacking}"):
        gpu_function(Half)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 0.0), ({"gpu": "any"}, 600.0), ({"gpu": "any", "park_timeout": 0}, 0.0), ({"park_timeout": 5}, 5.0)],
)
def test_by_default_only_functions_with_a_gpu_are_parked(options: dict[str, Any], expected: float) -> None:
    assert _declared(**options).park_timeout_s == expected


@pytest.mark.parametrize(("options", "expected"), [({}, False), ({"prewarm": True}, True)])
def test_prewarming_is_off_by_default(options: dict[str, Any], expected: bool) -> None:
    assert _declared(**options).scaling.prewarm is expected


def test_a_method_has_a_batch_of_its_own_or_none() -> None:
    @gpu_function(batch=Batch(2))
    class Mixed:
        @method
        def by_class(self, x: list[int]) -> list[int]:
            return x

        @method(batch=Batch(8))
        def own(self, x: list[int]) -> list[int]:
            return x

        @method(batch=None)
        def items(self, x: int) -> Iterator[int]:
            yield x

    mixed: Any = Mixed
    spec = mixed.spec()
    assert [spec.batch_of(each) for each in spec.methods] == [Batch(2), Batch(8), None]
    assert [each.parameters["properties"]["x"]["type"] for each in spec.methods] == ["integer"] * 3
    assert (spec.parallel_calls, spec.slots) == (8, 16)
    with run_locally():
        assert (mixed.own.remote(1), list(mixed.items.stream(2))) == (1, [2])


def test_the_batch_of_a_method_is_checked() -> None:
    with pytest.raises(InvalidSpec, match="batch is a Batch"):
        method(batch=8)  # type: ignore[call-overload]


def test_batch_and_a_generator_contradict_each_other() -> None:
    def items(x: list[int]) -> Iterator[int]:
        yield from x

    with pytest.raises(InvalidSpec, match=r"items: batch=.*generator"):
        gpu_function(batch=Batch(2))(items)


def test_the_method_that_contradicts_the_options_of_its_class_is_named() -> None:
    class Two_Words:  # noqa: N801
        @method
        def one(self, x: list[int]) -> list[int]:
            return x

        @method
        def items(self, x: list[int]) -> Iterator[int]:
            yield from x

    with pytest.raises(InvalidSpec, match=r"Two_Words: items: batch=.*generator"):
        gpu_function(batch=Batch(2))(Two_Words)


def test_a_function_is_decorated_once() -> None:
    @gpu_function
    def twice() -> None: ...

    with pytest.raises(InvalidSpec, match="twice is already"):
        gpu_function(twice)


def test_the_signature_shows_every_option_with_its_default() -> None:
    parameters = dict(inspect.signature(gpu_function).parameters)
    assert parameters.pop("declared").kind is inspect.Parameter.POSITIONAL_ONLY
    assert list(parameters) == list(Options.__annotations__)
    given = {name: parameter.default for name, parameter in parameters.items() if name != "name"}
    assert settings_from(given, "f") == settings_from({}, "f")


def test_a_lambda_needs_a_name() -> None:
    with pytest.raises(InvalidSpec, match=r"^a lambda .*name="):
        gpu_function(lambda x: x)
    assert gpu_function(name="doubled")(lambda x: 2 * x).name == "doubled"
