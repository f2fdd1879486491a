"""`gpufn calls` and `gpufn dlq` against canned answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpufn.cli import app
from tests.sdk.conftest import StubGateway

ID = "0" * 26
LETTER = {
    "id": ID,
    "function": "f",
    "revision": 3,
    "state": "failed",
    "submitted_at": 1.0,
    "died_at": 2.0,
    "error": {"code": "function_raised", "message": "no\nmore", "error_type": "ValueError", "traceback": "Traceback"},
    "attempts": [
        {"number": 1, "outcome": "lost", "ended_at": 1.5, "worker": "w-1", "code": "worker_lost", "message": "killed"},
        {"number": 2, "outcome": "raised", "ended_at": 2.0, "worker": "w-2", "message": "no"},
    ],
    "size": 2,
}


def _gpufn(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_calls_of_all_functions_name_theirs(gateway: StubGateway) -> None:
    timings = {"queue_s": 3.0, "launch_s": 0.5, "load_s": 2.0, "run_s": 0.1}
    call = {"id": ID, "state": "running", "function": "f.run", "submitted_at": 1.0, "timings": timings}
    gateway.on("GET /v1/calls", {"calls": [call]})
    result = _gpufn("calls", "--state", "running", "--function", "f", "--since", "2h", "-n", "5")
    assert "f.run" in result.stdout
    assert "2.5 s" in result.stdout  # the cold start
    query = gateway.requests[-1].path.partition("?")[2]
    assert ("function=f" in query, "state=running" in query, "since=" in query, "limit=5" in query) == (True,) * 4


def test_failed_items_of_maps_are_listed_with_failed_calls(gateway: StubGateway) -> None:
    call = {"id": ID, "state": "failed", "function": "f", "submitted_at": 5.0, "error": LETTER["error"]}
    item = LETTER | {"id": f"{ID}-17", "submitted_at": 9.0}
    gateway.on("GET /v1/calls", {"calls": [call]})
    gateway.on("GET /v1/dlq", {"letters": [LETTER, item, item | {"id": f"{ID}-18", "state": "expired"}]})
    lines = _gpufn("calls", "--state", "failed").stdout.splitlines()[1:]
    assert [line.split()[:3] for line in lines] == [[f"{ID}-17", "f", "failed"], [ID, "f", "failed"]]
    gone = _gpufn("calls", "--function", "gone", "--state", "failed")  # the stub has no letters of this function: 404
    assert (gone.exit_code, gone.stdout.count(ID)) == (0, 1)


def test_a_list_of_calls_follows_pages_until_there_are_enough(gateway: StubGateway) -> None:
    calls = [
        {"id": f"{ID[:-1]}{number}", "state": "queued", "function": "f", "submitted_at": 1.0} for number in range(4)
    ]
    for page, following in ((calls[:1], "9.0"), ([], "5.0"), (calls[1:], "1.0")):
        gateway.on("GET /v1/calls", {"calls": page, "next": following})
    lines = _gpufn("calls", "--key", "k1", "-n", "4").stdout.splitlines()[1:]
    assert len(lines) == 4
    queries = [request.path for request in gateway.requests if "/v1/calls" in request.path]
    assert ["before=9.0" in queries[1], "before=5.0&limit=3" in queries[2], len(queries)] == [True, True, 3]
    assert all("key=k1" in query for query in queries)


def test_usage_is_added_up_by_the_requested_columns(gateway: StubGateway) -> None:
    took = {"calls": 2, "failed": 1, "run_s": 90.0, "gpu_s": 22.5}
    days = ("2026-11-20", "2026-11-21")
    rows = [{"day": day, "function": "f", "key": "platform", "usage": took} for day in days]
    gateway.on("GET /v1/usage", {"usage": rows})
    table = [line.split() for line in _gpufn("usage", "f", "--since", "1d").stdout.splitlines()[1:]]
    assert table == [[day, "f", "platform", "2", "1", "90", "s", "22.5", "-", "-"] for day in days]
    assert "function=f&since=20" in gateway.requests[-1].path
    added = _gpufn("usage", "--by", "function").stdout.splitlines()
    assert [line.split() for line in added] == [
        ["FUNCTION", "ATTEMPTS", "FAILED", "RAN", "GPU", "SECONDS", "JOULES", "PER", "ATTEMPT"],
        ["f", "4", "2", "3", "min", "45.0", "-", "-"],
    ]  # fmt: skip
    totals = json.loads(_gpufn("usage", "--by", "key", "--json").stdout)
    known = {"calls": 4, "failed": 2, "run_s": 180.0, "gpu_s": 45.0}
    assert totals == [{"key": "platform", "usage": known | {"joules": None, "joules_calls": 0}}]


def test_the_joules_per_call_count_only_calls_with_known_energy(gateway: StubGateway) -> None:
    unknown = {"calls": 4, "run_s": 9.0, "gpu_s": 9.0}
    usage = {"2026-11-20": unknown | {"joules": 1800.0, "joules_calls": 3}, "2026-11-21": unknown}
    rows = [{"day": day, "function": "f", "key": "platform", "usage": each} for day, each in usage.items()]
    gateway.on("GET /v1/usage", {"usage": rows})
    assert _gpufn("usage", "--by", "function").stdout.split()[-2:] == ["1,800.0", "600.0"]


def test_a_list_without_usage_shows_its_start_and_that_the_last_seconds_are_missing(
    gateway: StubGateway,
) -> None:
    gateway.on("GET /v1/usage", {"usage": []})
    result = _gpufn("usage", "f")
    day = gateway.requests[-1].path.partition("since=")[2]
    message = f"no calls have ended since {day}; a call is counted within 10 s of its end\n"
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", message)


def test_a_time_that_is_none_is_refused(gateway: StubGateway) -> None:
    result = _gpufn("calls", "--since", "yesterday")
    assert (result.exit_code, result.stderr) == (2, "gpufn: --since: write 90s, 15m, 2h or 3d, not 'yesterday'\n")


def test_dead_letters_are_listed_and_shown(gateway: StubGateway, tmp_path: Path) -> None:
    gateway.on("GET /v1/dlq", {"letters": [LETTER]})
    gateway.on(f"GET /v1/dlq/f/{ID}", LETTER)
    gateway.on(f"GET /v1/dlq/f/{ID}/payload", b"{}")
    for arguments in (("dlq",), ("dlq", "ls")):
        assert "ValueError: no\n" in _gpufn(*arguments).stdout
    assert json.loads(_gpufn("dlq", "ls", "--json").stdout)[0]["id"] == ID
    shown = _gpufn("dlq", "show", "f", ID, "--payload", str(tmp_path / "payload")).stdout
    assert shown.splitlines()[0].startswith("f@3  failed ")
    assert [word in shown for word in ("lost", "killed", "w-2", "Traceback")] == [True] * 4
    assert (tmp_path / "payload").read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("arguments", "request_line", "answer", "output"),
    [
        (("replay", "f", ID), f"POST /v1/dlq/f/{ID}/replay", {"id": "1" * 26, "state": "queued"}, "1" * 26),
        (("replay", "f", "--all"), "POST /v1/dlq/f/replay", {"replayed": [{"letter": ID, "invocation": "x"}]}, "x"),
        (("drop", "f", ID, "--yes"), f"DELETE /v1/dlq/f/{ID}", {}, "dropped 1"),
        (("drop", "f", "--all", "--yes"), "DELETE /v1/dlq/f", {"dropped": 7}, "dropped 7"),
    ],
)
def test_dead_letters_are_replayed_or_dropped(
    gateway: StubGateway, arguments: tuple[str, ...], request_line: str, answer: Any, output: str
) -> None:
    gateway.on(request_line, answer)
    assert _gpufn("dlq", *arguments).stdout == f"{output}\n"


@pytest.mark.parametrize("verb", ["replay", "drop"])
def test_either_one_dead_letter_or_all_must_be_named(gateway: StubGateway, verb: str) -> None:
    for arguments in (("f",), ("f", ID, "--all")):
        result = _gpufn("dlq", verb, *arguments)
        assert (result.exit_code, "--all" in result.stderr) == (2, True)
    assert gateway.requests == []


def test_a_letter_that_is_not_there_is_not_found(gateway: StubGateway) -> None:
    problem = {"code": "dead_letter_not_found", "detail": "There is no dead letter"}
    gateway.on(f"GET /v1/dlq/f/{ID}", problem, 404, content_type="application/problem+json")
    assert _gpufn("dlq", "show", "f", ID).exit_code == 4


def test_the_status_of_a_call_shows_the_reason_of_its_wait_and_its_attempts(gateway: StubGateway) -> None:
    waiting = {"reason": "retry", "detail": "attempt 3 starts in 1.5 s", "eta_s": 1.5}
    call = {
        "id": ID,
        "function": "f",
        "revision": 3,
        "state": "queued",
        "attempt": 3,
        "submitted_at": 1.0,
        "waiting": waiting,
        "eta_s": 1.5,
        "attempts": LETTER["attempts"],
        "parent": "01k9xq3zr7c8m2v5t0w4y6b1d4",
    }
    gateway.on(f"GET /v1/invocations/{ID}", call)
    lines = _gpufn("status", ID).stdout.splitlines()
    assert [line.split(maxsplit=1) for line in lines[:5]] == [
        ["call", "f@3"],
        ["state", "queued, attempt 3"],
        ["called", "by  01k9xq3zr7c8m2v5t0w4y6b1d4"],
        ["waiting", "attempt 3 starts in 1.5 s (retry)"],
        ["starts", "in  1.5 s"],
    ]
    assert [line.split()[:3] for line in lines[-2:]] == [["1", "lost", "w-1"], ["2", "raised", "w-2"]]
    assert json.loads(_gpufn("status", ID, "--json").stdout)["eta_s"] == 1.5


def test_the_status_of_a_failed_call_shows_the_type_of_its_error_as_the_list_does(gateway: StubGateway) -> None:
    call = {"id": ID, "function": "f", "state": "failed", "error": LETTER["error"]}
    gateway.on(f"GET /v1/invocations/{ID}", call)
    gateway.on("GET /v1/calls", {"calls": [call]})
    gateway.on("GET /v1/maps", {"maps": []})
    assert "error" in (output := _gpufn("status", ID).stdout)
    assert output.splitlines()[-1].split(maxsplit=1) == ["error", "ValueError: no"]
    assert _gpufn("calls").stdout.rstrip().endswith("ValueError: no")


def test_map_names_the_faults_of_its_items(gateway: StubGateway, tmp_path: Path) -> None:
    gateway.on("GET /v1/functions/f", {"name": "f", "active": 1, "serving": 1, "latest": 1})
    (lines := tmp_path / "lines.jsonl").write_text("\n[1]\n")
    for data, code, text in (
        ('{"x": 1}', 2, "pass the items as @FILE"),
        (f"@{tmp_path}/missing", 2, "No such file"),
        (f"@{lines}", 2, "gpufn: --data: line 2: write a JSON object such as '{\"x\": 1}', not '[1]': "),
    ):
        result = _gpufn("map", "f", "-d", data)
        assert result.exit_code == code
        assert text in result.output
    assert {request.method for request in gateway.requests} == {"GET"}


def test_a_map_is_requested_if_no_call_is_found(gateway: StubGateway) -> None:
    nothing = b'{"code": "invocation_not_found", "detail": "There is no invocation with this id."}'
    gateway.on(f"GET /v1/invocations/{ID}", nothing, 404, content_type="application/problem+json")
    gateway.on(f"DELETE /v1/invocations/{ID}", nothing, 404, content_type="application/problem+json")
    view = {"id": ID, "function": "f", "revision": 2, "state": "running", "accepted": 5000, "ended": 1200}
    gateway.on(f"GET /v1/maps/{ID}", view)
    gateway.on(f"DELETE /v1/maps/{ID}", view | {"cancelled": True})
    assert "1,200 of 5,000 have ended" in _gpufn("status", ID).stdout
    assert json.loads(_gpufn("status", ID, "--json").stdout)["accepted"] == 5000
    assert _gpufn("cancel", ID).stdout == f"cancelled {ID}\n"
    gateway.on(f"GET /v1/invocations/{ID}/result", nothing, 404, content_type="application/problem+json")
    result = _gpufn("result", ID)
    assert (result.exit_code, f"`gpufn result {ID}-0`" in result.stderr) == (4, True)
    gateway.answers[f"GET /v1/maps/{ID}"] = []
    gateway.on(f"GET /v1/maps/{ID}", b'{"code": "map_not_found"}', 404, content_type="application/problem+json")
    result = _gpufn("status", ID)
    assert (result.exit_code, "no invocation" in result.output) == (4, True)
    result = _gpufn("result", ID)
    assert (result.exit_code, "no invocation" in result.output) == (4, True)


def test_the_calls_of_a_method_belong_to_its_class(gateway: StubGateway) -> None:
    """Maps were requested under the method's name, which is not a function's name."""
    gateway.on("GET /v1/functions/f.run/calls", {"calls": []})
    gateway.on("GET /v1/maps", {"maps": []})
    assert _gpufn("calls", "f.run").exit_code == 0
    assert "function=f&" in gateway.requests[-1].path + "&"
