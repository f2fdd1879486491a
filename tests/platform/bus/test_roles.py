"""The permissions of each role on the bus, against a real server: every JetStream API request on every stream and
bucket, every publish, every subscription."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_gateway.buckets import Buckets
from gpufn_gateway.bus_setup import Storage
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus, JetStreamError
from gpufn_platform.bus.server_check import check_server
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.bus.storage.key_value import KeyValue

NODE_ROLES = ("agent", "runner", "builder")
BUCKETS = (
    "arrivals", "assignments", "builds", "client_files", "engines", "functions", "key_use", "keys", "leases",
    "revisions", "schedules", "secrets", "signing", "teams", "token_keys", "usage", "users", "webhook_secrets",
    "volumes", "dicts", "node_drains",
)  # fmt: skip
STORES = ("bundles", "engine_files", "models", "results", "arguments", "volume_files", "values")
QUEUES = (
    "ASYNC", "AUDIT", "BUILD", "CHECKPOINTS", "DLQ", "HISTORY", "LOGS", "PROBE", "QUEUES", "RESULTS", "SYNC",
    "WEBHOOKS",
)  # fmt: skip
STREAMS = {
    **{f"GPUFN_{name}": "" for name in QUEUES},
    **{f"KV_gpufn_{name}": f"$KV.gpufn_{name}.>" for name in BUCKETS},
    **{f"OBJ_gpufn_{name}": f"$O.gpufn_{name}.>" for name in STORES},
    "EVIL": "evil.>",
}
FILTERS = {
    "GPUFN_ASYNC": "gpufn.v1.inv.a.>",
    "GPUFN_AUDIT": "gpufn.v1.audit",
    "GPUFN_BUILD": "gpufn.v1.bld.>",
    "GPUFN_CHECKPOINTS": "gpufn.v1.ckp.>",
    "GPUFN_DLQ": "gpufn.v1.dlq.>",
    "GPUFN_HISTORY": "gpufn.v1.hst.>",
    "GPUFN_LOGS": "gpufn.v1.log.>",
    "GPUFN_PROBE": "gpufn.v1.probe",
    "GPUFN_QUEUES": "gpufn.v1.que.>",
    "GPUFN_RESULTS": "gpufn.v1.res.>",
    "GPUFN_SYNC": "gpufn.v1.inv.s.>",
    "GPUFN_WEBHOOKS": "gpufn.v1.hook.>",
}
# One letter per request that a role may make about a stream. Only the gateway and the administrator may make the
# requests that appear in no row: to create, change, delete, purge, snapshot, restore, seal, move a stream ...
LETTERS = {
    "i": "STREAM.INFO.{stream}",
    "g": "STREAM.MSG.GET.{stream}",
    "x": "STREAM.MSG.DELETE.{stream}",
    "d": "DIRECT.GET.{stream}",
    "c": "CONSUMER.CREATE.{stream}.c.{filter}",
    "n": "CONSUMER.MSG.NEXT.{stream}.c",
    "r": "CONSUMER.DELETE.{stream}.c",
    "q": "CONSUMER.INFO.{stream}.c",
    "a": "ACK {stream}",
}
FOLLOW = "igcnr"
EXPECTED = {
    "agent": {
        "KV_gpufn_assignments": FOLLOW,
        "KV_gpufn_engines": FOLLOW,
        "KV_gpufn_functions": FOLLOW,
        "KV_gpufn_revisions": FOLLOW,
        "KV_gpufn_secrets": FOLLOW,
        "KV_gpufn_teams": FOLLOW,
        "KV_gpufn_signing": FOLLOW,
        "OBJ_gpufn_bundles": "igd",
        "OBJ_gpufn_models": "igd",  # weights
        "OBJ_gpufn_volume_files": "igd",
        "KV_gpufn_volumes": FOLLOW,
        "OBJ_gpufn_engine_files": "igd",
    },
    "runner": {
        "GPUFN_ASYNC": "igxdcnqa",
        "GPUFN_SYNC": "igxcnqa",
        "GPUFN_CHECKPOINTS": "igx",
        "GPUFN_DLQ": "ig",
        "GPUFN_RESULTS": "ig",
        "KV_gpufn_assignments": FOLLOW,
        "KV_gpufn_functions": FOLLOW,
        "KV_gpufn_revisions": FOLLOW,
        "KV_gpufn_teams": FOLLOW,
        "KV_gpufn_usage": "ig",
        "OBJ_gpufn_arguments": "igd",
        "OBJ_gpufn_results": "igd",
        "OBJ_gpufn_volume_files": "igd",
        "OBJ_gpufn_values": "igd",
    },
    "builder": {
        "GPUFN_BUILD": "icnqa",
        "KV_gpufn_builds": FOLLOW,
        "KV_gpufn_engines": FOLLOW,
        "KV_gpufn_leases": "ig",
        "KV_gpufn_signing": FOLLOW,
        "OBJ_gpufn_engine_files": "igxd",
        "OBJ_gpufn_models": "igxd",
    },
}
OTHER_REQUESTS = (
    "STREAM.CREATE.{stream}",
    "STREAM.UPDATE.{stream}",
    "STREAM.DELETE.{stream}",
    "STREAM.PURGE.{stream}",
    "STREAM.SNAPSHOT.{stream}",
    "STREAM.RESTORE.{stream}",
    "STREAM.PEER.REMOVE.{stream}",
    "STREAM.LEADER.STEPDOWN.{stream}",
    "DIRECT.GET.{stream}.{subject}",
    "CONSUMER.CREATE.{stream}",
    "CONSUMER.CREATE.{stream}.c",
    "CONSUMER.CREATE.{stream}.c.other.subject",
    "CONSUMER.DURABLE.CREATE.{stream}.c",
    "CONSUMER.LIST.{stream}",
    "CONSUMER.NAMES.{stream}",
    "CONSUMER.PAUSE.{stream}.c",
    "CONSUMER.RESET.{stream}.c",
    "CONSUMER.UNPIN.{stream}.c",
    "CONSUMER.LEADER.STEPDOWN.{stream}.c",
)
GLOBAL_REQUESTS = (
    "INFO", "STREAM.LIST", "STREAM.NAMES", "STREAM.TEMPLATE.CREATE.t", "META.LEADER.STEPDOWN", "SERVER.REMOVE",
    "ACCOUNT.PURGE.$G", "ACCOUNT.STREAM.MOVE.$G.s",
)  # fmt: skip
# Subjects that a role may publish to, each with an example; of all that any role may.
WRITES = {
    "$KV.gpufn_arrivals.f": set(),
    "$KV.gpufn_assignments.n.w": {"agent"},
    "$KV.gpufn_builds.b": {"builder"},
    "$KV.gpufn_client_files.k.f": set(),
    "$KV.gpufn_engines.e": {"builder"},
    "$KV.gpufn_functions.f": set(),
    "$KV.gpufn_keys.k": set(),
    "$KV.gpufn_key_use.k": set(),
    "$KV.gpufn_leases.build.e": {"builder"},
    "$KV.gpufn_leases.controller": set(),
    "$KV.gpufn_revisions.f.1": set(),
    "$KV.gpufn_node_drains.n": set(),
    "$KV.gpufn_teams.t": set(),
    "$KV.gpufn_schedules.f": set(),
    "$KV.gpufn_secrets.TOKEN": set(),
    "$KV.gpufn_signing.key.ci": set(),
    "$KV.gpufn_usage.d.f.k.n": {"runner"},
    "$KV.gpufn_webhook_secrets.platform": set(),
    "$O.gpufn_bundles.C.u": set(),
    "$O.gpufn_bundles.M.b": set(),
    "$O.gpufn_engine_files.C.u": {"builder"},
    "$O.gpufn_engine_files.M.b": {"builder"},
    "$O.gpufn_models.C.u": set(),
    "$O.gpufn_models.M.b": set(),
    "$KV.gpufn_volumes.v": set(),
    "$KV.gpufn_dicts.d.k": set(),
    "gpufn.v1.que.q": set(),
    "gpufn.v1.data": {"runner"},
    "$O.gpufn_volume_files.C.u": {"runner"},
    "$O.gpufn_volume_files.M.b": {"runner"},
    "$O.gpufn_values.C.u": {"runner"},
    "$O.gpufn_values.M.b": {"runner"},
    "$O.gpufn_arguments.C.u": {"runner"},
    "$O.gpufn_arguments.M.b": {"runner"},
    "$O.gpufn_results.C.u": {"runner"},
    "$O.gpufn_results.M.b": {"runner"},
    "gpufn.v1.bld.cpu": set(),
    "gpufn.v1.ckp.i": {"runner"},
    "gpufn.v1.ctl.builder.cpu": set(),
    "gpufn.v1.ctl.cancel": {"runner"},
    "gpufn.v1.ctl.kill.n": {"runner"},
    "gpufn.v1.ctl.node.agent.n": {"agent"},
    "gpufn.v1.ctl.node.builder.n": {"builder"},
    "gpufn.v1.ctl.node.runner.n": {"runner"},
    "gpufn.v1.ctl.where": {"runner"},
    "gpufn.v1.dlq.f.i": {"runner"},
    "gpufn.v1.dmd.f": {"runner"},
    "gpufn.v1.evt.call.i": {"runner"},
    "gpufn.v1.evt.worker.f": {"agent", "runner"},
    "gpufn.v1.hb.controller": set(),
    "gpufn.v1.hb.device.n": {"agent"},
    "gpufn.v1.hb.gateway.g": set(),
    "gpufn.v1.hb.node.n": {"agent"},
    "gpufn.v1.hb.runner.n": {"runner"},
    "gpufn.v1.hook.f": {"runner"},
    "gpufn.v1.inv.a.f.1.normal.platform": {"runner"},
    "gpufn.v1.inv.s.f.1.normal": {"runner"},
    "gpufn.v1.itm.i": {"runner"},
    "gpufn.v1.log.f": {"agent", "runner"},
    "gpufn.v1.map.f.m": set(),
    "gpufn.v1.prg.i": {"runner"},
    "gpufn.v1.probe": set(),
    "gpufn.v1.rep.f.gateway.i": {"runner"},
    "gpufn.v1.res.f.i": {"runner"},
    "gpufn.v1.run.r": {"runner"},
    **{f"_INBOX.{role}.x": set() for role in ("admin", "agent", "builder", "gateway", "runner")},  # of the server
    "_INBOX.admin.from.x": {"runner"},
    "_INBOX.agent.from.x": {"agent"},
    "_INBOX.builder.from.x": {"builder"},
    "_INBOX.gateway.from.x": {"agent", "runner", "builder"},
    "_INBOX.runner.from.x": {"runner"},
    "$SYS.REQ.ACCOUNT.PING.CONNZ": set(),
    "$SYS.REQ.SERVER.PING": set(),
    "$JS.EVENT.ADVISORY.x": set(),
    "$JS.FC.GPUFN_SYNC.c.x": set(),
    "anything": set(),
}
SUBSCRIPTIONS = {
    ">": set(),
    "*": set(),
    "$KV.>": set(),
    "$O.>": set(),
    "$JS.>": set(),
    "$JS.EVENT.>": set(),
    "$SYS.>": set(),
    "_INBOX.>": set(),
    "_INBOX.admin.>": set(),
    "_INBOX.gateway.>": set(),
    "_INBOX.agent.x": {"agent"},
    "_INBOX.runner.x": {"runner"},
    "_INBOX.builder.x": {"builder"},
    "gpufn.v1.>": set(),
    "gpufn.v1.rep.>": set(),
    "gpufn.v1.rep.*.gw-1.*": set(),
    "gpufn.v1.rep.*.runner.r1.*": {"runner"},
    "gpufn.v1.inv.>": set(),
    "gpufn.v1.res.>": {"runner"},
    "gpufn.v1.log.>": set(),
    "gpufn.v1.dlq.>": set(),
    "gpufn.v1.hook.>": set(),
    "gpufn.v1.ckp.>": set(),
    "gpufn.v1.map.>": set(),
    "gpufn.v1.itm.>": set(),
    "gpufn.v1.que.>": set(),
    "gpufn.v1.prg.>": set(),
    "gpufn.v1.bld.>": set(),
    "gpufn.v1.dmd.*": {"runner"},
    "gpufn.v1.run.r": {"runner"},
    "gpufn.v1.evt.worker.*": {"runner"},
    "gpufn.v1.evt.call.*": set(),
    "gpufn.v1.hb.controller": {"runner"},
    "gpufn.v1.hb.node.n": {"builder"},
    "gpufn.v1.hb.device.*": {"runner"},
    "gpufn.v1.hb.runner.n": {"agent"},
    "gpufn.v1.hb.gateway.*": set(),
    "gpufn.v1.ctl.builder.cpu": {"builder"},
    "gpufn.v1.ctl.cancel": {"runner"},
    "gpufn.v1.ctl.kill.n": {"agent"},
    "gpufn.v1.ctl.node.agent.n": {"agent"},
    "gpufn.v1.ctl.node.builder.n": {"builder"},
    "gpufn.v1.ctl.node.runner.n": {"runner"},
    "gpufn.v1.ctl.where": {"runner"},
}


async def denied(server: EmbeddedServer, role: str, publish: list[str], subscribe: list[str]) -> set[str]:
    """Return the subjects that the server refuses. Messages have no reply subject and a useless body, so allowed ones
    have no effect."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await reader.readline()
    password = json.loads((server.directory / "credentials.json").read_bytes())[role]
    connect = {"user": role, "pass": password, "verbose": False, "pedantic": False, "headers": True}
    writer.write(b"CONNECT " + json.dumps(connect).encode() + b"\r\n")
    for subject in publish:
        writer.write(f"PUB {subject} 1\r\n?\r\n".encode())
    for number, subject in enumerate(subscribe):
        writer.write(f"SUB {subject} {number}\r\nUNSUB {number}\r\n".encode())
    writer.write(b"PING\r\n")
    refused: set[str] = set()
    while (line := (await reader.readline()).decode().strip()) != "PONG":
        assert line, "the server hung up"
        if line.startswith("-ERR"):
            assert "Permissions Violation" in line, line
            refused.add(line.split('"')[1])
    writer.close()
    return refused


def requests() -> dict[str, tuple[str, str]]:
    """Each request's subject, with its stream and its letter, if it has one."""
    found: dict[str, tuple[str, str]] = {}
    for stream, subject in STREAMS.items():
        values = {
            "stream": stream,
            "filter": subject or FILTERS[stream],
            "subject": (subject or FILTERS[stream])[:-1] + "a",
        }
        for letter, request in LETTERS.items():
            ack = f"$JS.ACK.{stream}.c.1.1.1.1.1"
            found[ack if letter == "a" else f"$JS.API.{request.format(**values)}"] = (stream, letter)
        found |= {f"$JS.API.{request.format(**values)}": (stream, "") for request in OTHER_REQUESTS}
    return found | {f"$JS.API.{request}": ("", "") for request in GLOBAL_REQUESTS}


@pytest.mark.parametrize("role", NODE_ROLES)
async def test_a_node_may_make_the_requests_of_the_table_and_no_others(nats: EmbeddedServer, role: str) -> None:
    asked = requests()
    refused = await denied(nats, role, list(asked), [])
    allowed = sorted(asked[subject] for subject in asked.keys() - refused)
    table = EXPECTED[role]
    assert allowed == sorted((stream, letter) for stream, letters in table.items() for letter in letters)


@pytest.mark.parametrize("role", NODE_ROLES)
async def test_a_node_writes_and_subscribes_only_as_in_the_table(nats: EmbeddedServer, role: str) -> None:
    refused = await denied(nats, role, list(WRITES), [])
    assert sorted(WRITES.keys() - refused) == sorted(subject for subject, roles in WRITES.items() if role in roles)
    refused = await denied(nats, role, [], list(SUBSCRIPTIONS))
    allowed = sorted(subject for subject, roles in SUBSCRIPTIONS.items() if role in roles)
    assert sorted(SUBSCRIPTIONS.keys() - refused) == allowed


async def test_the_table_has_every_stream_that_the_gateway_creates(nats: EmbeddedServer, connect: Any) -> None:
    gateway = await connect(nats, "gateway")
    await everything(gateway)
    answer = await (await connect(nats)).js("STREAM.NAMES")
    assert set(answer["streams"]) == STREAMS.keys() - {"EVIL"}


async def test_the_gateway_may_touch_the_platforms_streams_and_no_others(nats: EmbeddedServer) -> None:
    asked = requests()
    refused = await denied(nats, "gateway", list(asked), [">", "_INBOX.runner.x", "$KV.gpufn_keys.>", "$JS.API.>"])
    assert {">", "_INBOX.runner.x", "$KV.gpufn_keys.>", "$JS.API.>"} <= refused
    sizes = {"$JS.API.INFO", "$JS.API.STREAM.LIST"}  # for metrics
    allowed = {asked[subject][0] for subject in asked.keys() - refused - sizes}
    assert allowed == STREAMS.keys() - {"EVIL"}
    assert {f"$JS.API.STREAM.{verb}.KV_gpufn_keys" for verb in ("DELETE", "SNAPSHOT", "RESTORE")} <= refused


BUCKET = "KV_gpufn_keys"
ESCAPES: dict[str, dict[str, Any]] = {
    "republish": {"subjects": ["evil.>"], "republish": {"src": "evil.>", "dest": "$KV.gpufn_keys.>"}},
    "sources": {"sources": [{"name": BUCKET}]},
    "a mirror": {"mirror": {"name": BUCKET}},
    "a subject transform": {
        "subjects": ["evil.>"], "subject_transform": {"src": "evil.>", "dest": "$KV.gpufn_keys.>"}
    },
    "the bucket's subjects": {"subjects": ["$KV.gpufn_keys.>"]},
}  # fmt: skip


@pytest.mark.parametrize("role", NODE_ROLES)
async def test_no_stream_of_a_node_reads_or_writes_a_bucket(nats: EmbeddedServer, connect: Any, role: str) -> None:
    """The same requests succeed for the administrator: they are well-formed."""
    await everything(await connect(nats, "gateway"))
    admin, node = await connect(nats), await connect(nats, role)
    tried = []
    for verb in ("CREATE", "UPDATE"):
        for name, config in ESCAPES.items():
            for stream in ("EVIL", "GPUFN_LOGS", BUCKET):
                request = f"$JS.API.STREAM.{verb}.{stream}", json.dumps({"name": stream, **config}).encode()
                inbox = node.new_inbox()
                answers: asyncio.Queue[Any] = asyncio.Queue()
                node.subscribe(inbox, answers.put_nowait)
                node.publish(*request, reply=inbox)
                tried.append((name, stream, answers))
    await node.flush()
    await admin.flush()
    assert [(name, stream) for name, stream, answers in tried if answers.qsize()] == []
    created = await admin.js("STREAM.CREATE.EVIL", {"name": "EVIL", **ESCAPES["sources"]})
    assert created["config"]["sources"]
    await admin.js("STREAM.DELETE.EVIL")


@pytest.mark.parametrize("role", NODE_ROLES)
@pytest.mark.parametrize("bucket", [subjects.API_KEYS, subjects.WEBHOOK_SECRETS, subjects.TOKEN_KEYS])
async def test_only_the_gateway_reads_keys_and_secrets(
    nats: EmbeddedServer, connect: Any, role: str, bucket: str
) -> None:
    gateway = await KeyValue.open(await connect(nats, "gateway"), bucket)
    await gateway.put("a", b"secret")
    assert await gateway.get("a") is not None
    other = await connect(nats, role)
    for verb, body in (
        (f"STREAM.MSG.GET.KV_{bucket}", b'{"last_by_subj":"$KV.%b.a"}' % bucket.encode()),
        (f"DIRECT.GET.KV_{bucket}", b'{"last_by_subj":"$KV.%b.a"}' % bucket.encode()),
        (f"DIRECT.GET.KV_{bucket}.$KV.{bucket}.a", b""),
    ):
        with pytest.raises(BusUnavailable):
            await other.request(f"$JS.API.{verb}", body, timeout_s=0.3)


async def test_a_consumer_reads_only_the_subject_of_its_request(nats: EmbeddedServer, connect: Any) -> None:
    await everything(await connect(nats, "gateway"))
    runner: Bus = await connect(nats, "runner")
    request = f"CONSUMER.CREATE.{subjects.ASYNC}.c.gpufn.v1.inv.a.f.1.normal.*"
    for config in (
        {"filter_subject": "gpufn.v1.map.>"},
        {"filter_subjects": ["gpufn.v1.map.>", "gpufn.v1.inv.a.>"]},
        {},
    ):
        body = {"stream_name": subjects.ASYNC, "config": {"name": "c", "ack_policy": "explicit", **config}}
        with pytest.raises(JetStreamError):
            await runner.js(request, body)
    body = {"stream_name": "KV_gpufn_keys", "config": {"name": "c", "filter_subject": "gpufn.v1.inv.a.f.1.normal.*"}}
    with pytest.raises(JetStreamError):
        await runner.js(request, body)


async def test_an_answer_of_the_server_neither_replaces_nor_makes_a_record(nats: EmbeddedServer, connect: Any) -> None:
    """The server sends its response to any reply subject: it checks permissions only for the request."""
    gateway = await connect(nats, "gateway")
    await everything(gateway)
    keys = await KeyValue.open(gateway, subjects.API_KEYS)
    for name in ("stored", "looked-up", "asked"):
        await keys.put(name, b"as it was")
    runner: Bus = await connect(nats, "runner")
    forged = subjects.result("f", "forged")
    await runner.publish_stored(forged, b"I am an administrator")
    await runner.publish_stored(subjects.async_queue("f", 1), b"I am an administrator")
    runner.publish(forged, b"?", reply="$KV.gpufn_keys.stored")
    runner.publish(f"$JS.API.STREAM.INFO.{subjects.ASYNC}", b"", reply="$KV.gpufn_keys.asked")
    last = json.dumps({"last_by_subj": subjects.async_queue("f", 1)}).encode()
    for key in ("looked-up", "new"):
        runner.publish(f"$JS.API.DIRECT.GET.{subjects.ASYNC}", last, reply=f"$KV.gpufn_keys.{key}")
    await runner.flush()
    await gateway.flush()
    for name in ("stored", "looked-up", "asked"):
        entry = await keys.get(name)
        assert entry is not None
        assert entry.value == b"as it was"
    await until_stored(gateway, "$KV.gpufn_keys.new")
    assert await keys.get("new") is None
    assert "new" not in await keys.keys()


async def until_stored(bus: Bus, subject: str) -> None:
    while await streams.last_message(bus, "KV_gpufn_keys", subject) is None:
        await bus.flush()


async def test_a_home_of_before_keeps_its_credentials(tmp_path: Path) -> None:
    """Permissions belong to the configuration, which every start writes; the passwords stay."""
    with EmbeddedServer.start(tmp_path) as server:
        before = (tmp_path / "credentials.json").read_bytes()
        (tmp_path / "nats.conf").write_text("of another release")
        assert server.exit_code is None
    with EmbeddedServer.start(tmp_path) as server:
        assert (tmp_path / "credentials.json").read_bytes() == before
        assert "$KV.gpufn_keys.k" in await denied(server, "builder", ["$KV.gpufn_keys.k"], [])


async def everything(gateway: Bus) -> None:
    """Everything that a gateway creates at its start."""
    await check_server(gateway)
    await Storage(gateway, await Buckets.open(gateway)).ensure()
    await object_store.ensure_bucket(gateway, subjects.RESULT_FILES, expires=True)


async def test_a_responder_does_not_learn_the_reply_address_of_the_server(nats: EmbeddedServer, connect: Any) -> None:
    """Regression: it could forge the server's responses to the gateway, such as the record of an API key."""
    gateway, runner = await connect(nats, "gateway"), await connect(nats, "runner")
    replies: list[str] = []
    runner.subscribe(subjects.WHEREABOUTS, lambda message: replies.append(message.reply))
    await runner.flush()
    with pytest.raises(BusUnavailable):
        await gateway.request(subjects.WHEREABOUTS, timeout_s=0.2)
    (learned,) = replies
    secret = gateway.new_inbox().rpartition(".")[0]
    assert not learned.startswith(secret)
    assert secret.rpartition(".")[2] not in learned
    received: asyncio.Queue[Any] = asyncio.Queue()
    inbox = gateway.new_inbox(for_processes=True)  # for the responses of several
    gateway.subscribe(inbox, received.put_nowait)
    await gateway.flush()
    runner.publish(inbox, b"here")
    assert (await asyncio.wait_for(received.get(), 10)).payload == b"here"
