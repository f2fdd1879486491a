"""Functions written with the SDK's own decorators, in a real worker."""

from __future__ import annotations

import random
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.encoding import media, values
from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol.frames import Answer, Cancel
from gpufn_platform.shared_bodies.bodies import SharedBodies

Start = Any


def test_a_decorated_function_calls_another_one(start: Start) -> None:
    worker = start(
        """
        from gpufn import gpu_function
        @gpu_function()
        def g(x: int) -> int: return x + 1
        @gpu_function()
        def f(x: int) -> list[int]: return [g(x), g.remote(x)]
        """
    )
    number = worker.run(b'{"x": 1}')
    call, body = worker.next()
    assert (call.target, call.parent, values.decode_call(body)) == ("g", number, ([1], {}))
    worker.answer(call.call, *values.encode_result(20, media.NATIVE))
    assert worker.result()[1] == b"[2,20]"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_function_whose_call_fails_for_want_of_the_bus_has_not_failed_itself(start: Start, kind: str) -> None:
    body = "return g.remote(x)" if kind == "sync" else "return await g.aio.remote(x)"
    worker = start(
        f"""
        from gpufn import gpu_function
        @gpu_function()
        def g(x: int) -> int: return x + 1
        @gpu_function()
        {"async " if kind == "async" else ""}def f(x: int) -> int: {body}
        """,
        kind=kind,
    )
    worker.run(b'{"x": 1}')
    call, _ = worker.next()
    worker.answer(call.call, "", b"", OutcomeKind.REJECTED, BusUnavailable("away").info())
    result, _ = worker.result()
    assert result.kind is OutcomeKind.LOST
    assert (result.error.code, result.error.message, result.error.retryable) == ("bus_unavailable", "away", True)


def test_a_large_body_is_passed_to_another_function_and_back_as_a_file(start: Start, tmp_path: Path) -> None:
    shared_bodies = SharedBodies(tmp_path / "shared_bodies")
    worker = start(
        """
        from gpufn import gpu_function
        @gpu_function()
        def g(x: bytes) -> bytes: return x
        @gpu_function()
        def f(x: int) -> int: return len(g.remote(b"x" * x)) + len(g.spawn(b"x" * x).id)
        """,
        shared_bodies=shared_bodies.folder,
    )
    worker.run(b'{"x": 8388608}')
    call, body = worker.next()
    assert body == b""
    assert values.decode_call(shared_bodies.take(call.shared_body)) == ([b"x" * 8388608], {})
    content_type, result = values.encode_result(b"y" * 9_000_000, media.NATIVE, limit_bytes=1 << 30)
    shared_body = shared_bodies.write([result])
    worker.send(Answer(call.call, OutcomeKind.SUCCEEDED, None, content_type, shared_body))
    call, body = worker.next()
    assert (call.verb, body) == ("submit", b"")
    worker.answer(call.call, "text/plain", b"an id")
    assert worker.result()[1] == b"9000005"


def test_a_body_above_the_limit_for_another_function_is_refused_here_with_a_message(start: Start) -> None:
    worker = start(
        """
        from gpufn import errors, gpu_function
        @gpu_function()
        def g(x: bytes) -> int: return len(x)
        def told(ask, *arguments):
            try:
                ask(*arguments)
            except errors.InvalidInput as error:
                return error.message
        @gpu_function()
        def f(x: int) -> list[str]: return [told(ask, b"x" * x) for ask in (g.remote, g.spawn)]
        """
    )
    assert worker.call(b'{"x": 67108864}').count(b"more than the 67,108,864 of one call") == 2


def test_an_async_function_awaits_another_one_and_stays_its_parent(start: Start) -> None:
    worker = start(
        """
        from gpufn import gpu_function
        @gpu_function()
        def g(x: int) -> int: return x + 1
        @gpu_function()
        async def f(x: int) -> int: return await g.aio.remote(x)
        """,
        kind="async",
    )
    number = worker.run(b'{"x": 1}')
    call, _ = worker.next()
    assert (call.target, call.parent) == ("g", number)
    worker.answer(call.call, *values.encode_result(20, media.NATIVE))
    assert worker.result()[1] == b"20"


def test_a_decorated_class_has_its_hooks_run(start: Start) -> None:
    worker = start(
        """
        from gpufn import enter, exit, gpu_function, method
        @gpu_function()
        class Counter:
            @enter
            def setup(self) -> None: self.n = 10
            @method
            def add(self, x: int) -> int: self.n += x; return self.n
            @method
            def twice(self, x: int) -> int: return self.add(x) + self.add(x)
        """,
        qualname="Counter",
        methods={"add": "sync", "twice": "sync"},
    )
    assert worker.call(b'{"x": 1}', method="add") == b"11"
    assert worker.call(b'{"x": 1}', method="twice") == b"25"


def test_a_thousand_calls_and_cancels_end_once_each(start: Start) -> None:
    chance = random.Random(4)
    for kind, source in (
        ("sync", "def f(x: int):\n    print(x)\n    return x"),
        ("async", "import asyncio\nasync def f(x: int):\n    await asyncio.sleep(0)\n    print(x)\n    return x"),
        ("generator", "def f(x: int):\n    for i in range(5): yield i"),
        ("async_generator", "async def f(x: int):\n    for i in range(5): yield i"),
    ):
        worker = start(source, kind=kind, concurrency=4)
        waiting: set[int] = set()
        with ThreadPoolExecutor(1) as reader:  # a worker waits for a runner that does not read
            ends = [reader.submit(worker.result) for _ in range(250)]
            for i in range(250):
                number = worker.run(b'{"x": %d}' % i)
                waiting.add(number)
                if chance.random() < 0.5:
                    worker.send(Cancel(chance.choice(sorted(waiting))))
            ended = [end.result()[0].attempt for end in ends]
        assert sorted(ended) == sorted(waiting)
        assert worker.call(b'{"x": 1}') in (b"1", b"[0,1,2,3,4]")


def test_a_hook_that_is_overridden_without_a_mark_does_not_run_here_nor_there(start: Start) -> None:
    source = """
        from gpufn import enter, exit, gpu_function, method
        class Base:
            @enter
            def prepare(self) -> None: self.seen = ["base"]
            @enter
            def load(self) -> None: self.seen.append("base's load")
        @gpu_function()
        class Model(Base):
            def load(self) -> None: self.seen.append("unmarked")
            @enter
            def prepare(self) -> None: self.seen = ["mine"]
            @method
            def look(self) -> list[str]: return self.seen
        """
    worker = start(source, qualname="Model", methods={"look": "sync"})
    here: dict[str, Any] = {"__name__": __name__}
    exec(textwrap.dedent(source), here)
    assert here["Model"]().look() == ["mine"]
    assert worker.call(method="look") == b'["mine"]'
