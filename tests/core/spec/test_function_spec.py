"""Invalid FunctionSpecs are rejected before they can break an agent or a worker."""

from __future__ import annotations

import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from gpufn_core.domain.devices.device import Share
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.function_spec import (
    Batch,
    EntryPoint,
    FunctionSpec,
    MethodSpec,
    Retry,
    ScalingPolicy,
    spec_from_json,
)
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_core.spec.isolation import Isolation, Network
from gpufn_core.spec.model_spec import ModelFile, ModelSpec
from gpufn_core.spec.naming.names import SPELLED_NAME, function_name, is_function_name
from gpufn_core.spec.resources import Resources


@hypothesis.given(text=st.text("aZ0_-.é", max_size=44))
@hypothesis.example("a" * 40)
@hypothesis.example("a" * 41)
@hypothesis.example("__A_b-0__")
def test_a_spelled_name_is_exactly_the_name_of_the_function(text: str) -> None:
    assert (SPELLED_NAME.fullmatch(text) is not None) == is_function_name(function_name(text))


def spec(**options: Any) -> FunctionSpec:
    return FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),), **options)


@pytest.mark.parametrize("name", ["num\0py", "-c", "", "a.b", "9lives", "x" * 101, "numpy\n", "a b"])
def test_an_invalid_module_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidSpec, match="module") as caught:
        spec(modules=("numpy", name))
    assert repr(name) in caught.value.message


def test_it_is_refused_as_json_too() -> None:
    data = b'{"name": "f", "entry": {"module": "a", "qualname": "f"}, "methods": [{}], "modules": ["a\\u0000"]}'
    with pytest.raises(InvalidSpec, match=r"'a\\x00' .* module"):
        spec_from_json(data)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"resources": {"gpu": ["L4"], "share": "mps"}}, "share='mps' needs a limit of GPU memory"),
        ({"resources": {"gpu": ["L4"], "gpu_count": 0}}, "gpu is a whole number from 1 to 16, not 0"),
        ({"methods": [{"name": "a"}, {"name": "a"}], "is_class": True}, "f: two methods have the same name"),
        ({"methods": [{"name": "a/../b"}], "is_class": True}, "f: 'a/../b' is not the name of a method"),
        ({"methods": [{"name": "a" * 101}], "is_class": True}, "is not the name of a method"),
        ({"methods": [{}], "is_class": True}, "f: '' is not the name of a method"),
        ({"methods": [{"name": "a"}]}, "f: a function has one method, without a name"),
        ({"methods": [{}, {}]}, "f: a function has one method, without a name"),
        ({"methods": [{"parameters": {"maximum": 1 << 64}}]}, "a number in the spec has more than 64 bits"),
    ],
)
def test_a_spec_that_no_decorator_makes_is_refused(fields: dict[str, object], message: str) -> None:
    given = msgspec.to_builtins(spec()) | fields
    with pytest.raises(InvalidSpec, match=re.escape(message)):
        spec_from_json(msgspec.json.encode(given))


def test_modules_have_a_number_that_is_too_many() -> None:
    assert len(spec(modules=tuple(f"m{number}" for number in range(256))).modules) == 256
    with pytest.raises(InvalidSpec, match=r"257 modules .* 256"):
        spec(modules=tuple(f"m{number}" for number in range(257)))


def test_an_environment_has_a_size_that_is_too_much() -> None:
    assert spec(env={"A": "x" * 16_000, "B": "x" * 16_000}).env["A"]
    with pytest.raises(InvalidSpec, match=r"env .* 33,002 bytes.* 32,768"):
        spec(env={"A": "x" * 16_000, "B": "x" * 17_000})
    with pytest.raises(InvalidSpec, match="env holds 40,001 bytes"):
        spec(env={"A": "é" * 20_000})


@pytest.mark.parametrize("seconds", [0, 31 * 86400, "1h"])
def test_a_retention_has_bounds(seconds: Any) -> None:
    assert spec(retention_s=3600.0).retention_s == 3600.0
    with pytest.raises(InvalidSpec, match=r"^retention .* 1 to 2592000"):
        spec(retention_s=seconds)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"attempts": 0, "on": (IOError,)}, "on=... has no effect with attempts=0"),
        ({"attempts": 1.5}, "retries.attempts is a whole number from 0 to 100, not 1.5"),
        ({"attempts": 3, "on": IOError}, r"write on=\(OSError,\)"),
        ({"attempts": 3, "on": "OSError"}, r"write on=\(OSError,\)"),
        ({"attempts": 3, "delay_s": 7200}, "retries.delay_s is a number of seconds from 0 to 3600, not 7200"),
    ],
)
def test_a_retry_policy_that_contradicts_itself_is_refused(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpec, match=message):
        Retry(**policy)


@pytest.mark.parametrize(("concurrency", "batch", "slots"), [(8, None, 8), (1, 8, 16), (4, 8, 40), (64, 32, 2080)])
def test_a_worker_holds_the_calls_of_its_runs_and_one_batch_that_gathers(
    concurrency: int, batch: int | None, slots: int
) -> None:
    assert spec(concurrency=concurrency, batch=Batch(batch) if batch else None).slots == slots


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"concurrency": 2}, "concurrency"),
        ({"batch": Batch(8)}, "batch"),
        ({"image": ImageSpec(python="3.12")}, "image"),
        ({"scaling": ScalingPolicy(park_timeout_s=5.0)}, "park_timeout"),
        ({"env": {"RANK": "0"}}, "RANK"),
        ({"models": (ModelSpec(parameter="m", files=(ModelFile("m.onnx", "0" * 64, 1),)),)}, "models"),
    ],
)
def test_unsupported_options_of_a_gang_are_refused_by_name(options: dict[str, Any], option: str) -> None:
    assert spec(**options).name
    with pytest.raises(InvalidSpec, match=option):
        spec(**options, resources=Resources(nodes=2))


@pytest.mark.parametrize(
    "fields",
    [{"nodes": 0}, {"nodes": -1}, {"nodes": 65}, {"nodes": 1.5}, {"nodes": 2, "gpu": ("L4",), "share": Share.TIME},
     {"nodes": 2, "gpu": ("L4",), "share": Share.MPS, "vram_bytes": 1 << 30}],
)  # fmt: skip
def test_a_number_of_nodes_is_from_1_to_64_and_their_gpus_are_exclusive(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match="nodes"):
        Resources(**fields)


def test_a_gang_is_not_parked() -> None:
    one, two = (spec(resources=Resources(gpu=("L4",), nodes=nodes)).park_timeout_s for nodes in (1, 2))
    assert (one > 0, two) == (True, 0.0)


def test_options_that_are_not_used_are_not_stored_so_that_older_nodes_read_the_spec() -> None:
    stored = msgspec.json.decode(msgspec.json.encode(spec()))
    assert stored.keys().isdisjoint({"isolation", "network"})
    offline = spec(network=Network.NONE, isolation=Isolation.SANDBOX)
    assert spec_from_json(msgspec.json.encode(offline)) == offline


@pytest.mark.parametrize(
    ("options", "in_container", "needs"),
    [
        ({}, False, set()),
        ({"isolation": Isolation.CONTAINER, "network": Network.EGRESS}, True, {"egress"}),
        ({"network": Network.EGRESS}, False, {"egress"}),
        ({"image": ImageSpec(base="x"), "network": Network.NONE}, True, {"none"}),
        ({"isolation": Isolation.SANDBOX, "network": Network.NONE}, False, {"sandbox", "none"}),
        ({"isolation": Isolation.PROCESS}, False, {"process"}),
        ({"isolation": Isolation.GVISOR}, True, {"gvisor"}),
    ],
)
def test_a_node_must_offer_the_chosen_isolation(options: dict[str, Any], in_container: bool, needs: set[str]) -> None:
    chosen = spec(**options)
    assert (chosen.in_container, set(chosen.node_needs)) == (in_container, needs)
