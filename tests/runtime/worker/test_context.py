"""`gpufn.current()` in a real worker process: the frames that its runner receives, and its responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.encoding import media, values
from gpufn_core.errors import BusUnavailable, PayloadTooLarge
from gpufn_core.protocol.frames import Call, Progress, Ready, Result

Start = Any


def test_a_call_knows_its_id_its_attempt_and_its_deadline(start: Start) -> None:
    worker = start(
        """
        import gpufn
        def f():
            ctx = gpufn.current()
            return [ctx.invocation, ctx.attempt, ctx.deadline, gpufn.current() is ctx]
        """
    )
    assert json.loads(worker.call(number=3, deadline=1234.5)) == ["i1", 3, 1234.5, True]
    assert json.loads(worker.call()) == ["i2", 1, None, True]


def test_progress_is_sent_to_the_runner_from_any_thread_with_the_context(start: Start) -> None:
    worker = start(
        """
        import threading
        import gpufn
        def f():
            ctx = gpufn.current()
            thread = threading.Thread(target=ctx.progress, args=(1, "done"))
            thread.start()
            thread.join()
            return True
        """
    )
    number = worker.run()
    assert worker.next()[0] == Progress(number, 1.0, "done")
    assert worker.result()[1] == b"true"


def test_a_progress_text_may_have_any_length(start: Start) -> None:
    """Regression: the runner disconnected on a message longer than a frame's header may be."""
    worker = start("import gpufn\ndef f(): gpufn.current().progress(1, '\\udcff' + 'x' * 2_000_000)")
    number = worker.run()
    assert worker.next()[0] == Progress(number, 1.0, "\\udcff" + "x" * 499)
    assert worker.result()[1] == b"null"


def test_a_checkpoint_returns_when_it_is_stored_and_a_refusal_is_raised(start: Start) -> None:
    worker = start(
        """
        import gpufn
        from gpufn.errors import PayloadTooLarge
        def f():
            ctx = gpufn.current()
            ctx.checkpoint({"step": 1})
            try:
                ctx.checkpoint({"step": 2})
            except PayloadTooLarge as error:
                return error.message
        """
    )
    number = worker.run()
    call, body = worker.next()
    assert isinstance(call, Call)
    assert (call.verb, call.parent, call.content_type) == ("checkpoint", number, media.NATIVE)
    assert values.decode_value(call.content_type, body) == {"step": 1}
    worker.answer(call.call, "", b"")
    call, _ = worker.next()
    worker.answer(call.call, "", b"", OutcomeKind.REJECTED, PayloadTooLarge("no room").info())
    assert worker.result()[1] == b'"no room"'


def test_a_checkpoint_of_an_earlier_attempt_is_fetched_on_request(start: Start) -> None:
    worker = start(
        """
        import gpufn
        async def f():
            return gpufn.current().restored
        """,
        kind="async",
    )
    number = worker.run(number=2)
    call, _ = worker.next()
    assert isinstance(call, Call)
    assert (call.verb, call.parent) == ("restore", number)
    worker.answer(call.call, *values.encode_result([1, 2], media.NATIVE))
    assert worker.result()[1] == b"[1,2]"


def test_a_checkpoint_that_cannot_be_stored_ends_the_call_with_the_reason(start: Start) -> None:
    worker = start("import gpufn\ndef f(): gpufn.current().checkpoint(1)")
    worker.run()
    call, _ = worker.next()
    worker.answer(call.call, "", b"", OutcomeKind.REJECTED, BusUnavailable("no bus").info())
    result, _ = worker.result()
    assert (result.kind, result.error.code, result.error.message) == ("lost", "bus_unavailable", "no bus")


def test_where_no_single_call_runs_there_is_no_context(start: Start) -> None:
    worker = start(
        """
        import gpufn
        from gpufn.errors import InvalidInput
        try:
            gpufn.current()
        except InvalidInput as error:
            why = error.message
        def f(): return why
        """
    )
    assert b"gpufn.current() needs exactly one current call: there is none in a hook" in worker.call()


def test_a_request_of_a_call_without_a_runner_gets_its_response_from_the_next_runner(
    start: Start, tmp_path: Path
) -> None:
    """Regression: its request was lost: it would have waited for a response forever, and kept its slot."""
    worker = start(
        """
        import gpufn, pathlib
        from gpufn.errors import PlatformError
        def f(noticed: str = ""):
            if not noticed:
                return True
            try:
                gpufn.current().checkpoint(0)
            except PlatformError:  # so the worker knows that its runner is gone
                pathlib.Path(noticed).touch()
            gpufn.current().checkpoint(1)
        """
    )
    noticed = tmp_path / "noticed"
    worker.run(json.dumps({"noticed": str(noticed)}).encode())
    assert isinstance(worker.next()[0], Call)
    worker.hang_up()
    while not noticed.exists():
        pass
    worker.listen()
    assert worker.accept().running == 1
    assert isinstance(worker.next()[0], Ready)
    while not worker.freed:
        worker.run()
        frame, _ = worker.next()
        if isinstance(frame, Call):  # it asked so late that there was a runner again
            worker.answer(frame.call, "", b"", OutcomeKind.REJECTED, BusUnavailable("no bus").info())
            frame, _ = worker.next()
        assert isinstance(frame, Result)
