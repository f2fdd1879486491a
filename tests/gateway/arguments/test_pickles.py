"""Pickled arguments run code in a worker: which keys may send them, for each kind of call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpufn_core.encoding import media, values
from gpufn_core.ids import new_map_id
from gpufn_gateway.calls.shared_bodies import GatewaySharedBodies
from gpufn_gateway.functions.deploy_checks import DeployOptions
from gpufn_gateway.http.body_reader import BodyBudget
from gpufn_platform.shared_bodies.bodies import MIN_SHARED_BYTES
from tests.gateway.calls.test_priorities import key_of
from tests.gateway.conftest import Gateway
from tests.gateway.submitted.test_submitted_calls import die
from tests.gateway.whole import DIGEST, gateway_on

PLAIN = values.encode_call((), {"texts": ["a"]})
PICKLED = values.encode_call((), {"texts": [len, print]}, may_pickle=True)


@pytest.mark.parametrize(
    ("content_type", "may_pickle", "scopes", "status", "code"),
    [
        (media.PICKLED, False, ("invoke:*", "pickle"), 415, "unsupported_media_type"),
        (media.PICKLED, False, ("admin",), 415, "unsupported_media_type"),
        (media.PICKLED, True, ("invoke:*",), 403, "forbidden"),
        (media.PICKLED, True, ("invoke:*", "deploy", "hi"), 403, "forbidden"),
        ("Application/VND.gpufn.PICKLE ; a=b", True, ("invoke:*",), 403, "forbidden"),
        (media.PICKLED, True, ("pickle",), 404, "function_not_found"),  # this key may call no function
        (media.PICKLED, True, ("invoke:embed", "pickle"), 200, None),
        (media.PICKLED, True, ("admin",), 200, None),
        (media.NATIVE, False, ("invoke:*",), 200, None),
    ],
)
@pytest.mark.parametrize("accept", [media.NATIVE, media.ITEMS])
async def test_pickled_arguments_need_the_functions_option_and_the_keys_scope(
    gateway: Any, make: Any, *, content_type: str, accept: str, may_pickle: bool, scopes: Any, status: int, code: str
) -> None:
    gateway.deploy(make.spec("embed", pickle=may_pickle))
    _, bearer = key_of(gateway, *scopes)
    headers = {"Authorization": bearer, "Content-Type": content_type, "Accept": accept}
    answer = await gateway.post("/v1/functions/embed/invoke", PICKLED, **headers)
    assert answer.status_code == status
    assert len(gateway.queue.calls) == (status == 200)
    if code is not None:
        assert answer.headers["content-type"] == media.PROBLEM
        assert answer.json()["code"] == code
        assert (
            code == "function_not_found"
            or "pickle" in answer.json()["detail"]
            or "invoke:embed" in answer.json()["detail"]
        )


async def test_a_large_pickle_that_is_refused_leaves_nothing_in_memory(clock: Any, make: Any, tmp_path: Path) -> None:
    shared_bodies = GatewaySharedBodies(
        tmp_path, "gw-1", budget=BodyBudget(2 * MIN_SHARED_BYTES), reaches_all=lambda: True
    )
    shared_bodies.open()
    gateway = Gateway(clock, shared_bodies=shared_bodies, limit_bytes=4 * MIN_SHARED_BYTES)
    gateway.deploy(make.spec("embed"))
    large = PICKLED + bytes(MIN_SHARED_BYTES)
    for _ in range(3):  # the budget holds one
        answer = await gateway.post("/v1/functions/embed/invoke", large, **{"Content-Type": media.PICKLED})
        assert answer.status_code == 415


async def test_without_keys_everybody_on_this_machine_may(gateway: Any, make: Any) -> None:
    gateway.deploy(make.spec("embed", pickle=True))
    answer = await gateway.post("/v1/functions/embed/invoke", PICKLED, **{"Content-Type": media.PICKLED})
    assert answer.status_code == 200


def _requests(function: str, content_type: str, letter: str) -> list[tuple[str, str, str, bytes]]:
    items, chunk = media.PICKLED_CALLS, len(PICKLED).to_bytes(4, "big") + PICKLED
    at = f"/v1/functions/{function}"
    return [
        ("POST", f"{at}/submit", content_type, PICKLED),
        ("PUT", f"{at}/invocations/01arz3ndektsv4rrffq69g5faw", content_type, PICKLED),
        ("PUT", f"{at}/maps/{new_map_id()}/items/0", items, chunk),
        ("POST", f"/v1/dlq/{function}/{letter}/replay", "", b""),
    ]


async def test_stored_pickles_need_the_right_as_well(nats: Any, make: Any) -> None:
    """A key that may not make a call may not replay its dead letter either."""
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("pickles", pickle=True), DIGEST)
        typed = {"content-type": media.PICKLED}
        letter = (await gateway.http.post("/v1/functions/pickles/submit", content=PICKLED, headers=typed)).json()["id"]
        await die(gateway, letter)
        without, may = ({"authorization": key_of(gateway, "invoke:*", *more)[1]} for more in ((), ("pickle",)))
        for method, path, content_type, body in _requests("pickles", media.PICKLED, letter):
            answer = await gateway.http.request(
                method, path, content=body, headers=without | {"content-type": content_type}
            )
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), path
        all_letters = "/v1/dlq/pickles/replay"
        assert (await gateway.http.post(all_letters, headers=without)).json() == {"replayed": []}
        for method, path, content_type, body in _requests("pickles", media.PICKLED, letter):
            answer = await gateway.http.request(
                method, path, content=body, headers=may | {"content-type": content_type}
            )
            assert answer.status_code == 202, (path, answer.text)


async def test_a_dead_letter_with_pickles_is_not_replayed_to_a_revision_that_accepts_none(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("pickled-once", pickle=True), DIGEST)
        path, typed = "/v1/functions/pickled-once/submit", {"content-type": media.PICKLED}
        letter = (await gateway.http.post(path, content=PICKLED, headers=typed)).json()["id"]
        await die(gateway, letter)
        gateway.report(make.status("pickled-once", ready=0))
        await gateway.deploys.deploy(make.spec("pickled-once"), DIGEST, DeployOptions(check=False))
        answer = await gateway.http.post(f"/v1/dlq/pickled-once/{letter}/replay")
        assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")
        assert (await gateway.http.post("/v1/dlq/pickled-once/replay")).json() == {"replayed": []}


async def test_the_scope_is_a_scope_of_keys(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        made = await gateway.http.post("/v1/keys", json={"scopes": ["admin", "pickle"]})
        assert (made.status_code, made.json()["scopes"]) == (201, ["admin", "pickle"])
