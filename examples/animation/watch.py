"""Request an animation and show its progress: python watch.py [film.gif [FRAMES]]"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from gpufn import Client, Function

_WIDTH = 40


def main(path: str = "film.gif", frames: str = "48") -> None:
    call = Function.from_name("animate").spawn(count=int(frames))
    with Client() as client:
        while not (view := client.invocation(call.id)).state.ended:
            if view.progress:
                _show(view.progress.fraction, view.progress.message)
            else:
                _show(0.0, view.state.value)
            time.sleep(0.1)
    Path(path).write_bytes(call.result())
    _show(1.0, path)
    print()


def _show(fraction: float, text: str) -> None:
    print(f"\r{'█' * round(_WIDTH * fraction):<{_WIDTH}} {fraction:4.0%} {text:<24}", end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
