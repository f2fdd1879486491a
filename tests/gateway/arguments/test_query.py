"""Arguments from a query string, beside a raw body."""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec
import pytest

from gpufn import gpu_function
from gpufn_core.errors import InvalidInput
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_gateway.arguments.query import arguments
from gpufn_gateway.arguments.signature import Signature


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


def detect(  # noqa: PLR0917  as a user writes it
    image: bytes,
    label: str,
    min_score: float = 0.5,
    top: int | None = None,
    crop: bool = False,
    mode: Mode = Mode.FAST,
    size: Literal["s", "m"] = "s",
    tags: list[str] | None = None,
    box: list[float] | None = None,
) -> str:
    return label


def method_of(function: Any) -> MethodSpec:
    method: MethodSpec = gpu_function(function).spec().methods[0]
    return method


SIGNATURE = Signature.of(method_of(detect))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (b"label=cat", {"label": "cat"}),
        (b"label=5&min_score=0.9", {"label": "5", "min_score": 0.9}),
        (b"label=null&top=null", {"label": "null", "top": None}),
        (b"label=%22a%22&top=3&crop=true", {"label": '"a"', "top": 3, "crop": True}),
        (b"label=a+b%26&mode=exact&size=m", {"label": "a b&", "mode": "exact", "size": "m"}),
        (b"label=&min_score=1", {"label": "", "min_score": 1}),
        (b"label=x&tags=a&tags=5", {"label": "x", "tags": ["a", "5"]}),
        (b"label=x&tags=a", {"label": "x", "tags": ["a"]}),
        (b"label=x&tags=5", {"label": "x", "tags": ["5"]}),
        (b"label=x&box=1&box=2.5", {"label": "x", "box": [1, 2.5]}),
        (b"label=x&box=[1,2]", {"label": "x", "box": [1, 2]}),
    ],
)
def test_a_query_sets_the_arguments_beside_the_body(query: bytes, expected: dict[str, Any]) -> None:
    assert arguments(query, SIGNATURE, "image") == expected


@pytest.mark.parametrize(
    ("query", "field", "said"),
    [
        (b"label=x&min_scor=1", "min_scor", "did you mean min_score"),
        (b"label=x&zzz=1", "zzz", "the query takes label, min_score"),
        (b"label=x&image=abc", "image", "the body is this argument"),
        (b"min_score=1", "label", "missing"),
        (b"label=x&min_score=high", "min_score", "expected float, got str"),
        (b"label=x&min_score=NaN", "min_score", "^min_score: JSON has no NaN"),
        (b"label=x&box=1&box=-Infinity", "box", "^box: JSON has no -Infinity"),
        (b"label=x&top=1.5", "top", "expected"),
        (b"label=x&mode=slow", "mode", 'it takes "exact", "fast"'),
        (b"label=x&crop=1&crop=0", "crop", "expected bool, got array"),
        (b"label=x&box=a", "box", "expected"),
        (b"label=%ff", None, "not valid"),
        (b"&".join(b"tags=%d" % number for number in range(300)), None, "at most 200"),
    ],
)
def test_invalid_parameters_are_named(query: bytes, field: str | None, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as refused:
        arguments(query, SIGNATURE, "image")
    assert refused.value.field == field


URL = "/v1/functions/embed/invoke"


async def test_a_raw_body_keeps_its_parameters(gateway: Any, make: Any, problem: Any) -> None:
    gateway.deploy(make.spec("embed", method_of(detect)), 2)
    answer = await gateway.post(f"{URL}?label=cat&min_score=0.9", b"\x89PNG", content_type="image/png")
    assert answer.status_code == 200
    fields = gateway.queue.calls[0].fields
    assert fields["content_type"] == "application/msgpack"
    assert msgspec.msgpack.decode(fields["body"]) == {"image": b"\x89PNG", "label": "cat", "min_score": 0.9}
    too_large = await gateway.post(f"{URL}?min_score={10**30}", b"\x89PNG", content_type="image/png")
    assert too_large.status_code == 422
    refused = await gateway.post(f"{URL}?lable=cat", b"\x89PNG", content_type="image/png")
    assert problem(refused) == (422, "invalid_input")
    assert (refused.json()["field"], "label?" in refused.json()["detail"]) == ("lable", True)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
async def test_a_number_that_json_lacks_is_refused_alike_in_the_query_and_in_json(
    gateway: Any, make: Any, problem: Any, word: str
) -> None:
    gateway.deploy(make.spec("embed", method_of(detect)), 2)
    by_query = await gateway.post(f"{URL}?label=x&min_score={word}", b"\x89PNG", content_type="image/png")
    by_json = await gateway.post(URL, b'{"label": "x", "image": "", "min_score": %s}' % word.encode())
    for refused in (by_query, by_json):
        assert problem(refused) == (422, "invalid_input")
        assert refused.json()["field"] == "min_score"
        assert refused.json()["detail"].startswith(f"min_score: JSON has no {word}")


async def test_arguments_in_the_body_leave_the_query_alone(gateway: Any, make: Any) -> None:
    gateway.deploy(make.spec("embed", method_of(detect)), 2)
    body = b'{"label": "x", "image": ""}'
    assert (await gateway.post(f"{URL}?lable=cat", body)).status_code == 200
    assert gateway.queue.calls[0].fields["body"] == body
