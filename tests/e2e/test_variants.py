"""Variants of a class: each value of its parameters has a pool of workers of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufn import Client, Function
from gpufn.call import transport
from gpufn.client.http_transport import HttpTransport
from gpufn.errors import FunctionStartFailed, GpufnError, InvalidInput, TooManyVariants
from tests.conftest import Platform
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = """
import uuid

from gpufn import exit, gpu_function, method

PROCESS = uuid.uuid4().hex

@gpu_function(max_variants=4, name="sized", cpu=0.25)
class Sized:
    def __init__(self, size: str = "base", scale: float = 1.0) -> None:
        if size == "broken":
            raise ValueError("no such size")
        self.size, self.scale = size, scale

    @method
    def where(self, x: int = 1) -> list:
        return [self.size, self.scale * x, PROCESS]

    @exit
    def bye(self, cause: str) -> None:
        print(f"{self.size} ends: {cause}")

@gpu_function(cpu=0.25)
def asks(size: str) -> list:
    return Sized(size).where.remote(2)
"""


@pytest.fixture(scope="module")
def app(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    file = tmp_path_factory.mktemp("variants") / "sizes.py"
    file.write_text(APP)
    platform.gpufn("deploy", file)
    spec = importlib.util.spec_from_file_location("sizes", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = transport.installed()
    with Client(platform.url) as client:
        transport.install(HttpTransport(lambda: client))
        yield module
    transport.install(before)


def functions(platform: Platform) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = platform.client.get("/v1/functions").json()["functions"]
    return listed


def test_each_value_has_a_pool_of_its_own(app: Any, platform: Platform, tmp_path: Path) -> None:
    big = app.Sized("big")
    base_process = app.Sized.where.remote()[2]
    size, value, process = big.where.remote(3)
    assert (size, value) == ("big", 3.0)
    assert process != base_process
    assert app.Sized("base", scale=1.0).where.remote()[2] == base_process  # all defaults: the function itself
    assert [each[1] for each in big.where.map(range(3))] == [0.0, 1.0, 2.0]
    assert big.where.spawn(5).result() == ["big", 5.0, process]
    assert platform.client.post("/v1/functions/sized(size=big).where/invoke", json={"x": 2}).json() == [
        "big",
        2.0,
        process,
    ]
    assert Function.from_name("sized(size=big&scale=1).where").remote() == ["big", 1.0, process]
    assert platform.gpufn("invoke", "sized(size=big).where", '{"x": 7}').strip().startswith('["big"')
    assert app.asks.remote("big") == ["big", 2.0, process]  # from inside a worker

    variant = next(each for each in functions(platform) if each["name"].startswith("sized="))
    assert variant["variant"]["parameters"] == {"size": "big"}
    assert platform.client.get("/v1/functions/sized(size=big)/why").json()["function"] == variant["name"]

    larger = app.Sized.with_options(cpu=0.3)("big")
    assert larger.where.with_options(timeout=30).remote(2)[2] != process
    with pytest.raises(InvalidInput) as refused:
        app.Sized.with_options(colour="red")
    assert refused.value.field == "colour"

    with pytest.raises(FunctionStartFailed, match="no such size"):
        app.Sized("broken").where.remote()
    with pytest.raises(InvalidInput) as refused:
        app.Sized(size=3).where.remote()
    assert refused.value.field == "size"
    app.Sized("third").where.remote()
    with pytest.raises(TooManyVariants) as over:
        app.Sized("fourth").where.remote()
    assert over.value.retry_after_s

    app.Sized.where.remote()  # its worker may have made room for the others
    # A deploy of the function replaces its variants with their next call.
    changed = tmp_path / "sizes.py"
    changed.write_text(APP.replace("self.scale * x", "self.scale * x + 100"))
    platform.gpufn("deploy", "--replace", changed)
    results: list[Any] = []
    for _ in range(200):
        results.append(big.where.remote(1)[1])
        if results[-1] == 101.0:
            break
    assert results[-1] == 101.0
    until(lambda: "base ends: deploy" in platform.client.get("/v1/functions/sized/logs").text)
    platform.client.delete("/v1/functions/sized")
    assert not [each for each in functions(platform) if each["name"].startswith("sized")]
    with pytest.raises(GpufnError):
        big.where.remote()
