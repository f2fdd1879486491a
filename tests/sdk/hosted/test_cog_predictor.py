"""Predictors of cog as functions: signatures, kinds, files. The predictors are written as for cog."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufn.declare.hints.signature_schema import methods_of
from gpufn.hosted import cog_files, cog_predictor
from gpufn.hosted import cog_module as cog
from gpufn_core.errors import InvalidInput, InvalidSpec
from gpufn_core.spec.function_spec import CallKind, MethodSpec


class Full(cog.BasePredictor):
    def setup(self, weights: Any = None) -> None:
        self.ready = True

    def predict(
        self,
        prompt: str = cog.Input(description="a text", min_length=1, regex="[a-z]+"),
        count: int = cog.Input(default=2, ge=1, le=4),
        size: float = cog.Input(default=0.5, choices=[0.5, 1.5]),
        images: list[cog.Path] | None = cog.Input(default=None),  # noqa: B008  as in cog
        token: cog.Secret | None = None,
    ) -> dict[str, Any]:
        """Predict."""
        return {"count": count, "texts": [each.read_text() for each in images or []], "ready": self.ready}


class Streaming(cog.BasePredictor):
    def predict(self, n: int) -> cog.ConcatenateIterator[str]:
        return (str(each) for each in range(n))  # type: ignore[return-value]


class Later(cog.BaseRunner):
    async def setup(self) -> None:  # type: ignore[override]
        self.base = 1

    async def run(self, n: int) -> AsyncIterator[int]:
        yield self.base + n


def described(target: Any) -> MethodSpec:
    (method,) = methods_of(cog_predictor.as_function(target, "m"), None)
    return method


def test_inputs_become_a_schema() -> None:
    method = described(Full)
    properties = method.parameters["properties"]
    assert (method.parameters["required"], method.doc) == (["prompt"], "Predict.")
    assert properties["prompt"] == {
        "type": "string", "description": "a text", "minLength": 1, "pattern": "[a-z]+"
    }  # fmt: skip
    assert properties["count"] == {"type": "integer", "minimum": 1, "maximum": 4, "default": 2}
    assert "uri" in str(properties["images"])


@pytest.mark.parametrize(
    ("target", "kind"),
    [(Full, CallKind.SYNC), (Streaming, CallKind.GENERATOR), (Later, CallKind.ASYNC_GENERATOR)],
)
def test_the_kind_follows_from_the_result(target: type, kind: CallKind) -> None:
    assert described(target).kind is kind


def test_a_call_gets_files_and_setup_has_run() -> None:
    function = cog_predictor.serve(Full, "m")
    result = function(prompt="a", count=3, images=["data:text/plain;base64,YQ==", "data:,b"])
    assert result == {"count": 3, "texts": ["a", "b"], "ready": True}


def test_a_parameter_that_a_caller_leaves_out_has_the_default_of_its_input() -> None:
    assert cog_predictor.serve(Full, "m")(prompt="a")["count"] == 2


def test_streams_and_coroutines() -> None:
    assert list(cog_predictor.serve(Streaming, "m")(n=2)) == ["0", "1"]

    function: Any = cog_predictor.serve(Later, "m")

    async def read() -> list[int]:
        return [each async for each in function(n=2)]

    assert asyncio.run(read()) == [3]


@pytest.mark.parametrize("wrong", [{"size": 2.0}, {"images": ["file:///etc/passwd"]}, {"images": ["data:;base64,?"]}])
def test_wrong_arguments_are_invalid_input(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        cog_predictor.serve(Full, "m")(prompt="a", **wrong)
    assert caught.value.field in wrong


def test_files_in_results_are_data_urls_and_temporary_ones_are_removed(tmp_path: Path) -> None:
    class Result(cog.BaseModel):
        file: Path
        secret: str = "x"

    own = tmp_path / "own.txt"
    own.write_bytes(b"a")
    folder = Path(tempfile.mkdtemp())
    temporary = folder / "b.png"
    temporary.write_bytes(b"b")
    assert cog_files.output([Result(file=own), {"image": temporary}]) == [  # type: ignore[call-arg]
        {"file": "data:text/plain;base64,YQ==", "secret": "x"},
        {"image": "data:image/png;base64,Yg=="},
    ]
    assert not temporary.exists()
    folder.rmdir()


def test_a_plain_function_is_a_predictor_and_a_class_without_predict_is_none() -> None:
    def predict(n: int = cog.Input(default=1)) -> Iterator[int]:
        yield n

    assert list(cog_predictor.serve(predict, "m")(n=3)) == [3]
    with pytest.raises(InvalidSpec):
        cog_predictor.as_function(type("Empty", (cog.BasePredictor,), {}), "m")


def test_a_secret_is_not_printed() -> None:
    assert "x" not in repr(cog.Secret("x"))
    assert inspect.signature(cog_predictor.as_function(Full, "m")).parameters["token"].default is None
