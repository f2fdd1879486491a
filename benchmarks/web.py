"""Requests and WebSocket messages to a web function against uvicorn alone, in turns, on a running platform.

    GPUFN_URL=http://127.0.0.1:8090 python benchmarks/web.py [--rounds 5] [--seconds 2] [--json FILE]

Both serve the same ASGI application. Each connection sends the next request or message when it has the response to the
one before. The WebSockets are uncompressed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from websockets.asyncio.client import connect

SOURCE = """
async def app(scope, receive, send):
    if scope["type"] == "http":
        headers = [(b"content-type", b"application/json"), (b"content-length", b"16")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"hello": "you"}'})
    elif scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (event := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": event["text"]})
"""
FUNCTION = """
from gpufn import asgi_app

@asgi_app(max_workers=1, min_workers=1, public=True, timeout=3600)
def bench_web():
    return app
"""
Once = Callable[[], Awaitable[None]]


def wait_for_port(port: int) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return


CASES = ("GET", "WebSocket")
CONNECTIONS = (1, 8)


async def get(url: str) -> Once:
    """Return a request on a connection of its own."""
    host, port = url.removeprefix("http://").partition("/")[0].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    path = "/" + url.removeprefix("http://").partition("/")[2]
    head = f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n".encode()

    async def once() -> None:
        writer.write(head)
        response = await reader.readuntil(b"\r\n\r\n")
        assert response.startswith(b"HTTP/1.1 200"), response
        await reader.readexactly(16)

    return once


async def echo(url: str) -> Once:
    socket_ = await connect(f"ws{url.removeprefix('http')}", compression=None, proxy=None)

    async def once() -> None:
        await socket_.send("hello")
        assert await socket_.recv() == "hello"

    return once


async def measure(case: str, url: str, connections: int, seconds: float) -> tuple[float, float]:
    """Return the requests per second, and the median duration in ms."""
    durations: list[float] = []

    async def run(once: Once) -> None:
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            await once()
            durations.append(time.perf_counter() - began)

    await asyncio.gather(*[run(await (get if case == "GET" else echo)(url)) for _ in range(connections)])
    return len(durations) / seconds, statistics.median(durations) * 1e3


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gateway, port = os.environ["GPUFN_URL"], free_port()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "alone.py").write_text(SOURCE)
        Path(folder, "deployed.py").write_text(SOURCE + FUNCTION)
        deploy = [sys.executable, "-m", "gpufn", "deploy", str(Path(folder, "deployed.py")), "--replace"]
        subprocess.run(deploy, check=True, stdout=subprocess.DEVNULL)
        command = "-m uvicorn alone:app --loop uvloop --http httptools --ws websockets-sansio --lifespan off"
        quiet = f"--ws-per-message-deflate false --no-access-log --log-level warning --port {port}"
        uvicorn = subprocess.Popen([sys.executable, *command.split(), *quiet.split()], cwd=folder)
        urls = {
            "uvicorn": f"http://127.0.0.1:{port}/",
            "gpufn": f"{gateway}/web/default/default/bench-web/",
        }
        figures: dict[str, list[tuple[float, float]]] = {}
        try:
            wait_for_port(port)
            for _ in range(options.rounds):
                for case in CASES:
                    for connections in CONNECTIONS:
                        for name, url in urls.items():
                            key = f"{case}, {connections}, {name}"
                            found = asyncio.run(measure(case, url, connections, options.seconds))
                            figures.setdefault(key, []).append(found)
        finally:
            uvicorn.terminate()
            uvicorn.wait()
    print("| what | connections | server | per second | p50 in ms |\n| --- | --- | --- | --- | --- |")
    for key, rounds in figures.items():
        case, connections_, name = key.split(", ")
        rate, p50 = (statistics.median(each[index] for each in rounds) for index in (0, 1))
        print(f"| {case} | {connections_} | {name} | {rate:,.0f} | {p50:.2f} |")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
