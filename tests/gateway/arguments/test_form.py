"""Arguments from a form, as `curl -F` sends it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import httpx
import msgspec
import pytest

from gpufn import gpu_function
from gpufn_core.errors import InvalidInput
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_gateway.arguments.form import Form
from gpufn_gateway.arguments.signature import Signature

BOUNDARY = "----x"
TYPE = f"multipart/form-data; boundary={BOUNDARY}"
URL = "/v1/functions/embed/invoke"


def detect(
    image: Annotated[bytes, msgspec.Meta(min_length=3)],
    label: str,
    min_score: float = 0.5,
    tags: list[str] | None = None,
    mask: bytes | None = None,
) -> str:
    return label


def method_of(function: Any) -> MethodSpec:
    method: MethodSpec = gpu_function(function).spec().methods[0]
    return method


SIGNATURE = Signature.of(method_of(detect))


def part(name: str, data: bytes, head: str = "") -> bytes:
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{head}\r\n\r\n'.encode() + data + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


IMAGE = part("image", b"\x89PNG\r\n--not", '; filename="cat.png"\r\nContent-Type: image/png')
LABEL = part("label", b"5")


def arguments(body: bytes, piece_bytes: int = 1 << 16) -> dict[str, Any]:
    read = Form(TYPE)
    for start in range(0, len(body), piece_bytes):
        read.write(body[start : start + piece_bytes])
    return read.arguments(SIGNATURE)


@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 16])
def test_parts_are_arguments_by_name(piece_bytes: int) -> None:
    more = [part("min_score", b"0.9"), part("tags", b"a"), part("tags", "ü".encode()), part("mask", b"\x00\xff")]
    assert arguments(form(IMAGE, LABEL, *more), piece_bytes) == {
        "image": b"\x89PNG\r\n--not",
        "label": "5",
        "min_score": 0.9,
        "tags": ["a", "ü"],
        "mask": b"\x00\xff",
    }


def test_a_part_of_bytes_needs_no_file_name() -> None:
    assert arguments(form(part("image", b"abc"), LABEL)) == {"image": b"abc", "label": "5"}


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        (form(IMAGE, LABEL, part("min_scor", b"1")), "min_scor", "did you mean min_score"),
        (form(IMAGE, LABEL, part("zzz", b"1")), "zzz", "the form takes image, label, min_score"),
        (form(IMAGE, IMAGE, LABEL), "image", "two parts with this name"),
        (form(IMAGE, LABEL, LABEL), "label", "expected str, got array"),
        (form(LABEL), "image", "missing"),
        (form(IMAGE), "label", "missing"),
        (form(IMAGE, LABEL, part("min_score", b"high")), "min_score", "expected float, got str"),
        (form(IMAGE, part("label", b"\xff")), "label", "not UTF-8, and this argument does not take bytes"),
        (form(part("image", b"AAAA", "\r\nContent-Transfer-Encoding: base64"), LABEL), "image", "unencoded"),
        (form(IMAGE, LABEL)[:-12], "label", "after its part 'label': it ends before its closing boundary"),
        (b"{}", None, "the form is not valid"),
        (b"", None, "it ends before its closing boundary"),
        (form(b"--%s\r\nContent-Type: text/plain\r\n\r\nx\r\n" % BOUNDARY.encode()), None, "part 1 has no name"),
        (form(IMAGE, b"--%s\r\nb\x00d: 1\r\n\r\nx\r\n" % BOUNDARY.encode()), "image", "invalid character"),
        (form(*[part("tags", b"a")] * 201), None, "more than 200 parts"),
    ],
)
def test_a_part_that_does_not_fit_is_named(body: bytes, field: str | None, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as refused:
        arguments(body)
    assert refused.value.field == field


@pytest.mark.parametrize("boundary", ["", "; boundary=", f"; boundary={'x' * 300}"])
def test_a_form_needs_a_boundary(boundary: str) -> None:
    with pytest.raises(InvalidInput, match=r"[Bb]oundary"):
        Form(f"multipart/form-data{boundary}")


def files() -> dict[str, Any]:
    return {"files": {"image": ("cat.png", b"\x89PNG", "image/png")}, "data": {"label": "cat", "min_score": "0.9"}}


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
async def test_a_form_reaches_the_queue_as_arguments(gateway: Any, make: Any, accept: str) -> None:
    gateway.deploy(make.spec("embed", method_of(detect)), 2)
    async with gateway.client(accept=accept) as client:
        answer = await client.post(f"{URL}?min_scor=1", **files())
    assert answer.status_code == 200, answer.text
    fields = gateway.queue.calls[0].fields
    assert fields["content_type"] == "application/msgpack"
    assert msgspec.msgpack.decode(fields["body"]) == {"image": b"\x89PNG", "label": "cat", "min_score": 0.9}


async def test_a_form_that_does_not_fit_is_a_problem(gateway: Any, make: Any, problem: Any) -> None:
    gateway.deploy(make.spec("embed", method_of(detect)), 2)
    async with gateway.client() as client:
        unknown = await client.post(URL, files={"imag": b"\x89PNG"}, data={"label": "cat"})
        assert problem(unknown) == (422, "invalid_input")
        assert (unknown.json()["field"], "image?" in unknown.json()["detail"]) == ("imag", True)
        overflow = await client.post(URL, files={"image": b"\x89PNG"}, data={"label": "x", "min_score": str(10**30)})
        assert problem(overflow) == (422, "invalid_input")
    without = await gateway.post(URL, b"", content_type="multipart/form-data")
    assert problem(without) == (422, "invalid_input")
    mixed = await gateway.post(URL, form(IMAGE, LABEL), content_type=f"multipart/mixed; boundary={BOUNDARY}")
    assert problem(mixed) == (415, "unsupported_media_type")
    too_large = await gateway.post(URL, form(part("image", b"x" * make.CALL_LIMIT), LABEL), content_type=TYPE)
    assert problem(too_large) == (413, "payload_too_large")


async def test_a_function_without_bytes_accepts_no_form(gateway: Any, problem: Any) -> None:
    async with gateway.client() as client:
        answer = await client.post(URL, files={"texts": b"a"})
    assert problem(answer) == (415, "unsupported_media_type")


async def test_a_large_form_leaves_the_loop_to_others(gateway: Any, make: Any, monkeypatch: Any) -> None:
    turns = 0
    seen: list[int] = []
    write = Form.write

    def counted(self: Form, data: bytes) -> None:
        seen.append(turns)
        write(self, data)

    monkeypatch.setattr(Form, "write", counted)
    monkeypatch.setattr("gpufn_gateway.calls.arguments._FORM_CHUNK_BYTES", 1024)
    gateway.deploy(make.spec("embed", method_of(detect)), 2)

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.get_running_loop().create_task(other())
    answer = await gateway.post(URL, form(part("image", b"x" * 3500), LABEL), content_type=TYPE)
    task.cancel()
    assert (answer.status_code, len(seen), seen == sorted(set(seen))) == (200, 4, True)


async def test_query_bytes_are_base64(gateway: Any, make: Any, problem: Any) -> None:
    gateway.deploy(make.spec("embed", method_of(detect)), 2)
    answer = await gateway.post(f"{URL}?label=x&mask=AP8%3D", b"\x89PNG", content_type="image/png")
    assert answer.status_code == 200
    assert msgspec.msgpack.decode(gateway.queue.calls[0].fields["body"])["mask"] == b"\x00\xff"
    refused = await gateway.post(f"{URL}?label=x&mask=a", b"\x89PNG", content_type="image/png")
    assert (problem(refused), refused.json()["field"]) == ((422, "invalid_input"), "mask")


def test_httpx_and_we_agree_on_a_form() -> None:
    request = httpx.Request("POST", "http://x", files={"image": b"\r\n--" * 1000}, data={"label": 'a"b\\c'})
    read = Form(request.headers["content-type"])
    read.write(request.read())
    assert read.arguments(SIGNATURE) == {"image": b"\r\n--" * 1000, "label": 'a"b\\c'}
