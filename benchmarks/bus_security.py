"""The cost of an encrypted store (GPUFN_STORE_CIPHER) and of TLS on the bus (--bus-listen).

    python benchmarks/bus_security.py [--seconds 2] [--rounds 3]

One platform per setting, all up at the same time, measured in turns: submitted calls, small and with 64 KiB, and an
echo that a client waits for. The submitted calls stay queued: no node has the GPU that they need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from collections import defaultdict
from typing import Any

import measure

SETTINGS = {
    "off": {},
    "aes": {"GPUFN_STORE_CIPHER": "aes"},
    "chachapoly": {"GPUFN_STORE_CIPHER": "chachapoly"},
    "tls": {"GPUFN_NATS_LISTEN": "127.0.0.1:0"},
}
_JSON = {"Content-Type": "application/json"}
_LARGE = json.dumps({"x": "x" * (64 << 10)}).encode()
# Name, path below the function, body, connections.
_LOADS = (
    ("submitted", "nowhere", "submit", b'{"x": 0}', 1),
    ("submitted", "nowhere", "submit", b'{"x": 0}', 64),
    ("submitted 64 KiB", "nowhere_text", "submit", _LARGE, 16),
    ("echo", "echo", "invoke", measure.ECHO.body, 1),
    ("echo", "echo", "invoke", measure.ECHO.body, 64),
)


def main() -> None:
    options = measure.arguments("The cost of an encrypted store and of TLS.", seconds=2.0, rounds=3)
    about = measure.machine()
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        platforms = {}
        for setting, environ in SETTINGS.items():
            platforms[setting] = stack.enter_context(measure.gpufn_up(**environ))
            measure.deploy(platforms[setting], "nowhere", "nowhere_text", "echo")
        for _ in range(options.rounds):
            for name, function, verb, body, connections in _LOADS:
                headers = _JSON if verb == "submit" else measure.ECHO.headers
                for setting, server in platforms.items():
                    url = f"{server.url}/v1/functions/{function}/{verb}"
                    target = measure.Server(setting, url, server.process, post=measure.Post("", body, headers))
                    load = measure.wrk(target, connections, options.seconds)
                    runs[f"{name}, at {connections}, {setting}"].append(dataclasses.asdict(load))
    measure.write("bus-security", {"rounds": options.rounds, "runs": runs}, _table(runs), about)


def _table(runs: dict[str, list[dict[str, Any]]]) -> str:
    def median(name: str, field: str) -> float:
        return float(statistics.median(run[field] for run in runs[name]))

    rows = []
    for name in runs:
        base = f"{name.rpartition(', ')[0]}, off"
        figures = [median(name, field) for field in ("per_second", "p50_ms", "p99_ms")]
        rows.append([name, *figures, round(figures[0] / median(base, "per_second"), 2)])
    return measure.table(["load, connections, setting", "calls/s", "p50 ms", "p99 ms", "of off's calls/s"], rows)


if __name__ == "__main__":
    main()
