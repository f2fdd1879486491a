"""A gateway without a bus: the real application over a stub queue, called through httpx; and `async def` tests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.revision import Function, Revision
from gpufn_core.domain.usage import Usage
from gpufn_core.errors import BusUnavailable, GpufnError, InvocationCancelled
from gpufn_core.ids import Digest, new_invocation_id
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import ResultReply
from gpufn_core.protocol.reports import ControllerReport, FunctionStatus, NodeReport, RunnerReport, WorkerCounts
from gpufn_core.spec.function_spec import CallKind, EntryPoint, FunctionSpec, MethodSpec
from gpufn_gateway.app import App
from gpufn_gateway.auth.access import Access
from gpufn_gateway.auth.key_use import KeyUse
from gpufn_gateway.auth.quota_sync import QuotaSync
from gpufn_gateway.calls.call_bodies import CallBodies
from gpufn_gateway.calls.prepare import Calls
from gpufn_gateway.calls.shared_bodies import GatewaySharedBodies
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.variants import Variants
from gpufn_gateway.http.body_reader import BodyBudget, BodyReader
from gpufn_gateway.http.connection.address_rate import AddressRate
from gpufn_gateway.metrics.gpus import GpuSeries
from gpufn_gateway.metrics.platform_series import ReportSeries
from gpufn_gateway.metrics.telemetry import Telemetry
from gpufn_gateway.oip.inference import Inference
from gpufn_gateway.oip.shared_memory.regions import Regions
from gpufn_gateway.protocols.platform import Platform
from gpufn_gateway.protocols.registration import installed
from gpufn_gateway.routes.calls.invocations import InvocationRoutes
from gpufn_gateway.routes.calls.invoke import Invoke
from gpufn_gateway.routes.calls.oip import OipRoutes
from gpufn_gateway.routes.calls.shared_memory import SharedMemoryRoutes
from gpufn_gateway.routes.functions.functions import FunctionRoutes
from gpufn_gateway.routes.nodes import NodeRoutes
from gpufn_gateway.routes.operations import OperationRoutes
from gpufn_gateway.store_sync import StoreSync
from gpufn_gateway.submitted.submit import Submissions
from gpufn_gateway.web.apps import WebApps
from gpufn_platform.bus.storage.key_value import Entry
from gpufn_platform.queue.call_request import CallRequest
from tests.gateway.unaudited import Unaudited

_TEST_TIMEOUT_S = 240  # of a test that hangs; on a busy machine the longest takes two minutes
CALL_LIMIT = 4096

ARGUMENTS = {
    "type": "object",
    "properties": {"texts": {"type": "array", "items": {"type": "string"}}, "top": {"type": "integer", "default": 5}},
    "required": ["texts"],
    "additionalProperties": False,
}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj) or "controller" in pyfuncitem.path.parts:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def scenario() -> None:
        async with asyncio.timeout(_TEST_TIMEOUT_S):
            await pyfuncitem.obj(**arguments)

    with asyncio.Runner() as runner:
        runner.run(scenario())
    return True


class ManualClock:
    """A clock that the test moves; `ahead_s` is the offset of the wall clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + self.ahead_s


class StubCall:
    """A call that the test ends; `cancelled` is set after its client has disconnected."""

    def __init__(self, queue: StubQueue, fields: dict[str, Any]) -> None:
        self.id = new_invocation_id()
        self.future: asyncio.Future[tuple[ResultReply, bytes]] = asyncio.get_running_loop().create_future()
        self.since = queue.clock.monotonic()
        self.fields = fields
        self.cancelled = False

    def reply(self, body: bytes = b"", kind: OutcomeKind = OutcomeKind.SUCCEEDED, **fields: Any) -> None:
        given = {"error": None, "content_type": "application/json", "revision": 1, "attempt": 1} | fields
        queue_s, run_s = given.pop("queue_s", 0.0012), given.pop("run_s", 0.0034)
        reply = ResultReply(invocation=self.id, kind=kind, queue_s=queue_s, run_s=run_s, **given)
        self.future.set_result((reply, body))

    def cancel(self) -> None:
        self.cancelled = True
        if not self.future.done():
            self.future.set_exception(InvocationCancelled("cancelled"))
            self.future.exception()


class StubQueue:
    """A stub of the Caller. `answer` is called with each new call; by default it echoes the body."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.calls: list[StubCall] = []
        self.failed: list[tuple[str, int | None, GpufnError]] = []
        self.refuses: GpufnError | None = None
        self.answer: Callable[[StubCall], None] = lambda call: call.reply(call.fields["body"])

    @property
    def pending(self) -> int:
        return sum(not call.future.done() for call in self.calls)

    def invoke(self, request: CallRequest) -> Any:
        if self.refuses is not None:
            raise self.refuses
        call = StubCall(self, request._asdict())
        self.calls.append(call)
        self.answer(call)
        return call

    open_stream = open_session = invoke

    def fail(self, function: str, revision: int | None, error: GpufnError) -> None:
        self.failed.append((function, revision, error))

    def tick(self, now: float) -> None: ...


class StubBus:
    def __init__(self) -> None:
        self.published: list[str] = []

    def publish(self, subject: str, payload: bytes) -> None:
        self.published.append(subject)

    async def js(self, api: str, body: Any = None) -> Any:
        raise BusUnavailable("there is no bus here")


class NeverUsed(KeyUse):
    """The use of keys, without a bus to record it."""

    def __init__(self) -> None: ...

    async def last_used(self) -> dict[str, float]:
        return {}


class Gateway:
    """The application and its parts."""

    def __init__(
        self,
        clock: ManualClock,
        *,
        loopback: bool = True,
        shared_bodies: GatewaySharedBodies | None = None,
        limit_bytes: int = CALL_LIMIT,
        address_rate: AddressRate | None = None,
        regions: Regions | None = None,
    ) -> None:
        self.audit = Unaudited()
        self.clock = clock
        self.bus = StubBus()
        self.queue = StubQueue(clock)
        self.access = Access(loopback=loopback, now=clock.time)
        self.registry = Registry(clock, self.access)
        registry = self.registry
        self.telemetry = Telemetry(lambda: self.queue.pending)
        self.telemetry.of_platform += [
            ReportSeries(registry.live_nodes, registry.live_runners, registry.totals.all, registry.split_functions),
            GpuSeries(registry.live_nodes, registry.device_reports.of, registry.trends),
        ]
        self.reason: str | None = None
        self.scaled: list[tuple[str, Any]] = []  # by `load` and `unload`
        self.took: dict[str, dict[str, Usage]] = {}  # by day and key
        self.stored: dict[str, int] = {}  # submitted calls that have not ended, by key
        bodies = BodyReader(limit_bytes, 30, what="a call's arguments", budget=BodyBudget(1 << 30))
        call_bodies = CallBodies(bodies, bodies, shared_bodies)
        nothing: Any = None
        variants = Variants(self.registry, nothing, clock)
        self.calls = Calls(
            bus=self.bus,
            queue=self.queue,
            registry=self.registry,
            access=self.access,
            telemetry=self.telemetry,
            bodies=call_bodies,
            clock=clock,
            quotas=QuotaSync("gw-test", self.bus, count_queued=self.count, usage_today=self.spent, clock=clock),
            variants=variants,
            shared_bodies=shared_bodies,
        )
        bus: Any = self.bus
        submissions = Submissions(bus, self.calls, StoreSync(None, waits=False))
        self.invoke = Invoke(self.calls, submissions)
        functions = FunctionRoutes(
            bus=bus,
            registry=self.registry,
            deploys=nothing,
            builds=nothing,
            splits=nothing,
            variants=variants,
            submissions=submissions,
            bodies=BodyReader(1 << 20, 30, what="this request", budget=BodyBudget(1 << 30)),
            bundle_bodies=bodies,
        )
        operations = OperationRoutes(
            registry=self.registry,
            telemetry=self.telemetry,
            access=self.access,
            keys=nothing,
            key_use=NeverUsed(),
            bodies=bodies,
            clock=clock,
            why_not_ready=lambda: self.reason,
        )
        stub_deploys: Any = self
        routes = [
            *functions.routes(),
            *InvocationRoutes(submissions, self.registry).routes(),
            *SharedMemoryRoutes(regions, self.access, bodies).routes(),
            *OipRoutes(
                self.registry,
                self.telemetry,
                lambda: self.reason,
                deploys=stub_deploys,
                bodies=bodies,
                shares_memory=regions is not None,
            ).routes(),
            *NodeRoutes(registry=self.registry, drains=nothing, clock=clock).routes(),
            *operations.routes(),
        ]
        self.app = App(
            self.invoke,
            Inference(self.calls, self.invoke, call_bodies, regions),
            self.access,
            routes,
            StoreSync(None, waits=False),
            audit=self.audit,
            address_rate=address_rate,
            protocols=installed(
                Platform(
                    self.calls, self.invoke, submissions, nothing, webhook_secrets=nothing, files=nothing, live=nothing
                )
            ),
            web=WebApps(self.calls, self.invoke),
        )

    async def scale(self, name: str, least: Any, most: Any) -> Function:
        """Record the scaling of a model that a client loads or unloads."""
        self.scaled.append((name, least))
        return self.registry.function(name)

    async def spent(self, day: str) -> dict[str, Usage]:
        return self.took.get(day, {})

    async def count(self, key: str) -> int:
        return self.stored.get(key, 0)

    def deploy(self, spec: FunctionSpec, number: int = 1, engines: Any = None, **fields: Any) -> None:
        """Set a function like the watches of the registry do."""
        revision = Revision(
            function=spec.name,
            number=number,
            spec=spec,
            bundle=Digest("0" * 64),
            created_at=self.clock.time(),
            engines=engines or {},
        )
        function = Function(
            name=spec.name, active=number, serving=number, latest=number, updated_at=self.clock.time(), **fields
        )
        self.registry.on_revision(f"{spec.name}.{number}", Entry(f"{spec.name}.{number}", encode(revision), number))
        self.registry.on_function(spec.name, Entry(spec.name, encode(function), number))

    def report(self, *statuses: FunctionStatus, partial: bool = False, epoch: int = 1) -> None:
        self.registry.receive_controller_report(
            ControllerReport("c", epoch, self.clock.time(), statuses, partial=partial)
        )

    def hear_node(self) -> None:
        self.registry.receive_node_report(NodeReport("n", self.clock.time(), ()))
        self.registry.receive_runner_report(RunnerReport("n", "r", self.clock.time()))

    def client(self, **headers: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8090", headers=headers)

    async def post(self, path: str, content: Any = b"{}", **headers: str) -> httpx.Response:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client() as client:
            return await client.post(path, content=content, headers=given)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        async with self.client(**headers) as client:
            return await client.get(path)


def spec_of(name: str = "embed", *methods: MethodSpec, **fields: Any) -> FunctionSpec:
    return FunctionSpec(
        name=name,
        entry=EntryPoint("app", name.replace("-", "_")),
        methods=methods or (MethodSpec(parameters=ARGUMENTS),),
        **fields,
    )


def status_of(function: str = "embed", serving: int = 1, *, ready: int = 1, **fields: Any) -> FunctionStatus:
    return FunctionStatus(function=function, serving=serving, workers=WorkerCounts(ready=ready), **fields)


class Make:
    """Helpers for tests; functions of a conftest cannot be imported."""

    spec = staticmethod(spec_of)
    status = staticmethod(status_of)
    ARGUMENTS = ARGUMENTS
    CALL_LIMIT = CALL_LIMIT
    Gateway = Gateway
    Clock = ManualClock

    @staticmethod
    def generator(**fields: Any) -> MethodSpec:
        return MethodSpec(kind=CallKind.GENERATOR, parameters={"type": "object"}, **fields)


@pytest.fixture
def make() -> type[Make]:
    return Make


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def gateway(clock: ManualClock) -> Gateway:
    gateway = Gateway(clock)
    gateway.deploy(spec_of())
    gateway.report(status_of())
    return gateway


class Connection:
    """One ASGI request: it records the response, and the test decides when the client disconnects."""

    def __init__(self, path: str, body: bytes = b"{}", **headers: str) -> None:
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self._body: list[bytes] = [body]
        lines = {"host": "127.0.0.1:8090"} | {name.replace("_", "-"): text for name, text in headers.items()}
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(name.encode(), text.encode()) for name, text in lines.items()],
        }

    async def receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    def start(self, app: Callable[..., Awaitable[None]]) -> asyncio.Task[None]:
        async def run() -> None:
            await app(self.scope, self.receive, self.send)

        return asyncio.get_running_loop().create_task(run())


@pytest.fixture
def connection() -> type[Connection]:
    return Connection


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def settle() -> Callable[[], Awaitable[None]]:
    """Let all tasks run until they wait."""
    return _settle


def problem(answer: httpx.Response) -> tuple[int, str]:
    """Return status and code of a problem response, and check its content type."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    fields = msgspec.json.decode(answer.content)
    assert fields["status"] == answer.status_code
    assert set(fields) >= {"type", "title", "status", "detail", "code", "retryable"}
    return answer.status_code, fields["code"]


@pytest.fixture(name="problem")
def problem_fixture() -> Callable[[httpx.Response], tuple[int, str]]:
    return problem
