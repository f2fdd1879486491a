"""All methods of the unmodified RunPod client, in a process of its own: base URL in the environment, key as argument.

Prints the results as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import requests
import runpod
from runpod import AsyncioEndpoint
from runpod.http_client import AsyncClientSession

GOOD = {"input": {"texts": ["a", "b"]}}


async def asynchronous(endpoint: str) -> Any:
    async with AsyncClientSession() as session:
        job = await AsyncioEndpoint(endpoint, session).run(GOOD["input"])
        return [await job.output(timeout=10), await job.status()]


def refused(endpoint: str, job: Any) -> Any:
    try:
        runpod.Endpoint(endpoint).run(job)
    except requests.HTTPError as error:
        response: Any = error.response
        return [response.status_code, response.json()["error"]]
    return None


def main(key: str, works: str, idle: str) -> None:
    runpod.api_key = key
    endpoint = runpod.Endpoint(works)
    got: dict[str, Any] = {"run_sync": endpoint.run_sync(GOOD)}
    job = endpoint.run(GOOD["input"])
    got["output"] = [job.output(timeout=10), job.status()]
    got["stream"] = list(job.stream())
    got["failed"] = endpoint.run({"texts": ["bad"]}).rp_client.get(f"{works}/health")["jobs"]["inQueue"]
    waiting = runpod.Endpoint(idle).run(GOOD)
    got["waiting"] = waiting.status()
    got["cancel"] = [waiting.cancel()["status"], waiting.status()]
    runpod.Endpoint(idle).run(GOOD)
    got["purge"] = runpod.Endpoint(idle).purge_queue()
    got["health"] = sorted(endpoint.health())
    got["unknown"] = refused("none", GOOD)
    got["wrong"] = refused(works, {"input": {"texts": 1}})
    got["extra"] = refused(works, {"input": {"texts": []}, "s3Config": {}})
    got["asyncio"] = asyncio.run(asynchronous(works))
    runpod.api_key = "wrong"
    try:
        runpod.Endpoint(works).health()
    except RuntimeError as error:
        got["401"] = str(error).startswith("401")
    print(json.dumps(got))


if __name__ == "__main__":
    main(*sys.argv[1:])
