"""A plain function, and an async one that serves many calls at a time."""

from __future__ import annotations

import asyncio

from gpufn import gpu_function


@gpu_function(idle_timeout=10)
def hello(name: str = "world") -> str:
    print("greeting", name)  # appears in `gpufn logs hello`
    return f"Hello, {name}!"


@gpu_function(concurrency=50, idle_timeout=10)
async def hello_later(name: str, seconds: float = 0.1) -> dict[str, str | float]:
    await asyncio.sleep(seconds)
    return {"greeting": hello(name), "waited_s": seconds}


if __name__ == "__main__":
    print("local: ", hello("you"))
    print("remote:", hello.remote("you"))
    print("remote, many at once:", list(hello.map(["Ada", "Grace", "Edsger"])))
