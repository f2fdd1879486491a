"""OpenAI's client, unmodified, against a gateway's port. The models are toys: one returns what it was sent."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from gpufn_core.protocol.codec import encode
from gpufn_core.spec.function_spec import MethodSpec, Serves
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.protocols.openai.streams import ChatChunks
from gpufn_platform.bus.storage.key_value import Entry
from tests.gateway.listening import serving

if TYPE_CHECKING:
    import openai

CHAT = {
    "type": "object",
    "properties": {"messages": {"type": "array"}, "temperature": {"type": "number"}},
    "required": ["messages"],
    "additionalProperties": False,
}
INPUT = {
    "type": "object",
    "properties": {"input": {"type": "array", "items": {"type": "string"}}},
    "required": ["input"],
    "additionalProperties": False,
}
HELLO: Any = [{"role": "user", "content": "hello"}]


SOUND = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "contentEncoding": "base64"},
        "filename": {"type": "string"},
        "temperature": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
    "required": ["file"],
    "additionalProperties": False,
}
PICTURE = {"type": "object", "properties": {"prompt": {"type": "string"}, "n": {"type": "integer"}}}


def answer(call: Any) -> None:
    fields = msgspec.json.decode(call.fields["body"])
    if "file" in fields:
        sound = base64.b64decode(fields["file"]).decode()
        call.reply(msgspec.json.encode(f"{sound} {fields['filename']} {fields.get('temperature')}"))
    elif "prompt" in fields:
        call.reply(msgspec.json.encode([fields["prompt"].encode()] * fields["n"]))
    elif "input" in fields:
        call.reply(msgspec.json.encode([[len(text), 0.5] for text in fields["input"]]))
    else:
        call.reply(msgspec.json.encode("".join(each["content"] for each in fields["messages"])))


@pytest.fixture(name="models")
def models_on_a_gateway(gateway: Any, make: Any) -> Any:
    for name, serves, parameters in (
        ("toy", Serves.OPENAI_CHAT, CHAT),
        ("vec", Serves.OPENAI_EMBEDDINGS, INPUT),
        ("ear", Serves.OPENAI_TRANSCRIPTIONS, SOUND),
        ("brush", Serves.OPENAI_IMAGES, PICTURE),
    ):
        gateway.deploy(make.spec(name, MethodSpec(parameters=parameters), serves=serves))
        gateway.report(make.status(name), partial=True)
    gateway.queue.answer = answer
    return gateway


def talk(url: str) -> dict[str, Any]:
    """Call the blocking client; return the results."""
    import openai

    got: dict[str, Any] = {}
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
        got["models"] = [model.id for model in client.models.list()]
        chat = client.chat.completions.create(model="toy", messages=HELLO, temperature=0.5)
        got["chat"] = chat.choices[0].message.content
        chunks = client.chat.completions.create(model="toy", messages=HELLO, stream=True)
        got["stream"] = [(chunk.choices[0].delta.content, chunk.choices[0].finish_reason) for chunk in chunks]
        forms: tuple[dict[str, Any], ...] = ({}, {"encoding_format": "float"})
        for form in forms:
            vectors = client.embeddings.create(model="vec", input=["a", "bc"], **form)
            got[f"embeddings {form}"] = [each.embedding for each in vectors.data]
        got["model"] = client.models.retrieve("toy").id
        got["response"] = client.responses.create(
            model="toy", instructions="be ", input="kind", store=False
        ).output_text
        parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
        events = client.responses.create(model="toy", input=parts, stream=True)
        got["events"] = [event.type for event in events]
        with client.responses.stream(model="toy", input="hello") as stream:
            got["streamed"] = stream.get_final_response().output_text
        sound = ("a.wav", b"ping")
        got["heard"] = client.audio.transcriptions.create(model="ear", file=sound, temperature=0.5).text
        text = client.audio.transcriptions.create(model="ear", file=sound, response_format="text")
        got["text"] = text
        deltas = client.audio.transcriptions.create(model="ear", file=sound, stream=True)
        got["deltas"] = [event.type for event in deltas]
        images = client.images.generate(model="brush", prompt="a cat", n=2)
        got["images"] = [base64.b64decode(image.b64_json or "") for image in images.data or []]
        refusals: tuple[tuple[str, type[openai.APIStatusError], dict[str, Any]], ...] = (
            ("unknown", openai.NotFoundError, {"model": "none"}),
            ("other", openai.NotFoundError, {"model": "vec"}),
            ("extra", openai.BadRequestError, {"model": "toy", "seed": 1}),
            ("wrong", openai.BadRequestError, {"model": "toy", "temperature": "hot"}),
        )
        for name, error, request in refusals:
            with pytest.raises(error) as caught:
                client.chat.completions.create(messages=HELLO, **request)
            got[name] = (caught.value.code, caught.value.param)
    return got


def test_only_the_first_chunk_of_a_chat_has_the_role() -> None:
    """Bug: OpenAI's `chat.completions.stream` joined the roles: assistantassistant."""
    chunks = ChatChunks("toy")
    sent = [chunks.item(number, "application/json", b'"hi"').removeprefix(b"data: ") for number in range(2)]
    deltas = [msgspec.json.decode(chunk)["choices"][0]["delta"] for chunk in sent]
    assert deltas == [{"role": "assistant", "content": "hi"}, {"content": "hi"}]


async def test_openai_works_unmodified(models: Any) -> None:
    import openai

    async with serving(models.app) as (_, port):
        got = await asyncio.to_thread(talk, f"http://127.0.0.1:{port}/openai/v1")
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any") as client:
            chat = await client.chat.completions.create(model="toy", messages=HELLO)
            vectors = await client.embeddings.create(model="vec", input="abc")
    assert (chat.choices[0].message.content, vectors.data[0].embedding) == ("hello", [3, 0.5])
    assert got == {
        "model": "toy", "response": "be kind", "streamed": "hello", "heard": "ping a.wav 0.5",
        "text": "ping a.wav None\n", "deltas": ["transcript.text.delta", "transcript.text.done"],
        "images": [b"a cat", b"a cat"],
        "events": [
            "response.created", "response.output_item.added", "response.content_part.added",
            "response.output_text.delta", "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "response.completed",
        ],
        "models": ["brush", "ear", "toy", "vec"], "chat": "hello", "stream": [("hello", None), (None, "stop")],
        "embeddings {}": [[1, 0.5], [2, 0.5]], "embeddings {'encoding_format': 'float'}": [[1, 0.5], [2, 0.5]],
        "unknown": ("model_not_found", None), "other": ("model_not_found", None),
        "extra": ("invalid_input", "seed"), "wrong": ("invalid_input", "temperature"),
    }  # fmt: skip


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"messages":[]}', b'{"model":"toy","stream":"yes"}'])
async def test_a_body_of_another_form_is_a_400(models: Any, body: bytes) -> None:
    refused = await models.post("/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_input")


async def test_a_key_reaches_the_models_that_it_may_call(models: Any) -> None:
    secrets = {}
    for scope in ("invoke:toy", "invoke:vec", "read"):
        key, secrets[scope] = new_key(scope, (scope,), 0.0)
        models.registry.on_key(key.id, Entry(key.id, encode(key), 1))
    refused = await models.get("/openai/v1/models")
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    seen = {}
    for scope, secret in secrets.items():
        headers = {"authorization": f"Bearer {secret}"}
        listed = [each["id"] for each in (await models.get("/openai/v1/models", **headers)).json()["data"]]
        statuses = [
            (await models.post(f"{prefix}/v1/{path}", body, **headers)).status_code
            for prefix in ("", "/openai")
            for path, body in (
                ("chat/completions", b'{"model":"toy","messages":[]}'),
                ("embeddings", b'{"model":"vec","input":[]}'),
            )
        ]
        seen[scope] = (listed, statuses)
    assert seen == {
        "invoke:toy": (["toy"], [200, 404, 200, 404]),
        "invoke:vec": (["vec"], [404, 200, 404, 200]),
        "read": ([], [403, 403, 403, 403]),
    }


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("responses", b'{"model":"toy"}', "input"),
        ("responses", b'{"model":"toy","input":[{"role":"user"}]}', "input"),
        ("responses", b'{"model":"toy","input":[{"type":"function_call_output","output":"x"}]}', "input"),
        ("responses", b'{"model":"toy","input":"x","previous_response_id":"r"}', "previous_response_id"),
        ("responses", b'{"model":"toy","input":[{"role":"user","content":[{"type":"input_image"}]}]}', "input"),
        ("images/generations", b'{"model":"brush","prompt":"x","n":1,"response_format":"url"}', "response_format"),
        ("images/generations", b'{"model":"brush","prompt":1}', "prompt"),
    ],
)
async def test_a_request_that_does_not_fit_is_a_400(models: Any, path: str, body: bytes, field: str) -> None:
    refused = await models.post(f"/openai/v1/{path}", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("fields", "files", "status", "param"),
    [
        ({"model": "ear"}, {}, 400, None),
        ({"model": "ear", "temperature": "hot"}, {"file": b"x"}, 400, "temperature"),
        ({"model": "ear", "response_format": "srt"}, {"file": b"x"}, 400, "response_format"),
        ({"model": "ear", "language": "en"}, {"file": b"x"}, 400, "language"),
        ({"model": "toy"}, {"file": b"x"}, 404, None),
        ({}, {"file": b"x"}, 404, None),
    ],
)
async def test_a_form_that_does_not_fit_is_refused(
    models: Any, fields: dict[str, str], files: Any, status: int, param: str | None
) -> None:
    async with models.client() as client:
        refused = await client.post("/openai/v1/audio/transcriptions", data=fields, files=files or None)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=x", b"no form"),
        ("multipart/form-data; boundary=x", b"--x--\r\n"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nab',
        ),
    ],
)
async def test_an_invalid_form_is_a_400(models: Any, content_type: str, body: bytes) -> None:
    for path in ("/openai/v1/files", "/replicate/v1/files"):
        refused = await models.post(path, body, content_type=content_type)
        assert refused.status_code == (400 if "openai" in path else 422)
