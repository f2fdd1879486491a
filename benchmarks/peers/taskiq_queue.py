"""taskiq on NATS: `work` runs a worker of one process, `run CALLS` submits that many and waits for their results.

NATS is the server's address. Calls are in a stream on disk, results in an object store: two messages each.
"""

from __future__ import annotations

import asyncio
import os
import sys

import nats
import timing
from taskiq_nats import NATSObjectStoreResultBackend, PullBasedJetStreamBroker

SERVER = os.environ.get("NATS", "nats://127.0.0.1:4222")
AT_ONCE = 64

broker = PullBasedJetStreamBroker(SERVER, queue="noop").with_result_backend(NATSObjectStoreResultBackend(SERVER))


@broker.task(task_name="noop")
async def noop(x: int) -> int:
    return x


async def run(calls: int) -> None:
    await broker.startup()
    client = await nats.connect(SERVER)
    semaphore = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with semaphore:
            await noop.kiq(number)

    async def submit() -> None:
        await asyncio.gather(*(one(number) for number in range(calls)))

    async def results() -> int:
        return int((await client.jetstream().stream_info("OBJ_taskiq_results")).state.messages) // 2

    await timing.report_async(calls, submit, results)
    await client.close()
    await broker.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "work":
        command = ["-m", "taskiq", "worker", "taskiq_queue:broker", "--workers", "1", "--log-level", "ERROR"]
        os.chdir(os.path.dirname(os.path.abspath(__file__)))
        os.execv(sys.executable, [sys.executable, *command])
    asyncio.run(run(int(sys.argv[2])))
