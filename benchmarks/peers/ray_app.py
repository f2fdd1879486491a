"""Ray Serve with one replica, or with none until it is called (RAY_MIN_REPLICAS=0)."""

from __future__ import annotations

import os
import threading

import ray
from ray import serve
from starlette.requests import Request

_MIN_REPLICAS = int(os.environ.get("RAY_MIN_REPLICAS", "1"))


@serve.deployment(
    max_ongoing_requests=100,
    ray_actor_options={"num_cpus": 0.1},
    autoscaling_config={
        "min_replicas": _MIN_REPLICAS,
        "initial_replicas": _MIN_REPLICAS,
        "max_replicas": 1,
        "upscale_delay_s": 0,
        "downscale_to_zero_delay_s": 1,
        "downscale_delay_s": 1,
        "look_back_period_s": 1,
    },
)
class Echo:
    async def __call__(self, request: Request) -> dict[str, int]:
        return {"x": (await request.json())["x"]}


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["PORT"])})
    serve.run(Echo.bind(), route_prefix="/echo")
    threading.Event().wait()  # until SIGTERM, which Ray handles
