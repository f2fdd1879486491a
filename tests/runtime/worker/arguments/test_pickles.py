"""A worker runs code of its bundle, and never code of a caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import pytest

from gpufn_core.encoding import media, values
from tests.runtime.worker.conftest import MakePeer as Start


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _bodies(pickle: bytes) -> list[bytes]:
    exts = [msgspec.msgpack.Ext(40, pickle), msgspec.msgpack.Ext(41, msgspec.msgpack.encode(["Exploit", pickle]))]
    nested = [msgspec.msgpack.Ext(1, msgspec.msgpack.encode([ext])) for ext in exts]
    return [msgspec.msgpack.encode({"args": [ext], "kwargs": {}}) for ext in (*exts, *nested)]


@pytest.mark.parametrize("content_type", [media.NATIVE, media.PICKLED])
def test_no_caller_runs_code_in_a_worker(start: Start, tmp_path: Path, content_type: str) -> None:
    made = tmp_path / "made"
    worker = start("def f(x): return 1")
    for body in _bodies(cloudpickle.dumps(Exploit(made))):
        assert worker.failure(body, content_type=content_type)[0] == "rejected"
    assert not made.exists()
    assert worker.call(b'{"x": 1}') == b"1"


def test_the_option_is_for_the_type_of_pickles_only(start: Start, tmp_path: Path) -> None:
    made = tmp_path / "made"
    worker = start("def f(x): return 1", pickle=True)
    for body in _bodies(cloudpickle.dumps(Exploit(made))):
        assert worker.failure(body, content_type=media.NATIVE)[0] == "rejected"
    assert not made.exists()


def test_a_function_with_the_option_accepts_and_returns_pickles(start: Start) -> None:
    worker = start("def f(g): return lambda x: g(x) + 1", pickle=True)
    worker.run(
        values.encode_call((lambda x: 2 * x,), {}, may_pickle=True), content_type=media.PICKLED, accept=media.NATIVE
    )
    result, body = worker.result()
    assert result.content_type == media.PICKLED
    assert values.decode_value(result.content_type, body, allow_pickle=True)(20) == 41
    worker.run(values.encode_call((1,), {}), content_type=media.NATIVE, accept=media.NATIVE)
    assert worker.result()[0].content_type == media.PICKLED


@pytest.mark.parametrize("kind", ["sync", "generator"])
def test_an_unencodable_result_fails_the_call_with_the_reason(start: Start, kind: str) -> None:
    give = "yield" if kind == "generator" else "return"
    worker = start(f"class Thing: ...\ndef f(): {give} {{'here': [Thing()]}}", kind=kind)
    outcome, error = worker.failure(accept=media.NATIVE, credits=8)
    assert (outcome, error.code) == ("raised", "result_not_encodable")
    assert ".here[0] is an app.Thing" in error.message
    assert "pickle=True" in error.message


def test_a_caller_chooses_no_class(start: Start) -> None:
    source = """
        import dataclasses
        @dataclasses.dataclass
        class Asked:
            x: int
        @dataclasses.dataclass
        class Secret:
            x: int
        def f(asked: Asked, rest=None): return [type(asked).__name__, type(rest).__name__]
    """
    record = [["app", name, {"x": 1}] for name in ("Asked", "Secret")]
    asked, secret = (msgspec.msgpack.Ext(30, msgspec.msgpack.encode(each)) for each in record)
    body = msgspec.msgpack.encode({"args": [asked, secret], "kwargs": {}})
    assert start(source).call(body, content_type=media.NATIVE) == b'["Asked","dict"]'


def test_a_checkpoint_is_pickled_if_the_function_has_the_option(start: Start) -> None:
    worker = start("import gpufn\ndef f(): gpufn.current().checkpoint(lambda: 1)")
    assert worker.failure()[1].error_type == "InvalidInput"
