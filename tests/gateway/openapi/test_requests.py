"""The OpenAPI document and the gateway agree: schemathesis sends requests at the bounds of each schema."""

from __future__ import annotations

import asyncio
import enum
import os
import sys
from pathlib import Path
from typing import Any, Literal

from gpufn import gpu_function
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.ids import digest_of
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.messages import ResultReply, unpack_invocation
from gpufn_gateway.functions.deploy_checks import DeployOptions
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store
from tests.conftest import ROOT
from tests.gateway.listening import serving
from tests.gateway.openapi.stored import BUNDLE_VARIABLE, KEY_VARIABLE, MODEL
from tests.gateway.whole import DIGEST, Whole, gateway_on
from tests.waiting import until_async

_CONFIG = Path(__file__).with_name("schemathesis.toml")


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


@gpu_function
def shout(text: str, times: int = 1) -> str:
    return text.upper() * times


@gpu_function
def detect(
    image: bytes, min_score: float = 0.5, mode: Mode = Mode.FAST, size: Literal["s", "m"] = "s"
) -> dict[str, int]:
    return {"image": len(image)}


_RESULTS = {"shout": b'"A"', "detect": b'{"image": 1}'}


def answer_calls(bus: Bus, function: str) -> None:
    """End all calls like a runner, with the same result."""

    def on_message(message: Any) -> None:
        invocation, _ = unpack_invocation(message.payload)
        succeeded = OutcomeKind.SUCCEEDED
        reply = ResultReply(invocation.id, succeeded, None, "application/json", invocation.revision, 1, 0.0, 0.0, "w")
        bus.publish(invocation.reply, pack(reply, _RESULTS[function]))

    bus.subscribe(subjects.sync_queue(function, 1, "*"), on_message)


async def prepare(gateway: Whole) -> tuple[str, str]:
    """Deploy and upload the objects that the requests name. Return the secret of an admin key and the id of another."""
    for each in (shout, detect):
        spec = each.spec()
        await gateway.deploys.deploy(spec, DIGEST, DeployOptions(check=False))
        answer_calls(gateway.bus, spec.name)
        await until_async(lambda: spec.name in gateway.registry.functions)  # noqa: B023  it is awaited here
    answer = await gateway.http.put(f"/v1/artifacts/{digest_of(MODEL)}", content=MODEL)
    assert answer.status_code == 201
    await gateway.volumes.put_file(digest_of(MODEL), len(MODEL), object_store.parts_of(MODEL))
    scopes = {"scopes": ["admin"]}
    key = (await gateway.http.post("/v1/keys", json=scopes)).json()["key"]
    await until_async(lambda: gateway.access.keys)
    other = await gateway.http.post("/v1/keys", json=scopes, headers={"authorization": f"Bearer {key}"})
    await until_async(lambda: len(gateway.access.keys) == 2)
    return key, other.json()["id"]


def test_requests_at_the_bounds_of_the_document_are_accepted_and_those_beyond_are_refused(
    nats: Any, tmp_path: Path
) -> None:
    # requests reads all variables twice for each request, and hypothesis keeps its table of characters in its folder.
    variables = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(ROOT / ".hypothesis"),
        BUNDLE_VARIABLE: DIGEST,
    }

    async def scenario() -> tuple[int | None, str]:
        async with gateway_on(nats, history=tmp_path / "history") as gateway, serving(gateway.app) as (_, port):
            key, other = await prepare(gateway)
            await gateway.recorder.store()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "schemathesis.cli", "--config-file", str(_CONFIG),
                "run", f"http://127.0.0.1:{port}/openapi.json", "--header", f"Authorization: Bearer {key}",
                "--seed", "1", "--no-color", "--warnings", "off",
                cwd=tmp_path, env=variables | {KEY_VARIABLE: other},
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            output, _ = await process.communicate()
            return process.returncode, output.decode()

    code, output = asyncio.run(scenario())
    assert code == 0, output
