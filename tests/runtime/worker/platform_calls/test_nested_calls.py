"""Calls of every kind, through a real worker process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.encoding import media, values
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.frames import Cancel, Credit, LiveItem

Start = Any


def test_a_function_is_called_with_keyword_arguments(start: Start) -> None:
    worker = start("def f(a: int, b: str = 'x'): return {'a': a, 'b': b}")
    assert worker.call(b'{"a": 1}') == b'{"a":1,"b":"x"}'
    assert worker.call(b'{"a": 2, "b": "y"}') == b'{"a":2,"b":"y"}'


def test_a_decorated_function_is_found_under_its_raw_attribute(start: Start) -> None:
    worker = start(
        """
        class Function:
            def __init__(self, raw): self.raw = raw
            def __call__(self): return "not me"
        @Function
        def f(): return "raw"
        """
    )
    assert worker.call() == b'"raw"'


def test_an_async_function_runs_as_many_calls_at_once_as_its_concurrency(start: Start) -> None:
    worker = start(
        """
        import asyncio
        here, both = 0, asyncio.Event()
        async def f(x: int):
            global here
            here += 1
            if here == 2:
                both.set()
            await both.wait()
            return x
        """,
        kind="async",
        concurrency=2,
    )
    sent = {worker.run(b'{"x": 1}'), worker.run(b'{"x": 2}')}
    answers = [worker.result() for _ in sent]
    assert {result.attempt for result, _ in answers} == sent
    assert sorted(body for _, body in answers) == [b"1", b"2"]


def test_a_sync_function_runs_as_many_calls_at_once_as_its_concurrency(start: Start) -> None:
    worker = start(
        """
        import threading
        together = threading.Barrier(3)
        def f():
            together.wait(20)
            return True
        """,
        concurrency=3,
    )
    for _ in range(3):
        worker.run()
    assert [worker.result()[1] for _ in range(3)] == [b"true"] * 3


def test_a_stream_sends_items_within_its_credits(start: Start) -> None:
    worker = start(
        """
        made = 0
        def f(n: int):
            global made
            for made in range(1, n + 1):
                yield made
        """,
        kind="generator",
    )
    number = worker.run(b'{"n": 4}', stream=True, credits=2)
    assert [worker.item(), worker.item()] == [b"1", b"2"]
    worker.send(Credit(number, 5))
    assert [worker.item(), worker.item()] == [b"3", b"4"]
    result, body = worker.result()
    assert (result.kind.value, body) == ("succeeded", b"")


def test_a_stream_without_further_items_ends_without_another_credit(start: Start) -> None:
    worker = start("def f():\n    yield 1", kind="generator")
    worker.run(stream=True, credits=1)
    assert worker.item() == b"1"
    assert worker.result()[0].kind.value == "succeeded"


def test_an_async_stream_sends_items_within_its_credits(start: Start) -> None:
    worker = start("async def f(n: int):\n    for i in range(n):\n        yield i", kind="async_generator")
    number = worker.run(b'{"n": 3}', stream=True, credits=1)
    assert worker.item() == b"0"
    worker.send(Credit(number, 5))
    assert [worker.item(), worker.item()] == [b"1", b"2"]
    assert worker.result()[0].kind.value == "succeeded"


@pytest.mark.parametrize("kind", ["generator", "async_generator"])
def test_a_followed_generator_sends_previews_and_answers_with_the_list(start: Start, kind: str) -> None:
    code = (
        "def f():\n    yield 1\n    yield object()\n    yield 3"
        if kind == "generator"
        else ("async def f():\n    yield 1\n    yield 2")
    )
    worker = start(code, kind=kind)
    worker.run(is_live=True)
    assert worker.next() == (LiveItem(1, 0, "application/json"), b"1")
    if kind == "generator":  # an item that cannot be encoded ends the previews; the result reports it
        assert worker.result()[0].kind.value == "raised"
    else:
        assert worker.next() == (LiveItem(1, 1, "application/json"), b"2")
        assert worker.result()[1] == b"[1,2]"


def test_the_previews_of_a_call_are_limited(start: Start) -> None:
    worker = start("def f():\n    for n in range(3):\n        yield 'x' * (3 << 19)", kind="generator")
    worker.run(is_live=True, accept="application/json")
    for number in range(2):
        frame, body = worker.next()
        assert (frame, len(body)) == (LiveItem(1, number, "application/json"), (3 << 19) + 2)
    assert worker.result()[0].kind.value == "succeeded"


def test_an_unstreamed_generator_returns_the_list_of_its_items(start: Start) -> None:
    worker = start("def f():\n    yield 1\n    yield 2", kind="generator")
    assert worker.call() == b"[1,2]"


def test_an_unstreamed_async_generator_returns_the_list_of_its_items(start: Start) -> None:
    worker = start("async def f():\n    yield 1\n    yield 2", kind="async_generator")
    assert worker.call() == b"[1,2]"


def test_a_cancelled_stream_closes_its_generator(start: Start) -> None:
    worker = start(
        """
        def f():
            try:
                while True:
                    yield "more"
            finally:
                print("closed")
        """,
        kind="generator",
    )
    number = worker.run(stream=True, credits=1)
    worker.item()
    worker.send(Cancel(number))
    assert worker.result()[0].kind.value == "cancelled"
    assert worker.logs == [(number, "stdout", "closed")]


def test_a_cancelled_async_stream_closes_its_generator(start: Start) -> None:
    worker = start(
        """
        async def f():
            try:
                while True:
                    yield "more"
            finally:
                print("closed")
        """,
        kind="async_generator",
    )
    number = worker.run(stream=True, credits=1)
    worker.item()
    worker.send(Cancel(number))
    assert worker.result()[0].kind.value == "cancelled"
    assert worker.logs == [(number, "stdout", "closed")]


def test_an_exception_in_a_stream_ends_it_after_its_items(start: Start) -> None:
    worker = start("def f():\n    yield 1\n    raise ValueError('enough')", kind="generator")
    worker.run(stream=True, credits=9)
    assert worker.item() == b"1"
    result, _ = worker.result()
    assert (result.kind.value, result.error.message) == ("raised", "enough")


def test_an_item_that_cannot_be_sent_ends_the_stream(start: Start) -> None:
    worker = start("def f():\n    yield object()", kind="generator")
    worker.run(stream=True, credits=9)
    result, _ = worker.result()
    assert (result.kind.value, result.error.code) == ("raised", "result_not_encodable")


def test_a_cancelled_async_call_is_interrupted(start: Start) -> None:
    worker = start(
        """
        import asyncio
        async def f():
            print("here")
            await asyncio.Event().wait()
        """,
        kind="async",
    )
    number = worker.run()
    worker.send(Cancel(number))
    assert worker.result()[0].kind.value == "cancelled"


def test_a_queued_call_that_is_cancelled_never_runs(start: Start) -> None:
    worker = start(
        """
        import threading
        def f(wait: bool, ran=[]):
            if wait:
                import gpufn.call.transport as transport
                from gpufn.call.transport_protocol import EncodedCall, Target
                transport.current().call(EncodedCall(Target("other"), "", b""))
            ran.append(wait)
            return ran
        """
    )
    worker.run(b'{"wait": true}')
    call, _ = worker.next()  # so it runs, and waits for our response
    queued = worker.run(b'{"wait": false}')
    worker.send(Cancel(queued))
    result, _ = worker.result()
    assert (result.attempt, result.kind.value) == (queued, "cancelled")
    worker.answer(call.call, media.NATIVE, b"\xc0")
    assert worker.result()[1] == b"[true]"


def test_a_class_keeps_its_state_between_calls_and_runs_its_hooks_in_the_same_thread(start: Start) -> None:
    worker = start(
        """
        import threading
        def hook(kind):
            def mark(f): f.__gpufn_hook__ = kind; return f
            return mark
        class Base:
            @hook("enter")
            def first(self): self.seen = ["first"]
        class C(Base):
            @hook("enter")
            def second(self): self.seen.append("second"); self.thread = threading.get_ident()
            @hook("exit")
            def bye(self): print("bye")
            @hook("method")
            def look(self, more: str): self.seen.append(more); return self.seen
            @hook("method")
            def same_thread(self): return threading.get_ident() == self.thread
            @hook("method")
            async def other(self): return len(self.seen)
        """,
        qualname="C",
        methods={"look": "sync", "same_thread": "sync", "other": "async"},
    )
    assert worker.call(b'{"more": "a"}', method="look") == b'["first","second","a"]'
    assert worker.call(method="same_thread") == b"true"
    assert worker.call(method="other") == b"3"
    kind, error = worker.failure(method="missing")
    assert (kind, error.field) == ("rejected", "method")
    assert "look, same_thread, other" in error.message


def test_async_hooks_run_on_the_loop_of_the_calls(start: Start) -> None:
    worker = start(
        """
        import asyncio
        class C:
            async def setup(self): self.loop = asyncio.get_running_loop()
            setup.__gpufn_hook__ = "enter"
            async def same(self): return asyncio.get_running_loop() is self.loop
        """,
        qualname="C",
        methods={"same": "async"},
    )
    assert worker.call(method="same") == b"true"


def test_numpy_arrays_travel_between_python_and_python(start: Start) -> None:
    import numpy as np

    worker = start("def f(x, scale=1): return (x * scale, {'shape': x.shape})")
    body = values.encode_call((np.ones((2, 3), "float32"),), {"scale": 2})
    answer = worker.call(body, content_type=media.NATIVE, accept=media.NATIVE)
    array, about = values.decode_value(media.NATIVE, answer)
    assert (array.dtype, array.tolist(), about) == ("float32", [[2.0] * 3] * 2, {"shape": (2, 3)})


def test_a_body_of_any_other_type_is_the_one_bytes_parameter(start: Start) -> None:
    worker = start("def f(image: bytes, top: int = 3): return [len(image), top]", raw="image")
    assert worker.call(b"\xff\xd8..", content_type="image/jpeg") == b"[4,3]"
    assert worker.call(b'{"image": "AAAA"}') == b"[3,3]"


def test_bytes_answer_as_bytes(start: Start) -> None:
    worker = start("def f(): return b'\\x00\\x01'")
    worker.run(accept="*/*")
    result, body = worker.result()
    assert (result.content_type, body) == ("application/octet-stream", b"\x00\x01")


def test_a_large_input_and_result_travel_whole(start: Start) -> None:
    worker = start("def f(data: bytes): return data[::-1]", raw="data")
    data = bytes(range(256)) * (4 << 12)
    worker.run(data, content_type="application/octet-stream")
    assert worker.result()[1] == data[::-1]


def test_a_nested_call_is_sent_through_the_runner_and_names_its_parent(start: Start) -> None:
    worker = start(
        """
        from gpufn.call import transport as _transport
        from gpufn.call.transport_protocol import EncodedCall, Target
        from gpufn_core.encoding import media, values
        def f(x: int):
            call = EncodedCall(Target("other", "m"), media.NATIVE, values.encode_call((x,), {}))
            answer = _transport.current().call(call)
            return values.decode_value(*answer) + 1
        """
    )
    number = worker.run(b'{"x": 20}')
    call, body = worker.next()
    assert (call.verb, call.target, call.method, call.accept, call.parent) == (
        "call", "other", "m", media.NATIVE, number,
    )  # fmt: skip
    assert values.decode_call(body) == ([20], {})
    worker.answer(call.call, *values.encode_result(41, media.NATIVE))
    assert worker.result()[1] == b"42"


def test_an_exception_of_a_nested_call_keeps_its_type_between_workers(start: Start) -> None:
    worker = start(
        """
        from gpufn import gpu_function
        @gpu_function
        def other(x: int) -> int: ...
        def f(passes: bool):
            try:
                return other.remote(1)
            except KeyError as error:
                if passes:
                    raise
                return str(error)
        """
    )
    error = ErrorInfo("function_raised", "'x'", error_type="KeyError", error_classes=("builtins:KeyError",))
    worker.run(b'{"passes": false}')
    worker.answer(worker.next()[0].call, "", b"", OutcomeKind.RAISED, error)
    assert worker.result()[1] == b"\"KeyError: 'x'\""
    worker.run(b'{"passes": true}')
    worker.answer(worker.next()[0].call, "", b"", OutcomeKind.RAISED, error)
    passed = worker.result()[0].error
    assert passed is not None
    assert "builtins:KeyError" in passed.error_classes
    assert "KeyError" in passed.error_bases  # which Retry(on=[KeyError]) compares


def test_a_nested_call_whose_task_is_cancelled_is_closed(start: Start) -> None:
    worker = start(
        """
        from gpufn import gpu_function
        @gpu_function
        def other(x: int) -> int: ...
        async def f():
            await other.aio.remote(1)
        """,
        kind="async",
    )
    number = worker.run()
    call, _ = worker.next()
    worker.send(Cancel(number))
    frames = [worker.next()[0] for _ in range(2)]  # either thread may report it first
    assert sorted(type(frame).__name__ for frame in frames) == ["CloseCall", "Result"]
    assert [frame.call for frame in frames if type(frame).__name__ == "CloseCall"] == [call.call]


def test_a_nested_stream_is_read_item_by_item_and_closed_when_left(start: Start) -> None:
    worker = start(
        """
        from gpufn.call import transport as _transport
        from gpufn.call.transport_protocol import EncodedCall, Target
        def f():
            items = _transport.current().stream(EncodedCall(Target("other"), "", b""))
            first = next(items)
            items.close()
            return first[1].decode()
        """
    )
    worker.run()
    call, _ = worker.next()
    worker.answer_item(call.call, b"one")
    closed, _ = worker.next()
    assert (call.verb, type(closed).__name__, closed.call) == ("stream", "CloseCall", call.call)
    assert worker.result()[1] == b'"one"'


def test_a_nested_call_that_fails_raises_the_error_it_failed_with(start: Start) -> None:
    worker = start(
        """
        from gpufn import errors
        from gpufn.call import transport as _transport
        def f(verb: str, expected: str):
            try:
                getattr(_transport.current(), verb)("x")
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        """
    )
    from gpufn_core.domain.invocation import OutcomeKind
    from gpufn_core.errors import InvocationNotFound

    worker.run(json.dumps({"verb": "status", "expected": ""}).encode())
    call, _ = worker.next()
    worker.answer(call.call, "", b"", OutcomeKind.REJECTED, InvocationNotFound("no x").info())
    assert worker.result()[1] == b'"InvocationNotFound: no x"'
    worker.run(json.dumps({"verb": "result", "expected": ""}).encode())
    call, _ = worker.next()
    worker.answer(call.call, "", b"", OutcomeKind.EXPIRED)
    assert worker.result()[1] == b'"TimeoutError: invocation x has not ended yet"'
