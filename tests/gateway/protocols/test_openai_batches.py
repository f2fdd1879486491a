"""Files and batches of OpenAI's client, unmodified. The bus is real; the test plays the runner."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from gpufn_core.spec.function_spec import MethodSpec, Serves
from gpufn_core.spec.priority import Priority
from tests.gateway.listening import serving
from tests.gateway.protocols.keys import with_key, without_keys
from tests.gateway.protocols.runner import running
from tests.gateway.whole import DIGEST, gateway_on

if TYPE_CHECKING:
    import openai

CHAT = MethodSpec(parameters={"type": "object", "properties": {"messages": {"type": "array"}}})
ENDPOINT: Any = "/v1/chat/completions"


def repeat(arguments: dict[str, Any]) -> str:
    text: str = arguments["messages"][0]["content"]
    if text == "bad":
        raise ValueError("no such text")
    return text


def lines(model: str, *texts: str, **changes: Any) -> bytes:
    rows = [
        {
            "custom_id": f"row {number}",
            "method": "POST",
            "url": ENDPOINT,
            "body": {"model": model, "messages": [{"role": "user", "content": text}]},
        }
        | changes
        for number, text in enumerate(texts)
    ]
    return "\n".join(json.dumps(row) for row in rows).encode()


def run_batches(client: openai.OpenAI) -> dict[str, Any]:
    def started(model: str, *texts: str) -> Any:
        file = client.files.create(file=("in.jsonl", lines(model, *texts)), purpose="batch")
        return client.batches.create(
            input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h", metadata={"of": "me"}
        )

    def content(file: str | None) -> list[dict[str, Any]]:
        return [json.loads(line) for line in client.files.content(file or "").text.splitlines()]

    got: dict[str, Any] = {}
    batch = started("oa-run", "a", "bad", "b")
    got["made"] = (batch.status, batch.metadata, batch.request_counts and batch.request_counts.total)
    while batch.status == "in_progress":
        batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    got["ended"] = (batch.status, counts and counts.completed, counts and counts.failed)
    got["output"] = [
        (line["custom_id"], line["response"]["body"]["choices"][0]["message"]["content"])
        for line in content(batch.output_file_id)
    ]
    got["errors"] = [
        (line["custom_id"], line["response"]["status_code"], line["response"]["body"]["error"]["code"])
        for line in content(batch.error_file_id)
    ]
    got["listed"] = [each.id for each in client.batches.list()] == [batch.id]
    got["again"] = client.batches.retrieve(batch.id).output_file_id == batch.output_file_id
    waiting = started("oa-idle", "a")
    got["cancelled"] = client.batches.cancel(waiting.id).status
    got["files"] = sorted({file.purpose for file in client.files.list()})
    file = client.files.list(purpose="batch").data[0]
    got["removed"] = client.files.delete(file.id).deleted
    return got


def refusals(client: openai.OpenAI) -> dict[str, Any]:
    import openai

    def status(content: bytes, **changes: Any) -> tuple[int, str | None]:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        request: Any = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}
        with pytest.raises(openai.APIStatusError) as caught:
            client.batches.create(**request | changes)
        return caught.value.status_code, caught.value.param

    good = lines("oa-run", "a")
    return {
        "no json": status(b"{"),
        "empty": status(b""),
        "twice": status(good + b"\n" + good),
        "another url": status(lines("oa-run", "a", url="/v1/embeddings")),
        "a wrong body": status(lines("oa-run", "a", body={"model": "oa-run", "messages": 1})),
        "no function": status(lines("none", "a")),
        "a foreign function": status(lines("oa-foreign", "a")),
        "another endpoint": status(good, endpoint="/v1/completions"),
        "an extra field": status(good, extra_body={"more": 1}),
        "no file": status(good, input_file_id="file-01arz3ndektsv4rrffq69g5faw"),
    }


async def test_batches_and_files_work_unmodified(nats: Any, make: Any) -> None:
    import openai

    async with gateway_on(nats) as gateway:
        for name in ("oa-run", "oa-idle", "oa-foreign"):
            await gateway.deploys.deploy(make.spec(name, CHAT, serves=Serves.OPENAI_CHAT), DIGEST)
        key = await with_key(gateway, "invoke:oa-run", "invoke:oa-idle")
        other = await with_key(gateway, "invoke:oa-run")
        try:
            async with running(gateway, "oa-run", repeat, Priority.LOW), serving(gateway.app) as (_, port):
                url = f"http://127.0.0.1:{port}/openai/v1"
                with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
                    got = await asyncio.to_thread(run_batches, client)
                    refused = await asyncio.to_thread(refusals, client)
                    batch = (await asyncio.to_thread(client.batches.list)).data[0].id
                with openai.OpenAI(base_url=url, api_key=other, max_retries=0) as client:
                    assert (await asyncio.to_thread(client.files.list)).data == []
                    with pytest.raises(openai.NotFoundError):
                        await asyncio.to_thread(client.batches.retrieve, batch)
        finally:
            await without_keys(gateway)
    assert got == {
        "made": ("in_progress", {"of": "me"}, 3), "ended": ("completed", 2, 1),
        "output": [("row 0", "a"), ("row 2", "b")], "errors": [("row 1", 500, "function_raised")],
        "listed": True, "again": True, "cancelled": "cancelled", "files": ["batch", "batch_output"], "removed": True,
    }  # fmt: skip
    wrong = (400, "input_file_id")
    assert refused == {
        "no json": wrong, "empty": wrong, "twice": wrong, "another url": wrong, "a wrong body": wrong,
        "no function": (404, None), "a foreign function": (404, None), "another endpoint": (400, "endpoint"),
        "an extra field": (400, "more"), "no file": (404, None),
    }  # fmt: skip
