"""Cost of a round trip over the bus, for three clients side by side in one run.

    python benchmarks/bus.py [--seconds 2] [--rounds 3] [--uvloop]

core       request → subscriber → reply
jetstream  publish → work queue in memory → pull → reply and ack (as for an invocation)

nats-py    its public API: request, fetch(1) in one task per slot
fast-lane  nats-py's connection and read loop, with its parser replaced by one that dispatches synchronously
bus        gpufn_platform.bus: nats-py connects, then our own asyncio.Protocol takes over the socket
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.errors import TimeoutError as NatsTimeoutError

from gpufn_core.protocol import subjects
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus, Message, NoResponders
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.tls import PUBLIC_AUTHORITIES, BusTls
from gpufn_platform.queue.delivery import Delivery
from gpufn_platform.queue.puller import Pull

PAYLOAD = b"x" * 256
QUEUE = subjects.sync_queue("echo", 1)
CONSUMER = subjects.sync_consumer("echo", 1)
Call = Callable[[], Awaitable[Any]]


class FastLane(Bus):
    """A Bus on top of nats-py: its tasks read, ping and close the connection; the parser is ours."""

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        tls: BusTls = PUBLIC_AUTHORITIES,
        ping_interval_s: float = 5.0,
        retry_for_s: float = 0.0,
    ) -> Bus:
        bus = cls(url, name, ping_interval_s, tls)
        client: Any = Client()
        await client.connect(url, name=name)
        bus._link = _FastLink(client, bus._handlers)  # type: ignore[assignment]
        bus.subscribe(f"{bus._inbox}.r.*", bus._on_response)
        return bus

    async def close(self) -> None:
        await self._link.client.close()  # type: ignore[union-attr]


class _FastLink:
    congested = False

    def __init__(self, client: Any, handlers: dict[bytes, Any]) -> None:
        from gpufn_platform.bus.tcp_connection import Link

        self.client, self.info = client, client._server_info
        self._out: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        parser: Any = Link.__new__(Link)
        parser._handlers, parser._rest, parser._needed = handlers, bytearray(), 0
        parser._flush, parser.write, parser._pings, parser.info = self._flush, self.write, [], {}

        async def parse(data: bytes = b"") -> None:
            parser.data_received(data)

        client._ps.parse = parse

    def write(self, command: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(command)

    def ping(self) -> asyncio.Future[None]:
        return self._loop.create_future()

    def _flush(self) -> None:
        if self._out:
            self.client._transport.write(b"".join(self._out))
            self._out.clear()


async def measure(call: Call, concurrency: int, seconds: float) -> tuple[float, float]:
    """Return the round trips per second, and the median in milliseconds."""
    took: list[float] = []
    stop = time.perf_counter() + seconds

    async def caller() -> None:
        while (start := time.perf_counter()) < stop:
            await call()
            took.append(time.perf_counter() - start)

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    return len(took) / (time.perf_counter() - started), statistics.median(took) * 1e3


@contextlib.asynccontextmanager
async def nats_py(url: str, concurrency: int) -> Any:
    client, server = await nats.connect(url), await nats.connect(url)

    async def echo(message: Any) -> None:
        await message.respond(message.data)

    await server.subscribe("echo", cb=echo)
    waiting: dict[str, asyncio.Future[bytes]] = {}
    inbox, numbers = client.new_inbox(), itertools.count()

    async def on_reply(message: Any) -> None:
        if (future := waiting.get(message.subject)) is not None and message.data[:1] != b"{":
            future.set_result(message.data)

    await client.subscribe(f"{inbox}.*", cb=on_reply)
    subscription = await server.jetstream().pull_subscribe_bind(CONSUMER, subjects.SYNC)

    async def slot() -> None:
        while True:
            with contextlib.suppress(NatsTimeoutError):
                for message in await subscription.fetch(1, timeout=1):
                    assert message.headers is not None
                    await server.publish(message.headers["Reply"], message.data)
                    await message.ack()

    slots = [asyncio.create_task(slot()) for _ in range(concurrency)]

    async def core() -> None:
        await client.request("echo", PAYLOAD)

    async def jetstream() -> None:
        reply = f"{inbox}.{next(numbers)}"
        waiting[reply] = asyncio.get_running_loop().create_future()
        await client.publish(QUEUE, PAYLOAD, reply=reply, headers={"Reply": reply})
        await waiting[reply]
        del waiting[reply]

    await server.flush()
    yield core, jetstream
    for task in slots:
        task.cancel()
    await asyncio.gather(*slots, return_exceptions=True)
    await client.close()
    await server.close()


@contextlib.asynccontextmanager
async def ours(url: str, concurrency: int, kind: type[Bus]) -> Any:
    client, server = await kind.connect(url, name="client"), await kind.connect(url, name="server")
    server.subscribe("echo", lambda message: server.publish(message.reply, message.payload))
    waiting: dict[str, asyncio.Future[bytes]] = {}
    inbox, numbers = client.new_inbox(), itertools.count()

    def on_reply(message: Message) -> None:
        if (future := waiting.get(message.subject)) is not None and message.payload[:1] != b"{":
            future.set_result(message.payload)

    client.subscribe(f"{inbox}.*", on_reply)

    def on_delivery(delivery: Delivery) -> None:
        reply, _, body = delivery.payload.partition(b"\n")
        server.publish(reply.decode(), body)
        delivery.ack()
        pull.grant(1)

    pull = Pull(server, subjects.SYNC, CONSUMER, on_delivery)
    pull.grant(concurrency)

    async def core() -> None:
        await client.request("echo", PAYLOAD)

    async def jetstream() -> None:
        reply = f"{inbox}.{next(numbers)}"
        waiting[reply] = asyncio.get_running_loop().create_future()
        client.publish(QUEUE, reply.encode() + b"\n" + PAYLOAD, reply=reply)
        await waiting[reply]
        del waiting[reply]

    while True:  # until the server has the subscription
        with contextlib.suppress(NoResponders):
            await core()
            break
    yield core, jetstream
    pull.withdraw()
    await client.close()
    await server.close()


async def run(seconds: float, rounds: int) -> dict[str, Any]:
    clients: dict[str, Callable[[str, int], Any]] = {
        "nats-py": nats_py,
        "fast-lane": lambda url, concurrency: ours(url, concurrency, FastLane),
        "bus": lambda url, concurrency: ours(url, concurrency, Bus),
    }
    results: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as home, EmbeddedServer.start(Path(home)) as server:
        admin = await Bus.connect(server.url, name="bench")
        await streams.ensure_streams(admin)
        await streams.ensure_consumer(admin, subjects.SYNC, CONSUMER, QUEUE, ack_wait_s=15, max_ack_pending=1000)
        for _ in range(rounds):  # interleaved, so that noise affects all clients
            for concurrency, (name, client) in itertools.product((1, 16, 64), clients.items()):
                async with client(server.url, concurrency) as (core, jetstream):
                    for kind, call in (("core", core), ("jetstream", jetstream)):
                        result = await measure(call, concurrency, seconds)
                        results.setdefault(f"{kind:9} {concurrency:2} {name}", []).append(result)
        await admin.close()
    return {
        key: {
            "per_s": round(statistics.median(r[0] for r in rs)),
            "p50_ms": round(statistics.median(r[1] for r in rs), 3),
        }
        for key, rs in sorted(results.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    factory = None
    if options.uvloop:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        figures = runner.run(run(options.seconds, options.rounds))
    for key, figure in figures.items():
        share = figure["per_s"] / max(f["per_s"] for other, f in figures.items() if other[:12] == key[:12])
        print(f"{key:24} {figure['per_s']:>7,}/s  p50 {figure['p50_ms']:6.3f} ms  {share:4.0%} of the best")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
