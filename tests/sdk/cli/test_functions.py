"""Commands that show and change functions, and the other lists."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from tests.sdk.cli.commands import VIEW, command
from tests.sdk.conftest import StubGateway


def test_a_function_without_lines_is_reported(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f/logs", b"")
    result = command("logs", "f")
    assert (result.stdout, result.stderr.startswith("f has no ")) == ("", True)


def test_zero_requested_lines_do_not_report_an_empty_log(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f/logs", b"")
    result = command("logs", "f", "-n", "0")
    assert (result.stdout, result.stderr) == ("", "")


def test_a_log_marks_the_beginning_of_another_revision(gateway: StubGateway) -> None:
    line = {"at": 1.0, "function": "f", "worker": "w", "stream": "stdout", "text": "hi"}
    lines = [json.dumps(line | {"revision": revision}).encode() for revision in (1, 1, 2)]
    gateway.on("GET /v1/functions/f/logs", b"\n".join(lines))
    day = time.strftime("%Y-%m-%d", time.localtime(1.0))
    shown = [text if text.startswith("---") else "line" for text in command("logs", "f").stdout.splitlines()]
    assert shown == [f"--- {day}  f@1", "line", "line", f"--- {day}  f@2", "line"]


def test_a_log_line_with_a_newline_looks_like_no_other_line(gateway: StubGateway) -> None:
    forged = "x\n00:00:00  w  # worker_lost: the platform"
    line = {"at": 1.0, "function": "f", "worker": "w", "stream": "stdout", "text": forged, "revision": 1}
    gateway.on("GET /v1/functions/f/logs", json.dumps(line).encode())
    _, _, second = command("logs", "f").stdout.splitlines()
    assert second == "    00:00:00  w  # worker_lost: the platform"


def test_the_command_that_advice_proposes_works(gateway: StubGateway) -> None:
    """Bug: it named the option --min-workers, which `gpufn scale` does not have."""
    advice = {"option": "min_workers", "finding": "rarely called", "value": "0", "scale": {"min_workers": 0}}
    gateway.on("GET /v1/functions/f/advice", {"function": "f", "advice": [advice]})
    gateway.on("POST /v1/functions/f/scale", VIEW | {"min_workers": 0, "max_workers": 4})
    proposed = command("advise", "f").stderr.strip().partition("gpufn ")[2]
    assert command(*proposed.split()).exit_code == 0
    assert gateway.requests[-1].json == {"min_workers": 0, "max_workers": None}


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(0, 0, "f has no workers: its calls wait"), (2, 2, "f has 2 workers"), (0, 1, "f has 0 to 1 worker")],
)
def test_scale_describes_its_effect(gateway: StubGateway, low: int, high: int, text: str) -> None:
    gateway.on("POST /v1/functions/f/scale", VIEW | {"min_workers": low, "max_workers": high})
    assert command("scale", "f").stdout == f"{text}\n"


def test_ls_in_a_pipe_is_aligned_text(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions", {"functions": [VIEW]})
    header, row = command("ls").stdout.splitlines()
    assert header.split() == ["NAME", "REVISION", "WORKERS", "QUEUED", "RUNNING", "UPDATED", "NOTE"]
    assert row.startswith("f     3 (still serving 2)  2 ready, 1 starting  ?       1 ")
    assert row.endswith("calls wait: " + VIEW["waiting"]["detail"])


SPLIT = {
    "weights": {"2": 90, "3": 10},
    "headers": [{"name": "x-canary", "value": "1", "revision": 3}],
    "mirror": {"revision": 4, "percent": 5.0, "tolerance": 1e-5},
}


def test_ls_and_describe_show_a_split(gateway: StubGateway) -> None:
    view = VIEW | {"active": 2, "traffic": SPLIT}
    gateway.on("GET /v1/functions", {"functions": [view]})
    gateway.on("GET /v1/functions/f", view)
    gateway.on("GET /v1/functions/f/revisions", {"revisions": []})
    text = "2=90%, 3=10%, copies of 5% to 4"
    assert command("ls").stdout.splitlines()[1].startswith(f"f     {text}  2 ready")
    described = command("describe", "f").stdout.splitlines()
    assert f"traffic           {text}" in described
    assert "headers           x-canary=1: revision 3" in described


def test_describe_as_json_is_the_functions_view(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f", VIEW)
    view = json.loads(command("describe", "f", "--json").stdout)
    assert {name: view[name] for name in VIEW} == VIEW


def test_describe_names_the_source_of_a_figure(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f", VIEW)
    gateway.on("GET /v1/functions/f/revisions", {"revisions": []})
    lines = command("describe", "f").stdout.splitlines()
    assert "min, max workers  0, 8 (gpufn scale)" in lines
    assert "gpu               L4, time" in lines


def test_describe_names_the_file_the_deployer_and_the_time_of_the_deploy(gateway: StubGateway) -> None:
    source = {"file": "lib/ocr.py", "project": "vision", "project_id": "1", "deployer": "ada@laptop", "key": "k1"}
    gateway.on("GET /v1/functions/f", VIEW | {"source": source, "deployed_at": time.time() - 300})
    gateway.on("GET /v1/functions/f/revisions", {"revisions": []})
    lines = command("describe", "f").stdout.splitlines()
    fields = dict(line.split(maxsplit=1) for line in lines)
    assert fields["source"].split()[::4] == ["lib/ocr.py", "vision"]
    assert [part.split()[-1] for part in fields["deployed"].split(", ")] == ["ada@laptop", "k1", "ago"]


def test_describe_shows_the_set_options(gateway: StubGateway) -> None:
    spec = VIEW["spec"] | {
        "batch": {"max_size": 16, "max_wait_ms": 2.5},
        "retries": {"attempts": 3, "delay_s": 1.0, "backoff": 2.0, "on": ["OSError"]},
        "queue_timeout_s": 90.0,
        "schedule": {"cron": "0 6 * * *", "timezone": "Europe/Berlin"},
        "webhook": "https://example.org/done",
        "priority": "low",
        "image": {"python": "3.12", "apt": ["libgl1"], "pip": ["torch"]},
    }
    gateway.on("GET /v1/functions/f", VIEW | {"spec": spec, "env": ["HF_HOME", "TOKEN"]})
    gateway.on("GET /v1/functions/f/revisions", {"revisions": []})
    output = command("describe", "f").stdout
    fields = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in output.splitlines())
    assert {name: fields.get(name) for name in ("batch", "retries", "queue timeout", "schedule", "webhook")} == {
        "batch": "up to 16 calls, waiting up to 2.5 ms",
        "retries": "3, after 1 s, on OSError",
        "queue timeout": "90 s",
        "schedule": "0 6 * * * Europe/Berlin",
        "webhook": "https://example.org/done",
    }
    assert (fields.get("priority"), fields.get("env")) == ("low", "HF_HOME, TOKEN")
    assert fields.get("image") == "Python 3.12 with libgl1, torch"
    gateway.answers.clear()
    gateway.on("GET /v1/functions/f/revisions", {"revisions": []})
    gateway.on("GET /v1/functions/f", VIEW | {"spec": spec | {"env": {"TOKEN": "hush"}}, "env": ["TOKEN"]})
    assert "TOKEN=hush" in command("describe", "f", "--env-values").stdout


@pytest.mark.parametrize(
    ("arguments", "request_", "body"),
    [
        (
            ["scale", "f", "--min", "1", "--max", "8"],
            "POST /v1/functions/f/scale",
            {"min_workers": 1, "max_workers": 8},
        ),
        (["scale", "f"], "POST /v1/functions/f/scale", {"min_workers": None, "max_workers": None}),
        (["rollback", "f"], "POST /v1/functions/f/rollback", {}),
        (["rollback", "f", "--revision", "2"], "POST /v1/functions/f/rollback", {"revision": 2}),
    ],
)
def test_changes_are_sent_as_documented(
    gateway: StubGateway, arguments: list[str], request_: str, body: dict[str, Any]
) -> None:
    gateway.on(request_, VIEW | {"serving": 3})
    assert command(*arguments).exit_code == 0
    assert gateway.requests[-1].json == body


def test_rollback_returns_when_calls_go_there(gateway: StubGateway) -> None:
    gateway.on("POST /v1/functions/f/rollback", VIEW)
    gateway.on("GET /v1/functions/f", VIEW)
    gateway.on("GET /v1/functions/f", VIEW | {"serving": 3})
    assert command("rollback", "f").stdout == "f@3 serves\n"
    assert len(gateway.requests) == 3
    assert command("rollback", "f", "--no-wait").stdout == "f@3 is active\n"


@pytest.mark.parametrize(
    "typed",
    ["rm f", "volume rm f", "queue rm f", "dict rm f", "keys rm f", "secrets rm f", "teams rm f", "schedules rm f",
     "signing rm f", "dlq drop f --all"],
)  # fmt: skip
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_commands_that_delete_ask_first_and_do_nothing_without_an_answer(
    gateway: StubGateway, typed: str, options: tuple[str, ...]
) -> None:
    gateway.on("GET /v1/functions/f", VIEW)
    assert command(*typed.split(), *options, input="n\n").exit_code == 1
    unanswered = command(*typed.split(), *options, input="")
    assert (unanswered.exit_code, "--yes" in unanswered.stderr) == (2, True)
    assert {request.method for request in gateway.requests} <= {"GET"}


def test_an_option_answers_the_question_of_a_deletion(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f", VIEW)
    gateway.on("DELETE /v1/functions/f", status=204)
    assert command("rm", "f", "--yes").stdout == "deleted f\n"


def test_the_other_lists_have_a_text_and_a_json_form(gateway: StubGateway) -> None:
    device = {"uuid": "cpu", "type": "cpu", "kind": "EPYC", "memory_bytes": 1 << 30, "cores": 2.0}
    status = {"id": "0" * 26, "state": "failed", "submitted_at": 1.0, "error": {"message": "boom\nmore"}, "attempt": 2}
    line = {"at": 1.0, "function": "f", "revision": 1, "worker": "w-1", "stream": "stderr", "text": "hi"}
    gateway.on("GET /v1/nodes", {"nodes": [{"node": "n1", "sent_at": 1.0, "devices": [device]}]})
    gateway.on("GET /v1/functions/f/calls", {"calls": [status]})
    map_ = {"id": "1" * 26, "function": "f", "state": "open", "submitted_at": 2.0, "accepted": 3000, "ended": 1200}
    gateway.on("GET /v1/maps", {"maps": [map_]})
    gateway.on("GET /v1/functions/f/logs", json.dumps(line).encode())
    start = {"node": "gpu-1", "at": 1.0, "phases": {"place": 0.0, "load": 2.0}}
    decision = {"function": "f", "reason": "because", "terms": {"calls": 2.0}, "last_start": start}
    gateway.on("GET /v1/functions/f/why", decision)
    gateway.on("GET /v1/keys", {"keys": []})
    for arguments, text in {
        ("nodes",): "EPYC, 2 cores",
        ("calls", "f"): "failed, attempt 2",
        ("logs", "f"): "  f@1\n" + time.strftime("%H:%M:%S", time.localtime(1.0)) + "  w-1  ! hi\n",
        ("calls", "f", "-n", "1"): "a map: 1,200 of 3,000 items have ended",
        ("why", "f"): "reason      because\ncalls       unknown yet\nlast start  2 s on gpu-1, ",
        ("why", "f", "--verbose"): "terms       calls 2",
    }.items():
        assert text in command(*arguments).stdout
        json.loads(command(*arguments, "--json").stdout)
    assert (command("keys", "ls").stdout, command("keys", "ls", "--json").stdout) == ("", "[]\n")


@pytest.mark.parametrize("noun", ["builds", "dlq", "engines", "keys", "models", "schedules"])
def test_a_noun_alone_lists(gateway: StubGateway, noun: str) -> None:
    path = {"dlq": "/v1/dlq?limit=20"}.get(noun, f"/v1/{noun}")
    gateway.on(f"GET {path.partition('?')[0]}", {"letters" if noun == "dlq" else noun: []})
    assert (command(noun).exit_code, command(noun, "--json").stdout) == (0, "[]\n")
    assert {request.path for request in gateway.requests} == {path}
    assert command(noun, "nothing").exit_code == 2


def test_an_error_that_prevents_a_start_has_its_type(gateway: StubGateway) -> None:
    error = {"code": "function_start_failed", "message": "'missing-key'", "error_type": "KeyError"}
    gateway.on("GET /v1/functions/f/why", {"function": "f", "start_error": error})
    view = {"name": "f", "active": 1, "serving": 1, "latest": 1, "start_error": error}
    gateway.on("GET /v1/functions", {"functions": [view]})
    assert "last start error  KeyError: 'missing-key'" in command("why", "f").stdout
    assert command("ls").stdout.endswith(": KeyError: 'missing-key'\n")


def test_costs_of_functions_without_a_team_are_not_called_unused(gateway: StubGateway) -> None:
    row = {"used": 0.0, "idle": 0.0, "cpu": 0.00003, "unused": 0.0, "total": 0.00003, "calls": 1067}
    gateway.on("GET /v1/costs", {"currency": "EUR", "costs": [row], "budgets": []})
    assert "(no team)" in (shown := command("cost", "--by", "team").stdout)
    assert "0.000000028" in shown
    assert "ATTEMPTS" in shown.upper()
    assert "(unused)" in command("cost").stdout


def test_cost_waits_until_the_gateway_has_loaded_its_history(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufn.client.http._LOADING_RETRY_S", 0.0)
    loading = {"code": "history_unavailable", "detail": "the history is not loaded yet"}
    for _ in range(3):
        gateway.on("GET /v1/costs", loading, status=503, retry_after="1")
    gateway.on("GET /v1/costs", {"currency": "EUR", "costs": [], "budgets": []})
    assert command("cost").exit_code == 0
    monkeypatch.setattr("gpufn.client.http._LOADING_S", 0.0)
    gateway.on("GET /v1/costs", loading, status=503)
    result = command("cost")
    while result.exit_code == 0:
        result = command("cost")
    assert "not loaded yet" in result.stderr


_NAMES = ("clf", "clf=3f2a9c1b0d", "run-3c31j5szwv/default/f", "dev-ada/default/g", "dev-ada/default/f")


@pytest.mark.parametrize(
    ("options", "functions"),
    [((), {"clf": 2, "dev-ada/default/f": 1, "(temporary functions)": 2}), (("--all",), dict.fromkeys(_NAMES, 1))],
)
def test_what_has_ended_is_charged_to_its_function_or_to_one_row(
    gateway: StubGateway, options: tuple[str, ...], functions: dict[str, int]
) -> None:
    used = {"calls": 1, "failed": 0, "run_s": 1.0, "gpu_s": 1.0}
    rows = [{"day": "2026-11-28", "function": name, "key": "platform", "usage": used} for name in _NAMES]
    gateway.on("GET /v1/usage", {"usage": rows})
    gateway.on("GET /v1/functions", {"functions": [VIEW | {"name": "dev-ada/default/f"}]})
    usage = json.loads(command("usage", "--by", "function", "--json", *options).stdout)
    assert {row["function"]: row["usage"]["calls"] for row in usage} == functions
    costs = [{"function": name, "calls": 1, "total": 0.5, "joules": None} for name in _NAMES]
    gateway.on("GET /v1/costs", {"currency": "EUR", "costs": costs, "budgets": []})
    cost = json.loads(command("cost", "--json", *options).stdout)["costs"]
    assert {row["function"]: row["calls"] for row in cost} == functions
    assert sum(row["total"] for row in cost) == 2.5


def test_apps_of_runs_are_one_row(gateway: StubGateway) -> None:
    costs = [
        {"app": app, "calls": 1, "joules": 2.0}
        for app in ("run-3c31j5szwv/default", "dev-ada/a", "prod/a", "dev-ada/b")
    ]
    gateway.on("GET /v1/functions", {"functions": [VIEW | {"name": "dev-ada/b/f"}]})
    gateway.on("GET /v1/costs", {"costs": costs})
    rows = json.loads(command("cost", "--by", "app", "--json").stdout)["costs"]
    assert [(row["app"], row["joules"]) for row in rows] == [
        ("(temporary functions)", 4.0),
        ("prod/a", 2.0),
        ("dev-ada/b", 2.0),
    ]
