"""Random faults under load: kill -9, SIGSTOP and SIGTERM of any process, and `gpufn down` and `up`, while clients use
every kind of call.

Afterwards each accepted call has one outcome at every gateway, and its webhook and its dead letter report the same
outcome. All schedules have made their calls, and all builds have ended. No function ran more often than "at least once"
allows. Each start has its own attempt number, and no two runs of a call overlap. No call is stuck, and no resource has
leaked. `--chaos-seconds 60` makes the run longer, and `--chaos-seed random` chooses new faults.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpufn_core.errors import PlatformError
from gpufn_core.ids import new_invocation_id
from gpufn_core.protocol import subjects
from tests.conftest import Platform, http_client, running_platform
from tests.e2e.chaos import ledger
from tests.e2e.chaos.again import Again
from tests.e2e.chaos.callers import Callers
from tests.e2e.chaos.client import Call
from tests.e2e.chaos.cluster import Cluster, behind, leader
from tests.e2e.chaos.faults import Faults, Victim, of_up, terminate, workers
from tests.e2e.chaos.gateway import Gateway, embedded_bus
from tests.e2e.chaos.receiver import Receiver
from tests.e2e.chaos.verdict import (
    WITHIN_S,
    Stock,
    busy,
    ended_again,
    eventually,
    outcomes,
    runs,
    schedules,
    unbuilt,
    wrong_dead_letters,
    wrong_webhooks,
)

pytestmark = pytest.mark.e2e

ALLOWED = {"GPUFN_WEBHOOK_NETWORKS": "127.0.0.0/8"}
APP = Path(__file__).parent / "apps" / "restless.py"
ITEMS = 100  # of a stream
# A kill repeats the running calls of at most twelve slots. A stop repeats them if it outlasts a lease or a delivery.
REPEATED_BY_ONE_FAULT = 16


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    given = request.config.getoption("--chaos-seed")
    return random.SystemRandom().randrange(10**6) if given == "random" else int(given)


@pytest.fixture
def chaos_s(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--chaos-seconds"))


def test_every_accepted_call_has_one_outcome_after_random_faults(tmp_path: Path, seed: int, chaos_s: float) -> None:
    home = tmp_path / "home"
    with (
        running_platform(home, environ=ALLOWED) as platform,
        Gateway(home, embedded_bus(home), ALLOWED) as second,
        contextlib.ExitStack() as stack,
    ):
        again = stack.enter_context(Again(platform, second, ALLOWED))
        down = Victim(lambda: [again.pid], 1, act=again.down_and_up)
        victims = processes(home, second) | {"nats": Victim(of_up(home, "nats"), 2), "down and up": down}
        stock = Stock(home, embedded_bus(home, "admin"), second)
        survives(platform, second, Faults(victims, seed), stock, chaos_s=chaos_s, runs_at=tmp_path / "runs")


def test_every_accepted_call_has_one_outcome_after_deaths_of_stream_leaders(
    tmp_path: Path, seed: int, chaos_s: float
) -> None:
    home, dice = tmp_path / "home", random.Random(seed)

    def a_leader() -> list[int]:
        """Return one node, and none while another node catches up: the bus needs two of three nodes."""
        stream = dice.choice((subjects.SYNC, subjects.ASYNC, subjects.RESULTS, f"KV_{subjects.LEASES}"))
        try:
            return [] if behind(cluster) else [cluster.pid(leader(cluster, stream))]
        except PlatformError:
            return []

    def revive(pid: int) -> None:
        [node] = [node for node in cluster.nodes if cluster.pid(node) == pid]
        cluster.kill(node)
        cluster.start(node)

    with (
        Cluster(tmp_path / "nats") as cluster,
        running_platform(home, "--nats", cluster.url, environ=ALLOWED) as platform,
        Gateway(home, cluster.url, ALLOWED) as second,
    ):
        victims = processes(home, second) | {"leader of the bus": Victim(a_leader, 6, revive)}
        stock = Stock(home, cluster.url, second)
        survives(platform, second, Faults(victims, seed), stock, chaos_s=chaos_s, runs_at=tmp_path / "runs")


def processes(home: Path, second: Gateway) -> dict[str, Victim]:
    def revive(_: int) -> None:
        second.kill()
        second.start()

    return {
        "gateway": Victim(of_up(home, "gateway"), 2),
        "second gateway": Victim(lambda: [second.pid], 2, revive),
        "agent": Victim(of_up(home, "agent"), 2),
        "builder": Victim(of_up(home, "builder"), 1),
        "runner": Victim(of_up(home, "runner"), 3),
        "worker": Victim(workers(home), 3),
        "SIGTERM of the node": Victim(lambda: of_up(home, "agent")() + of_up(home, "runner")(), 2, act=terminate),
        "SIGTERM of the runner": Victim(of_up(home, "runner"), 1, act=terminate),
    }


def survives(
    platform: Platform, second: Gateway, faults: Faults, stock: Stock, *, chaos_s: float, runs_at: Path
) -> None:
    platform.gpufn("deploy", APP)
    with http_client(second.url, timeout_s=30) as other, Receiver() as receiver:
        clients = [platform.client, other]
        eventually(lambda: other.get("/v1/functions/nap").status_code != 200, "the second gateway knows no functions")
        call_each(clients, runs_at, 0)  # the stock below includes the resources that calls create
        eventually(lambda: busy(clients), "still at work")
        stock.take()
        callers = Callers([platform.url, second.url], runs_at, faults.seed, receiver.url)
        callers.start()
        try:
            faults.run(chaos_s)
        finally:
            callers.stop(WITHIN_S)
        story = f"--chaos-seed {faults.seed}: {dict(faults.done)}, {len(callers.calls)} calls\n"
        print(f"\n{story}")
        story += "\n".join(faults.log) + "\n"
        assert callers.wrong == [], story + "\n".join(callers.wrong)
        eventually(lambda: schedules(clients), f"{story}schedules that have not made their calls")
        accepted = [call for call in callers.calls if call.id]
        ends = outcomes(clients, accepted)
        wrong = [f"{ends[call.id]} of {call}" for call in accepted if not is_right(call, ends[call.id])]
        assert wrong == [], story + "\n".join(wrong)
        eventually(lambda: ended_again(platform.client, accepted), f"{story}cancelled")
        eventually(lambda: wrong_webhooks(accepted, ends, receiver), f"{story}webhooks with a missing or wrong outcome")
        eventually(lambda: unbuilt(clients), f"{story}builds")
        eventually(lambda: wrong_dead_letters(clients, accepted), f"{story}dead letters")
        none_ran_too_rarely_or_too_often(accepted, ends, runs(runs_at), faults, story)
        numbers_are_right(platform.client, accepted, ledger.read(runs_at), faults, story)
        eventually(lambda: busy(clients), "still at work")
        eventually(stock.grown, "left over", every_s=0.5)  # the bus removes consumers of killed clients after 30 s
        call_each(clients, runs_at, -1)


def none_ran_too_rarely_or_too_often(
    accepted: list[Call], ends: dict[str, tuple[int, Any]], count: Counter[int], faults: Faults, story: str
) -> None:
    never = [str(call) for call in accepted if ends[call.id][0] == 200 and not count[call.number]]
    assert never == [], story + "\n".join(never)
    repeated = count.total() - len(count)
    assert repeated <= REPEATED_BY_ONE_FAULT * faults.done.total(), f"{story}{count.most_common(10)}"


def numbers_are_right(
    client: httpx.Client, accepted: list[Call], starts: list[ledger.Start], faults: Faults, story: str
) -> None:
    """Check that each start has its own number, that runs of an accepted call do not overlap, and that its record lists
    them. A record may lack starts that died together with their runner or node, in at most twelve slots per fault."""
    assert ledger.twice_numbered(starts, faults.bus_killed_at) == [], story
    assert ledger.out_of_order(starts) == [], story
    stored = {call.id for call in accepted if call.kind in ("submit", "map item", "schedule")}
    of_stored = [start for start in starts if start.call in stored]
    assert ledger.overlapping(of_stored) == [], story
    repeated = {start.call for start in of_stored if start.attempt > 1}
    records = {call: client.get(f"/v1/invocations/{call}").json() for call in repeated}
    assert ledger.misrecorded(of_stored, records) == [], story
    unrecorded = ledger.unrecorded(of_stored, records)
    print(f"{len(of_stored)} starts of {len(stored)} calls, {len(repeated)} calls started again, {unrecorded=}")
    assert len(unrecorded) <= REPEATED_BY_ONE_FAULT * faults.done.total(), story + "\n".join(unrecorded)


def is_right(call: Call, end: tuple[int, Any]) -> bool:
    status, body = end
    if call.kind == "cancel":
        was_cancelled = status != 200 and body["code"] == "invocation_cancelled"
        # A repeated DELETE may report "not cancelled" although the first one cancelled the call.
        return was_cancelled or (not call.is_cancelled and end == (200, call.number))
    if call.fails == "always":
        return status != 200 and body["code"] == "function_raised"
    return (status, call.result(body)) == (200, call.number) and set(call.answers) <= {call.number}


def call_each(clients: list[httpx.Client], runs_at: Path, number: int) -> None:
    """Make calls without faults: each runs once, and a stream is complete. A PUT at each gateway makes one call."""
    body = {"path": str(runs_at), "number": number}
    own = new_invocation_id()
    for client in clients:
        for name, more in (("mark", {}), ("nap", {"seconds": 0.0})):
            answer = client.post(f"/v1/functions/{name}/invoke", json=body | more)
            assert answer.status_code == 200, answer.text
            assert answer.json() == number
        stream = body | {"count": ITEMS}
        answer = client.post("/v1/functions/series/invoke", json=stream, headers={"accept": "text/event-stream"})
        data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert [json.loads(item) for item in data[:ITEMS]] == list(range(ITEMS)), answer.text
        put = client.put(f"/v1/functions/mark/invocations/{own}", json=body)
        assert put.status_code == 202, put.text
    for client in clients:
        assert client.get(f"/v1/invocations/{own}/result?wait=30").json() == number
    assert runs(runs_at)[number] == 3 * len(clients) + 1
