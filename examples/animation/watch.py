"""Request an animation and show its progress: python watch.py [film.gif [FRAMES]]"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from gpufn import Client

_WIDTH = 40


def main(path: str = "film.gif", count: str = "48") -> None:
    with Client() as client:
        call = client.submit("animate", msgspec.json.encode({"count": int(count)}), accept="application/json")
        while not (view := client.invocation(call.id)).state.ended:
            if view.progress is None:
                status, fraction = view.state.value, 0.0
            else:
                status, fraction = view.progress.message, view.progress.fraction
            bar = "█" * round(_WIDTH * fraction)
            print(f"\r{bar:<{_WIDTH}} {fraction:4.0%} {status:<24}", end="", flush=True)
            time.sleep(0.1)
        Path(path).write_bytes(client.result_raw(call.id).body)
    print(f"\r{'█' * _WIDTH} 100% {path:<24}")


if __name__ == "__main__":
    main(*sys.argv[1:])
