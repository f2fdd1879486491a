"""A gateway with one object of each kind in two apps, and requests to every route with every kind of key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from gpufn_core.domain.devices.engine import Accuracy, Backend, Build, EngineIdentity, EngineManifest
from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.domain.revision import Function, Revision
from gpufn_core.domain.usage import Usage, UsageKey, day_of
from gpufn_core.errors import ErrorInfo
from gpufn_core.ids import Digest, digest_of, new_invocation_id, new_map_id, new_ulid
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode, pack
from gpufn_core.protocol.messages import InvocationMessage, ResultReply, unpack_invocation
from gpufn_core.protocol.records import CallRecord, NodeDrain, ScheduleRecord
from gpufn_core.protocol.spans import Attribute, Span, SpanKind
from gpufn_core.signing.ed25519 import Signer
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec, Packaging
from gpufn_core.spec.model_spec import ModelFile, ModelSpec, Precision, TensorSpec
from gpufn_core.spec.naming.names import parts_of
from gpufn_core.spec.schedule import Schedule
from gpufn_core.spec.volume_spec import VolumeFile
from gpufn_core.spec.web_spec import WebKind, WebSpec
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.auth.tokens import User
from gpufn_gateway.functions.deploy_checks import DeployOptions
from gpufn_gateway.history.blocks import Event, EventKind, encode_event
from gpufn_platform.bus.storage import object_store
from gpufn_platform.queue.records import dead_letters
from tests.gateway.auth.access_table import PRINCIPALS, ROUTES, UNSUPPORTED
from tests.gateway.whole import BUNDLE, DIGEST, Whole
from tests.waiting import until_async

_ONNX: Final = b"a model of the access test"
_NET: Final = ModelSpec(parameter="net", files=(ModelFile("net.onnx", digest_of(_ONNX), len(_ONNX)),))
_SECRET: Final = "MATRIX_TOKEN"
_USER: Final = User(id="user-matrix", issuer="https://login.example.org", subject="a", name="a", seen_at=0.0)
_TEAM: Final = "access-matrix"
_SIGNER: Final = "access-matrix"
_NODE: Final = "access-matrix"
_PUBLIC_KEY: Final = Signer.new().public_pem()
_JSON: Final = {"content-type": "application/json"}
_INFERENCE: Final = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}
# Successes that the OpenAPI document does not state.
_ALSO: Final[dict[str, tuple[int, str]]] = {
    "POST /v1/apps/{env}/{app}/rollback": (404, "revision_not_found"),  # the first rollback has succeeded
    "GET /v1/functions/{fn}/exec": (426, "bad_request"),  # it is a WebSocket
    "POST /v1/functions/{fn}/profile": (503, "capacity"),  # there is no worker
    "POST /v1/functions/{fn}/lease": (409, "conflict"),  # the function is permanent
    "GET /v2/systemsharedmemory/region/{region}/status": (404, "model_not_found"),  # nobody has registered one
    "POST /v2/systemsharedmemory/region/{region}/register": (422, "model_not_found"),  # the body names no memory
}


class Objects(NamedTuple):
    """One side of the test: a function with all that can belong to one, or names of objects that do not exist."""

    function: str
    model: str
    schedule: str
    call: str
    map: str
    letter: str
    build: str
    key: str

    @property
    def doomed(self) -> str:
        """The function that DELETE deletes."""
        return f"{self.function}-doomed"


def objects(group: str, base: str = "matrix") -> Objects:
    function = f"{group}/{base}"
    ids = (new_invocation_id(), new_map_id(), new_invocation_id(), new_ulid(), new_ulid()[-12:])
    return Objects(function, f"{function}-net", f"{function}.{new_ulid()[-8:]}", *ids)


class Matrix:
    """The gateway with the objects of both sides."""

    def __init__(self, gateway: Whole, own: Objects, foreign: Objects) -> None:
        self.gateway = gateway
        self.sides = {"own": own, "foreign": foreign}
        self.missing = {side: self._missing(each) for side, each in self.sides.items()}
        self.documented: dict[str, set[int]] = {}  # statuses of success by route
        self._headers: dict[str, dict[str, str]] = {}
        self._ids: dict[str, str] = {}
        self.value = ""  # the id of a stored value

    @staticmethod
    def _missing(side: Objects) -> Objects:
        env, app_, _ = parts_of(side.function)
        # The name of the app is replaced too: the app of the other objects exists.
        return objects(f"{env}/{app_}", "nothing")

    async def prepare(self) -> None:
        gateway = self.gateway
        # The load of a model waits for a worker.
        gateway.registry.ready_workers = lambda function: 1  # type: ignore[method-assign]
        await gateway.artifacts.put(digest_of(_ONNX), len(_ONNX), _parts(_ONNX))
        for side in self.sides.values():
            await self._add_function(side)
            await self._add_model(side)
            await self._add_others(side)
            await self.restore("secrets", side)
            await gateway.volumes.put_file(digest_of(_ONNX), len(_ONNX), _parts(_ONNX))
            await self.restore("volumes", side)
            await self.restore("queues", side)
            stored = await gateway.http.post("/v1/values", content=b"a value")
            self.value = stored.json()["id"]
            body = {"owns": ["{}/{}/*".format(*parts_of(side.function))]}
            assert (await gateway.http.put(f"/v1/teams/{_team_of(side)}", json=body)).status_code == 200
        document = (await gateway.http.get("/openapi.json")).json()
        self.documented = {
            route: {int(status) for status in operation["responses"] if status.isdecimal() and int(status) < 600}
            for route, operation in _operations(document)
        }
        for name, scopes in PRINCIPALS.items():
            if scopes:
                key, secret = new_key(name, scopes, 0.0)
                if name == "expired key":
                    key = msgspec.structs.replace(key, expires_at=1.0)
                await gateway.keys.create(key.id, encode(key))
                self._headers[name], self._ids[name] = {"authorization": f"Bearer {secret}"}, key.id
        for side in self.sides.values():
            await self.restore("keys", side)
        await until_async(lambda: len(gateway.access.keys) == len(self._headers) + len(self.sides))

    async def _add_function(self, side: Objects) -> None:
        gateway = self.gateway
        spec = FunctionSpec(
            name=side.function,
            entry=EntryPoint("app", "f"),
            methods=(MethodSpec(),),
            web=WebSpec(WebKind.ENDPOINT, methods=("GET",)),
        )
        for deploy_id in ("d1", "d2"):
            await gateway.deploys.deploy(spec, DIGEST, DeployOptions(check=False, deploy_id=deploy_id))
        await until_async(lambda: 2 in gateway.registry.revisions.get(side.function, {}))
        await until_async(lambda: side.function in gateway.registry.functions)
        _answer_calls(gateway, side.function)
        _answer_calls(gateway, side.model)

    async def _add_model(self, side: Objects) -> None:
        gateway, now = self.gateway, self.gateway.clock.time()
        manifest = _manifest(f"engine-of-{side.model.replace('/', '-')}")
        await gateway.buckets.engines.create(manifest.key, encode(manifest))
        spec = FunctionSpec(
            name=side.model, entry=EntryPoint("", "", Packaging.MODEL), methods=(MethodSpec(),), models=(_NET,)
        )
        revision = Revision(
            function=side.model, number=1, spec=spec, bundle=Digest(DIGEST), created_at=now,
            engines={"net": {"cpu": (manifest.key,)}},
        )  # fmt: skip
        await gateway.buckets.revisions.create(subjects.revision_key(side.model, 1), encode(revision))
        function = Function(name=side.model, active=1, serving=1, latest=1, updated_at=now)
        await gateway.buckets.functions.create(side.model, encode(function))
        report = await object_store.put(gateway.bus, subjects.ENGINE_FILES, b"{}")
        build = Build(
            id=side.build, model=_NET, device="cpu", created_at=now, function=side.model, report=report, page=report
        )
        await gateway.buckets.builds.create(build.id, encode(build))
        await until_async(lambda: side.build in gateway.builds.known and side.model in gateway.registry.functions)

    async def _add_others(self, side: Objects) -> None:
        gateway, now = self.gateway, self.gateway.clock.time()
        submitted = await gateway.http.put(f"/v1/functions/{side.function}/invocations/{side.call}", json={})
        items = f"/v1/functions/{side.function}/maps/{side.map}/items/0?last=true"
        mapped = await gateway.http.put(items, content=b"{}\n", headers={"content-type": "application/x-ndjson"})
        assert (submitted.status_code, mapped.status_code) == (202, 202), (submitted.text, mapped.text)
        usage = UsageKey(day_of(now), side.function, "platform").record("node")
        await gateway.buckets.usage.put(usage, encode(Usage(1, 0, 1.0)))
        event = Event(now, EventKind.DEPLOY, f"function:{side.function}", "revision 2 serves", 2)
        await gateway.bus.publish_stored(subjects.HISTORY_EVENTS, encode_event(event))
        await gateway.recorder.store()
        called: dict[str, Attribute] = {"faas.invocation_id": side.call}
        gateway.traces.add([Span(new_ulid(), new_ulid(), "", "f", SpanKind.SERVER, side.function, now, now, called)])
        await self.restore("schedules", side)
        await self.restore("dlq", side)

    async def restore(self, kind: str, side: Objects) -> None:
        """Make an object again that an earlier request has removed."""
        gateway, now = self.gateway, self.gateway.clock.time()
        if kind == "functions" and side.doomed not in gateway.registry.functions:
            spec = FunctionSpec(name=side.doomed, entry=EntryPoint("app", "f"), methods=(MethodSpec(),))
            await gateway.deploys.deploy(spec, DIGEST, DeployOptions(check=False))
            await until_async(lambda: side.doomed in gateway.registry.functions)
        elif kind == "schedules" and side.schedule not in gateway.schedules.known:
            schedule = Schedule(cron="0 6 * * *")
            record = ScheduleRecord(
                id=side.schedule, function=side.function, schedule=schedule, done_until=now, created_at=now
            )
            await gateway.buckets.schedules.create(record.id, encode(record))
            await until_async(lambda: side.schedule in gateway.schedules.known)
        elif kind == "dlq" and await dead_letters.read(gateway.bus, side.function, side.letter) is None:
            await dead_letters.store(gateway.bus, *_failed_call(side, now), b"{}")
        elif kind == "keys" and all(key.id != side.key for key in gateway.access.keys):
            key, _ = new_key("target", ("read",), 0.0)
            await gateway.keys.create(side.key, encode(msgspec.structs.replace(key, id=side.key)))
            await until_async(lambda: any(key.id == side.key for key in gateway.access.keys))
        elif kind == "users":
            await gateway.token_store.record(_USER, gateway.clock.time())
        elif kind == "nodes":
            await gateway.buckets.node_drains.put(_NODE, encode(NodeDrain(node=_NODE, since=now)))
            await until_async(lambda: _NODE in gateway.registry.drains)
        elif kind == "teams":
            assert (await self.send("PUT /v1/teams/{team}", side, "admin")).status_code == 200
            await until_async(lambda: self.gateway.registry.teams.get(_TEAM) is not None)
        elif kind == "signing":
            for route in ("PUT /v1/signing/keys/{name}", "PUT /v1/signing/required/{env}"):
                assert (await self.send(route, side, "admin")).status_code == 200, route
        elif kind == "volumes":
            route = "POST /v1/volumes/{volume}/commits"
            assert (await self.send(route, side, "admin")).status_code == 201
            await until_async(lambda: gateway.volumes.exists(side.function))
        elif kind in ("queues", "dicts"):
            await gateway.operations.queues.put(
                side.function, "text/plain", b"a", ttl_s=None, max_items=None, id_=new_ulid()
            )
            await gateway.operations.queues.get(side.function, wait_s=0, lease_s=60)  # its consumer exists
            await gateway.operations.dicts.set(side.function, "k", "text/plain", b"a", ttl_s=None, only_new=False)
        elif kind == "secrets":
            assert (await self.send("PUT /v1/secrets/{name}", side, "admin")).status_code == 200

    async def clean(self) -> None:
        """Delete what other tests on this bus could see."""
        for key in await self.gateway.keys.keys():
            await self.gateway.keys.delete(key)
        await until_async(lambda: not self.gateway.access.keys)
        for side in self.sides.values():
            for name in (side.function, side.model, side.doomed):
                await self.gateway.http.delete(f"/v1/functions/{name}")
            await self.send("DELETE /v1/secrets/{name}", side, "admin")
            for kind in ("volumes/{volume}", "queues/{queue}", "dicts/{dict}"):
                await self.send(f"DELETE /v1/{kind}", side, "admin")
            await self.gateway.http.delete(f"/v1/teams/{_team_of(side)}")
        await self.gateway.http.delete(f"/v1/signing/keys/{_SIGNER}")
        await self.gateway.http.delete(f"/v1/nodes/{_NODE}/drain")

    async def send(self, route: str, side: Objects, principal: str) -> httpx.Response:
        method, path = route.split(" ")
        is_model = "{model}" in path or path.startswith("/v1/builds")
        env, app_, _ = parts_of(side.function)
        values = {
            "fn": side.doomed if route == "DELETE /v1/functions/{fn}" else side.function,
            "model": side.model, "env": env, "app": app_, "number": "1", "version": "1", "first": "0",
            "rest": "x", "region": "r", "name": _SIGNER if "signing" in path else _SECRET, "team": _TEAM,
            "node": _NODE,
            "id": self._id(route, side, principal),
            "digest": digest_of(_ONNX) if "artifacts" in path or "volumes" in path else DIGEST,
            **dict.fromkeys(("volume", "queue", "dict"), side.function),
        }  # fmt: skip
        url = re.sub(r"{(\w+)}", lambda match: values[match[1]], path)
        if path.startswith("/v1/dicts/") and path.endswith("/entry"):
            url += "?key=k"
        if path == "/v1/history":
            url += f"?subject=function:{side.function}"
        if path.endswith(("/ack", "/release")):
            url += f"?lease={self._lease_of(side)}"
        if path == "/v1/secrets/{name}":
            url += f"?scope={env}/{app_}/*"
        assert is_model or "{" not in url
        if path.endswith("/runsync"):
            url += "?wait=0"  # no worker runs the job
        content, headers = _body(route, side)
        return await self.gateway.http.request(
            method, url, content=content, headers=headers | self._headers.get(principal, {})
        )

    @staticmethod
    def _lease_of(side: Objects) -> str:
        return f"{subjects.QUEUES}.{subjects.queue_consumer(side.function)}.1.1.1.1.0"

    def _id(self, route: str, side: Objects, principal: str) -> str:
        if "/v1/values/" in route:
            return self.value
        if route.startswith("PUT /v1/functions/"):
            return new_invocation_id()
        ids = {
            "/v1/schedules": side.schedule, "/v1/invocations": side.call, "/v1/maps": side.map, "/v1/dlq": side.letter,
            "/v1/builds": side.build, "/v1/keys": side.key, "/v1/users": _USER.id,
            "/v1/traces": side.call,
            "/retry/": side.letter, "/status/": side.call, "/stream/": side.call, "/cancel/": side.call,
            "/predictions/": side.call,
        }  # fmt: skip
        if ROUTES[route] == "own key" and side is self.sides["own"]:
            return self._ids.get(principal, side.key)
        return next((id_ for path, id_ in ids.items() if path in route), "")

    async def response(self, route: str, side_name: str, principal: str, expected: str) -> str:
        """Send a request, and return the response in the words of the table."""
        side = self.sides[side_name]
        if route.startswith("DELETE") or "/dlq/" in route or "/nodes/" in route:
            await self.restore(route.split("/")[2], side)
        elif "/retry/" in route:
            await self.restore("dlq", side)
        answer = await self.send(route, side, principal)
        if answer.status_code in (401, 403):
            return str(answer.status_code)
        if answer.status_code == 404 and _code(answer).endswith("_not_found") and not self._is_success(route, answer):
            await self._check_as_if_missing(route, side_name, principal, answer)
            return "404"
        if not self._is_success(route, answer):
            return f"{answer.status_code} {answer.text}"
        await self._undo(route, side, answer)
        if "listed" in ROUTES[route]:
            name = side.model if "model" in route or "engines" in route or "v2" in route or "builds" in route else ""
            if route == "GET /v1/teams":
                name = _team_of(side)
            if "secrets" in route:
                name = '"scope":"{}/{}/*"'.format(*parts_of(side.function))
            return "yes" if (name or side.function) in answer.text else "hidden"
        return "yes"

    def _is_success(self, route: str, answer: httpx.Response) -> bool:
        if route in UNSUPPORTED:
            return answer.status_code in (400, 501)
        if (answer.status_code, _code(answer)) == _ALSO.get(route):
            return True
        return answer.status_code in self.documented.get(route, {200, 503} if "health" in route else {200, 202})

    async def _check_as_if_missing(self, route: str, side_name: str, principal: str, answer: httpx.Response) -> None:
        """Compare a 404 with the response about an object that does not exist."""
        side, missing = self.sides[side_name], self.missing[side_name]
        about_missing = await self.send(route, missing, principal)
        texts = []
        for response, names in ((answer, side), (about_missing, missing)):
            text = response.text
            for name in sorted((*names, names.doomed), key=len, reverse=True):
                text = text.replace(name, "X")
            texts.append((response.status_code, _without_request_id(text), sorted(response.headers)))
        assert texts[0] == texts[1], (route, principal)

    async def _undo(self, route: str, side: Objects, answer: httpx.Response) -> None:
        gateway = self.gateway
        if route == "DELETE /v1/functions/{fn}":
            await until_async(lambda: side.doomed not in gateway.registry.functions)
        elif route == "PUT /v1/signing/required/{env}":  # else the next deploy would need a signature
            assert (await self.send("DELETE /v1/signing/required/{env}", side, "admin")).status_code == 200
        elif route == "DELETE /v1/schedules/{id}":
            await until_async(lambda: side.schedule not in gateway.schedules.known)
        elif route == "POST /v1/keys":
            await gateway.keys.delete(answer.json()["id"])
            await until_async(lambda: all(key.id != answer.json()["id"] for key in gateway.access.keys))
        elif route == "DELETE /v1/keys/{id}":
            await until_async(lambda: all(key.id != side.key for key in gateway.access.keys))


def _team_of(side: Objects) -> str:
    """The team that owns the objects of a side."""
    return "team-{}-{}".format(*parts_of(side.function))


def _body(route: str, side: Objects) -> tuple[bytes, dict[str, str]]:
    """Return the body that a route takes, and its headers."""
    spec = FunctionSpec(name=side.function, entry=EntryPoint("app", "f"), methods=(MethodSpec(),))
    bodies: dict[str, Any] = {
        "POST /v1/functions": {"spec": spec, "bundle": DIGEST, "replace": True},
        "POST /v1/functions/{fn}/lease": {"id": "matrix", "ttl_s": 60},
        "POST /v1/functions/{fn}/rollback": {"revision": 1},
        "POST /v1/functions/{fn}/scale": {"min_workers": 0},
        "PUT /v1/functions/{fn}/traffic": {"weights": {"1": 100}},
        "POST /v1/schedules": {"function": side.function, "cron": "0 6 * * *"},
        "POST /v1/builds": {"model": _NET},
        "POST /v1/engines/gc": {"dry_run": True},
        "PUT /v1/secrets/{name}": {"value": "v"},
        "POST /v1/volumes/{volume}/commits": {"put": [VolumeFile("net.onnx", len(_ONNX), digest_of(_ONNX))]},
        "POST /v1/volumes/{volume}/missing": {"digests": [digest_of(_ONNX)]},
        "PUT /v1/teams/{team}": {"owns": ["access-matrix/*"]},
        "POST /v1/keys": {"scopes": ["read"]},
        "PUT /v1/signing/keys/{name}": {"public_key": _PUBLIC_KEY, "patterns": ["access-matrix/*"]},
        "PUT /v1/signing/required/{env}": {"force": True},
    }
    if route.endswith("/infer"):
        return msgspec.json.encode(_INFERENCE), _JSON
    if "v2/{fn}/" in route:
        return b'{"input":{}}', _JSON
    if "/items/" in route:
        return b"{}\n", {"content-type": "application/x-ndjson"}
    if route.startswith("PUT /v1/bundles"):
        return BUNDLE, {"content-type": "application/zip"}
    if route.startswith(("PUT /v1/artifacts", "PUT /v1/volumes")):
        return _ONNX, {}
    has_body = route.startswith(("POST", "PUT"))
    return (msgspec.json.encode(bodies.get(route, {})), _JSON) if has_body else (b"", {})


def _manifest(key: str) -> EngineManifest:
    identity = EngineIdentity(
        model="m", recipe=Precision.FP32, tools={}, profiles=(), max_batch=1, samples="", flags={},
        backend=Backend.ORT_CPU, versions={}, device="cpu", compute_capability="", os="", arch="",
    )  # fmt: skip
    tensors = (TensorSpec("x", "FP32", (-1, 1)),)
    return EngineManifest(
        key=key, identity=identity, model="net.onnx", inputs=tensors, outputs=tensors, profiles=(), batched=False,
        max_batch=1, files=(), settings={}, accuracy=Accuracy(0.0, 0.0, 1.0), latency=None, built_at=0.0,
    )  # fmt: skip


def _failed_call(side: Objects, now: float) -> tuple[CallRecord, InvocationMessage]:
    error = ErrorInfo("function_raised", "no", error_type="ValueError")
    record = CallRecord(
        id=side.letter, function=side.function, revision=1, state=InvocationState.FAILED, submitted_at=now,
        ended_at=now, error=error,
    )  # fmt: skip
    message = InvocationMessage(
        id=side.letter, function=side.function, revision=1, method="", submitted_at=now, deadline=0.0, reply="",
        content_type="application/json", accept="application/json",
    )  # fmt: skip
    return record, message


def _answer_calls(gateway: Whole, function: str) -> None:
    """End calls with waiting clients like a runner."""

    def on_message(message: Any) -> None:
        invocation, _ = unpack_invocation(message.payload)
        succeeded = OutcomeKind.SUCCEEDED
        reply = ResultReply(invocation.id, succeeded, None, "application/json", invocation.revision, 1, 0.0, 0.0, "w")
        gateway.bus.publish(invocation.reply, pack(reply, b"1"))

    gateway.bus.subscribe(subjects.sync_queue(function, 1, "*"), on_message)


async def _parts(data: bytes) -> Any:
    yield data


def _code(answer: httpx.Response) -> str:
    """Return the code of a problem. A problem of another protocol has only a message."""
    try:
        fields = answer.json()
    except ValueError:
        return "model_not_found"
    return str(fields.get("code", "model_not_found")) if isinstance(fields, dict) else ""


def _without_request_id(text: str) -> str:
    return re.sub(r'"request_id": ?"[^"]*"', "", text)


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the routes of an OpenAPI document, with {fn} and {model} for the names of deployed functions."""
    for path, operations in document["paths"].items():
        general = re.sub(r"^(/v1/functions/)(?!{)[^{]+/(invoke|submit|invocations/|maps/)", r"\1{fn}/\2", path)
        general = re.sub(r"^/web/[^{]+/$", "/web/{fn}/", general)
        general = re.sub(r"^(/v2/models/)(?!{)[^{]+/infer$", r"\1{model}/infer", general)
        for method, operation in operations.items():
            yield f"{method.upper()} {general}", operation


def served(gateway: Whole) -> Iterator[str]:
    """Yield the routes that the router knows. A GET route also serves HEAD."""
    for route in gateway.app._routes:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
        methods = route.methods or set()
        yield from (f"{method} {path}" for method in methods - ({"HEAD"} if "GET" in methods else set()))
