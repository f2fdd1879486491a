"""OpenAI's client, unmodified, against a gateway's port. The models are toys: one returns what it was sent."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import openai
import pytest

from gpufn_core.protocol.codec import encode
from gpufn_core.spec.function_spec import MethodSpec, Serves
from gpufn_gateway.auth.access import new_key
from gpufn_platform.bus.storage.key_value import Entry
from tests.gateway.listening import serving

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


def answer(call: Any) -> None:
    fields = msgspec.json.decode(call.fields["body"])
    if "input" in fields:
        call.reply(msgspec.json.encode([[len(text), 0.5] for text in fields["input"]]))
    else:
        call.reply(msgspec.json.encode("".join(each["content"] for each in fields["messages"])))


@pytest.fixture(name="models")
def models_on_a_gateway(gateway: Any, make: Any) -> Any:
    for name, serves, parameters in (("toy", Serves.OPENAI_CHAT, CHAT), ("vec", Serves.OPENAI_EMBEDDINGS, INPUT)):
        gateway.deploy(make.spec(name, MethodSpec(parameters=parameters), serves=serves))
        gateway.report(make.status(name), partial=True)
    gateway.queue.answer = answer
    return gateway


def talk(url: str) -> dict[str, Any]:
    """Call the blocking client; return the results."""
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


async def test_openai_works_unmodified(models: Any) -> None:
    async with serving(models.app) as (_, port):
        got = await asyncio.to_thread(talk, f"http://127.0.0.1:{port}/openai/v1")
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any") as client:
            chat = await client.chat.completions.create(model="toy", messages=HELLO)
            vectors = await client.embeddings.create(model="vec", input="abc")
    assert (chat.choices[0].message.content, vectors.data[0].embedding) == ("hello", [3, 0.5])
    assert got == {
        "models": ["toy", "vec"], "chat": "hello", "stream": [("hello", None), (None, "stop")],
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
