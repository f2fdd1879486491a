"""The spec of a terminal: the environment of the function, and none of its calls."""

from __future__ import annotations

import json

import msgspec
import pytest

from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.streams.terminal import Start, parse_start
from gpufn_core.spec.function_spec import Batch, EntryPoint, FunctionSpec, MethodSpec, Retry, ScalingPolicy
from gpufn_core.spec.isolation import Network
from gpufn_core.spec.resources import Resources
from gpufn_core.spec.schedule import Schedule
from gpufn_core.spec.terminal_spec import LONGEST_S, terminal_spec
from gpufn_core.spec.web_spec import WebKind, WebSpec


def test_a_terminal_has_the_environment_of_its_function_and_none_of_its_calls() -> None:
    spec = FunctionSpec(
        name="prod/search/clf",
        entry=EntryPoint("app", "Clf"),
        methods=(MethodSpec("a"), MethodSpec("b")),
        is_class=True,
        constructor={"type": "object"},
        resources=Resources(gpu=("any",), cpu=2),
        scaling=ScalingPolicy(min_workers=2, max_workers=5),
        batch=Batch(max_size=8),
        concurrency=4,
        retries=Retry(3),
        schedule=Schedule("0 3 * * *", method="a"),
        webhook="https://example.org/hook",
        env={"A": "1"},
        secrets=("TOKEN",),
        network=Network.NONE,
        modules=("numpy",),
    )
    terminal = terminal_spec(spec)
    kept = ("name", "entry", "resources", "env", "secrets", "image", "weights", "models", "isolation", "network")
    assert all(getattr(terminal, field) == getattr(spec, field) for field in kept)
    assert (terminal.max_calls, terminal.concurrency, terminal.timeout_s) == (1, 1, LONGEST_S)
    assert (terminal.scaling.min_workers, terminal.scaling.max_workers) == (0, 1)
    assert (terminal.batch, terminal.retries, terminal.schedule, terminal.webhook) == (None, None, None, None)
    assert [method.name for method in terminal.methods] == [""]


def test_a_web_function_has_one_and_a_gang_has_none() -> None:
    web = FunctionSpec(
        name="site",
        entry=EntryPoint("app", "site"),
        methods=(MethodSpec(),),
        web=WebSpec(WebKind.ENDPOINT, methods=("GET",)),
    )
    assert not terminal_spec(web).serves_app
    with pytest.raises(InvalidInput):
        terminal_spec(msgspec.structs.replace(web, web=msgspec.UNSET, resources=Resources(gpu=("any",), nodes=2)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"command": "ls"}',
        '{"command": [""]}',
        '{"command": ["a\\u0000b"]}',
        '{"term": "a\\u0000"}',
        '{"size": {"rows": 0}}',
        '{"size": {"columns": 1e9}}',
        '{"shell": true}',
        f'{{"command": {json.dumps(["x"] * 1001)}}}',
        f'{{"command": {json.dumps(["x" * 70_000])}}}',
    ],
)
def test_a_start_with_garbage_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_start(text)


def test_a_start_may_leave_all_out() -> None:
    assert parse_start("{}") == Start()
