"""Dramatiq on Redis: `work` runs a worker of one process, `run CALLS` submits that many and waits for their results.

REDIS is the server's address.
"""

from __future__ import annotations

import os
import sys

import dramatiq
import redis
import timing
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

SERVER = os.environ.get("REDIS", "redis://127.0.0.1:6379")

broker = RedisBroker(url=f"{SERVER}/2")
broker.add_middleware(Results(backend=RedisBackend(url=f"{SERVER}/3"), store_results=True))
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name="noop")
def noop(x: int) -> int:
    return x


def run(calls: int) -> None:
    results = redis.Redis.from_url(f"{SERVER}/3")

    def submit() -> None:
        for number in range(calls):
            noop.send(number)

    timing.report(calls, submit, results.dbsize)


if __name__ == "__main__":
    if sys.argv[1] == "work":
        command = [
            "-m",
            "dramatiq",
            "dramatiq_queue",
            "--processes=1",
            "--threads=8",
            "--path",
            os.path.dirname(__file__),
        ]
        os.execv(sys.executable, [sys.executable, *command])
    run(int(sys.argv[2]))
