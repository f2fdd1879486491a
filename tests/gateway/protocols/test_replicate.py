"""Replicate's client, unmodified, against a gateway's port. The bus is real; the tests play the runner."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import httpx
import pytest
import replicate
from replicate.client import Client
from replicate.exceptions import ModelError, ReplicateError
from replicate.helpers import FileOutput
from replicate.webhook import Webhooks

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.domain.revision import Revision
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.messages import Progress
from gpufn_core.protocol.records import CallRecord
from gpufn_core.spec.function_spec import CallKind, MethodSpec
from gpufn_gateway.protocols.captured import Outcome
from gpufn_gateway.protocols.replicate import models, predictions
from gpufn_gateway.submitted import call_views
from tests.gateway.conftest import ARGUMENTS, spec_of
from tests.gateway.listening import serving
from tests.gateway.protocols.delivering import delivering
from tests.gateway.protocols.keys import with_key, without_keys
from tests.gateway.protocols.runner import running
from tests.gateway.webhooks.receiver import Receiver, receiving
from tests.gateway.whole import DIGEST, gateway_on

TEXTS: Any = {"texts": ["a", "b"]}


def talk(client: Client, url: str) -> dict[str, Any]:
    """Call the blocking client; return the results."""
    got: dict[str, Any] = {"run": client.run("default/rep", TEXTS)}
    model = client.models.get("default/rep")
    assert model.latest_version is not None
    version = model.latest_version.id
    got["version"] = (version, model.versions.get(version).id, [each.id for each in model.versions.list()])
    got["run a version"] = list(client.run(f"default/rep:{version}", TEXTS))
    got["models"] = [each.id for each in client.models.list() if each.name.startswith("rep")]
    got["stream"] = [(each.event.value, each.data) for each in client.stream("default/rep", input=TEXTS)]
    made = client.predictions.create(version, TEXTS, webhook=url, webhook_events_filter=["completed"])
    made.wait()
    got["prediction"] = (made.status, made.output, made.model, made.metrics and made.metrics["predict_time"])
    got["secret"] = client.webhooks.default.secret().key
    got["listed"] = made.id in [each.id for each in client.predictions.list()]
    idle = client.models.predictions.create("default/rep-idle", TEXTS)
    got["idle"] = idle.status
    idle.cancel()
    got["canceled"] = idle.status
    with pytest.raises(ModelError) as caught:
        client.run("default/rep", {"texts": ["bad"]})
    got["failed"] = (str(caught.value), caught.value.prediction.status)
    got["file"] = client.run("default/rep", {"texts": [io.BytesIO(b"bytes")]})
    (file,) = client.files.list()
    got["read"] = got.pop("file")[0].read()
    assert client.files.get(file.id).size == 5
    got["removed"] = (client.files.delete(file.id), client.files.list())
    got["account"] = client.accounts.current().type
    return got


def refusals(client: Client) -> dict[str, int | None]:
    def status(call: Any) -> int | None:
        with pytest.raises(ReplicateError) as caught:
            call()
        return caught.value.status

    version = "rep@1"
    return {
        "unknown model": status(lambda: client.run("default/none", TEXTS)),
        "unknown version": status(lambda: client.predictions.create("5c7d5dc6", TEXTS)),
        "another version": status(lambda: client.predictions.create("rep@7", TEXTS)),
        "extra field": status(lambda: client.predictions.create(version, {"texts": [], "seed": 1})),
        "wrong type": status(lambda: client.predictions.create(version, {"texts": 1})),
        "wrong event": status(lambda: client.predictions.create(version, TEXTS, webhook_events_filter=["x"])),
        "unknown prediction": status(lambda: client.predictions.get("01arz3ndektsv4rrffq69g5faw")),
        "unknown file": status(lambda: client.files.get("01arz3ndektsv4rrffq69g5faw")),
        "a file of nobody": status(
            lambda: client.run("default/rep", {"texts": ["http://x/replicate/v1/files/01arz3ndektsv4rrffq69g5faw"]})
        ),
    }


async def test_replicate_works_unmodified(nats: Any, make: Any) -> None:
    generator = MethodSpec(parameters=ARGUMENTS, kind=CallKind.GENERATOR)
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("rep", generator), DIGEST)
        await gateway.deploys.deploy(make.spec("rep-idle"), DIGEST)
        token = await with_key(gateway, "invoke:rep", "invoke:rep-idle", "read:rep")
        other = await with_key(gateway, "invoke:rep-idle")
        try:
            async with running(gateway, "rep"), serving(gateway.app) as (_, port), receiving() as receiver:
                base = f"http://127.0.0.1:{port}/replicate"
                client = Client(api_token=token, base_url=base)
                client.poll_interval = 0.01
                async with delivering(gateway):
                    got = await asyncio.to_thread(talk, client, receiver.url())
                    await _check_webhook(receiver, got.pop("secret"))
                refused = await asyncio.to_thread(refusals, client)
                foreign = await asyncio.to_thread(foreign_requests, base, other, token)
                asynchronous = await client.async_run("default/rep", TEXTS)
                client._client.close()
                await client._async_client.aclose()
        finally:
            await without_keys(gateway)
    assert asynchronous == ["a", "b"]
    assert got == {
        "run": ["a", "b"], "run a version": ["a", "b"], "version": ("rep@1", "rep@1", ["rep@1"]),
        "models": ["default/rep", "default/rep-idle"], "stream": [("output", "a"), ("output", "b"), ("done", "{}")],
        "prediction": ("succeeded", ["a", "b"], "default/rep", 0.25), "listed": True, "idle": "starting",
        "canceled": "canceled", "failed": ("no such text", "failed"), "read": b"bytes", "removed": (True, []),
        "account": "user",
    }  # fmt: skip
    assert refused == {
        "unknown model": 404, "unknown version": 422, "another version": 422, "extra field": 422, "wrong type": 422,
        "wrong event": 422, "unknown prediction": 404, "unknown file": 404, "a file of nobody": 404,
    }  # fmt: skip
    assert foreign == {
        "model": 404,
        "version": 422,
        "prediction": 404,
        "list": 403,
        "file": 404,
        "models": 1,
        "key": 401,
    }


async def _check_webhook(receiver: Receiver, key: str) -> None:
    request = await receiver.requests.get()
    secret = replicate.webhook.WebhookSigningSecret(key=key)
    Webhooks.validate(headers=request.headers, body=request.body.decode(), secret=secret)
    body = httpx.Response(200, content=request.body).json()
    assert (body["status"], body["output"], body["version"]) == ("succeeded", ["a", "b"], "rep@1")


def foreign_requests(base: str, other: str, token: str) -> dict[str, int]:
    """Requests of a key that may not see the function `rep`."""
    with httpx.Client(base_url=f"{base}/v1/", headers={"authorization": f"Bearer {token}"}) as client:
        prediction = client.post("models/default/rep/predictions", json={"input": TEXTS}).json()["id"]
        file = client.post("files", files={"content": ("a.txt", b"a")}).json()["id"]
    with httpx.Client(base_url=f"{base}/v1/", headers={"authorization": f"Bearer {other}"}) as client:
        return {
            "model": client.post("models/default/rep/predictions", json={"input": TEXTS}).status_code,
            "version": client.post("predictions", json={"version": "rep@1", "input": TEXTS}).status_code,
            "prediction": client.get(f"predictions/{prediction}").status_code,
            "list": client.get("predictions").status_code,
            "file": client.get(f"files/{file}").status_code,
            "models": len(client.get("models").json()["results"]),
            "key": client.get("models", headers={"authorization": "Bearer r8_x"}).status_code,
        }


def test_bytes_are_a_data_url_which_the_client_reads_as_a_file() -> None:
    raw = predictions.output(Outcome("image/png", b"\x89PNG", []))
    value = httpx.Response(200, content=bytes(raw)).json()
    assert FileOutput(value, Client()).read() == b"\x89PNG"


def test_progress_is_a_line_that_the_client_parses() -> None:
    record = CallRecord(id="x", function="f", revision=1, state=InvocationState.RUNNING, submitted_at=0.0)
    view = call_views.status(record) | {"progress": Progress(0.5, "half")}
    parsed = replicate.prediction.Prediction.Progress.parse(predictions.prediction(view)["logs"])
    assert parsed is not None
    assert (parsed.current, parsed.total) == (50, 100)


def test_the_output_of_a_generator_is_an_iterator_of_its_items() -> None:
    texts = {"type": "array", "items": {"type": "string"}}
    revision = Revision(function="f", number=1, spec=spec_of("f"), bundle=DIGEST, created_at=0.0)
    for returns, items in ((texts, {"type": "string"}), ({}, {})):
        method = MethodSpec(kind=CallKind.GENERATOR, returns=returns)
        output = models.version("f", method, revision)["openapi_schema"]["components"]["schemas"]["Output"]
        assert output == {"title": "Output", "type": "array", "items": items, "x-cog-array-type": "iterator"}


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"input": []}', b'{"input": {}, "more": 1}', b'{"stream": "yes"}'])
def test_a_body_of_another_form_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        predictions.new_prediction(body)
