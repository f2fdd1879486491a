"""Celery on Redis: `work` runs a worker of one process, `run CALLS` submits that many and waits for their results.

REDIS is the server's address. Calls are acknowledged when they are done; otherwise a worker that dies would lose them.
"""

from __future__ import annotations

import os
import sys

import redis
import timing
from celery import Celery

SERVER = os.environ.get("REDIS", "redis://127.0.0.1:6379")

app = Celery("noop", broker=f"{SERVER}/0", backend=f"{SERVER}/1")
app.conf.update(task_acks_late=True, worker_prefetch_multiplier=64, task_serializer="json", result_serializer="json")


@app.task(name="noop")
def noop(x: int) -> int:
    return x


def run(calls: int) -> None:
    results = redis.Redis.from_url(f"{SERVER}/1")

    def submit() -> None:
        for number in range(calls):
            noop.delay(number)

    timing.report(calls, submit, results.dbsize)


if __name__ == "__main__":
    if sys.argv[1] == "work":
        quiet = ["--loglevel=ERROR", "--without-gossip", "--without-mingle", "--without-heartbeat"]
        app.worker_main(["worker", "--concurrency=1", *quiet])
    else:
        run(int(sys.argv[2]))
