"""BentoML: one worker."""

from __future__ import annotations

import os
import sys

import bentoml


@bentoml.service(workers=1, traffic={"timeout": 60}, logging={"access": {"enabled": False}})
class Echo:
    @bentoml.api
    async def echo(self, x: int) -> dict[str, int]:
        return {"x": x}


if __name__ == "__main__":
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    os.execv(
        sys.executable,
        [
            sys.executable,
            "-m",
            "bentoml",
            "serve",
            "bentoml_app:Echo",
            "--port",
            os.environ["PORT"],
            "--host",
            "127.0.0.1",
        ],
    )
